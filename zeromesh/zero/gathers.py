"""Which units are live: gathers in the order that was recorded, ahead of their use, on all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence

from zeromesh import ranges
from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.watch import Activity
from zeromesh.zero.order import GatherOrder
from zeromesh.zero.phase import Phase
from zeromesh.zero.unit import Unit


class Gathers:
    """Of one engine."""

    def __init__(self, units: Sequence[Unit], mesh: Mesh, prefetch: int) -> None:
        self._units = units
        self._mesh = mesh
        self._prefetch = prefetch
        self._order = GatherOrder()
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
            with ranges.named("wait for", unit.name):
                unit.wait()
        for index in self._order.upcoming(self._prefetch):
            if self._units[index].phase is Phase.RESTING:
                self.start(self._units[index], settled=True)

    def start(self, unit: Unit, *, settled: bool) -> None:
        """Begin to gather a unit; `settled` where that follows a recorded order."""
        self.tell(Activity.GATHER, unit, settled=settled)
        with ranges.named("gather", unit.name):
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
