"""The positions of ranks in the mesh: arithmetic on integers, with no torch and no processes.

Axes run from outer to inner, so ranks that communicate most (tensor) are neighbours and those that communicate least (pipeline) are
far apart. For pipeline 2 x replicate 1 x shard 2 x context 1 x tensor 2:

    rank        0  1  2  3  4  5  6  7
    pipeline    0  0  0  0  1  1  1  1
    replicate   0  0  0  0  0  0  0  0
    shard       0  0  1  1  0  0  1  1
    context     0  0  0  0  0  0  0  0
    tensor      0  1  0  1  0  1  0  1

An axis that is folded has no factor of its own in the number of ranks: `expert` numbers neighbours among the ranks that shard
states, and `expert_shard` those of them that have the same experts."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from zeromesh.errors import LayoutError, counted

Axis = str
Divided = Literal["blocks", "layers", "sequence", "batch", "states", "experts"]
"""Ranks along an axis divide one of these: blocks of the model, layers, the sequence, samples, parameters' states, or experts."""
EXPERT, EXPERT_SHARD = "expert", "expert_shard"
"""The axes that fold the ranks that shard states: those with different experts, and those with the same ones."""


def axis(*divides: Divided, folded: bool = False) -> Any:
    """Declare an axis, a field of `MeshShape`, with what its ranks divide."""
    return field(default=1, metadata={"divides": divides, "folded": folded})


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """The number of ranks along each axis. Raises `LayoutError` if one is not a positive integer. The fields are the axes from
    outer to inner, each with the things that it divides. The rest follows: gradients and counts are summed over axes of the
    `batch`, whose ranks see different samples; axes of the `states` shard states; ranks along others compute a batch together."""

    pipeline: int = axis("blocks")
    replicate: int = axis("batch")
    shard: int = axis("batch", "states")
    context: int = axis("sequence", "states")
    tensor: int = axis("layers", "sequence")
    expert: int = axis("experts", folded=True)

    def __post_init__(self) -> None:
        for name in SIZES:
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                auto = ", or auto" if name == "shard" else ""
                raise LayoutError(f"parallel.{name}: got {size!r}; allowed is an integer >= 1{auto}")
        if self.state_size % self.expert:
            axes = " x ".join(f"parallel.{name} ({getattr(self, name)})" for name in axes_of("states"))
            raise LayoutError(f"parallel.expert: {self.expert} does not divide {axes}, over which experts are spread")

    @classmethod
    def resolve(cls, world_size: int, *, shard: int | Literal["auto"] = "auto", **others: int) -> "MeshShape":
        """Compute the shape of a world of `world_size` ranks; `shard="auto"` takes the ranks that the other axes leave. Raises
        `LayoutError` when the axes do not fit the world. The message names their product, and a remedy."""
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise LayoutError(f"a world has at least 1 rank, got {world_size!r}")
        expert = others.pop(EXPERT, 1)
        fixed = {name: others.get(name, 1) for name in AXES if name != "shard"}
        product = cls(**fixed).world_size
        fits, rest = divmod(world_size, product)
        if shard == "auto" and rest:
            misfit = f"{_product(fixed)} = {product}, which does not divide the world of {counted(world_size, 'rank')}"
            more = counted(world_size + product - rest, "rank")
            raise LayoutError(f"{misfit}; start {more}, or change parallel.{max(fixed, key=fixed.__getitem__)}")
        shape = cls(**fixed, shard=fits if shard == "auto" else shard, expert=expert)
        if shape.world_size != world_size:
            start = f"start {counted(shape.world_size, 'rank')}"
            advice = f"{start}, or change parallel.{max(AXES, key=lambda name: getattr(shape, name))}"
            if not rest:
                advice = f"set parallel.shard to {fits} or auto, or {start}"
            raise LayoutError(f"{shape} = {shape.world_size}, but the run has {counted(world_size, 'rank')}; {advice}")
        return shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks along each axis, from outer to inner."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def model_size(self) -> int:
        """The number of ranks that compute one batch together, which lie along the axes that divide the model."""
        return math.prod(getattr(self, name) for name in MODEL_AXES)

    @property
    def state_size(self) -> int:
        """The number of ranks that shard the states of a parameter which all of them use."""
        return math.prod(getattr(self, name) for name in axes_of("states"))

    def divides(self, what: Divided) -> bool:
        """Return True if several ranks divide `what` among them."""
        return any(getattr(self, name) > 1 for name in axes_of(what))

    @property
    def swaps_tokens(self) -> bool:
        """True if ranks with different samples send each other tokens, since they have different experts."""
        return any(len({*map(self.data_index, group)}) > 1 for group in self.groups(EXPERT))

    def coordinate(self, rank: int) -> dict[Axis, int]:
        """Return the index of `rank` along each axis, from 0. Raises `LayoutError` when the mesh has no such rank."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank!r} is not in the mesh {self}: ranks are 0 to {self.world_size - 1}")
        return {name: rank // stride % size for name, size, stride in self._strides()}

    def rank(self, coordinate: Mapping[Axis, int]) -> int:
        """Return the rank at a coordinate; axes that are left out count as 0."""
        return sum(coordinate.get(name, 0) * stride for name, _, stride in self._strides())

    def neighbour(self, rank: int, axis: Axis, step: int, *, wrap: bool = False) -> int | None:
        """Return the rank whose index along `axis` is larger by `step`; None past an end, unless `wrap` makes the axis a ring."""
        at, size = self.coordinate(rank), getattr(self, axis)
        index = (at[axis] + step) % size if wrap else at[axis] + step
        return self.rank(at | {axis: index}) if 0 <= index < size else None

    def data_index(self, rank: int) -> int:
        """Return the data-parallel index of `rank`, from 0, which is equal along the axes that divide the model."""
        return self.group_index(rank, *MODEL_AXES)

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks that differ along `axes` only (none: each rank), by their lowest rank; ranks ascend inside."""
        firsts = _offsets([row for row in self._strides(axes) if row[0] not in axes])
        return tuple(self.group_of(first, *axes) for first in firsts)

    def group_of(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the group over `axes` that contains `rank`, ranks ascending, without computing the others."""
        within = [row for row in self._strides(axes) if row[0] in axes]
        first = rank - sum(rank // stride % size * stride for _, size, stride in within)
        return tuple(first + more for more in _offsets(within))

    def group_index(self, rank: int, *axes: Axis) -> int:
        """Return the index of `group_of` among all `groups` over `axes`."""
        index = 0
        for name, size, stride in self._strides(axes):
            if name not in axes:
                index = index * size + rank // stride % size
        return index

    def _strides(self, among: Sequence[Axis] = ()) -> list[tuple[Axis, int, int]]:
        """Return each axis with its size and its stride, the difference between ranks that are neighbours along it; where a folded
        axis is `among` those asked for, the ones that it folds are left out."""
        names, sizes = list(AXES), dict(zip(AXES, self.sizes, strict=True))
        if EXPERT in among or EXPERT_SHARD in among:
            sizes |= {EXPERT_SHARD: self.state_size // self.expert, EXPERT: self.expert}
            first, *rest = axes_of("states")
            names[names.index(first) : names.index(first) + 1 + len(rest)] = [EXPERT_SHARD, EXPERT]
        ordered = [sizes[name] for name in names]
        return [(name, sizes[name], math.prod(ordered[number + 1 :])) for number, name in enumerate(names)]

    def __str__(self) -> str:
        experts = f" (expert {self.expert})" if self.expert > 1 else ""
        return _product(dict(zip(AXES, self.sizes, strict=True))) + experts


_ROWS = {each.name: each.metadata["divides"] for each in fields(MeshShape)}
SIZES: tuple[Axis, ...] = tuple(_ROWS)
"""The axes that have a size, `MeshShape`'s fields."""
AXES: tuple[Axis, ...] = tuple(each.name for each in fields(MeshShape) if not each.metadata["folded"])
"""The mesh axes from outer to inner, whose product is the number of ranks."""


def axes_of(*divided: Divided, but: Sequence[Divided] = ()) -> tuple[Axis, ...]:
    """Return the axes that divide any of `divided` and none of `but`, from outer to inner."""
    return tuple(name for name, row in _ROWS.items() if {*divided} & {*row} and not {*but} & {*row})


MODEL_AXES = tuple(name for name in AXES if name not in axes_of("batch"))
"""The axes whose ranks compute one batch together."""


def _offsets(strides: Sequence[tuple[Axis, int, int]]) -> list[int]:
    found = [0]
    for _, size, stride in strides:
        found = [first + more for first in found for more in range(0, size * stride, stride)]
    return found


def _product(sizes: Mapping[Axis, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())
