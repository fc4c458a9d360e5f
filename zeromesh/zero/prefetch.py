"""Which units are live: gathers in the order that was recorded, ahead of their use, on all ranks alike.

The order in which units are gathered, recorded in one pass and replayed for prefetch in the next.

An order belongs to a kind of pass (training, evaluation). A pass that leaves it gathers on demand and is recorded anew; only
ranks that disagree with each other are in error, and the watch finds that.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.telemetry.watchdog import Activity
from zeromesh.units.unit import Phase, Unit


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
