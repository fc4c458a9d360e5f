"""The parts of tensors that a rank holds, the places of their elements in files, and integer arithmetic of bytes in a file: unions,
whole disk blocks, the grid of checksums, and what overlaps what.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import BinaryIO, TypeVar

import torch

from zeromesh.checkpoint.format.manifest import ChecksumPiece, FileRecord, checksum
from zeromesh.checkpoint.format.safetensors_layout import StoredTensor, TensorSpec
from zeromesh.flat.layout import Region, StridedRows
from zeromesh.intervals import Interval, round_up
from zeromesh.offload import TieredTensor
from zeromesh.offload.io.direct_io import BLOCK

GRID = 4 << 20
"""Bytes between checksum boundaries."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size in bytes: elements are moved as these, so that no bit of a NaN changes."""


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, in order, with neighbours as one interval and none of them empty."""
    found: list[Interval] = []
    for interval in sorted(intervals, key=lambda each: each.start):
        if found and interval.start <= found[-1].end:
            found[-1] = Interval(start=found[-1].start, end=max(found[-1].end, interval.end))
        else:
            found.append(interval)
    return [interval for interval in found if interval.length]


def starts_in_blocks_of_others(extents: Sequence[Interval]) -> list[Interval]:
    """The beginnings of merged extents that lie in a disk block whose first byte belongs to another extent."""
    starts = [Interval(start=each.start, end=min(each.end, round_up(each.start, BLOCK))) for each in extents]
    return [start for start in starts if start.length]


def written_blocks(extents: Sequence[Interval], nbytes: int) -> list[Interval]:
    """The disk blocks whose first byte lies in one of the merged extents, in a file of `nbytes` bytes."""
    blocks = [(round_up(each.start, BLOCK), round_up(each.end, BLOCK)) for each in extents]
    return merged(Interval(start=start, end=min(end, nbytes)) for start, end in blocks if start < end)


def cut_at_grid(interval: Interval) -> Iterator[Interval]:
    """An interval cut at multiples of `GRID`."""
    start = interval.start
    while start < interval.end:
        end = min(interval.end, (start // GRID + 1) * GRID)
        yield Interval(start=start, end=end)
        start = end


def record_of(
    path: str, file: BinaryIO, nbytes: int, rank: int = 0, on_progress: Callable[[], None] = lambda: None
) -> FileRecord:
    """The record of a file that `rank` has written, which is read from its start; `on_progress` is called after each piece."""
    pieces = []
    for cut in cut_at_grid(Interval(start=0, end=nbytes)):
        found = checksum(file.read(cut.length))
        pieces.append(ChecksumPiece(path=path, begin=cut.start, end=cut.end, checksum=found, rank=rank))
        on_progress()
    return FileRecord(nbytes=nbytes, pieces=tuple(pieces))


_Member = TypeVar("_Member", ChecksumPiece, "PlacedValues")


def overlapping(members: Sequence[_Member], begin: int, end: int) -> Iterator[_Member]:
    """The members that have a byte in [begin, end), of members that are disjoint and in order."""
    at = max(0, bisect_right(members, begin, key=attrgetter("begin")) - 1)
    while at < len(members) and members[at].begin < end:
        if members[at].end > begin:
            yield members[at]
        at += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """Elements of a stored tensor that this rank has in memory; engine and checkpoint exchange nothing else.

    `region` selects slices of the tensor `spec`. `values` are the elements `interval` of the flattened selection. `owner` numbers
    the bucket whose update changes them; it is None for what no update changes.
    """

    spec: TensorSpec
    region: Region
    interval: Interval
    values: TieredTensor
    owner: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedValues:
    """Elements in this process's memory, and where their bytes lie in a file that is written or read.

    A tensor begins at byte `origin` of the file `path` with elements of `dtype`. `rows` selects columns of its rows, and `values`
    are the elements of the selection from `first` on, in the file's order; bytes of other elements may lie between them. They may
    have another dtype than the file, and are converted then. `owner` is the bucket whose update changes them; None for what stays
    during a save.
    """

    path: str
    origin: int
    dtype: torch.dtype
    rows: StridedRows
    values: TieredTensor
    first: int = 0
    owner: int | None = None
    begin: int = field(init=False, repr=False, compare=False)
    """The first byte of the file, and after the last one `end`."""
    end: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        hull = self.rows.hull(self.interval) if self.values.numel else Interval(start=0, end=0)
        for name, element in (("begin", hull.start), ("end", hull.end)):
            object.__setattr__(self, name, self.origin + element * self.dtype.itemsize)

    @classmethod
    def of_bytes(cls, path: str, begin: int, data: bytes) -> PlacedValues:
        """Bytes of the file `path` from `begin` on."""
        values = TieredTensor.of(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return cls(path=path, origin=begin, dtype=torch.uint8, rows=StridedRows.whole(len(data)), values=values)

    @classmethod
    def stored(cls, tensor: StoredTensor, first: int, values: TieredTensor, owner: int | None = None) -> PlacedValues:
        """The elements from `first` on of a flattened tensor."""
        dtype, rows = tensor.spec.dtype, StridedRows.whole(values.numel)
        origin = tensor.begin + first * dtype.itemsize
        return cls(path=tensor.path, origin=origin, dtype=dtype, rows=rows, values=values, owner=owner)

    @classmethod
    def runs(cls, tensor: StoredTensor, shard: TensorShard) -> Iterator[PlacedValues]:
        """Each contiguous run of elements of a shard of a tensor."""
        for run in shard.region.runs(shard.interval):
            first = run.local - shard.interval.start
            yield cls.stored(tensor, run.logical, shard.values.slice(first, first + run.length), shard.owner)

    @property
    def interval(self) -> Interval:
        """The elements, counted in the selection."""
        return Interval(start=self.first, end=self.first + self.values.numel)

    @property
    def nbytes(self) -> int:
        return self.values.numel * self.dtype.itemsize

    def cut(self, window: Interval) -> PlacedValues:
        """The elements that lie in bytes `window` of the file, which may be longer and must cut no element."""
        start, end = (self.rows.before((b - self.origin) // self.dtype.itemsize) for b in (window.start, window.end))
        inside = self.interval.intersect(Interval(start=start, end=max(start, end))).after(self.first)
        return replace(self, first=self.first + inside.start, values=self.values.slice(inside.start, inside.end))

    def to_bytes(self) -> bytes:
        """The bytes of all elements, one after the other."""
        out = torch.empty(self.nbytes, dtype=torch.uint8)
        self.fill(out)
        return out.numpy().tobytes()

    def fill(self, out: torch.Tensor) -> None:
        """Put the bytes of all elements, one after the other, into `out`, `[nbytes]` uint8."""
        self.values.copy_to(out.view(self.dtype))

    def take(self, data: torch.Tensor, begin: int) -> None:
        """Take the elements that lie in `data`, the bytes of the file from `begin` on, 1-D uint8 that cut no element."""
        window = Interval(start=max(self.begin, begin), end=min(self.end, begin + data.numel()))
        part, data = self.cut(window), data[window.start - begin : window.end - begin]
        if part.nbytes != data.numel():
            words, found = _WORDS[self.dtype.itemsize], torch.empty(part.nbytes, dtype=torch.uint8)
            start = (window.start - self.origin) // self.dtype.itemsize
            self.rows.take(data.view(words), start, part.interval, found.view(words))
            data = found
        part.values.copy_from(data.view(self.dtype))
