"""Which rank the others wait for: every rank's time at work in a step, compared.

Figures of a step beside its result: utilisation of the hardware, memory by tier and purpose, time by phase.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Ledger, peak_bytes
from zeromesh.trainer.formatting import human_count
from zeromesh.trainer.models.flops import ModelFlops, peak_flops
from zeromesh.trainer.monitoring.step_result import StepResult


class StepStats:
    """Figures of the steps of one run; all ranks make it together. `samples` is the size of a global batch."""

    def __init__(
        self, flops: ModelFlops | None, mesh: Mesh, compute: torch.dtype, samples: int, ledger: Ledger
    ) -> None:
        self._flops = flops
        self._samples = samples
        self._ledger = ledger
        self._peak = 0.0
        self.notes: list[str] = []
        """What utilisation is measured against, where it is."""
        if flops is not None:
            own_peak, how = peak_flops(mesh.device, compute)
            self._peak = float(sum(row[0] for row in mesh.world.gather_integers([int(own_peak)])))
            self.notes.append(
                f"model FLOPs: {human_count(flops.of_step(1, 0))} a token without attention; all ranks can do "
                f"{human_count(self._peak)} a second, {how}"
            )

    def of(self, result: StepResult) -> dict[str, Any]:
        """Fields of the step's line of metrics.

        `mfu`: model FLOPs utilisation. `phases`: this rank's seconds by what they went to. `memory`: by tier and purpose, the most
        bytes of this rank in the step.
        """
        found: dict[str, Any] = {}
        if self._flops is not None and result.tokens:
            needed = self._flops.of_step(result.tokens, result.tokens / self._samples)
            found["mfu"] = round(needed / (result.seconds * self._peak), 5)
        if result.phases:
            found["phases"] = {phase: round(seconds, 6) for phase, seconds in result.phases.items()}
        found["memory"] = {
            tier.value: {purpose.name.lower(): nbytes for purpose, nbytes in purposes.items()}
            for tier, purposes in self._ledger.take_highest().items()
        }
        return found


_WINDOW = 10
"""Steps that are looked at together, at least."""
_FACTOR = 1.5
_LEAST_SECONDS = 0.05
"""A step. Less is not worth a person's time."""
_SILENT_STEPS = 100
"""Between two lines about the same rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStats:
    """What ranks tell one another: the highest peak memory of any, and the seconds that each was at work in a step."""

    peak_bytes: int
    busy: tuple[float, ...]

    @classmethod
    def of(cls, mesh: Mesh, busy: float = 0.0) -> RankStats:
        """Those of all ranks by now; all call it."""
        on_device = mesh.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(mesh.device) if on_device else peak_bytes()
        rows = mesh.world.gather_integers([peak, int(1e6 * busy)])
        return cls(peak_bytes=max(rows)[0], busy=tuple([row[1] / 1e6 for row in rows]))


class Stragglers:
    """Looks at the seconds that ranks were at work in steps, without those that they have waited there for one another.

    What is between steps, such as evaluations and checkpoints, is no part of it, nor is the first step, in which much is done once.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[int, Sequence[float]]] = deque()
        """For each look: the steps since the one before, and each rank's seconds at work in one of them."""
        self._last_note: dict[int, int] = {}
        self._begun = False
        self._own: list[float] = []

    def took(self, seconds: float, waited: float) -> None:
        """This rank has made a step of so many seconds, of which it has waited `waited` for other ranks."""
        if self._begun:
            self._own.append(max(0.0, seconds - waited))
        self._begun = True

    @property
    def busy(self) -> float:
        """Seconds that this rank was at work in a step, on average since the last look."""
        return sum(self._own) / max(1, len(self._own))

    def look(self, step: int, busy: Sequence[float]) -> str | None:
        """Take `busy` of each rank after a step; a line about a slow rank, when there is news of one."""
        made, self._own = len(self._own), []
        if not made:
            return None
        self._looks.append((made, busy))
        while sum([steps for steps, _ in self._looks]) - self._looks[0][0] >= _WINDOW:
            self._looks.popleft()
        steps = sum([steps for steps, _ in self._looks])
        if len(busy) < 2 or steps < _WINDOW:
            return None
        mean = [sum(made * row[rank] for made, row in self._looks) / steps for rank in range(len(busy))]
        slowest = max(range(len(mean)), key=mean.__getitem__)
        others = statistics.median(mean[:slowest] + mean[slowest + 1 :])
        last_note = self._last_note.get(slowest)
        if mean[slowest] < max(_FACTOR * others, others + _LEAST_SECONDS) or (
            last_note is not None and step - last_note < _SILENT_STEPS
        ):
            return None
        self._last_note[slowest] = step
        return (
            f"rank {slowest} is slow: over {steps} steps it was at work for {1000 * mean[slowest]:.0f} ms a step, the others "
            f"for {1000 * others:.0f} ms, and waited for it"
        )
