"""Streams a rank's part of a checkpoint from live shards to files: fill a staging buffer, checksum it, write it.

There is no second copy of the state. What a training step is about to change is written first, and the step waits for what is not
written yet (`release`); buffers in flight are the only memory that a save takes.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from zeromesh import fault_injection
from zeromesh.checkpoint.format.manifest import ChecksumPiece, checksum
from zeromesh.checkpoint.format.safetensors_layout import FileLayout
from zeromesh.checkpoint.io.blocks import GRID, edges, merged, overlapping, pieces, written_blocks
from zeromesh.checkpoint.io.interleaved import InterleavedBlock
from zeromesh.errors import CheckpointError, StorageError, ZeromeshError
from zeromesh.intervals import Interval
from zeromesh.offload import TensorSlice
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.offload.io.transfer import StagingPool

STAGING_BUFFERS = 4
_IO_THREADS = 2
_TELL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteSource:
    """Elements that are the bytes of file number `file` from `begin` on, as `dtype`.

    `owner` is the bucket whose update changes them; None for what stays during a save.
    """

    file: int
    begin: int
    values: TensorSlice
    dtype: torch.dtype
    owner: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.values.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.nbytes

    def copy_into(self, out: torch.Tensor, begin: int, end: int) -> None:
        """Put bytes [begin, end) of the file, which hold whole elements, into `out`, 1-D uint8 of that length."""
        size = self.dtype.itemsize
        first, last = (begin - self.begin) // size, (end - self.begin) // size
        self.values.slice(first, last).copy_to(out.view(self.dtype))

    def bytes_of(self, interval: Interval) -> bytes:
        """These bytes of the file, as far as they are this source's."""
        begin, end = max(interval.start, self.begin), min(interval.end, self.end)
        if begin >= end:
            return b""
        out = torch.empty(end - begin, dtype=torch.uint8)
        self.copy_into(out, begin, end)
        return out.numpy().tobytes()


