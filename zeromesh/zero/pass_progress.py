"""`PassProgress`: how far one microbatch has got, through the units in forward and back again. Bookkeeping alone, by unit number.

forward     visits     0  1  2  1  3       place 0, 1, ... of each call; a unit may be called twice
backward    reaches the calls in reverse; done with what forward began to use only after the call it has reached
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from zeromesh.rng import Streams


class PassMode(Enum):
    """What the engine is in the middle of."""

    IDLE = "idle"
    EVALUATION = "evaluation"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchPosition:
    """Where a microbatch stands: its first sample's global index seeds dropout, whatever rank runs it."""

    step: int
    first_sample: int
    first: bool
    last: bool


class PassProgress:
    """Of one rank."""

    def __init__(self, streams: Streams | None = None) -> None:
        self.streams = streams
        """What the microbatch draws; None: it draws from the generators as they are."""
        self.calls: list[tuple[int, int]] = []
        """Unit and place of the calls whose outputs have gradients."""
        self.held: set[int] = set()
        """Units that are needed beyond their calls: live from then on until the pass is over, and in all of backward."""
        self._visited: list[int] = []
        self._first_visits: dict[int, int] = {}
        self._reached: set[int] = set()
        self._inside: list[int] = []
        self._unreduced: dict[int, int] = {}

    def visit(self, unit: int) -> None:
        """Forward calls a unit."""
        self._first_visits.setdefault(unit, len(self._visited))
        self._visited.append(unit)

    @property
    def place(self) -> int:
        """Of the call that is running."""
        return len(self._visited) - 1

    def reduction_order(self, units: Iterable[int]) -> list[int]:
        """Units in the reverse order of their first visits; what forward did not touch comes last."""
        return [*reversed(self._first_visits), *(unit for unit in units if unit not in self._first_visits)]

    def turn(self, unreduced: Mapping[int, int]) -> None:
        """Forward is over. `unreduced`: buckets of each unit whose gradients backward is to bring."""
        self._unreduced = dict(unreduced)

    def reach(self, unit: int) -> bool:
        """Backward has got to the outputs of a unit; whether that is for the first time."""
        new = unit not in self._reached
        self._reached.add(unit)
        return new

    def enter(self, unit: int) -> bool:
        """Backward needs a unit's parameters; whether it has not been inside already."""
        new = unit not in self._inside
        if new:
            self._inside.append(unit)
        return new

    def complete(self, unit: int) -> None:
        """All gradients of one of a unit's buckets have arrived."""
        self._unreduced[unit] -= 1

    def leave_passed(self, place: int) -> list[int]:
        """The units that backward is done with, now that it has reached what was before call number `place`.

        Autograd takes what is ready in the reverse order of its creation, so nothing is to come of units that forward began to
        use only later. That a parameter has its gradient does not tell: a weight may be frozen, or be read through `detach`.
        """
        passed = [
            unit
            for unit in self._inside
            if self._first_visits.get(unit, 0) > place and not self._unreduced[unit] and unit not in self.held
        ]
        self._inside = [unit for unit in self._inside if unit not in passed]
        return passed
