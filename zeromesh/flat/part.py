"""`ParameterPart`: what a rank of the tensor axis holds of a whole parameter, and who holds the same."""

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
        if not self.holders or list(self.holders) != sorted(set(self.holders)):
            raise LayoutError(f"holders {list(self.holders)} are not in order")
