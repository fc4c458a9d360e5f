"""Decides where a model is cut: how many blocks each stage has. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from zeromesh.errors import LayoutError


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Blocks of each stage, in order. Raises `LayoutError` at construction for a stage without blocks."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in self.counts):
            raise LayoutError(f"a pipeline is cut into {list(self.counts)} blocks; each stage has at least 1")

    @property
    def stages(self) -> int:
        return len(self.counts)

    @property
    def blocks(self) -> int:
        """The number of blocks of all stages."""
        return sum(self.counts)

    def ranges(self) -> tuple[range, ...]:
        """The indices of each stage's blocks."""
        return tuple(range(start, end) for start, end in pairwise(accumulate(self.counts, initial=0)))


def cut_by_hand(counts: Sequence[int], *, blocks: int, stages: int) -> Cut:
    """The cut that a user gave.

    Raises:
        LayoutError: when it has not `stages` stages of `blocks` blocks in all.
    """
    cut = Cut(counts=tuple(counts))
    if cut.stages != stages:
        raise LayoutError(f"a cut into {list(counts)} blocks has {cut.stages} stages, the pipeline {stages}")
    if cut.blocks != blocks:
        raise LayoutError(f"a cut into {list(counts)} blocks has {cut.blocks} of them, the model {blocks}")
    return cut


def cut_by_cost(costs: Sequence[float], *, stages: int, first: float = 0.0, last: float = 0.0) -> Cut:
    """The cut whose most expensive stage costs least; among those, the one whose costs have the least sum of squares.

    `costs` has a number for each block, in parameters, FLOPs or seconds; `first` is what comes before the blocks (the embedding),
    `last` what comes after them (the head), in the same unit.

    Raises:
        LayoutError: with fewer blocks than stages, or a cost that is negative.
    """
    if stages < 1 or stages > len(costs):
        raise LayoutError(
            f"{len(costs)} blocks cannot be cut into {stages} pipeline stages: each has at least one; "
            "take fewer ranks along pipeline, or fewer chunks"
        )
    if min(*costs, first, last) < 0:
        raise LayoutError("a block cannot cost less than nothing")
    sums = list(accumulate(costs, initial=0.0))

    def cost(start: int, end: int, stage: int) -> float:
        return sums[end] - sums[start] + first * (stage == 0) + last * (stage == stages - 1)

    # best[end]: the blocks before `end` in the stages so far, as (largest stage, sum of squares, ends of stages)
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in range(stage + 1, len(costs) - (stages - 1 - stage) + 1):
            options = (
                (max(largest, cost(start, end, stage)), squares + cost(start, end, stage) ** 2, (*ends, end))
                for start, (largest, squares, ends) in best.items()
                if start < end
            )
            found[end] = min(options)
        best = found
    ends = best[len(costs)][2]
    return Cut(counts=tuple(end - start for start, end in pairwise((0, *ends))))
