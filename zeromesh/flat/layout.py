"""`BucketLayout`: which parameter lies where in one flat buffer, and which rank owns which elements of it.

    bucket  |  weight  |gap|   bias  |  ...  | weight2      | padding |
            0          a   b                                numel     padded
    shards  |        rank 0         |        rank 1         |  rank 2 ... |

Parameters begin at multiples of `alignment`; what lies between them, and the padding at the end, belongs to no parameter and
holds zeros. Parameters of one optimizer group lie together, so that a shard has a few long segments.

[Note: Regions]
A `Region` says which elements of a logical tensor a rank holds, and where they lie in it: integer arithmetic alone.
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
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

import torch

from zeromesh.errors import LayoutError
from zeromesh.intervals import ALIGNMENT, Interval, padded_length, round_up, shard_interval
from zeromesh.mesh.mesh_shape import Axis

Positions = tuple[tuple[Axis, tuple[int, ...]], ...]
"""Indices along some axes."""


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

    @classmethod
    def whole(cls, numel: int) -> StridedRows:
        """All of a tensor of some elements, as one row."""
        return cls(count=1, width=max(1, numel), columns=_all(max(1, numel)))

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

    def windows(self, interval: Interval, numel: int) -> Iterator[Interval]:
        """Yield local elements `interval` in parts: of whole rows of `numel` logical elements, or of as many of one row."""
        step = max(1, numel // self.width) * min(self.taken, numel)
        for start in range(interval.start, interval.end, step):
            yield Interval(start=start, end=min(start + step, interval.end))

    def blocks(self, interval: Interval) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
        """Yield the blocks of rows that local elements `interval` consist of: the rest of a row, whole rows, the beginning of one.

        Of each block: the first row, how many rows, and its runs in each of them: where a run begins in the logical row, where in
        the local one, and its length.
        """
        first, start = divmod(interval.start, self.taken)
        last, end = divmod(interval.end, self.taken)
        whole = first + bool(start)
        spans = [(first, int(bool(start)), start, self.taken), (whole, last - whole, 0, self.taken), (last, 1, 0, end)]
        for row, rows, low, high in spans if first < last else [(first, 1, start, end)]:
            if parts := list(self._parts(low, high)) if rows else []:
                yield row, rows, parts

    def _parts(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield where runs of elements [low, high) of a local row begin in the logical row, where in the local one, and lengths."""
        at = 0
        for column in self.columns:
            begin, end = max(low, at), min(high, at + column.length)
            if begin < end:
                yield column.start + begin - at, begin, end - begin
            at += column.length

    def tiles(self, interval: Interval) -> Iterator[Tile]:
        """Yield the tiles that local elements `interval` consist of: one of each column of each block of rows."""
        for row, rows, parts in self.blocks(interval):
            for start, local, length in parts:
                yield Tile(local=row * self.taken + local, logical=row * self.width + start, rows=rows, length=length)

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
        """True if the region is all of the tensor, in order."""
        return self._last_split() < 0

    @property
    def is_strided(self) -> bool:
        """True if the region is taken from the inside of rows, of which there are several."""
        split = self._last_split()
        return split > 0 and prod(self.shape[:split]) > 1

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
    """Yield for each interval its place when the intervals follow one another, and the place that it is taken from."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPart:
    """The part of a parameter that a rank holds under tensor parallelism: its tensor is `region` of the whole one, in its order."""

    region: Region
    holders: tuple[int, ...]
    """Positions along the tensor axis that hold this very region, in order; the first one counts and writes it."""
    partial: bool = False
    """True if the holders' gradients are summands of the gradient; otherwise they compute the same one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCopies:
    """A tied parameter of which several ranks of a pipeline have a copy each: the gradients of the copies are summands."""

    name: str
    """In checkpoints: the first of its names in the whole model."""
    aliases: tuple[str, ...]
    """Its other names in the whole model."""
    ranks: tuple[int, ...]
    """Positions along the pipeline axis that have a copy, in order; the first one counts and writes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """One physical parameter. Tied parameters are one spec with several names."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    group: int = 0
    """Index of the optimizer group whose settings apply."""
    aliases: tuple[str, ...] = ()
    """Further fully qualified names of the same parameter."""
    part: ParameterPart | None = None
    """The part of the whole parameter that this is; None: all of it, the same on all ranks of the tensor axis."""
    copies: StageCopies | None = None
    """For a tied parameter that several stages of a pipeline have."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def name(self) -> str:
        """The name of the parameter in checkpoints, and for whoever asks for it."""
        return self.fqn if self.copies is None else self.copies.name

    @property
    def other_names(self) -> tuple[str, ...]:
        """The other names of the parameter, including those that only other pipeline stages use."""
        return self.aliases if self.copies is None else self.copies.aliases

    @property
    def region(self) -> Region:
        """The region of the whole parameter that this is."""
        return Region.whole(self.shape) if self.part is None else self.part.region

    @property
    def holders(self) -> tuple[int, ...]:
        """Positions along the tensor axis that hold the same; none: all of them."""
        return () if self.part is None else self.part.holders

    @property
    def shared_by(self) -> Positions:
        """Positions along axes, other than those of the batch, whose gradients of it are summands of the whole one."""
        holders = self.holders if self.part is not None and self.part.partial else ()
        found = (("tensor", holders), ("pipeline", () if self.copies is None else self.copies.ranks))
        return tuple(each for each in found if each[1])

    @property
    def counted_at(self) -> dict[Axis, int]:
        """The index, along the axes that divide the model, of the ranks that count and write it; on other axes it is elsewhere."""
        first = {"tensor": self.holders[0] if self.holders else 0}
        return first if self.copies is None else first | {"pipeline": self.copies.ranks[0]}

    @property
    def kind(self) -> tuple[torch.dtype, bool, object, object]:
        """Parameters of one kind may lie in one bucket."""
        return self.dtype, self.requires_grad, self.holders, self.shared_by


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSlot:
    """The place of one parameter in a bucket."""

    spec: ParameterSpec
    where: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSegment:
    """A run of elements of a shard that are updated alike; `where` counts from the start of the shard."""

    group: int
    slot: int
    """The first of the slots that it spans."""
    where: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPiece:
    """The part of one parameter inside one shard."""

    spec: ParameterSpec
    in_parameter: Interval
    in_shard: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """Frozen and self-checking: slots are in order, aligned, disjoint and inside the buffer.

    Raises:
        LayoutError: at construction, when any of this does not hold.
    """

    name: str
    slots: tuple[ParameterSlot, ...]
    parts: int
    """Shards that the buffer is split into: the size of the shard axis."""
    alignment: int = ALIGNMENT
    padded: int = field(init=False)

    def __post_init__(self) -> None:
        end = 0
        for slot in self.slots:
            spec, where = slot.spec, slot.where
            if where.start < end or where.start % self.alignment or where.length != spec.numel:
                raise LayoutError(
                    f"bucket {self.name}: {spec.fqn} with {spec.numel} elements lies at [{where.start}, {where.end}), "
                    f"which overlaps, is not aligned to {self.alignment} or has another length"
                )
            end = where.end
        object.__setattr__(self, "padded", padded_length(end, self.parts, self.alignment))

    @property
    def first(self) -> ParameterSpec:
        """The first parameter: all have its dtype, are trained or not like it, and are shared by the same ranks."""
        return self.slots[0].spec

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered parameters, padding included."""
        return self.padded * self.first.dtype.itemsize

    @property
    def shard_length(self) -> int:
        return self.padded // self.parts

    def shard(self, index: int) -> Interval:
        """Elements of the buffer that shard `index` owns."""
        return shard_interval(self.padded, self.parts, index)

    def gaps(self) -> tuple[Interval, ...]:
        """Intervals that belong to no parameter, padding included."""
        starts = [*(slot.where.start for slot in self.slots), self.padded]
        ends = [0, *(slot.where.end for slot in self.slots)]
        return tuple(Interval(start=end, end=start) for end, start in zip(ends, starts, strict=True) if start > end)

    def pieces(self, interval: Interval) -> tuple[ShardPiece, ...]:
        """Return the parts of parameters that lie in `interval`; `in_shard` counts from its start. Empty parts are left out."""
        first = bisect_right(self.slots, interval.start, key=lambda slot: slot.where.end)
        last = bisect_left(self.slots, interval.end, key=lambda slot: slot.where.start)
        shared = [(slot, slot.where.intersect(interval)) for slot in self.slots[first:last]]
        return tuple(
            ShardPiece(
                spec=slot.spec, in_parameter=common.after(slot.where.start), in_shard=common.after(interval.start)
            )
            for slot, common in shared
            if common.length
        )

    def segments(self, interval: Interval, kinds: Sequence[object] | None = None) -> tuple[ShardSegment, ...]:
        """`interval` cut where the optimizer group changes, or what `kinds` has for each slot. Gaps go with the parameter before
        them."""
        if not self.slots or not interval.length:
            return ()
        keys = [(slot.spec.group, kinds[number] if kinds else None) for number, slot in enumerate(self.slots)]
        firsts = [number for number, key in enumerate(keys) if not number or keys[number - 1] != key]
        starts = [self.slots[number].where.start if number else 0 for number in firsts]
        segments = []
        for number, start, end in zip(firsts, starts, [*starts[1:], self.padded], strict=True):
            common = Interval(start=start, end=end).intersect(interval)
            if common.length:
                segments.append(ShardSegment(group=keys[number][0], slot=number, where=common.after(interval.start)))
        return tuple(segments)


def build_layout(name: str, specs: Iterable[ParameterSpec], parts: int, alignment: int = ALIGNMENT) -> BucketLayout:
    """Lay parameters out one after the other, those of one optimizer group together, order kept otherwise."""
    slots, end = [], 0
    for spec in sorted(specs, key=lambda spec: spec.group):
        start = round_up(end, alignment)
        end = start + spec.numel
        slots.append(ParameterSlot(spec=spec, where=Interval(start=start, end=end)))
    return BucketLayout(name=name, slots=tuple(slots), parts=parts, alignment=alignment)
