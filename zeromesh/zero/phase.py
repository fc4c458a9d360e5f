"""The life of a unit as a table of legal transitions; anything else raises with the unit's name."""

from __future__ import annotations

from enum import Enum

from zeromesh.errors import PhaseError


class Phase(Enum):
    """Where a unit is in its life."""

    RESTING = "resting"
    """Parameters are not usable: sharded away, or out of date."""
    GATHERING = "gathering"
    """A gather is in flight."""
    LIVE = "live"
    """Parameters are whole and current."""
    REDUCING = "reducing"
    """Backward has passed; gradients are being summed."""


_LEGAL: dict[Phase, frozenset[Phase]] = {
    Phase.RESTING: frozenset({Phase.GATHERING}),
    Phase.GATHERING: frozenset({Phase.LIVE}),
    # A unit that stays live through its reduction (replicated parameters) goes back from REDUCING to LIVE.
    Phase.LIVE: frozenset({Phase.RESTING, Phase.REDUCING}),
    Phase.REDUCING: frozenset({Phase.RESTING, Phase.LIVE}),
}


def advance(unit: str, old: Phase, new: Phase) -> Phase:
    """The new phase.

    Raises:
        PhaseError: when the table does not allow it.
    """
    if new not in _LEGAL[old]:
        allowed = ", ".join(sorted(phase.value for phase in _LEGAL[old]))
        raise PhaseError(f"unit {unit} is {old.value} and cannot become {new.value}; it can become {allowed}")
    return new
