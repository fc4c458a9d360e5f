"""`StateMonitor`: where every rank is, in one file, so that a lost, hung or slow rank shows while the run goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from zeromesh.files import write_whole

if TYPE_CHECKING:  # `zeromesh status` needs the file's name alone, and a watch needs torch.
    from zeromesh.telemetry.watchdog import Watchdog

NAME = "ranks.json"


class StateMonitor:
    """Writes `path` every `period` seconds, from a thread of its own, whole each time.

        {"time": 1790000000.0, "ranks": [{"rank": 0, "pid": 17, "step": 12, "doing": "in forward of unit layers.3",
                                          "seconds_without_progress": 0.1, "failure": ""}, ...]}

    `failure` is what `clean` leaves of the error. What it cannot write it does not write: nothing depends on it.
    """

    def __init__(
        self,
        watch: Watchdog,
        ranks: Sequence[int],
        path: Path,
        *,
        period: float = 1.0,
        clean: Callable[[str], str] = str,
    ) -> None:
        self._watch = watch
        self._path = path
        self._period = period
        self._clean = clean
        self._progress = dict.fromkeys(ranks, (-1, time.monotonic()))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeromesh-monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def states(self) -> list[dict[str, Any]]:
        """One mapping for each rank."""
        now = time.monotonic()
        found = []
        for rank, (before, since) in self._progress.items():
            row, doing = self._watch.state(rank)
            if row.progress != before:
                since = now
                self._progress[rank] = (row.progress, now)
            seconds, failure = round(now - since, 1), self._clean(row.failure)
            found.append(
                {"rank": rank, "pid": row.pid, "step": row.step, "doing": doing}
                | {"seconds_without_progress": seconds, "failure": failure}
            )
        return found

    def _run(self) -> None:
        last = False
        while True:
            content = json.dumps({"time": time.time(), "ranks": self.states()})
            with suppress(OSError):  # A full disk is reported by what matters.
                write_whole(self._path, content.encode(), sync=False)
            if last:
                return
            last = self._ended.wait(self._period)
