"""`Remover`: removes directories in a thread of its own, so that training never waits for a disk that takes seconds for a file."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from pathlib import Path


class Remover:
    """Removes one directory after another. What cannot be removed is tried again with the next one, and reported once.

    The thread runs only while there is something to remove, and does not keep a process from ending: the next start of the run
    removes what is left.
    """

    def __init__(self) -> None:
        self._waiting: deque[Path] = deque()
        self._refused: dict[Path, str] = {}
        """Directories that are still there, and why."""
        self._reported: set[Path] = set()
        self._running = False
        self._changed = threading.Condition()

    def remove(self, path: Path) -> None:
        """Remove a directory and all that is in it, later."""
        with self._changed:
            self._waiting.extend(each for each in (*self._refused, path) if each not in self._waiting)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="zeromesh-remove", daemon=True).start()

    def wait(self, *, left: int = 0, seconds: float | None = None) -> bool:
        """Wait until at most `left` directories are still to be removed, for at most `seconds`; returns whether that came true."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._waiting) <= left, timeout=seconds)

    def problems(self) -> str:
        """A report of directories that could not be removed and were not reported before; empty where there are none."""
        with self._changed:
            new = {path: why for path, why in self._refused.items() if path not in self._reported}
            self._reported.update(new)
        first = next(iter(new.values()), "")
        return first + (f" (and {len(new) - 1} more directories)" if len(new) > 1 else "")

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._running = False
                    return
                path = self._waiting[0]
            why = _removed(path)
            with self._changed:
                self._refused.pop(path, None)
                if why:
                    self._refused[path] = why
                self._waiting.popleft()
                self._changed.notify_all()


def _removed(path: Path) -> str:
    """Remove as much of a directory as possible; returns why the rest is still there, or an empty text."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        if path.exists():
            shutil.rmtree(path)
    except OSError as error:
        name = error.filename if error.filename is not None else path
        return f"{str(path)!r} is still there: {Path(name).name!r} cannot be removed: {error.strerror or error}"
    return ""
