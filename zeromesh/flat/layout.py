"""`BucketLayout`: which parameter lies where in one flat buffer, and which rank owns which elements of it.

    bucket  |  weight  |gap|   bias  |  ...  | weight2      | padding |
            0          a   b                                numel     padded
    shards  |        rank 0         |        rank 1         |  rank 2 ... |

Parameters begin at multiples of `alignment`; what lies between them, and the padding at the end, belongs to no parameter and
holds zeros. Parameters of one optimizer group lie together, so that a shard has a few long segments.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from zeromesh.errors import LayoutError
from zeromesh.flat.regions import Region
from zeromesh.intervals import ALIGNMENT, Interval, padded_length, round_up, shard_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPart:
    """What a rank has of a parameter that tensor parallelism divides: its tensor is `region` of the whole one, in its order."""

    region: Region
    holders: tuple[int, ...]
    """Positions along the tensor axis that hold this very region, in order; the first one counts and writes it."""
    partial: bool = False
    """Whether the holders' gradients are summands of the gradient; else they compute the same one."""


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
    """What this is of the whole parameter; None: all of it, the same on all ranks of the tensor axis."""
    copies: StageCopies | None = None
    """For a tied parameter that several stages of a pipeline have."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def name(self) -> str:
        """What it is called in checkpoints, and by whoever asks for it."""
        return self.fqn if self.copies is None else self.copies.name

    @property
    def other_names(self) -> tuple[str, ...]:
        """What it may be called too, also by stages that have it not."""
        return self.aliases if self.copies is None else self.copies.aliases

    @property
    def region(self) -> Region:
        """Where it lies in the whole parameter."""
        return Region.whole(self.shape) if self.part is None else self.part.region

    @property
    def holders(self) -> tuple[int, ...]:
        """Positions along the tensor axis that hold the same; none: all of them."""
        return () if self.part is None else self.part.holders

    @property
    def shared_by(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Positions along the tensor and along the pipeline axis whose gradients of it are summands of the whole one."""
        holders = self.holders if self.part is not None and self.part.partial else ()
        return holders, () if self.copies is None else self.copies.ranks

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
        """What parts of which parameters lie in `interval`; `in_shard` counts from its start. Empty parts are left out."""
        shared = [(slot, slot.where.intersect(interval)) for slot in self.slots]
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
