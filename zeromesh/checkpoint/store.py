"""A directory of checkpoints: which are there, making one all at once or not at all, and removing old ones in a thread.

checkpoints/step-00000100/        a checkpoint
            step-00000200.tmp/    being written, or left behind by a kill: never read, removed at the next start
            .trash-00000050/      being removed: never read, removed at the next start
"""

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from zeromesh.checkpoint.format import manifest as manifests
from zeromesh.checkpoint.format.manifest import FileRecord, Manifest
from zeromesh.checkpoint.format.safetensors_layout import FileLayout
from zeromesh.checkpoint.io.file_slices import record_of
from zeromesh.checkpoint.io.reader import manifest_of
from zeromesh.checkpoint.io.writer import in_thread
from zeromesh.errors import ConfigError, StorageError, counted
from zeromesh.files import read_whole, refusals, write_whole
from zeromesh.offload.io.direct_io import PositionalFile, sync_directory

_STEP = re.compile(r"step-(\d{8,})")
_TMP = re.compile(r"step-\d{8,}\.tmp")
_TRASH = re.compile(r"\.trash-.+")
MARK = re.compile(r"\.seen-[0-9a-f]+-\d+")
"""Files that ranks make there for a moment to find out which of them see the directory."""
_SPARE_BYTES = 16 << 20
"""Bytes kept free for the manifest, other small files, and what directories take."""
_ROOM_SECONDS = 10.0
"""How long a checkpoint that has no room waits for old ones to be removed."""
_MOST_TRASH = 4
"""Checkpoints that may wait to be removed. A disk that is slower than that holds up retention, and in the end the next save."""


