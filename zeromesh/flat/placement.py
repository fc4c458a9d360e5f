"""A ZeRO stage is a row of data: where parameters, gradients and optimizer state lie over the shard axis.

    stage   parameters                    gradients                            optimizer state
    0       replicated                    replicated                           replicated
    1       replicated                    partial, at the end sharded          sharded
    2       replicated                    sharded as a bucket completes        sharded
    3       sharded, gathered around use  sharded as a bucket completes        sharded

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020. That stages are placements
rather than code paths follows Megatron-FSDP's experimental rewrite.

`ParameterPart` and `StageCopies` say what a rank has of a parameter that tensor parallelism divides, or that several stages of a
pipeline have.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from zeromesh.errors import LayoutError
from zeromesh.flat.regions import Region


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPart:
    """A rank's local tensor is `region` of the whole parameter, in the region's order.

    Raises:
        LayoutError: at construction, for holders that are not in order.
    """

    region: Region
    holders: tuple[int, ...]
    """Positions along the tensor axis that hold this very region, in order; the first one counts and writes it."""
    partial: bool = False
    """Whether the holders' gradients are summands of the gradient. If not, each has all of it: where there are several holders,
    they compute the same."""

    def __post_init__(self) -> None:
        _require_order("holders", self.holders)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCopies:
    """A tied parameter of which several ranks of a pipeline have a copy each: the gradients of the copies are summands.

    Raises:
        LayoutError: at construction, for ranks that are not in order.
    """

    name: str
    """In checkpoints: the first of its names in the whole model."""
    aliases: tuple[str, ...]
    """Its other names in the whole model."""
    ranks: tuple[int, ...]
    """Positions along the pipeline axis that have a copy, in order; the first one counts and writes it."""

    def __post_init__(self) -> None:
        _require_order("ranks", self.ranks)


def _require_order(what: str, positions: tuple[int, ...]) -> None:
    if not positions or list(positions) != sorted(set(positions)):
        raise LayoutError(f"{what} {list(positions)} are not in order")


class Placement(Enum):
    """How a tensor lies over the ranks of an axis."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    PARTIAL = "partial"
    """Every rank holds a summand of it."""
    SHARDED = "sharded"
    """Every rank holds its interval of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placements:
    """One stage. `accumulating` is where gradients lie between two microbatches of a step, `gradients` where at its end."""

    parameters: Placement
    accumulating: Placement
    gradients: Placement
    optimizer: Placement

    def __post_init__(self) -> None:
        if self.gradients is not self.optimizer:
            raise LayoutError(
                f"gradients end {self.gradients.value} but the optimizer state is {self.optimizer.value}: "
                "an update needs both over the same elements"
            )
        if Placement.PARTIAL in (self.parameters, self.gradients, self.optimizer):
            raise LayoutError("only gradients between microbatches can be partial")
        if self.parameters is Placement.SHARDED and self.optimizer is Placement.REPLICATED:
            raise LayoutError("sharded parameters need a sharded optimizer state")


_WHOLE, _PARTIAL, _SHARDED = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED
STAGES: dict[int, Placements] = {
    0: Placements(parameters=_WHOLE, accumulating=_PARTIAL, gradients=_WHOLE, optimizer=_WHOLE),
    1: Placements(parameters=_WHOLE, accumulating=_PARTIAL, gradients=_SHARDED, optimizer=_SHARDED),
    2: Placements(parameters=_WHOLE, accumulating=_SHARDED, gradients=_SHARDED, optimizer=_SHARDED),
    3: Placements(parameters=_SHARDED, accumulating=_SHARDED, gradients=_SHARDED, optimizer=_SHARDED),
}


def placements_of(stage: int) -> Placements:
    """The row of `stage`.

    Raises:
        LayoutError: when there is no such stage.
    """
    if stage not in STAGES:
        raise LayoutError(f"zero.stage is {stage}; it must be one of {sorted(STAGES)}")
    return STAGES[stage]
