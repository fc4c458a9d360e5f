"""A directory of checkpoints: which are there, making one all at once or not at all, and removing old ones.

checkpoints/step-00000100/        a checkpoint
            step-00000200.tmp/    being written, or left behind by a kill: never read, removed at the next start
            .trash-00000050/      being removed: never read, removed at the next start
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from zeromesh import fault_injection
from zeromesh.checkpoint.format import manifest as manifests
from zeromesh.checkpoint.format.manifest import ChecksumPiece, FileRecord, Manifest, checksum
from zeromesh.checkpoint.format.safetensors_layout import FileLayout
from zeromesh.checkpoint.io.blocks import cut_at_grid
from zeromesh.checkpoint.io.reader import manifest_of
from zeromesh.checkpoint.remover import Remover
from zeromesh.errors import StorageError
from zeromesh.files import read_whole, write_whole
from zeromesh.intervals import Interval
from zeromesh.offload.io.direct_io import PositionalFile, sync_directory

_STEP = re.compile(r"step-(\d{8,})")
_TMP = re.compile(r"step-\d{8,}\.tmp")
_TRASH = re.compile(r"\.trash-.+")
MARK = re.compile(r"\.seen-[0-9a-f]+-\d+")
"""Files that ranks make there for a moment to find out which of them see the directory."""
_SPARE_BYTES = 16 << 20
"""Bytes kept free for the manifest and other small files."""
_ROOM_SECONDS = 10.0
"""How long a checkpoint that has no room waits for old ones to be removed."""
_MOST_TRASH = 4
"""Checkpoints that may wait to be removed. A disk that is slower than that holds up retention, and in the end the next save."""


class CheckpointStore:
    """Checkpoints in `root`. Only the process that holds the run's lock may change it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.trash = Remover()
        """Removes what has been set aside, in a thread of its own."""

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

    @classmethod
    def is_checkpoint(cls, path: Path) -> bool:
        """Whether a path has the name of a checkpoint, and is a directory."""
        return cls.step_of(path) is not None and path.is_dir()

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
        fault_injection.visit("before-tmp")
        directory = self.temporary(step)
        needed = sum(file.nbytes for file in files) if part_nbytes is None else part_nbytes
        try:
            self._discard(self._set_aside(step, directory))  # What is in it may be of other sizes.
            for folder in {directory, *((directory / file.path).parent for file in files)}:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{str(directory)!r} cannot be written: {error.strerror or error}") from error
        self.require_room(needed)
        for file in files:
            PositionalFile(directory / file.path, write=True, size=file.nbytes, sparse=part_nbytes is not None).close()
        return directory

    def require_room(self, nbytes: int) -> None:
        """Raise `StorageError` where a checkpoint of so many bytes would not fit."""
        needed = nbytes + _SPARE_BYTES
        try:
            free = shutil.disk_usage(self.root).free
            if free < needed and self.trash.wait(seconds=_ROOM_SECONDS):
                free = shutil.disk_usage(self.root).free
        except OSError as error:
            raise StorageError(f"{str(self.root)!r} cannot be read: {error.strerror or error}") from error
        if free < needed:
            raise StorageError(
                f"{str(self.root)!r}: a checkpoint takes {nbytes:,} bytes, {_SPARE_BYTES:,} more are kept free, and "
                f"{free:,} are free; make room, lower "
                "checkpoint.keep_last, or set run.output_dir to a larger disk"
            )

    def commit(self, step: int, manifest: Manifest) -> None:
        """Make the temporary directory the checkpoint: the manifest last, everything on the disk, then the name.

        `manifest` has the records of the tensor files; those of all other files in the directory are added.

        Raises:
            StorageError, CheckpointError: before the name appears.
        """
        directory, final = self.temporary(step), self.path(step)
        try:
            small = {path: _seal(directory / path, path) for path in _small_files(directory, manifest.files)}
            whole = replace(manifest, step=step, files={**manifest.files, **small})
            fault_injection.visit("before-manifest")
            self._put_manifest(directory, whole)
            for folder in {path.parent for path in directory.glob("*/*")}:
                sync_directory(folder)
            fault_injection.visit("before-rename")
            replaced = self._set_aside(step, final)
            directory.rename(final)
            sync_directory(self.root)
            self._discard(replaced)
        except OSError as error:
            raise StorageError(f"{str(directory)!r} cannot be written: {error.strerror or error}") from error
        fault_injection.visit("after-rename", *_largest(final, whole))

    def amend(self, step: int, name: str, data: bytes) -> None:
        """Put the small file `name` into a checkpoint that is there: first the file, then a manifest with it, all at once.

        A kill leaves the checkpoint as it was, or at worst without `name`.

        Raises:
            StorageError, CheckpointError: where the checkpoint cannot be read or written.
        """
        directory = self.path(step)
        _, manifest = manifest_of(directory)
        others = {path: record for path, record in manifest.files.items() if path != name}
        try:
            if name in manifest.files:
                self._put_manifest(directory, replace(manifest, files=others))
            write_whole(directory / name, data)
            self._put_manifest(directory, replace(manifest, files={**others, name: _record(name, data)}))
        except OSError as error:
            raise StorageError(f"{str(directory)!r} cannot be written: {error.strerror or error}") from error

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
            fault_injection.visit("during-retention")
            self.trash.remove(trash)


def _small_files(directory: Path, known: Iterable[str]) -> list[str]:
    names = set(known)
    found = [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]
    return sorted(name for name in found if name not in names and name != manifests.NAME)


def _seal(path: Path, name: str) -> FileRecord:
    """Bring a small file to the disk, and return its record, with rank 0 as the writer.

    It is written anew: some libraries make files that only their owner may read, whatever the umask says.
    """
    data = read_whole(path)
    write_whole(path, data)
    return _record(name, data)


def _record(name: str, data: bytes) -> FileRecord:
    return FileRecord(
        nbytes=len(data),
        pieces=tuple(
            ChecksumPiece(path=name, begin=cut.start, end=cut.end, checksum=checksum(data[cut.start : cut.end]), rank=0)
            for cut in cut_at_grid(Interval(start=0, end=len(data)))
        ),
    )


def _largest(directory: Path, manifest: Manifest) -> tuple[Path, int, int]:
    path, record = max(manifest.files.items(), key=lambda item: item[1].nbytes)
    return directory / path, 0, record.nbytes
