"""Which elements of a logical tensor a rank holds, and where they lie in it: integer arithmetic alone.

A rank's part of a tensor is cut twice. Tensor parallelism takes slices of dims (several of one dim where projections are packed),
which make a local tensor of their own; ZeRO then takes an interval of that local tensor, flattened. A checkpoint knows whole
tensors, so both are undone here: an interval of a local tensor is a list of runs, each contiguous in the local and in the logical
tensor.

    logical [4, 6]         region: all of dim 0, [0, 2) and [4, 6) of dim 1         local [4, 4], interval [2, 9)
      0  1  .  .  4  5                                                               run  local 2   logical 4   length 4
      6  7  .  . 10 11                                                               run  local 6   logical 10  length 3
     12 13  .  . 16 17
     18 19  .  . 22 23

Columns of rows: what a rank has of a tensor that is divided inside of its rows, moved by whole blocks of rows.

    logical rows of 6         columns [0, 2) and [4, 6)         local rows of 4
      0  1  .  .  4  5                                            0  1  2  3
      6  7  .  . 10 11                                            4  5  6  7
     12 13  .  . 16 17                                            8  9 10 11

Columns are in order, so elements have one order in both: those of a stretch of the logical tensor are a stretch of the local one.
Whatever the number of rows, a stretch is a few tiles, each of which is copied at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

import torch

from zeromesh.errors import LayoutError
from zeromesh.intervals import Interval, round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """`rows` runs of `length` elements each: the first from `local` on in a flattened local tensor and from `logical` on in the
    logical one, the next ones a row further in both."""

    local: int
    logical: int
    length: int
    rows: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StridedRows:
    """The same `columns` of each of `count` logical rows of `width` elements.

    Raises:
        LayoutError: at construction, for columns that are empty, not in order or beyond the row.
    """

    count: int
    width: int
    columns: tuple[Interval, ...]
    taken: int = field(init=False, repr=False, compare=False)
    """Elements of a local row."""

    def __post_init__(self) -> None:
        ordered = all(one.end <= other.start for one, other in pairwise(self.columns))
        empty = not self.columns or any(not column.length for column in self.columns)
        if empty or not ordered or self.columns[-1].end > self.width:
            raise LayoutError(
                f"columns {self.columns} of rows of {self.width}: they are to be in order, and inside of a row"
            )
        object.__setattr__(self, "taken", sum(column.length for column in self.columns))

    def before(self, logical: int) -> int:
        """How many local elements come before a logical position, which is also the place of the first one from there on."""
        row, at = divmod(min(max(logical, 0), self.count * self.width), self.width)
        return row * self.taken + sum(min(max(at - column.start, 0), column.length) for column in self.columns)

    def hull(self, interval: Interval) -> Interval:
        """The logical stretch from the first to the last of some local elements, of which there is one at least."""
        return Interval(start=self._logical(interval.start), end=self._logical(interval.end - 1) + 1)

    def _logical(self, local: int) -> int:
        row, at = divmod(local, self.taken)
        return row * self.width + _logical_index(self.columns, at)

    def tiles(self, interval: Interval) -> Iterator[Tile]:
        """What local elements `interval` consist of: the rest of a row, whole rows, the beginning of a row."""
        first, start = divmod(interval.start, self.taken)
        last, end = divmod(interval.end, self.taken)
        whole = first + bool(start)
        spans = [(first, int(bool(start)), start, self.taken), (whole, last - whole, 0, self.taken), (last, 1, 0, end)]
        for row, rows, low, high in spans if first < last else [(first, 1, start, end)]:
            at = 0
            for column in self.columns:
                begin, stop = max(low, at), min(high, at + column.length)
                if rows and begin < stop:
                    logical = row * self.width + column.start + begin - at
                    yield Tile(local=row * self.taken + begin, logical=logical, rows=rows, length=stop - begin)
                at += column.length

    def take(self, window: torch.Tensor, start: int, interval: Interval, out: torch.Tensor) -> None:
        """Put local elements `interval` into `out`, 1-D, from `window`: the logical tensor from position `start` on, 1-D."""
        for tile in self.tiles(interval):
            there = _block(window, tile.logical - start, tile, self.width)
            _block(out, tile.local - interval.start, tile, self.taken).copy_(there)


def _block(flat: torch.Tensor, at: int, tile: Tile, stride: int) -> torch.Tensor:
    """A tile in memory, `[rows, length]`."""
    return flat.as_strided((tile.rows, tile.length), (stride, 1), flat.storage_offset() + at)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Slices of the dims of a logical tensor of `shape`; `dims` has the intervals of each dim in the local tensor's order.

    Raises:
        LayoutError: at construction, for intervals outside the shape or that overlap.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.shape):
            raise LayoutError(f"a region of {len(self.dims)} dims in a tensor of shape {list(self.shape)}")
        for dim, (size, intervals) in enumerate(zip(self.shape, self.dims, strict=True)):
            end = 0
            for interval in sorted(intervals, key=lambda each: (each.start, each.end)):
                if interval.start < end or interval.end > size:
                    raise LayoutError(
                        f"dim {dim} of {size}: [{interval.start}, {interval.end}) overlaps another interval or ends beyond it"
                    )
                end = interval.end

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """All of a tensor."""
        return cls(shape=shape, dims=tuple(_all(size) for size in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(interval.length for interval in intervals) for intervals in self.dims)

    @property
    def numel(self) -> int:
        return prod(self.local_shape)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor, in order."""
        return self._last_split() < 0

    @property
    def is_strided(self) -> bool:
        """Whether it is taken from the inside of rows, of which there are several."""
        split = self._last_split()
        return split > 0 and prod(self.shape[:split]) > 1

    @property
    def row_numel(self) -> int:
        """Elements of the whole tensor that have the same index in the dims before the last one that is divided."""
        return prod(self.shape[max(0, self._last_split()) :])

    def rows(self) -> StridedRows | None:
        """The region as columns of rows, if it has elements and is just that: one dim is divided, into slices in order."""
        split = self._last_split()
        others = [dim for dim in range(len(self.shape)) if dim != split]
        if split < 0 or not self.numel or any(self.dims[dim] != _all(self.shape[dim]) for dim in others):
            return None
        taken = [interval for interval in self.dims[split] if interval.length]
        if any(one.end > other.start for one, other in pairwise(taken)):
            return None
        inner = prod(self.shape[split + 1 :])
        columns = tuple(Interval(start=each.start * inner, end=each.end * inner) for each in taken)
        return StridedRows(count=prod(self.shape[:split]), width=self.shape[split] * inner, columns=columns)

    def boxes(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Boxes that make the region up: where each lies in the local tensor, and where in the logical one."""
        for box in itertools.product(*map(_placed, self.dims)):
            yield tuple(here for here, _ in box), tuple(there for _, there in box)

    def runs(self, interval: Interval) -> Iterator[Tile]:
        """Runs of elements `interval` of the flattened local tensor, in its order, each as long as it can be.

        Raises:
            LayoutError: for an interval beyond the local tensor.
        """
        if interval.end > self.numel:
            raise LayoutError(f"elements [{interval.start}, {interval.end}) of a local tensor of {self.numel}")
        found: Tile | None = None
        for run in self._pieces(interval):
            if found is not None and run.logical == found.logical + found.length:
                found = replace(found, length=found.length + run.length)
                continue
            if found is not None:
                yield found
            found = run
        if found is not None:
            yield found

    def _pieces(self, interval: Interval) -> Iterator[Tile]:
        """As `runs`, but neighbours may still continue each other."""
        if not interval.length:
            return
        split = self._last_split()
        if split < 0:
            yield Tile(local=interval.start, logical=interval.start, length=interval.length)
            return
        inner = prod(self.shape[split + 1 :])
        row = self.local_shape[split] * inner
        for number in range(interval.start // row, (interval.end - 1) // row + 1):
            at, base = number * row, self._logical_row(number, split)
            for taken in self.dims[split]:
                here = Interval(start=at, end=at + taken.length * inner).intersect(interval)
                if here.length:
                    logical = base + taken.start * inner + here.start - at
                    yield Tile(local=here.start, logical=logical, length=here.length)
                at += taken.length * inner

    def _last_split(self) -> int:
        """The last dim that is not taken whole; -1 when all are."""
        split = [dim for dim, size in enumerate(self.shape) if self.dims[dim] != _all(size)]
        return split[-1] if split else -1

    def _logical_row(self, number: int, split: int) -> int:
        """The logical position of the first element of local row `number`, rows being indices of the dims before `split`."""
        at, stride = 0, prod(self.shape[split:])
        for dim in range(split - 1, -1, -1):
            number, index = divmod(number, self.local_shape[dim])
            at += _logical_index(self.dims[dim], index) * stride
            stride *= self.shape[dim]
        return at


def _all(size: int) -> tuple[Interval, ...]:
    return (Interval(start=0, end=size),)


def _placed(intervals: tuple[Interval, ...]) -> Iterator[tuple[slice, slice]]:
    """Where intervals lie when they follow one another, and where they are taken from."""
    at = 0
    for interval in intervals:
        yield slice(at, at + interval.length), slice(interval.start, interval.end)
        at += interval.length


def _logical_index(intervals: tuple[Interval, ...], index: int) -> int:
    for interval in intervals:
        if index < interval.length:
            return interval.start + index
        index -= interval.length
    raise LayoutError(f"an index is {index} beyond the end of its intervals")


def share_of(interval: Interval, parts: int, index: int, alignment: int) -> Interval:
    """Part `index` of an interval that `parts` ranks hold alike: each writes its share, and together all of it once.

    Shares begin at multiples of `alignment` from the interval's start. Some are empty where the interval is short.
    """
    length = round_up(-(-interval.length // parts), alignment)
    start = min(interval.start + index * length, interval.end)
    return Interval(start=start, end=min(start + length, interval.end))
