"""Bands: stretches of a file in which the bytes of several ranks of one host lie between each other, row by row.

A tensor that is divided inside of its rows has runs of a few KB, of one rank and then of another. Each rank writes exactly its own
bytes of a band, through the page cache that the host's ranks share. When all have, one of them reads each piece of it back,
compares what every rank has in it with what that rank was to write, and takes the checksum of the whole.

    tensor     | head |                core of whole blocks                   | tail |
    host 0            |  band: ranks 0 and 1 |      |
    host 1                                   | both |  band: ranks 2 and 3    |

Blocks with bytes of two hosts, and the head and the tail, are in no band: there each block has one writer (`blocks`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format.manifest import ChecksumPiece, checksum
from zeromesh.checkpoint.format.safetensors_layout import FileLayout
from zeromesh.checkpoint.io.blocks import GRID, minus, pieces, union
from zeromesh.checkpoint.io.tensor_shard import TensorShard
from zeromesh.errors import CheckpointError
from zeromesh.flat.regions import StridedRows
from zeromesh.intervals import Interval, round_up
from zeromesh.offload.io.direct_io import BLOCK, PositionalFile
from zeromesh.offload.io.transfer import StagingPool

LEAST_TENSOR = 64 << 10
"""Bytes. A smaller tensor has few runs, however it is divided."""
LONGEST_ROW = 512 << 10
"""Bytes. Runs of longer rows are few enough to be pieces of their own."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class InterleavedShard:
    """Local elements `interval`, of `size` bytes each, that `rank` has of the tensor at byte `begin` of file number `file`."""

    rank: int
    file: int
    begin: int
    size: int
    rows: StridedRows
    interval: Interval

    @classmethod
    def of(cls, holding: TensorShard, file: int, begin: int, rank: int) -> InterleavedShard | None:
        """A holding of an interleaved tensor; None for one that is in no band."""
        rows = holding.region.rows() if is_interleaved(holding) else None
        if rows is None or not holding.interval.length:
            return None
        size = holding.spec.dtype.itemsize
        return cls(rank=rank, file=file, begin=begin, size=size, rows=rows, interval=holding.interval)

    @property
    def tensor(self) -> tuple[int, int]:
        """Its file, and its first byte there."""
        return self.file, self.begin

    @property
    def whole(self) -> Interval:
        """The bytes of the tensor."""
        return Interval(start=self.begin, end=self.begin + self.rows.count * self.rows.width * self.size)

    @property
    def hull(self) -> Interval:
        """From the first to the last byte in the file."""
        found = self.rows.hull(self.interval)
        return Interval(start=self.begin + found.start * self.size, end=self.begin + found.end * self.size)

    def within(self, window: Interval) -> Interval:
        """The local elements in a stretch of the file, which cuts none."""
        start, end = (self.rows.before((at - self.begin) // self.size) for at in (window.start, window.end))
        return self.interval.intersect(Interval(start=start, end=max(start, end)))

    def bytes_of(self, data: torch.Tensor, window: Interval, out: torch.Tensor) -> torch.Tensor:
        """Its bytes of a window, of which `data` has all, put together at the beginning of `out`; both 1-D uint8."""
        taken, words = self.within(window), _WORDS[self.size]
        found = out[: taken.length * self.size]
        self.rows.take(data.view(words), (window.start - self.begin) // self.size, taken, found.view(words))
        return found

    def to_row(self) -> list[Any]:
        """As JSON."""
        columns = [[each.start, each.end] for each in self.rows.columns]
        place = [self.file, self.begin, self.size, self.rows.count, self.rows.width]
        return [*place, columns, self.interval.start, self.interval.end]

    @classmethod
    def from_row(cls, rank: int, row: Sequence[Any]) -> InterleavedShard:
        """What `to_row` gave on another rank."""
        file, begin, size, count, width, columns, start, end = row
        rows = StridedRows(count=count, width=width, columns=tuple(Interval(start=a, end=b) for a, b in columns))
        return cls(rank=rank, file=file, begin=begin, size=size, rows=rows, interval=Interval(start=start, end=end))


def is_interleaved(holding: TensorShard) -> bool:
    """Whether a tensor is divided into so many short runs that it goes into bands: all ranks that divide it come to the same."""
    spec, region = holding.spec, holding.region
    if spec.nbytes < LEAST_TENSOR or not region.is_strided:
        return False
    return region.row_numel * spec.dtype.itemsize <= LONGEST_ROW


@dataclass(frozen=True, kw_only=True, slots=True)
class InterleavedBlock:
    """Whole blocks of file number `file`, at most as long as the grid: all bytes belong to these strands, of ranks of one host."""

    number: int
    """The same on all ranks of the host."""
    file: int
    where: Interval
    strands: tuple[InterleavedShard, ...]

    @property
    def checker(self) -> int:
        """The rank that reads it back."""
        return self.strands[self.number % len(self.strands)].rank


def plan_bands(
    strands: Iterable[InterleavedShard], barred: Iterable[tuple[int, int]], hosts: Sequence[Hashable], rank: int
) -> list[InterleavedBlock]:
    """The bands of a rank's host. All ranks' `strands` are given, and in `hosts` for each rank what tells its host.

    `barred` are tensors of which some rank has what is no strand: they have no bands.
    """
    tensors: dict[tuple[int, int], list[InterleavedShard]] = {}
    for strand in strands:
        tensors.setdefault(strand.tensor, []).append(strand)
    for tensor in set(barred):
        tensors.pop(tensor, None)
    found: list[InterleavedBlock] = []
    for (file, _), members in sorted(tensors.items()):
        here = [strand for strand in members if hosts[strand.rank] == hosts[rank]]
        others = [strand for strand in members if hosts[strand.rank] != hosts[rank]]
        for stretch in minus(_blocks_of(here), _blocks_of(others)):
            for where in pieces(stretch):
                touching = tuple(strand for strand in here if strand.within(where).length)
                if touching:
                    found.append(InterleavedBlock(number=len(found), file=file, where=where, strands=touching))
    return found


def _blocks_of(strands: Sequence[InterleavedShard]) -> list[Interval]:
    """The blocks that strands of one tensor reach into, as far as they are the tensor's alone."""
    found = []
    for strand in strands:
        start = max(strand.hull.start // BLOCK * BLOCK, round_up(strand.whole.start, BLOCK))
        end = min(round_up(strand.hull.end, BLOCK), strand.whole.end // BLOCK * BLOCK)
        if start < end:
            found.append(Interval(start=start, end=end))
    return union(found)


def digests_of(
    bands: Sequence[InterleavedBlock], rows: Sequence[Sequence[Sequence[Any]]]
) -> dict[tuple[int, int], str]:
    """What `check_bands` takes, of the rows `[number, place, checksum]` of every rank: other hosts have other bands."""
    ranks = {(band.number, place): each.rank for band in bands for place, each in enumerate(band.strands)}
    return {
        (number, place): digest
        for rank, own in enumerate(rows)
        for number, place, digest in own
        if ranks.get((number, place)) == rank
    }


def check_bands(
    directory: Path,
    files: Sequence[FileLayout],
    bands: Sequence[InterleavedBlock],
    digests: Mapping[tuple[int, int], str],
    rank: int,
) -> list[ChecksumPiece]:
    """Read back the bands that fall to `rank`, once every rank has written and synced what it has of them; their pieces.

    `digests` has the checksum of what each strand was to write in a band, by the band's number and the strand's place in it.

    Raises:
        CheckpointError: when the file has not what some rank was to write, or the strands do not make up a band.
        StorageError: when the system cannot read.
    """
    found: list[ChecksumPiece] = []
    pool = StagingPool(2, GRID)
    buffer, spare = pool.take(), pool.take()
    opened: dict[int, PositionalFile] = {}
    try:
        for band in bands:
            if band.checker != rank:
                continue
            if band.file not in opened:
                opened[band.file] = PositionalFile(directory / files[band.file].path, direct=False)
            data = buffer[: band.where.length]
            opened[band.file].read(data, band.where.start)
            _compare(f"{directory / files[band.file].path}", band, data, spare, digests)
            opened[band.file].forget(band.where.start, band.where.length)
            where, path = band.where, files[band.file].path
            found.append(ChecksumPiece(path=path, begin=where.start, end=where.end, checksum=checksum(data), rank=rank))
    finally:
        for file in opened.values():
            file.close()
    return found


def _compare(
    path: str, band: InterleavedBlock, data: torch.Tensor, spare: torch.Tensor, digests: Mapping[tuple[int, int], str]
) -> None:
    where, filled = f"bytes [{band.where.start:,}, {band.where.end:,})", 0
    for place, strand in enumerate(band.strands):
        own = strand.bytes_of(data, band.where, spare)
        filled += own.numel()
        if checksum(own) != digests.get((band.number, place)):
            raise CheckpointError(
                f"{path}: of {where}, those of rank {strand.rank} are not what rank {strand.rank} wrote"
            )
    if filled != data.numel():
        raise CheckpointError(
            f"{path}: {filled} of the {where} belong to some rank; the ranks' parts do not make whole tensors"
        )
