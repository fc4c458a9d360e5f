"""The positions of ranks in the mesh: arithmetic on integers, with no torch and no processes.

Axes run from outer to inner, so the ranks that talk most (tensor) are neighbours and those that talk least
(pipeline) are far apart. For pipeline 2 x replicate 1 x shard 2 x tensor 2:

    rank        0  1  2  3  4  5  6  7
    pipeline    0  0  0  0  1  1  1  1
    replicate   0  0  0  0  0  0  0  0
    shard       0  0  1  1  0  0  1  1
    tensor      0  1  0  1  0  1  0  1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from zeromesh.errors import LayoutError, counted

Axis = Literal["pipeline", "replicate", "shard", "tensor"]

AXES: tuple[Axis, ...] = get_args(Axis)
"""The mesh axes from outer to inner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinate:
    """A rank's index along each axis, from 0."""

    pipeline: int = 0
    replicate: int = 0
    shard: int = 0
    tensor: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """How many ranks lie along each axis. Raises `LayoutError` when one is not a positive integer."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            _check_size(axis, getattr(self, axis))

    @classmethod
    def resolve(
        cls,
        world_size: int,
        *,
        pipeline: int = 1,
        replicate: int = 1,
        shard: int | Literal["auto"] = "auto",
        tensor: int = 1,
    ) -> MeshShape:
        """The shape that fills a world of `world_size` ranks; `shard="auto"` takes what the other axes leave.

        Raises:
            LayoutError: the axes do not fit the world. The message names their product, and what to change.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise LayoutError(f"a world has at least 1 rank, got {world_size!r}")
        fixed: dict[Axis, int] = {"pipeline": pipeline, "replicate": replicate, "tensor": tensor}
        for axis, size in fixed.items():
            _check_size(axis, size)
        others = math.prod(fixed.values())
        fits, rest = divmod(world_size, others)
        if shard == "auto" and rest:
            product = f"{_product(fixed)} = {others}, which does not divide the world of {counted(world_size, 'rank')}"
            more = counted(world_size + others - rest, "rank")
            raise LayoutError(f"{product}; start {more}, or change parallel.{max(fixed, key=fixed.__getitem__)}")
        shard = fits if shard == "auto" else shard
        shape = cls(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)
        if shape.world_size != world_size:
            sizes = dict(zip(AXES, shape.sizes, strict=True))
            start = f"start {counted(shape.world_size, 'rank')}"
            advice = f"{start}, or change parallel.{max(sizes, key=sizes.__getitem__)}"
            if not rest:
                advice = f"set parallel.shard to {fits} or auto, or {start}"
            raise LayoutError(
                f"{shape} = {shape.world_size}, but the world has {counted(world_size, 'rank')}; {advice}"
            )
        return shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks along each axis, from outer to inner."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        """The number of ranks in the mesh."""
        return math.prod(self.sizes)

    def coordinate(self, rank: int) -> Coordinate:
        """Return the coordinate of `rank`. Raises `LayoutError` when the mesh has no such rank."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank!r} is not in the mesh {self}: ranks are 0 to {self.world_size - 1}")
        indices: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, indices[axis] = divmod(rank, getattr(self, axis))
        return Coordinate(**indices)

    def rank(self, coordinate: Coordinate) -> int:
        """The rank at a coordinate of the mesh."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + getattr(coordinate, axis)
        return rank

    def neighbour(self, rank: int, axis: Axis, step: int, *, wrap: bool = False) -> int | None:
        """The rank `step` places from `rank` along `axis`; None past an end, unless the axis goes round (`wrap`)."""
        at, size = self.coordinate(rank), getattr(self, axis)
        index = getattr(at, axis) + step
        if wrap:
            index %= size
        return self.rank(replace(at, **{axis: index})) if 0 <= index < size else None

    def data_index(self, rank: int) -> int:
        """Which data-parallel rank this is, counted from 0. Equal along pipeline and tensor."""
        at = self.coordinate(rank)
        return at.replicate * self.shard + at.shard

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ along `axes` only; every rank is in exactly one.

        Groups are in the order of their lowest rank, and ranks ascend inside each, whatever the order of
        `axes`. With no axes, every rank is a group of its own.
        """
        firsts = self._from_first([axis for axis in AXES if axis not in axes])
        others = self._from_first(axes)
        return tuple(tuple(first + more for more in others) for first in firsts)

    def group_of(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """The group over `axes` that holds `rank`, ranks ascending; the others are not looked at."""
        at: dict[str, int] = dict.fromkeys(axes, 0)
        first = self.rank(replace(self.coordinate(rank), **at))
        return tuple(first + more for more in self._from_first(axes))

    def group_index(self, rank: int, *axes: Axis) -> int:
        """The position of `group_of` among all `groups` over `axes`."""
        at, index = self.coordinate(rank), 0
        for axis in AXES:
            if axis not in axes:
                index = index * getattr(self, axis) + getattr(at, axis)
        return index

    def _from_first(self, axes: Sequence[Axis]) -> list[int]:
        """The ranks that differ from rank 0 along `axes` only, ascending."""
        found, stride = [0], self.world_size
        for axis in AXES:
            size = getattr(self, axis)
            stride //= size
            if axis in axes:
                found = [first + more for first in found for more in range(0, size * stride, stride)]
        return found

    def __str__(self) -> str:
        return _product(dict(zip(AXES, self.sizes, strict=True)))


def _check_size(axis: str, size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        auto = ", or auto" if axis == "shard" else ""
        raise LayoutError(f"parallel.{axis}: got {size!r}; allowed is an integer >= 1{auto}")


def _product(sizes: Mapping[Axis, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())
