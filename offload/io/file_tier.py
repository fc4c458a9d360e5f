"""The file tier: flat ranges of bytes (slots) in swap files, read and written in pieces by a few threads past the page cache.
Unaligned parts go through a buffer of the thread. With checksums every piece that is read is verified."""

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import xxhash

from zeromesh.errors import StorageError, errors_as
from zeromesh.intervals import round_up
from zeromesh.offload import accelerator
from zeromesh.offload.io.direct_io import BLOCK, PositionalFile, is_block_aligned
from zeromesh.offload.io.transfer import AllocateBuffer, Transfer, WaitTime, allocate_pages, copy_streams_of

PIECE = 1 << 20  # bytes that one thread moves at a time, and that one checksum covers
STRIPE = 1 << 20  # the bytes of a stripe: consecutive stripes lie in the files of consecutive directories, round robin
THREADS = 8
THREAD_BYTES = THREADS * PIECE  # bytes of all threads' staging buffers, one of `PIECE` bytes for each thread
_LARGE_PIECE = 4 << 20  # bytes that one thread moves at a time if they need no buffer and have no checksum
_Copy = Callable[[torch.Tensor, torch.Tensor], object]
_CPU = torch.device("cpu")
_UNWRITTEN = 0  # the checksum recorded for a piece of a slot that was never written, and so reads as zeros


def open_in(directory: Path, name: str, *, stays: bool = True, direct: bool = True) -> PositionalFile:
    """Open a file of this user alone, and make it if it is absent. One that does not `stay` is new, and unlinked at once: no other
    process can open it, and the system frees it when this one ends."""
    path, cure = directory / name, "; set offload.directory to one that can be written"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if stays else os.O_EXCL)
    with errors_as(StorageError, f"cannot make swap files in {str(directory)!r}: ", OSError, StorageError, after=cure):
        directory.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, flags, 0o600))
        try:
            return PositionalFile(path, write=True, direct=direct)
        finally:
            if not stays:
                path.unlink()


