"""Which rank the others wait for: every rank's time at work in a step, compared."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeromesh.mesh.groups import Mesh
from zeromesh.offload import peak_bytes

_WINDOW = 10
"""Steps that are looked at together."""
_FACTOR = 1.5
_LEAST_SECONDS = 0.05
"""A step. Less is not worth a person's time."""
_SILENT_STEPS = 100
"""Between two lines about the same rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """What ranks tell one another: the highest peak memory of any, and how long each has waited for others so far."""

    peak_bytes: int
    waited: tuple[float, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> RankFigures:
        """Those of all ranks by now; all call it."""
        on_device = mesh.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(mesh.device) if on_device else peak_bytes()
        waited = int(1e6 * mesh.watch.waited) if mesh.watch is not None else 0
        rows = mesh.world.gather_integers([peak, waited])
        return cls(peak_bytes=max(row[0] for row in rows), waited=tuple(row[1] / 1e6 for row in rows))


class Stragglers:
    """Looks at the seconds that ranks were at work in each step, without those that they have waited for one another."""

    def __init__(self) -> None:
        self._steps: deque[list[float]] = deque(maxlen=_WINDOW)
        self._told: dict[int, int] = {}
        self._waited: Sequence[float] | None = None

    def look(self, step: int, seconds: float, waited: Sequence[float]) -> str | None:
        """Take the seconds of a step, and those that each rank has waited since the start; as `add`."""
        before, self._waited = self._waited, waited
        if before is None:
            return None
        return self.add(step, [seconds - (now - then) for now, then in zip(waited, before, strict=True)])

    def add(self, step: int, busy: Sequence[float]) -> str | None:
        """Take the seconds of each rank in a step; a line about a slow rank, when there is news of one."""
        self._steps.append(list(busy))
        if len(busy) < 2 or len(self._steps) < _WINDOW:
            return None
        mean = [sum(row[rank] for row in self._steps) / _WINDOW for rank in range(len(busy))]
        slowest = max(range(len(mean)), key=mean.__getitem__)
        others = statistics.median(mean[:slowest] + mean[slowest + 1 :])
        told = self._told.get(slowest)
        if mean[slowest] < max(_FACTOR * others, others + _LEAST_SECONDS) or (
            told is not None and step - told < _SILENT_STEPS
        ):
            return None
        self._told[slowest] = step
        return (
            f"rank {slowest} is slow: over {_WINDOW} steps it was at work for {1000 * mean[slowest]:.0f} ms a step, the others "
            f"for {1000 * others:.0f} ms, and waited for it"
        )
