"""Files that states rest in while a process lives: locked by it, striped over directories, gone with it.

A name in a directory is `zeromesh-LABEL-TOKEN.swap`. The process that made it holds a lock on it, which the system takes back
when the process ends, however it does: a file that can be locked belongs to nobody, and is removed by whoever comes next.

The last functions tell where directories lie.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from zeromesh.errors import StorageError
from zeromesh.files import try_lock
from zeromesh.offload.io.direct_io import PositionalFile, whole_blocks

STRIPE = 1 << 20
"""Bytes that lie together in one directory before the next one's turn comes."""
_NAME = re.compile(r"zeromesh-[A-Za-z0-9._-]*-[0-9a-f]{16}\.swap")
_ATTEMPTS = 8


def remove_leftovers(directory: str | os.PathLike[str]) -> int:
    """Remove the swap files in a directory that no process holds; returns the bytes that are free again."""
    freed = 0
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(directory)):
            if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                freed += _remove_if_dead(entry.path)
    return freed


def _remove_if_dead(path: str) -> int:
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        if not try_lock(descriptor):
            return 0
        nbytes = os.fstat(descriptor).st_blocks * 512
        os.unlink(path)
    except OSError:  # It is somebody's, or somebody else has just removed it.
        return 0
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return nbytes


class SwapFile:
    """One file in one directory, which grows as room in it is taken.

    Raises:
        StorageError: where it cannot be made, names the directory.
        ValueError: for a label that does not fit into a name.
    """

    def __init__(self, directory: Path, label: str) -> None:
        self.path, self._lock = _make(directory, label)
        self.nbytes = 0
        self._reserved = False
        try:
            self.io = PositionalFile(self.path, write=True)
        except BaseException:
            _discard(self.path, self._lock)
            raise
        # Also where nobody closes it: when it is forgotten, and when the interpreter ends.
        self._end = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())

    def grow(self, nbytes: int) -> None:
        """Take room for `nbytes` in all, which read as zeros. Raises `StorageError` where the disk is full."""
        if nbytes <= self.nbytes:
            return
        try:
            os.posix_fallocate(self._lock, self.nbytes, nbytes - self.nbytes)
        except OSError as error:
            why = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            raise StorageError(
                f"{self.path!r} cannot be given {nbytes - self.nbytes:,} bytes more: {why}; free some there, or give "
                "offload.directory another disk"
            ) from error
        self.nbytes = nbytes
        self._reserved = _on_disk(os.fstat(self._lock)) >= nbytes

    def check(self) -> None:
        """Raise `StorageError` where somebody has removed or shortened the file."""
        try:
            found = os.fstat(self._lock)
        except OSError as error:
            raise StorageError(f"{self.path!r} cannot be looked at: {error.strerror or error}") from error
        if found.st_nlink == 0:
            raise StorageError(
                f"{self.path!r}, {self.nbytes:,} bytes, was removed while the run was using it; leave swap files alone"
            )
        if found.st_size < self.nbytes:
            raise StorageError(
                f"{self.path!r} has {found.st_size:,} bytes, {self.nbytes:,} were reserved; leave swap files alone"
            )
        if self._reserved and _on_disk(found) < self.nbytes:  # A write that was on its way has made it long again.
            raise StorageError(
                f"{self.path!r} was shortened while the run was using it: {_on_disk(found):,} bytes of {self.nbytes:,} are on the "
                "disk; leave swap files alone"
            )

    def close(self) -> None:
        """Remove the file; closing twice is allowed."""
        self.io.close()
        self._end()
        self._lock = -1


def _on_disk(status: os.stat_result) -> int:
    """Bytes of a file that are not holes."""
    return 512 * status.st_blocks


def _remove(path: str, descriptor: int, process: int) -> None:
    """Remove a swap file of this process; a child that was forked off it has nothing to remove."""
    if os.getpid() != process:
        return
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_nlink:
            os.unlink(path)
    os.close(descriptor)