class FileTier:
    """Swap files, striped over directories, and threads that read and write them. Raises `StorageError` for a bad directory."""

    unwritten: ClassVar[int | None] = _UNWRITTEN  # the first checksum of a piece; None: that of the first read

    def __init__(
        self,
        directories: Sequence[Path],
        label: str,
        *,
        checksums: bool = False,
        waits: WaitTime | None = None,
        memory: AllocateBuffer = allocate_pages,
        device: torch.device = _CPU,
    ) -> None:
        """`label` is in the names of files; `memory` allocates buffers, `waits` counts callers' waiting time, `device` computes."""
        if not directories:
            raise ValueError("swap files need a directory, none is given")
        self.waits = waits or WaitTime()
        self.checksums = checksums
        self.nbytes = 0
        with ExitStack() as opened, errors_as(StorageError, "file tier: ", StorageError):
            self._files = [opened.enter_context(self._open_file(directory, label)) for directory in directories]
            self._opened = opened.pop_all()
        self.paths = [file.path for file in self._files]
        self._close_files = weakref.finalize(self, self._opened.close)  # Also where nobody calls `close`.
        self._stored: dict[Path, FileSlot] = {}
        self._reserved = [0] * len(directories)
        self._buffers = list(torch.split(memory(THREADS * PIECE), PIECE))
        self._threads = ThreadPoolExecutor(THREADS, "zeromesh-swap", partial(accelerator.make_current, device))
        self._local = threading.local()

    def _open_file(self, directory: Path, label: str) -> PositionalFile:
        return open_in(directory, f"zeromesh-{label}-{secrets.token_hex(8)}.swap", stays=False)

    def allocate(self, nbytes: int, label: str) -> "FileSlot":
        """Reserve a range, which reads as zeros. Raises `StorageError` when a disk is full."""
        begin, count = self.nbytes, len(self._files)
        end = begin + round_up(nbytes, BLOCK)
        stripes = -(-end // STRIPE)
        for number, file in enumerate(self._files):
            length = end if count == 1 else (stripes - number + count - 1) // count * STRIPE
            if length > self._reserved[number]:
                with errors_as(StorageError, f"file tier, {label}: ", StorageError):
                    file.reserve(self._reserved[number], length - self._reserved[number])
                self._reserved[number] = length
        self.nbytes = end
        return FileSlot(self, begin, nbytes, label)

    def open_stored(self, path: Path) -> "FileSlot":
        """Open an existing file as a slot, which is only read. Raises `StorageError` if it cannot be opened."""
        if path not in self._stored:
            with errors_as(StorageError, "file tier: ", StorageError):
                file = self._opened.enter_context(PositionalFile(path, constant=True))
            self._stored[path] = FileSlot(self, 0, file.size(), file.path, file)
        return self._stored[path]

    def close(self) -> None:
        """Finish running work, cancel queued work, and free the files. A tier may be closed twice."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._close_files()

    def submit(self, work: Callable[[int, torch.Tensor], None], at: int, data: torch.Tensor) -> Future[None]:
        """Have a thread run `work(at, data)`. Without threads, for example after `close`, the future is cancelled."""
        try:
            return self._threads.submit(work, at, data)
        except RuntimeError:  # The caller may have buffers in flight, and gets the error when waiting for them.
            refused: Future[None] = Future()
            refused.cancel()
            return refused

    def buffer(self) -> torch.Tensor:
        """Return the buffer of the calling thread of this tier: `[PIECE]` bytes, on separate pages."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = self._buffers.pop()
        return self._local.buffer  # type: ignore[no-any-return]

    def read(self, data: torch.Tensor, offset: int) -> None:
        """Fill `data`, 1-D uint8, from the files synchronously. Raises `StorageError`."""
        for file, at, part in self._locate(data, offset):
            file.read(part, at)

    def write(self, data: torch.Tensor, offset: int) -> None:
        """Write `data`, 1-D uint8, to the files synchronously. Raises `StorageError`."""
        for file, at, part in self._locate(data, offset):
            file.write(part, at)

    def _locate(self, data: torch.Tensor, offset: int) -> Iterator[tuple[PositionalFile, int, torch.Tensor]]:
        """Split `data`, which begins at byte `offset` of the tier, at stripes; yields file, offset in the file, and part."""
        if len(self._files) == 1:
            yield self._files[0], offset, data
            return
        for begin, part in _pieces(offset, data, STRIPE):
            stripe, inside = divmod(begin, STRIPE)
            row, number = divmod(stripe, len(self._files))
            yield self._files[number], row * STRIPE + inside, part


class FileSlot:
    """A range of `nbytes` bytes in a file tier's swap files, or in an existing `file`, which is only read. Reads wait for earlier
    writes; bytes that are being read must not be written. Threads may share a slot."""

    def __init__(self, tier: FileTier, begin: int, nbytes: int, label: str, file: PositionalFile | None = None) -> None:
        self.tier = tier
        self.nbytes = nbytes
        self.label = label
        self._begin = begin
        self._file = file
        self.digests: dict[int, tuple[int, int]] | None = None
        """If it is not None, the length and the digest of each part that is written, by its first byte."""
        self._room = round_up(nbytes, BLOCK) if file is None else nbytes
        checked = tier.checksums and file is None
        self._alignment = PIECE if checked else BLOCK
        count = -(-nbytes // PIECE) if checked else 0
        self._checksums = [tier.unwritten] * count
        self._locks = [threading.Lock() for _ in range(count)]
        self._order = threading.Lock()
        self._writing: list[tuple[int, int, Transfer]] = []

    def read(self, begin: int, out: torch.Tensor) -> Transfer:
        """Start to fill `out`, 1-D uint8, from byte `begin` on. Tensors outside the CPU go through the threads' buffers. Raises
        `StorageError` at `wait`, naming the tier, what the bytes are, and why they cannot be had."""
        with self._order:
            return self._move(self._read_piece, begin, out)

    def write(self, begin: int, data: torch.Tensor) -> Transfer:
        """Start to write `data`, 1-D uint8, unchanged until the end. Raises as `read`, and `ValueError` for a file only read."""
        if self._file is not None:
            raise ValueError(f"{data.numel()} bytes at {begin} of {self.label}, which is only read")
        with self._order:
            transfer = self._move(self._write_piece, begin, data)
            self._writing.append((begin, begin + data.numel(), transfer))
        return transfer

    def wait_for_writes(self) -> None:
        """Wait until all writes are in the file. Raises `StorageError` if one has failed."""
        with self._order:
            self._wait_for_writes(0, self.nbytes)

    def _wait_for_writes(self, begin: int, end: int) -> None:
        """Wait for writes that share a block (with checksums, a piece) with bytes [begin, end); raises again if one has failed."""
        begin, end = begin - begin % self._alignment, end + -end % self._alignment
        near = [transfer for first, last, transfer in self._writing if first < end and last > begin]
        for transfer in near:
            transfer.wait_for_end()
        self._writing = [each for each in self._writing if not each[2].done() or each[2].failed()]
        for transfer in near:
            transfer.wait()

    def _move(self, work: Callable[[_Copy, int, torch.Tensor], None], begin: int, data: torch.Tensor) -> Transfer:
        end = begin + data.numel()
        if not 0 <= begin <= end <= self.nbytes:
            raise ValueError(f"bytes [{begin}, {end}) do not lie in the {self.nbytes} of {self.label}")
        try:
            self._wait_for_writes(begin, end)
        except StorageError as error:  # Raised by `wait`: the caller may have other transfers in flight.
            return Transfer.with_error(error)
        copy = copy_streams_of(data.device).copy_later() if accelerator.on_accelerator(data) else torch.Tensor.copy_
        first = self._unbuffered_bytes(begin, data)
        parts = (*_pieces(begin, data[:first], _LARGE_PIECE), *_pieces(begin + first, data[first:], PIECE))
        pieces = [self.tier.submit(partial(work, copy), at, part) for at, part in parts]
        return Transfer(pieces, self.tier.waits, f"file tier, {self.label}: bytes [{begin:,}, {end:,})")

    def _unbuffered_bytes(self, begin: int, data: torch.Tensor) -> int:
        """Return the number of leading bytes that need neither a thread's buffer nor a checksum."""
        if self._file is not None:  # Unaligned ends may come through the page cache, as nobody writes.
            return data.numel() if is_block_aligned(data, begin) else 0
        whole = not self._checksums and begin % BLOCK == 0 and is_block_aligned(data, begin)
        # With several directories, each stripe is one piece, so that several threads keep several disks busy.
        return data.numel() - data.numel() % BLOCK if whole and len(self.tier.paths) == 1 else 0

    def _aligned_around(self, at: int, data: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return the first byte of the aligned bytes around a piece at byte `at`, and memory for them: `data` or a buffer."""
        if self._file is not None and is_block_aligned(data, at):
            return at, data
        begin, end = at - at % self._alignment, at + data.numel()
        end = min(end + -end % self._alignment, self._room)  # The last aligned piece ends with the slot's room.
        whole = (begin, end) == (at, at + data.numel())
        return begin, data if whole and is_block_aligned(data, at) else self.tier.buffer()[: end - begin]

    def _read_piece(self, copy: _Copy, at: int, out: torch.Tensor) -> None:
        with self._locks[at // PIECE] if self._locks else nullcontext():
            begin, memory = self._aligned_around(at, out)
            self._read_aligned(begin, memory)
        if memory is not out:
            with torch.inference_mode():  # A caller may have made `out` in that mode.
                copy(out, memory[at - begin : at - begin + out.numel()])

    def _write_piece(self, copy: _Copy, at: int, data: torch.Tensor) -> None:
        # The data of a piece and its checksum change together.
        with self._locks[at // PIECE] if self._locks else nullcontext():
            begin, memory = self._aligned_around(at, data)
            if memory is not data:
                last = at + data.numel()
                if begin < at or (last < begin + memory.numel() and last < self.nbytes):
                    self._read_aligned(begin, memory)
                else:
                    memory[last - begin :].zero_()
                copy(memory[at - begin : last - begin], data)
            if self._checksums:
                self._checksums[begin // PIECE] = checksum(memory)
            if self.digests is not None:
                self.digests[at] = data.numel(), checksum(memory[at - begin :][: data.numel()])
            with errors_as(StorageError, f"file tier, {self.label}: ", StorageError):
                self.tier.write(memory, self._begin + begin)

    def _read_aligned(self, begin: int, data: torch.Tensor) -> None:
        # An error of `self._file` has its path already.
        what = "file tier" if self._file else f"file tier, {self.label}"
        with errors_as(StorageError, f"{what}: ", StorageError):
            (self._file or self.tier).read(data, self._begin + begin)
        if self._checksums:
            recorded = self._checksums[begin // PIECE]
            found = checksum(data)
            if recorded is None:
                self._checksums[begin // PIECE] = found
            elif recorded != found and (recorded != _UNWRITTEN or bool(data.any())):
                why = f"file tier, {self.label}: bytes [{begin:,}, {begin + data.numel():,}) are not what was written"
                raise StorageError(f"{why} (xxh3 {found:016x}, {recorded:016x} was recorded; {', '.join(self.tier.paths)})")


def _pieces(begin: int, data: torch.Tensor, step: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut `data`, which begins at byte `begin`, at multiples of `step` bytes; yields first byte and piece."""
    done = 0
    while done < data.numel():
        length = min(step - (begin + done) % step, data.numel() - done)
        yield begin + done, data[done : done + length]
        done += length


def checksum(data: torch.Tensor) -> int:
    """Return the XXH3 digest of `data`, uint8 on the CPU, which is never 0."""
    return xxhash.xxh3_64_intdigest(data.numpy().data) or 1