class CheckpointStore:
    """Checkpoints in `root`. Only the process that holds the run's lock may change it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trash = Remover()
        """Removes what has been set aside, in threads."""

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, newest first, whole or not."""
        if not self.root.is_dir():
            return []
        found = [self.step_of(path) for path in self.root.iterdir() if path.is_dir()]
        return sorted((step for step in found if step is not None), reverse=True)

    def path(self, step: int) -> Path:
        """The directory of a checkpoint."""
        return self.root / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        """The directory in which a checkpoint is written."""
        return self.root / f"step-{step:08d}.tmp"

    @staticmethod
    def step_of(path: Path) -> int | None:
        """The step in a path's name, if it is the name of a checkpoint."""
        match = _STEP.fullmatch(path.name)
        return int(match[1]) if match else None

    def leftovers(self) -> list[str]:
        """Names of directories and files that are being written or removed, or were when a run was killed."""
        if not self.root.is_dir():
            return []
        names = [path.name for path in self.root.iterdir()]
        return sorted(name for name in names if any(kind.fullmatch(name) for kind in (_TMP, _TRASH, MARK)))

    def clean(self) -> list[str]:
        """Remove what dead runs left behind; returns the names."""
        left = self.leftovers()
        for name in left:
            if MARK.fullmatch(name):
                (self.root / name).unlink(missing_ok=True)
            else:
                shutil.rmtree(self.root / name, ignore_errors=True)
        return left

    def create(self, step: int, files: Sequence[FileLayout], part_nbytes: int | None = None) -> Path:
        """The temporary directory of a checkpoint, with its files at their full sizes.

        `part_nbytes` is how many bytes will be written here, of a part; the rest of its files takes no room. None means all bytes.

        Raises:
            StorageError: where there is no room, or it cannot be written.
        """
        directory = self.temporary(step)
        needed = sum(file.nbytes for file in files) if part_nbytes is None else part_nbytes
        with refusals(directory, "written"):
            self._discard(self._set_aside(step, directory))  # What is in it may be of other sizes.
            for folder in {directory, *((directory / file.path).parent for file in files)}:
                folder.mkdir(parents=True, exist_ok=True)
        self.require_room(needed)
        for file in files:
            PositionalFile(directory / file.path, write=True, size=file.nbytes, sparse=part_nbytes is not None).close()
        return directory

    def require_room(self, nbytes: int) -> None:
        """Raise `StorageError` where a checkpoint of so many bytes would not fit."""
        with refusals(self.root, "read"):
            if shutil.disk_usage(self.root).free < nbytes + _SPARE_BYTES:
                self.trash.wait(seconds=_ROOM_SECONDS)
            cure = "make room, lower checkpoint.keep_last, or set run.output_dir to a larger disk"
            _require_free(self.root, nbytes, f"{str(self.root)!r}: a checkpoint", cure)

    def commit(self, step: int, manifest: Manifest) -> None:
        """Make the temporary directory the checkpoint: the manifest last, everything on the disk, then the name.

        `manifest` has the records of the tensor files; those of all other files in the directory are added.

        Raises:
            StorageError, CheckpointError: before the name appears.
        """
        directory, final = self.temporary(step), self.path(step)
        with refusals(directory, "written"):
            small = _seal_small_files(directory, manifest.files)
            whole = replace(manifest, step=step, files={**manifest.files, **small})
            self._put_manifest(directory, whole)
            for folder in {path.parent for path in directory.glob("*/*")}:
                sync_directory(folder)
            replaced = self._set_aside(step, final)
            directory.rename(final)
            sync_directory(self.root)
            self._discard(replaced)

    def amend(self, step: int, name: str, data: bytes) -> None:
        """Put the small file `name` into a checkpoint that is there: first the file, then a manifest with it, all at once.

        A kill leaves the checkpoint as it was, or at worst without `name`.

        Raises:
            StorageError, CheckpointError: where the checkpoint cannot be read or written.
        """
        directory = self.path(step)
        _, manifest = manifest_of(directory)
        others = {path: record for path, record in manifest.files.items() if path != name}
        with refusals(directory, "written"):
            if name in manifest.files:
                self._put_manifest(directory, replace(manifest, files=others))
            write_whole(directory / name, data)
            self._put_manifest(
                directory, replace(manifest, files={**others, name: record_of(name, BytesIO(data), len(data))})
            )

    @staticmethod
    def _put_manifest(directory: Path, manifest: Manifest) -> None:
        text = manifest.to_json()
        manifests.parse(directory / manifests.NAME, text)  # What no reader would take is no checkpoint.
        write_whole(directory / manifests.NAME, text)
        sync_directory(directory)

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed. What cannot even be renamed is left to the next start."""
        with suppress(OSError):
            self._discard(self._set_aside(step, self.temporary(step)))

    def retire(self, keep: Iterable[int]) -> list[int]:
        """Take away all checkpoints but these steps, whose files `trash` then removes; returns the steps that are gone."""
        kept = set(keep)
        self.trash.wait(left=_MOST_TRASH)
        gone = [step for step in self.steps() if step not in kept]
        for step in gone:
            self.remove(step)
        return gone

    def remove(self, step: int) -> None:
        """Take away a checkpoint, if it is there. It is renamed first, so that no half of it is ever read."""
        self._discard(self._set_aside(step, self.path(step)))

    def _set_aside(self, step: int, path: Path) -> Path | None:
        if not path.exists():
            return None
        trash = self.root / f".trash-{step:08d}-{os.getpid()}-{time.monotonic_ns()}"
        path.rename(trash)
        return trash

    def _discard(self, trash: Path | None) -> None:
        if trash is not None:
            self.trash.remove(trash)


def _require_free(directory: Path, nbytes: int, what: str, cure: str) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes + _SPARE_BYTES:
        raise StorageError(
            f"{what} takes {nbytes:,} bytes, {_SPARE_BYTES:,} more are kept free, and {free:,} are free; {cure}"
        )


def _seal_small_files(directory: Path, known: Iterable[str]) -> dict[str, FileRecord]:
    """Bring the files that are not known to the disk, anew: some libraries make files that only their owner may read."""
    found = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        name = path.relative_to(directory).as_posix()
        if name not in known and name != manifests.NAME:
            data = read_whole(path)
            write_whole(path, data)
            found[name] = record_of(name, BytesIO(data), len(data))
    return found


@contextmanager
def fresh_directory(out: Path, nbytes: int) -> Iterator[Path]:
    """A directory to be filled inside the block with about `nbytes` bytes; it is `out` when the block has ended well.

    Otherwise it is removed. What is written into it through `PositionalFile` has to be synced inside the block.

    Raises:
        ConfigError: where there is something at `out` already.
        StorageError: where there is no room, or it cannot be written.
    """
    out = Path(os.path.realpath(out))
    # Short, since `out` may have the longest name; its own, since another process may be writing the same directory.
    temporary = out.with_name(f".zeromesh-{secrets.token_hex(8)}.tmp")
    occupied = f"{out} exists and is not an empty directory; give another one, or remove it first"
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(occupied)
        temporary.mkdir(parents=True)
        _require_free(temporary, nbytes, repr(str(out)), "make room")
        yield temporary
        for folder in {temporary, *(path for path in temporary.rglob("*") if path.is_dir())}:
            sync_directory(folder)
        temporary.rename(out)  # Only where there is nothing yet, or an empty directory.
        sync_directory(out.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and error.filename == str(temporary):
            raise ConfigError(f"{occupied}: something else has been written there meanwhile") from error
        raise StorageError(f"{error.filename or str(out)!r} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class Remover:
    """Removes directories, each in a thread. What cannot be removed is tried again with the next one, and reported once.

    Threads do not keep a process from ending: the next start of the run removes what is left.
    """

    def __init__(self) -> None:
        self._tasks: dict[Path, Future[Any]] = {}
        """By directory its removal, which returns why it is still there. It is replaced as a whole: other threads may look."""
        self._reported: set[Path] = set()

    def remove(self, path: Path) -> None:
        """Remove a directory and all that is in it, later."""
        tasks = {each: task for each, task in self._tasks.items() if not task.done()}
        for each in (*self._refused(), path):
            tasks[each] = in_thread("remove", partial(_remove, each), daemon=True)
        self._tasks = tasks

    def wait(self, *, left: int = 0, seconds: float | None = None) -> bool:
        """Wait until the oldest but `left` removals have ended, for at most `seconds`; returns whether that came true."""
        tasks = [task for task in self._tasks.values() if not task.done()]
        return not futures.wait(tasks[: max(0, len(tasks) - left)], seconds).not_done

    def problems(self) -> str:
        """A report of directories that could not be removed and were not reported before; empty where there are none."""
        new = {path: why for path, why in self._refused().items() if path not in self._reported}
        self._reported.update(new)
        first = next(iter(new.values()), "")
        return first + (f" (and {counted(len(new) - 1, 'more directory')})" if len(new) > 1 else "")

    def _refused(self) -> dict[Path, str]:
        return {path: task.result() for path, task in self._tasks.items() if task.done() and task.result()}


def _remove(path: Path) -> str:
    """Remove a directory; returns why it is still there, if it is. Of what cannot be removed as a whole, as much goes as can."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        if path.exists():
            shutil.rmtree(path)
    except OSError as error:
        name = Path(error.filename if error.filename is not None else path).name
        return f"{str(path)!r} is still there: {name!r} cannot be removed: {error.strerror or error}"
    return ""
