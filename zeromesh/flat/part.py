"""What a rank holds of a parameter that other ranks hold too: of its own along the tensor axis, or alike along the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.checkpoint.regions import Region
from zeromesh.errors import LayoutError


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
