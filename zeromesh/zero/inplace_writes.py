"""Parameters that user code changes in place: kept where that is what a plain loop does, refused by name where it would be lost."""

from __future__ import annotations

from collections.abc import Iterable

from zeromesh.errors import PhaseError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.units.unit import Phase, Unit

_FIRST = 2


class InplaceWrites:
    """What is looked for: version counters in every pass; digests of values, which show writes through `.data` as well, of all
    units in the first two microbatches, of one unit in turn later, and of whatever is read between steps."""

    def __init__(self, mesh: Mesh) -> None:
        self._alone = mesh.data.size == 1
        self._forwards = 0

    def look_at(self, unit: Unit, units: int) -> None:
        """A unit, of so many, is about to run forward in training."""
        if self._forwards < _FIRST or self._forwards % units == unit.index:
            unit.note_values()

    def refuse_in_pass(self, units: Iterable[Unit]) -> None:
        """Raise `PhaseError` when forward has changed a parameter: ranks would train different weights."""
        for unit in units:
            name = unit.written() if unit.phase is Phase.LIVE else None
            if name is not None and not (self._alone and unit.keeps_writes):
                raise PhaseError(
                    f"parameter {name} of unit {unit.name} was changed in place during a pass over the model, as by "
                    "Embedding(max_norm=), averaged codebooks or clamped weights; ranks would then train different weights. "
                    "Compute a changed copy in forward, or keep these values in a buffer"
                )

    def end_forward(self, units: Iterable[Unit]) -> None:
        """A training forward is over; see `refuse_in_pass`."""
        self._forwards += 1
        self.refuse_in_pass(units)

    def refuse_between_passes(self, units: Iterable[Unit]) -> None:
        """Raise `PhaseError` when a parameter was changed since the last update, and the next one would not know of it."""
        for unit in units:
            name = unit.written() if unit.phase is Phase.LIVE else None
            if name is not None and not unit.keeps_writes:
                raise PhaseError(
                    f"parameter {name} was changed in place between steps, and the change would be lost: the optimizer updates "
                    "master weights, of which the model's parameters are copies. Change it before training"
                )