def _make(directory: Path, label: str) -> tuple[str, int]:
    """A new file and a descriptor that holds its lock."""
    for _ in range(_ATTEMPTS):
        name = f"zeromesh-{label}-{secrets.token_hex(8)}.swap"
        if not _NAME.fullmatch(name):  # Nobody would know it for a leftover.
            raise ValueError(f"label {label!r} of swap files; give letters, digits, '.', '_' and '-'")
        path = os.fspath(directory / name)
        descriptor = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if try_lock(descriptor) and os.fstat(descriptor).st_nlink:
                return path, descriptor
            _discard(path, descriptor)  # Somebody was looking whether it is a leftover, and removes it.
        except OSError as error:
            _discard(path, descriptor)
            raise StorageError(
                f"swap files cannot be made in {str(directory)!r}: {error.strerror or error}; "
                "give offload.directory a directory that can be written"
            ) from error
    raise StorageError(
        f"swap files made in {str(directory)!r} vanish at once; give offload.directory another directory"
    )


def _discard(path: str, descriptor: int) -> None:
    """Remove a file that was made in vain."""
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


class Stripes:
    """Several swap files as one range of bytes: stripe by stripe, each directory in turn."""

    def __init__(self, directories: Sequence[Path], label: str) -> None:
        if not directories:
            raise ValueError("swap files need a directory, none is given")
        self._files: list[SwapFile] = []
        try:
            for directory in directories:
                self._files.append(SwapFile(directory, label))
        except BaseException:
            self.close()
            raise
        self.nbytes = 0

    @property
    def direct(self) -> bool:
        """Whether bytes go past the page cache of every directory."""
        return all(file.io.direct for file in self._files)

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self._files]

    def take(self, nbytes: int) -> int:
        """Reserve room; returns where it begins, a multiple of `BLOCK`. Raises `StorageError` where a disk is full."""
        begin = self.nbytes
        end = begin + whole_blocks(nbytes)
        count = len(self._files)
        stripes = -(-end // STRIPE)
        for number, file in enumerate(self._files):
            whole = (stripes - number + count - 1) // count * STRIPE
            file.grow(end if count == 1 else whole)
        self.nbytes = end
        return begin

    def read(self, data: torch.Tensor, offset: int) -> None:
        """Fill `data`, 1-D uint8. Raises `StorageError`."""
        for file, at, part in self._parts(data, offset):
            file.read(part, at)

    def write(self, data: torch.Tensor, offset: int) -> None:
        """Write `data`, 1-D uint8. Raises `StorageError`."""
        for file, at, part in self._parts(data, offset):
            file.write(part, at)

    def _parts(self, data: torch.Tensor, offset: int) -> Iterator[tuple[PositionalFile, int, torch.Tensor]]:
        """Where the bytes of `data` lie, which begin at `offset`: file, offset in it, and which of `data`."""
        if len(self._files) == 1:
            yield self._files[0].io, offset, data
            return
        done = 0
        while done < data.numel():
            stripe, inside = divmod(offset + done, STRIPE)
            length = min(STRIPE - inside, data.numel() - done)
            row, number = divmod(stripe, len(self._files))
            yield self._files[number].io, row * STRIPE + inside, data[done : done + length]
            done += length

    def check(self) -> None:
        """Raise `StorageError` where a file is not what it was."""
        for file in self._files:
            file.check()

    def close(self) -> None:
        """Remove the files."""
        for file in self._files:
            file.close()


IN_MEMORY = ("tmpfs", "ramfs")
"""Kinds of file systems that are memory and no disk."""


def nearest_directory(directory: Path) -> Path:
    """The directory, or the nearest one above it that is there."""
    return next(path for path in (directory, *directory.parents) if path.is_dir())


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written into a directory that is there."""
    return shutil.disk_usage(directory).free


def file_system_of(directory: Path) -> str:
    """The kind of file system that a directory lies on, or will, such as `ext4`; empty where the system does not tell."""
    path, best, kind = os.path.realpath(nearest_directory(directory)), "", ""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, name, *_ = line.split(" ")
        # Of several at one place the last one mounted is seen.
        if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, kind = point, name
    return kind