@dataclass(frozen=True, kw_only=True, slots=True)
class FileShare:
    """What this rank has of a band: `values` are the elements of the band's strand number `place`, as `dtype`. `owner` as above."""

    band: InterleavedBlock
    place: int
    values: TensorSlice
    dtype: torch.dtype
    owner: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.values.numel * self.dtype.itemsize

    def write(self, data: torch.Tensor, file: PositionalFile) -> None:
        """Write these bytes, `[nbytes]` uint8, to their places in the file, and none beside them."""
        strand = self.band.strands[self.place]
        local, size = strand.within(self.band.where), strand.size
        for tile in strand.rows.tiles(local):
            file.write_rows(
                data[(tile.local - local.start) * size :],
                strand.begin + tile.logical * size,
                rows=tile.rows,
                length=tile.length * size,
                step=strand.rows.taken * size,
                stride=strand.rows.width * size,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBlock:
    """Bytes of file number `file` from `begin` on that another rank writes."""

    file: int
    begin: int
    data: bytes


def edges_of(sources: Sequence[WriteSource]) -> list[SharedBlock]:
    """What this rank has of blocks that other ranks write."""
    found = []
    for file, members in _by_file(sources).items():
        for edge in edges(_extents(members)):
            data = b"".join(source.bytes_of(edge) for source in overlapping(members, edge.start, edge.end))
            found.append(SharedBlock(file=file, begin=edge.start, data=data))
    return found


def _by_file(sources: Sequence[WriteSource]) -> dict[int, list[WriteSource]]:
    found: dict[int, list[WriteSource]] = {}
    for source in sorted(sources, key=lambda each: (each.file, each.begin)):
        if source.values.numel:
            found.setdefault(source.file, []).append(source)
    return found


def _extents(sources: Sequence[WriteSource]) -> list[Interval]:
    return merged(Interval(start=source.begin, end=source.end) for source in sources)


@dataclass(frozen=True, kw_only=True, slots=True)
class _BlockPart:
    """One piece of a file to be written, whole or a share of it, and the buckets that it holds elements of."""

    file: int
    where: Interval
    owners: frozenset[int]
    share: FileShare | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes of it."""
        return self.where.length if self.share is None else self.share.nbytes


class ShardWriter:
    """Writes what one rank writes of one checkpoint. `start`, then `release` before updates, and `join` at the end."""

    def __init__(
        self,
        directory: Path,
        files: Sequence[FileLayout],
        sources: Sequence[WriteSource],
        received: Sequence[SharedBlock],
        order: Mapping[int, int],
        rank: int,
        shares: Sequence[FileShare] = (),
    ) -> None:
        """`received` are the other ranks' edges; `order` has the position of each owner in the next update; bands have `shares`."""
        self._directory = directory
        self._files = files
        self._rank = rank
        given = [
            WriteSource(file=edge.file, begin=edge.begin, values=as_values(edge.data), dtype=torch.uint8)
            for edge in received
        ]
        own = _by_file(sources)
        self._blocks = {file: written_blocks(_extents(members), files[file].nbytes) for file, members in own.items()}
        self._content = _by_file([*sources, *given])
        self._cells = self._cut(order, shares)
        self._left = Counter(owner for cell in self._cells for owner in cell.owners)
        self._changed = threading.Condition()
        self._failure: ZeromeshError | None = None
        self._pieces: list[ChecksumPiece] = []
        self.digests: list[tuple[int, int, str]] = []
        """Once all is written: the number of the band of each share, its place there, and its checksum."""
        self._done = 0
        self._thread = threading.Thread(target=self._run, name="zeromesh-save", daemon=True)

    def _cut(self, order: Mapping[int, int], shares: Sequence[FileShare]) -> list[_BlockPart]:
        cells = [_cell_of(share) for share in shares]
        cells += [
            _BlockPart(file=file, where=piece, owners=self._owners(file, piece))
            for file, blocks in self._blocks.items()
            for block in blocks
            for piece in pieces(block)
        ]
        last = len(order)
        return sorted(cells, key=lambda cell: min((order.get(owner, last) for owner in cell.owners), default=last))

    def _owners(self, file: int, piece: Interval) -> frozenset[int]:
        found = overlapping(self._content[file], piece.start, piece.end)
        return frozenset(source.owner for source in found if source.owner is not None)

    def start(self) -> None:
        """Begin to write, in a thread of its own."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether there is more to write."""
        return self._thread.is_alive()

    @property
    def progress(self) -> int:
        """Pieces written so far."""
        return self._done

    def release(self, owner: int, tell: Callable[[], None]) -> float:
        """Return when what `owner` holds is written, or the save has failed, so that it may change.

        `tell` is called now and then while writing goes on. Returns the seconds that it took.
        """
        if not self._left.get(owner):
            return 0.0
        return self._wait(lambda: not self._left.get(owner), tell)

    def join(self, tell: Callable[[], None]) -> list[ChecksumPiece]:
        """Return when all is on the disk: the pieces that this rank has written.

        Raises:
            StorageError, CheckpointError: what went wrong in the thread.
        """
        self._wait(lambda: not self._thread.is_alive(), tell)
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        return sorted(self._pieces, key=lambda piece: (piece.path, piece.begin))

    def end(self) -> None:
        """Return when the thread has ended, whatever it came to."""
        self._thread.join()

    def _wait(self, over: Callable[[], bool], tell: Callable[[], None]) -> float:
        began = time.monotonic()
        seen = -1
        while not over():
            if (
                self._done != seen
            ):  # Peers are patient with a rank whose disk is at work, not with one whose disk hangs.
                seen = self._done
                tell()
            with self._changed:
                self._changed.wait_for(over, timeout=_TELL_SECONDS)
        return time.monotonic() - began

    def _run(self) -> None:
        try:
            self._write_all()
        except ZeromeshError as error:
            self._failure = error
        except OSError as error:
            self._failure = StorageError(f"{str(self._directory)!r} cannot be written: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, training has to see it
            self._failure = CheckpointError(
                f"saving to {str(self._directory)!r} failed: {type(error).__name__}: {error}"
            )
        finally:
            with self._changed:
                self._left.clear()
                self._changed.notify_all()

    def _write_all(self) -> None:
        pool = StagingPool(STAGING_BUFFERS, GRID)
        numbers = {cell.file for cell in self._cells}
        files = {file: PositionalFile(self._directory / self._files[file].path, write=True) for file in numbers}
        try:
            with ThreadPoolExecutor(_IO_THREADS) as threads:
                flying: deque[Future[None]] = deque()
                for cell in self._cells:
                    buffer = pool.take()
                    data = buffer[: cell.nbytes]
                    self._fill(cell, data)
                    flying.append(threads.submit(self._store, files[cell.file], cell, data, buffer, pool))
                    while flying and (flying[0].done() or len(flying) > STAGING_BUFFERS):
                        flying.popleft().result()
                for future in flying:
                    future.result()
                for future in [threads.submit(file.sync) for file in files.values()]:
                    future.result()
        finally:
            for file in files.values():
                file.close()

    def _fill(self, cell: _BlockPart, data: torch.Tensor) -> None:
        """Put the bytes of a cell into `data`; what they came from may change afterwards."""
        if cell.share is not None:
            cell.share.values.copy_to(data.view(cell.share.dtype))
        else:
            self._fill_blocks(cell, data)
        with self._changed:
            for owner in cell.owners:
                self._left[owner] -= 1
            self._changed.notify_all()

    def _fill_blocks(self, cell: _BlockPart, data: torch.Tensor) -> None:
        filled = 0
        start, end = cell.where.start, cell.where.end
        for source in overlapping(self._content[cell.file], start, end):
            begin, stop = max(start, source.begin), min(end, source.end)
            source.copy_into(data[begin - start : stop - start], begin, stop)
            filled += stop - begin
        if filled != cell.where.length:
            raise CheckpointError(
                f"{self._files[cell.file].path}: {filled} of the bytes [{start}, {end}) belong to some rank; the ranks' "
                "parts do not make whole tensors"
            )

    def _store(
        self, file: PositionalFile, cell: _BlockPart, data: torch.Tensor, buffer: torch.Tensor, pool: StagingPool
    ) -> None:
        """Checksum and write what is in a staging buffer, and hand the buffer back."""
        try:
            digest, where, share = checksum(data), cell.where, cell.share
            if share is None:
                file.write(data, where.start)
            else:
                share.write(data, file)
            fault_injection.visit("mid-write", Path(file.path), where.start, where.end)
        finally:
            pool.give(buffer)
        with self._changed:
            if share is None:
                path = self._files[cell.file].path
                self._pieces.append(
                    ChecksumPiece(path=path, begin=where.start, end=where.end, checksum=digest, rank=self._rank)
                )
            else:
                self.digests.append((share.band.number, share.place, digest))
            self._done += 1
            self._changed.notify_all()


def _cell_of(share: FileShare) -> _BlockPart:
    owners = frozenset(() if share.owner is None else (share.owner,))
    return _BlockPart(file=share.band.file, where=share.band.where, owners=owners, share=share)


def as_values(data: bytes) -> TensorSlice:
    """Bytes as uint8 elements."""
    return TensorSlice.of(torch.frombuffer(bytearray(data), dtype=torch.uint8))
