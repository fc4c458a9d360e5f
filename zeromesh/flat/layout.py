"""`BucketLayout`: the positions of parameters in one flat buffer, and the division of its elements over ranks.

    bucket  |  weight  |gap|   bias  |  ...  | weight2      | padding |
            0          a   b                                numel     padded
    shards  |        rank 0         |        rank 1         |  rank 2 ... |

Parameters begin at multiples of `alignment`; gaps between them and the padding at the end hold zeros. Parameters of one optimizer
group are adjacent, so that a shard has a few long segments.

[Note: Regions] A `Region` is the set of elements of a logical tensor that a rank holds, and their order. Tensor parallelism slices
dims (in several slices where projections are packed), which gives a local tensor; ZeRO then takes an interval of that, flattened.
A checkpoint holds whole tensors: such an interval becomes a list of runs, each contiguous in the local and the logical tensor.

    logical [4, 6]         region: all of dim 0, [0, 2) and [4, 6) of dim 1         local [4, 4], interval [2, 9)
      0  1  .  .  4  5                                                               run  local 2   logical 4   length 4
      6  7  .  . 10 11                                                               run  local 6   logical 10  length 3
     12 13  .  . 16 17
     18 19  .  . 22 23

Columns of rows, as in the picture, are moved in blocks of rows: an interval of any number of rows is a few tiles, each one copy."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import torch

from zeromesh.errors import LayoutError
from zeromesh.flat.codec import Codec
from zeromesh.intervals import ALIGNMENT, Interval, round_up
from zeromesh.mesh.mesh_shape import Axis

Positions = tuple[tuple[Axis, tuple[int, ...]], ...]  # pairs of a mesh axis and indices along it


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """`rows` runs of `length` elements each: the first one begins at `local` in the flattened local tensor and at `logical` in the
    logical one, each further one a row later in both."""

    local: int
    logical: int
    length: int
    rows: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StridedRows:
    """The same `columns` of `count` logical rows of `width` elements. Raises `LayoutError` for empty, unordered or outer ones."""

    count: int
    width: int
    columns: tuple[Interval, ...]
    local_width: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = all(one.end <= other.start for one, other in itertools.pairwise(self.columns))
        empty = not self.columns or any(not column.length for column in self.columns)
        if empty or not ordered or self.columns[-1].end > self.width:
            raise LayoutError(f"columns {self.columns} of rows of {self.width}: they are to be in order, inside a row")
        object.__setattr__(self, "local_width", sum(column.length for column in self.columns))

    @classmethod
    @lru_cache
    def whole(cls, numel: int) -> "StridedRows":
        return cls(count=1, width=max(1, numel), columns=_full_dim(max(1, numel)))

    def count_before(self, logical: int) -> int:
        """Return the number of local elements before a logical position, also the local position of the first element after it."""
        row, at = divmod(min(max(logical, 0), self.count * self.width), self.width)
        return row * self.local_width + sum(min(max(at - column.start, 0), column.length) for column in self.columns)

    def hull(self, interval: Interval) -> Interval:
        """Return the logical interval from the first to the last of the local elements `interval`, which is not empty."""
        ends = [divmod(local, self.local_width) for local in (interval.start, interval.end - 1)]
        first, last = [row * self.width + _logical_index(self.columns, at) for row, at in ends]
        return Interval(start=first, end=last + 1)

    def windows(self, interval: Interval, numel: int) -> Iterator[Interval]:
        """Split local elements `interval` into whole rows of at most `numel` logical elements together, or into parts of a row."""
        step = max(1, numel // self.width) * min(self.local_width, numel)
        for start in range(interval.start, interval.end, step):
            yield Interval(start=start, end=min(start + step, interval.end))

    def blocks(self, interval: Interval) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
        """Yield the blocks of rows of local elements `interval`: the rest of a row, whole rows, the beginning of one. A block is
        its first row, its number of rows, and its runs per row: begin in the logical and in the local row, length."""
        size = self.local_width
        (first, start), (last, end) = divmod(interval.start, size), divmod(interval.end, size)
        whole = first + bool(start)
        spans = [(first, int(bool(start)), start, size), (whole, last - whole, 0, size), (last, 1, 0, end)]
        for row, rows, low, high in spans if first < last else [(first, 1, start, end)]:
            parts, at = [], 0
            for column in self.columns:
                begin, stop = max(low, at), min(high, at + column.length)
                if begin < stop:
                    parts.append((column.start + begin - at, begin, stop - begin))
                at += column.length
            if rows and parts:
                yield row, rows, parts

    def tiles(self, interval: Interval) -> Iterator[Tile]:
        """Yield the tiles of local elements `interval`: one for each column of each block of rows."""
        for row, rows, parts in self.blocks(interval):
            for start, at, size in parts:
                yield Tile(local=row * self.local_width + at, logical=row * self.width + start, rows=rows, length=size)

    def take(self, window: torch.Tensor, start: int, interval: Interval, out: torch.Tensor) -> None:
        """Copy local elements `interval` into `out`, 1-D, from `window`, 1-D: the logical tensor from position `start` on."""
        for tile in self.tiles(interval):
            there = _strided_view(window, tile.logical - start, tile, self.width)
            _strided_view(out, tile.local - interval.start, tile, self.local_width).copy_(there)


def _strided_view(flat: torch.Tensor, at: int, tile: Tile, stride: int) -> torch.Tensor:
    return flat.as_strided((tile.rows, tile.length), (stride, 1), flat.storage_offset() + at)


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """Slices of the dims of a logical tensor; `dims` has the intervals of each dim in the local tensor's order. Raises
    `LayoutError` at construction, for intervals outside the shape or that overlap."""

    shape: tuple[int, ...]
    dims: tuple[tuple[Interval, ...], ...]
    local_shape: tuple[int, ...] = field(init=False, repr=False, compare=False)
    numel: int = field(init=False, repr=False, compare=False)
    split: int = field(init=False, repr=False, compare=False)
    """The last dim that is not whole and in order; -1 without any."""

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.shape):
            raise LayoutError(f"a region of {len(self.dims)} dims in a tensor of shape {list(self.shape)}")
        for dim, (size, intervals) in enumerate(zip(self.shape, self.dims, strict=True)):
            end = 0
            for interval in sorted(intervals, key=lambda each: (each.start, each.end)):
                if interval.start < end or interval.end > size:
                    where = f"dim {dim} of {size}: [{interval.start}, {interval.end})"
                    raise LayoutError(f"{where} overlaps another interval or ends beyond it")
                end = interval.end
        local_shape = tuple(sum(interval.length for interval in intervals) for intervals in self.dims)
        split = max((dim for dim, size in enumerate(self.shape) if self.dims[dim] != _full_dim(size)), default=-1)
        for name, value in (("local_shape", local_shape), ("numel", prod(local_shape)), ("split", split)):
            object.__setattr__(self, name, value)

    @classmethod
    @lru_cache
    def whole(cls, shape: tuple[int, ...]) -> "Region":
        return cls(shape=shape, dims=tuple(_full_dim(size) for size in shape))

    @property
    def is_whole(self) -> bool:
        """True if the region is all of the tensor, in order."""
        return self.split < 0

    def rows(self) -> StridedRows | None:
        """Return the region as columns of rows, if it has elements and one dim is divided, into slices in order; else None."""
        split = self.split
        if split < 0 or not self.numel or any(self.dims[dim] != _full_dim(self.shape[dim]) for dim in range(split)):
            return None
        taken = [interval for interval in self.dims[split] if interval.length]
        if any(one.end > other.start for one, other in itertools.pairwise(taken)):
            return None
        inner = prod(self.shape[split + 1 :])
        columns = tuple(Interval(start=each.start * inner, end=each.end * inner) for each in taken)
        return StridedRows(count=prod(self.shape[:split]), width=self.shape[split] * inner, columns=columns)

    def boxes(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Yield the boxes of the region, each as slices of the local tensor and of the logical one."""
        pairs: list[list[tuple[slice, slice]]] = []
        for intervals in self.dims:
            placed = zip(intervals, itertools.accumulate(each.length for each in intervals), strict=True)
            pairs.append([(slice(end - each.length, end), slice(each.start, each.end)) for each, end in placed])
        for box in itertools.product(*pairs):
            yield tuple(here for here, _ in box), tuple(there for _, there in box)

    def runs(self, interval: Interval) -> Iterator[Tile]:
        """Yield the maximal runs of local elements `interval`, in order. Raises `LayoutError` for an interval beyond them."""
        if interval.end > self.numel:
            raise LayoutError(f"elements [{interval.start}, {interval.end}) of a local tensor of {self.numel}")
        if not interval.length:
            return
        split = self.split
        if split < 0:
            yield Tile(local=interval.start, logical=interval.start, length=interval.length)
            return
        inner = prod(self.shape[split + 1 :])
        row = self.local_shape[split] * inner
        run: Tile | None = None
        for number in range(interval.start // row, (interval.end - 1) // row + 1):
            at, base, stride, rest = number * row, 0, self.shape[split] * inner, number
            # `base`: the logical position of row `number`, whose digits are indices of the earlier dims.
            for dim in reversed(range(split)):
                rest, index = divmod(rest, self.local_shape[dim])
                base += _logical_index(self.dims[dim], index) * stride
                stride *= self.shape[dim]
            for taken in self.dims[split]:
                here = Interval(start=at, end=at + taken.length * inner).intersect(interval)
                logical = base + taken.start * inner + here.start - at
                at += taken.length * inner
                if here.length and run is not None and logical == run.logical + run.length:
                    run = replace(run, length=run.length + here.length)
                elif here.length:
                    if run is not None:
                        yield run
                    run = Tile(local=here.start, logical=logical, length=here.length)
        if run is not None:
            yield run


def part_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """Return a copy of the elements of `whole` in a region, or `whole` itself for the whole region."""
    for dim, intervals in enumerate(region.dims):
        if intervals != _full_dim(region.shape[dim]):
            whole = torch.cat([whole.narrow(dim, one.start, one.length) for one in intervals], dim)
    return whole


def _full_dim(size: int) -> tuple[Interval, ...]:
    return (Interval(start=0, end=size),)


def _logical_index(intervals: tuple[Interval, ...], index: int) -> int:
    for interval in intervals:
        if index < interval.length:
            return interval.start + index
        index -= interval.length
    raise LayoutError(f"an index is {index} beyond the end of its intervals")


def share_of(interval: Interval, parts: int, index: int, alignment: int) -> Interval:
    """Return part `index`, perhaps empty, of an interval that `parts` ranks share, in multiples of `alignment` elements."""
    length = round_up(-(-interval.length // parts), alignment)
    start = min(interval.start + index * length, interval.end)
    return Interval(start=start, end=min(start + length, interval.end))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPart:
    """The part of a parameter that a rank holds where layers or experts are divided: `region` of the whole tensor."""

    region: Region
    holders: tuple[int, ...]
    """Positions along the tensor axis of the ranks with the same region, in order; the first one counts and writes it."""
    partial: bool = False  # True if the holders' gradients must be summed; otherwise they are equal
    experts: bool = False  # True if it has some of the experts, whose states the ranks with the same ones share


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCopies:
    """A tied parameter of which several pipeline ranks have copies; its gradient is the sum over them."""

    name: str  # the name in checkpoints: the first of the parameter's names in the whole model
    aliases: tuple[str, ...]
    ranks: tuple[int, ...]
    """Positions along the pipeline axis of the ranks with a copy, in order; the first one counts and writes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """One physical parameter, of which this rank holds `region`. Tied parameters are one spec with several names."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    group: int = 0
    aliases: tuple[str, ...] = ()
    part: ParameterPart | None = None
    """The part of the whole parameter; None: all of it, equal on all ranks that compute a batch together."""
    copies: StageCopies | None = None
    codec: Codec | None = None
    """The codec of a frozen parameter that is kept encoded; None: it is kept as it is computed with."""
    experts: str = ""  # the module of experts whose frozen parameter this is, with a row for each; empty for all others
    numel: int = field(init=False, repr=False, compare=False)
    name: str = field(init=False, repr=False, compare=False)  # the name of the parameter in checkpoints and for users
    region: Region = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", prod(self.shape))
        object.__setattr__(self, "name", self.fqn if self.copies is None else self.copies.name)
        object.__setattr__(self, "region", Region.whole(self.shape) if self.part is None else self.part.region)

    @property
    def other_names(self) -> tuple[str, ...]:
        """The other names of the parameter, including those on other pipeline stages."""
        return self.aliases if self.copies is None else self.copies.aliases

    @property
    def holders(self) -> tuple[int, ...]:
        """Positions along the tensor axis of the ranks with the same part; empty: all."""
        return () if self.part is None else self.part.holders

    @property
    def in_experts(self) -> bool:
        """True if ranks have different experts in it."""
        return self.part is not None and self.part.experts

    @property
    def shared_by(self) -> Positions:
        """Positions, along axes other than the batch's, of the ranks that share this parameter and sum its gradients."""
        holders = self.holders if self.part is not None and self.part.partial else ()
        positions = (("tensor", holders), ("pipeline", () if self.copies is None else self.copies.ranks))
        return tuple(each for each in positions if each[1])

    @property
    def counted_at(self) -> dict[Axis, int]:
        """The index, along axes that divide the model, of the ranks that count it in norms and write it."""
        first = {"tensor": self.holders[0] if self.holders else 0}
        return first if self.copies is None else first | {"pipeline": self.copies.ranks[0]}

    @property
    def bucket_key(self) -> tuple[torch.dtype, bool, object, object, object, bool, str]:
        """A key that is equal for parameters that may lie in one bucket."""
        return self.dtype, self.requires_grad, self.holders, self.shared_by, self.codec, self.in_experts, self.experts


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSlot:
    spec: ParameterSpec
    where: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSegment:
    """A run of a shard's elements with one optimizer group and equal keys (`BucketLayout.segments`), from parameter `number` on."""

    group: int
    number: int
    where: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPiece:
    spec: ParameterSpec
    in_parameter: Interval
    in_shard: Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketLayout:
    """The layout of a bucket of `parts` shards, each held by ranks of which `dividers` divide its states, if more than one does.
    Raises `LayoutError` unless slots are in order, aligned and disjoint."""

    name: str
    slots: tuple[ParameterSlot, ...]
    parts: int
    alignment: int = ALIGNMENT
    dividers: int = 1
    padded: int = field(init=False)
    shard_length: int = field(init=False)
    first: ParameterSpec = field(init=False, repr=False)
    """The first parameter; all others have its dtype, `requires_grad`, codec and ranks."""

    def __post_init__(self) -> None:
        end = 0
        for slot in self.slots:
            spec, where = slot.spec, slot.where
            if where.start < end or where.start % self.alignment or where.length != spec.numel:
                why = f"bucket {self.name}: {spec.fqn} with {spec.numel} elements lies at [{where.start}, {where.end})"
                raise LayoutError(f"{why}, which overlaps, is not aligned to {self.alignment} or has another length")
            end = where.end
        # Aligned shards of equal length fill it, and aligned parts each of them.
        padded = round_up(end, self.parts * self.dividers * self.alignment)
        object.__setattr__(self, "padded", padded)
        object.__setattr__(self, "shard_length", padded // self.parts)
        object.__setattr__(self, "first", self.slots[0].spec if self.slots else None)

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered parameters, including padding."""
        return self.padded * self.first.dtype.itemsize

    def rest_nbytes(self, length: int) -> int:
        """Return the bytes of a shard of `length` elements at rest, and on its way to other ranks."""
        codec = self.first.codec
        return length * self.first.dtype.itemsize if codec is None else round_up(codec.nbytes(length), ALIGNMENT)

    def travelling_nbytes(self, shards: int) -> int:
        """Return the bytes of all `shards` shards of a bucket, as they are gathered."""
        return shards * self.rest_nbytes(self.padded // shards)

    def shard(self, index: int) -> Interval:
        return Interval(start=index * self.shard_length, end=(index + 1) * self.shard_length)

    def part(self, held: Interval, replica: int) -> Interval:
        """Return the elements of a shard `held` whose states the rank at position `replica` of those with the shard has."""
        length = held.length // self.dividers
        start = held.start + replica % self.dividers * length
        return Interval(start=start, end=start + length)

    def gaps(self) -> tuple[Interval, ...]:
        """Return the intervals that belong to no parameter, including the padding."""
        starts = [*(slot.where.start for slot in self.slots), self.padded]
        ends = [0, *(slot.where.end for slot in self.slots)]
        return tuple(Interval(start=end, end=start) for end, start in zip(ends, starts, strict=True) if start > end)

    def pieces(self, interval: Interval) -> tuple[ShardPiece, ...]:
        """Return the parts of parameters that lie in `interval`; `in_shard` counts from its start. Empty parts are left out."""
        first = bisect_right(self.slots, interval.start, key=lambda slot: slot.where.end)
        last = bisect_left(self.slots, interval.end, key=lambda slot: slot.where.start)
        shared = [(slot, slot.where.intersect(interval)) for slot in self.slots[first:last]]
        return tuple(
            ShardPiece(spec=slot.spec, in_parameter=part.after(slot.where.start), in_shard=part.after(interval.start))
            for slot, part in shared
            if part.length
        )

    def segments(self, interval: Interval, keys: Sequence[object] | None = None) -> tuple[ShardSegment, ...]:
        """Split `interval` where the optimizer group or the slots' entry in `keys` changes. Gaps go with the parameter before."""
        if not self.slots or not interval.length:
            return ()
        pairs = [(slot.spec.group, keys[number] if keys else None) for number, slot in enumerate(self.slots)]
        firsts = [number for number, key in enumerate(pairs) if not number or pairs[number - 1] != key]
        starts = [self.slots[number].where.start if number else 0 for number in firsts]
        segments = []
        for number, start, end in zip(firsts, starts, [*starts[1:], self.padded], strict=True):
            common = Interval(start=start, end=end).intersect(interval)
            if common.length:
                segments.append(ShardSegment(group=pairs[number][0], number=number, where=common.after(interval.start)))
        return tuple(segments)


UnitLayouts = Sequence[Sequence[BucketLayout]]  # The bucket layouts of each unit of a rank, the root unit first.


def build_layout(
    name: str, specs: Sequence[ParameterSpec], parts: int, alignment: int = ALIGNMENT, dividers: int = 1
) -> BucketLayout:
    """Lay out parameters one after the other, grouped by optimizer group, otherwise in order. Blocks of a codec are not cut."""
    alignment = max([alignment, *(spec.codec.block for spec in specs if spec.codec is not None)])
    slots, end = [], 0
    for spec in sorted(specs, key=lambda spec: spec.group):
        start = round_up(end, alignment)
        end = start + spec.numel
        slots.append(ParameterSlot(spec=spec, where=Interval(start=start, end=end)))
    return BucketLayout(name=name, slots=tuple(slots), parts=parts, alignment=alignment, dividers=dividers)
