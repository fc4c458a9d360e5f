"""Positional I/O: whole transfers at byte offsets of a file, past the page cache (O_DIRECT) where bytes are whole blocks and the
file system allows it. Transfers release the interpreter's lock, so a few threads keep a disk busy while others compute."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import accumulate, pairwise, product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from zeromesh.errors import StorageError
from zeromesh.files import disk_call, open_regular, refusals
from zeromesh.intervals import round_up

_Bytes = npt.NDArray[np.uint8]
_Move = Callable[..., int]

BLOCK = 4096
"""The block size in bytes. Offsets, lengths and addresses that are multiples of it bypass the page cache."""
_NEAR = 1 << 14
"""The largest gap between columns, in bytes, that is read and discarded; copying it takes about as long as a system call."""
_MOST_PIECES = os.sysconf("SC_IOV_MAX")
_READ_AHEAD_BYTES = 1 << 18  # bytes that one call reads ahead, few enough to stay in the processor's cache
IN_MEMORY = ("tmpfs", "ramfs")


def is_block_aligned(data: torch.Tensor, offset: int) -> bool:
    """Return True if `data`, uint8 on the CPU, and byte `offset` of a file are equally far from a block boundary (O_DIRECT)."""
    return data.device.type == "cpu" and (data.data_ptr() - offset) % BLOCK == 0


class PositionalFile(AbstractContextManager["PositionalFile"]):
    """A file that is read or written at offsets, by any number of threads. Raises `StorageError` from any method, with the file,
    the bytes and the reason, when the system refuses or the file ends too early."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        write: bool = False,
        size: int = 0,
        sparse: bool = False,
        direct: bool = True,
        constant: bool = False,
    ) -> None:
        """Open a file, not a link; for writing it is created if absent, with `size` bytes, reserved unless it is `sparse`. Without
        `direct` all bytes go through the page cache. Reading a `constant` file raises once anybody has written to it."""
        self.path = os.fspath(path)
        flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
        self._direct = -1
        with disk_call("opening", self.path), refusals(self.path, "opened"):
            self._buffered = open_regular(self.path, flags)
        try:
            if write and size and sparse:
                with disk_call("truncate", self.path), refusals(self.path, f"given {size:,} bytes"):
                    os.ftruncate(self._buffered, size)
            elif write and size:
                self.reserve(0, size)
        except StorageError:
            self.close()
            raise
        if direct:
            with suppress(OSError):  # The file system has no O_DIRECT.
                self._direct = open_regular(self.path, flags & ~os.O_CREAT | os.O_DIRECT)
        self._identity = _change_marks(self._buffered) if constant else None

    def _require_unchanged(self) -> None:
        before = self._identity
        if before is None or (found := _change_marks(self._buffered)) == before:
            return
        self._identity = found
        # If only the status time differs, the file was renamed or its modification time was set back; its bytes are the same.
        if found[:-1] != before[:-1] or (os.path.exists(self.path) and os.stat(self.path).st_ino == found[0]):
            why = f"{self.path!r} has changed since it was opened, and weights are read from it as long as this process runs"
            raise StorageError(f"{why}; leave it alone (write a new file and rename it), and start again")

    @property
    def direct(self) -> bool:
        return self._direct >= 0

    def size(self) -> int:
        with refusals(self.path, "looked at"):
            return os.fstat(self._buffered).st_size

    def reserve(self, offset: int, nbytes: int) -> None:
        """Reserve disk space for `nbytes` bytes from `offset` on, which read as zeros until written."""
        with disk_call("fallocate", self.path), refusals(self.path, f"given {nbytes:,} bytes more"):
            os.posix_fallocate(self._buffered, offset, nbytes)

    def write(self, data: torch.Tensor, offset: int) -> None:
        """Write all bytes of `data`, 1-D uint8 on CPU, at `offset`."""
        self._move("write", "written", os.pwritev, data, offset)

    def read(self, data: torch.Tensor, offset: int) -> None:
        """Fill `data`, 1-D uint8 on CPU, from `offset`."""
        self._move("read", "read", os.preadv, data, offset)

    def _move(self, name: str, done_to: str, move: _Move, data: torch.Tensor, offset: int) -> None:
        view = data.numpy()
        begin, end = offset, offset + len(view)
        with disk_call(name, self.path), refusals(self.path, f"{done_to} ({len(view):,} bytes at {offset:,})"):
            if self.direct and is_block_aligned(data, offset):
                # The bytes before the first whole block go through the page cache, the whole blocks past it.
                begin = min(round_up(offset, BLOCK), end)
                self._move_buffered(done_to, move, [view[: begin - offset]], offset, begin)
                begin += self._move_direct(move, view[begin - offset :], begin)
            self._move_buffered(done_to, move, [view[begin - offset :]], begin, end)
            self._require_unchanged()

    def _move_buffered(self, done_to: str, move: _Move, pieces: list[_Bytes], begin: int, end: int) -> None:
        """Move bytes [`begin`, `end`) of the file, which are the concatenated `pieces`, through the page cache."""
        at = begin
        while at < end:
            if (count := move(self._buffered, pieces, at)) == 0:
                raise StorageError(f"{self.path!r} ends after {at:,} bytes; {end - begin:,} were to be {done_to} at {begin:,}")
            at += count
            while at < end and count >= len(pieces[0]):
                count -= len(pieces.pop(0))
            pieces[0] = pieces[0][count:]

    def read_rows(self, data: torch.Tensor, offset: int, *, rows: int, columns: Sequence[tuple[int, int]], stride: int) -> int:
        """Fill the start of `data`, 1-D uint8 on CPU, with some columns of `rows` rows, row after row, through the page cache;
        returns the bytes filled. Rows begin every `stride` bytes of the file from `offset` on. `columns` are pairs of a column's
        first byte in the row and its length in bytes, ascending."""
        starts, lengths = zip(*columns, strict=True)
        following = (*starts[1:], starts[0] + stride)
        gaps = [after - start - length for start, length, after in zip(starts, lengths, following, strict=True)]
        # Garbage collection does not traverse views of arrays, unlike memoryviews, of which there would be many.
        block = data[: rows * sum(lengths)].numpy().reshape(rows, -1)
        parts = [block[:, begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]
        step = 2 * len(columns)
        together = _MOST_PIECES // step if max(gaps) <= _NEAR else 0
        if not together:
            for row, (part, start) in product(range(rows), zip(parts, starts, strict=True)):
                self._read_pieces([part[row]], offset + row * stride + start, part.shape[1])
            return block.size
        scrap = np.empty(_NEAR, np.uint8)  # Reading short gaps takes less time than a system call for each column.
        for first in range(0, rows, together):
            count = min(together, rows - first)
            pieces = [scrap] * (step * count)
            for number, (part, gap) in enumerate(zip(parts, gaps, strict=True)):
                pieces[2 * number :: step] = list(part[first : first + count])
                pieces[2 * number + 1 :: step] = [scrap[:gap]] * count
            self._read_pieces(pieces[:-1], offset + first * stride + starts[0], count * stride - gaps[-1])
        return block.size

    def _read_pieces(self, pieces: list[_Bytes], offset: int, nbytes: int) -> None:
        with disk_call("read", self.path), refusals(self.path, f"read ({nbytes:,} bytes at {offset:,})"):
            self._move_buffered("read", os.preadv, pieces, offset, offset + nbytes)
            self._require_unchanged()

    def in_memory(self, offset: int) -> bool:
        """Return True if the page cache surely holds the byte at `offset`."""
        try:
            return os.preadv(self._buffered, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:
            return False

    def read_ahead(self, offset: int, length: int) -> None:
        # The system uses larger reads and pages than after the advice `POSIX_FADV_WILLNEED`.
        scrap = memoryview(bytearray(_READ_AHEAD_BYTES))
        for at in range(offset, offset + length, _READ_AHEAD_BYTES):
            os.preadv(self._buffered, [scrap[: offset + length - at]], at)

    def drop_from_cache(self, offset: int, length: int) -> None:
        """Drop bytes from the page cache that are on the disk and will not be read soon."""
        os.posix_fadvise(self._buffered, offset, length, os.POSIX_FADV_DONTNEED)

    def _move_direct(self, move: _Move, view: _Bytes, offset: int) -> int:
        """Move the whole blocks of `view`, which begins at a block boundary, past the page cache; returns the bytes moved."""
        whole = len(view) - len(view) % BLOCK
        done = 0
        while done < whole:
            try:
                count = move(self._direct, [view[done:whole]], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                count = 0  # Some file systems open with O_DIRECT and refuse then.
            if count % BLOCK or not count:
                break
            done += count
        return done

    def sync(self, *, data: bool = False) -> None:
        with disk_call("fsync", self.path), refusals(self.path, "brought to the disk"):
            (os.fdatasync if data else os.fsync)(self._buffered)

    def clear(self) -> None:
        with disk_call("truncate", self.path), refusals(self.path, "emptied"):
            os.ftruncate(self._buffered, 0)

    def lock(self) -> None:
        """Lock the file until this process closes it or ends; forks do not have the lock. Raises `StorageError` if it is locked."""
        with refusals(self.path, "locked", "; another process uses it"):
            fcntl.lockf(self._buffered, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        for descriptor in (self._direct, self._buffered):
            if descriptor >= 0:
                os.close(descriptor)
        self._direct = self._buffered = -1

    def __exit__(self, *_: object) -> None:
        self.close()


def _change_marks(descriptor: int) -> tuple[int, ...]:
    """Return an open file's inode, size, and modification and status times (ns), of which a write to the file changes one."""
    found = os.fstat(descriptor)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Sync a directory's entries (file names) to the disk. Raises `StorageError`."""
    with disk_call("fsync", path), refusals(path, "brought to the disk"):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def nearest_directory(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.is_dir())


def free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


def mount_of(directory: Path) -> tuple[str, str]:
    """Return the device that holds a directory, which may not exist yet, and the file system's type; empty if unknown."""
    path, best, found = os.path.realpath(nearest_directory(directory)), "", ("", "")
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        device, point, name, *_ = line.split(" ")
        # Among mounts at the same mount point, the last one hides the others.
        if len(point) >= len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
            best, found = point, (device, name)
    return found
