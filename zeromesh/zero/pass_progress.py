"""Which units are live: gathers in the order that was recorded, ahead of their use, on all ranks alike.

The order in which units are gathered, recorded in one pass and replayed for prefetch in the next.

An order belongs to a kind of pass (training, evaluation). A pass that leaves it gathers on demand and is recorded anew; only
ranks that disagree with each other are in error, and the watch finds that.

`PassProgress`: how far one microbatch has got, through the units in forward and back again. Bookkeeping alone, by unit number.

forward     visits     0  1  2  1  3       place 0, 1, ... of each call; a unit may be called twice
backward    reaches the calls in reverse; done with what forward began to use only after the call it has reached
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.rng import Streams
from zeromesh.telemetry.watchdog import Activity
from zeromesh.units.unit import Phase, Unit


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


class PrefetchOrder:
    """Orders by kind of pass, and where the present pass is in its own."""

    def __init__(self) -> None:
        self._orders: dict[str, list[int]] = {}
        self._recorded: Sequence[int] = ()
        self._now: list[int] = []
        self._kind = ""
        self._left = False

    def begin(self, kind: str) -> None:
        """Begin a pass of this kind."""
        self._kind = kind
        self._recorded = self._orders.get(kind, ())
        self._now = []
        self._left = not self._recorded

    def visit(self, unit: int) -> bool:
        """Note that `unit` is needed next; returns whether the recorded order says so too."""
        place = len(self._now)
        self._now.append(unit)
        if not self._left and (place >= len(self._recorded) or self._recorded[place] != unit):
            self._left = True
        return not self._left

    def upcoming(self, count: int) -> Sequence[int]:
        """The next `count` units that the record expects; none once the pass has left it."""
        if self._left:
            return ()
        place = len(self._now)
        return self._recorded[place : place + count]

    def end(self) -> None:
        """The pass is over: what it did is the record."""
        if self._left or len(self._now) != len(self._recorded):
            self._orders[self._kind] = self._now


class Prefetcher:
    """Of one engine."""

    def __init__(self, units: Sequence[Unit], mesh: Mesh, prefetch: int) -> None:
        self._units = units
        self._mesh = mesh
        self._prefetch = prefetch
        self._order = PrefetchOrder()
        self._lasting: dict[str, set[int]] = {}
        self._kind = ""

    def begin(self, kind: str) -> None:
        """A pass of this kind begins."""
        self._kind = kind
        self._order.begin(kind)

    def end(self) -> None:
        """It is over."""
        self._order.end()

    def need(self, unit: Unit) -> None:
        """Make a unit live, and start to gather what the recorded order expects next."""
        settled = self._order.visit(unit.index)
        if unit.phase is Phase.RESTING:
            self.start(unit, settled=settled)
        if unit.phase is Phase.GATHERING:
            with self._mesh.recorder.range("wait for", unit.name):
                unit.wait()
        for index in self._order.upcoming(self._prefetch):
            if self._units[index].phase is Phase.RESTING:
                self.start(self._units[index], settled=True)

    def start(self, unit: Unit, *, settled: bool) -> None:
        """Begin to gather a unit; `settled` where that follows a recorded order."""
        self.tell(Activity.GATHER, unit, settled=settled)
        with self._mesh.recorder.range("gather", unit.name):
            unit.gather()

    def tell(self, activity: Activity, unit: Unit, *, settled: bool) -> None:
        """Have the other ranks compare what this one is about to do."""
        if self._mesh.watch is not None:
            # All data-parallel ranks: replicas sum over one another in the order of reductions.
            self._mesh.watch.event(activity, unit.index, self._mesh.data.ranks, settled=settled)

    def keep(self, unit: Unit) -> None:
        """Note that passes of this kind need a unit beyond its calls."""
        self._lasting.setdefault(self._kind, set()).add(unit.index)

    def keeps(self, unit: Unit) -> bool:
        """Whether an earlier pass of this kind has needed a unit beyond its calls."""
        return unit.index in self._lasting.get(self._kind, ())
