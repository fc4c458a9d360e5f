"""The parts of tensors that a rank holds, the places of their elements in files, and arithmetic of byte intervals."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import BinaryIO, TypeVar

import torch

from zeromesh.checkpoint.io.format import ChecksumPiece, FileRecord, TensorSpec, checksum
from zeromesh.flat.layout import Region, StridedRows
from zeromesh.intervals import Interval, merged, round_up
from zeromesh.offload import TieredTensor
from zeromesh.offload.io.direct_io import BLOCK

GRID = 4 << 20  # the bytes of a piece with a checksum: pieces are cut at multiples of this offset in a file
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by element size in bytes: elements are copied as these, so that no bit of a NaN changes."""


def starts_in_others_blocks(extents: Sequence[Interval]) -> list[Interval]:
    """Return the start of each merged extent, up to the next block boundary, if its block's first byte is outside the extent."""
    return merged(Interval(start=each.start, end=min(each.end, round_up(each.start, BLOCK))) for each in extents)


def written_blocks(extents: Sequence[Interval], nbytes: int) -> list[Interval]:
    """List the disk blocks whose first byte lies in one of the merged extents, in a file of `nbytes` bytes."""
    blocks = [(round_up(each.start, BLOCK), round_up(each.end, BLOCK)) for each in extents]
    return merged(Interval(start=start, end=min(end, nbytes)) for start, end in blocks if start < end)


def cut_at_grid(interval: Interval) -> Iterator[Interval]:
    start = interval.start
    while start < interval.end:
        end = min(interval.end, (start // GRID + 1) * GRID)
        yield Interval(start=start, end=end)
        start = end


def record_of(path: str, file: BinaryIO, nbytes: int, rank: int = 0, on_progress: Callable[[], None] = lambda: None) -> FileRecord:
    """Make the record of a `file` that `rank` has written; `on_progress` is called after each piece."""
    pieces = []
    for cut in cut_at_grid(Interval(start=0, end=nbytes)):
        pieces.append(ChecksumPiece(path=path, begin=cut.start, end=cut.end, checksum=checksum(file.read(cut.length)), rank=rank))
        on_progress()
    return FileRecord(nbytes=nbytes, pieces=tuple(pieces))


_Member = TypeVar("_Member", ChecksumPiece, "PlacedValues")


def overlapping(members: Sequence[_Member], begin: int, end: int) -> Sequence[_Member]:
    """Return the members that have a byte in [begin, end), of sorted disjoint members."""
    first = bisect_right(members, begin, key=attrgetter("end"))
    return members[first : bisect_left(members, end, first, key=attrgetter("begin"))]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """Elements of a stored tensor in this rank's memory, as engine and checkpoint exchange them: `values` are elements `interval`
    of the flattened slices `region` of the tensor `spec`. `owner` is the number of the bucket whose update changes them, if any."""

    spec: TensorSpec
    region: Region
    interval: Interval
    values: TieredTensor
    owner: int | None = None


def elements_of(data: torch.Tensor, tensor: TensorSpec) -> torch.Tensor:
    """Return the elements, in the file's dtype, whose bytes in the file are `data`, 1-D uint8. A codec of stored weights decodes
    here, as all bytes pass through that are not read into memory of the file's dtype directly."""
    return data.view(tensor.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedValues:
    """Elements of a stored tensor in this process's memory, for reading or writing: `values` are the elements from `first` on of
    the columns `rows`, in the file's order, between whose bytes others may lie. Other dtypes than the file's are converted. `owner`
    is the bucket whose update changes them; None if no update does."""

    tensor: TensorSpec
    rows: StridedRows
    values: TieredTensor
    first: int = 0
    owner: int | None = None
    begin: int = field(init=False, repr=False, compare=False)
    """The elements' first byte in the file; `end` is the end of their last byte."""
    end: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        hull = self.rows.hull(self.interval) if self.values.numel else Interval(start=0, end=0)
        for name, element in (("begin", hull.start), ("end", hull.end)):
            object.__setattr__(self, name, self.tensor.begin + element * self.tensor.dtype.itemsize)

    @classmethod
    def of_bytes(cls, path: str, begin: int, data: bytes) -> "PlacedValues":
        values = TieredTensor.of(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        tensor = TensorSpec(kind="", name="", dtype=torch.uint8, shape=(len(data),), path=path, begin=begin)
        return cls.stored(tensor, 0, values)

    @classmethod
    def stored(cls, tensor: TensorSpec, first: int, values: TieredTensor, owner: int | None = None) -> "PlacedValues":
        """Place the elements of a flattened tensor from `first` on."""
        return cls(tensor=tensor, rows=StridedRows.whole(tensor.numel), values=values, first=first, owner=owner)

    @classmethod
    def runs(cls, tensor: TensorSpec, shard: TensorShard) -> Iterator["PlacedValues"]:
        for run in shard.region.runs(shard.interval):
            first = run.local - shard.interval.start
            yield cls.stored(tensor, run.logical, shard.values.slice(first, first + run.length), shard.owner)

    @property
    def interval(self) -> Interval:
        return Interval(start=self.first, end=self.first + self.values.numel)

    @property
    def nbytes(self) -> int:
        return self.values.numel * self.tensor.dtype.itemsize

    def cut(self, window: Interval) -> "PlacedValues":
        """Cut out the elements in the file's bytes `window`, which splits no element."""
        begin, size = self.tensor.begin, self.tensor.dtype.itemsize
        start, end = [self.rows.count_before((byte - begin) // size) for byte in (window.start, window.end)]
        inside = self.interval.intersect(Interval(start=start, end=max(start, end))).after(self.first)
        return replace(self, first=self.first + inside.start, values=self.values.slice(inside.start, inside.end))

    def to_bytes(self) -> bytes:
        out = torch.empty(self.nbytes, dtype=torch.uint8)
        self.fill(out)
        return out.numpy().tobytes()

    def fill(self, out: torch.Tensor) -> None:
        """Copy the bytes of all elements, in order, into `out`, `[nbytes]` uint8."""
        self.values.copy_to(out.view(self.tensor.dtype))

    def take(self, data: torch.Tensor, begin: int) -> None:
        """Copy elements from `data`, 1-D uint8, which is the file's bytes from `begin` on and splits no element."""
        window = Interval(start=max(self.begin, begin), end=min(self.end, begin + data.numel()))
        part = self if (window.start, window.end) == (self.begin, self.end) else self.cut(window)
        data = data[window.start - begin : window.end - begin]
        if part.nbytes != data.numel():
            size = self.tensor.dtype.itemsize
            words, found = WORDS[size], torch.empty(part.nbytes, dtype=torch.uint8)
            start = (window.start - self.tensor.begin) // size
            self.rows.take(data.view(words), start, part.interval, found.view(words))
            data = found
        part.values.copy_from(elements_of(data, self.tensor))
