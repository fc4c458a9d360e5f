"""A run beside its plan: predicted and measured seconds by phase, and bytes by purpose, at the end of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from zeromesh.offload import Purpose, Tier
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.trainer.monitoring.plan_comparison import UNCOUNTED


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The prediction of a plan for a step of one rank."""

    layout: str
    phases: Mapping[StepPhase, float]
    """Seconds."""
    memory: Mapping[Tier, Mapping[Purpose, int]]
    """Bytes of states and buffers at the end of a step."""
    peak: int
    """Bytes of the process, or of its accelerator, at the highest moment."""


@dataclass(kw_only=True, slots=True)
class PlanCheck:
    """A prediction, and what is measured meanwhile. Seconds are medians of the steps after the first."""

    prediction: Prediction
    result: dict[str, Any] = field(default_factory=dict)
    """The latest comparison."""
    _steps: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)

    def add(self, seconds: float, phases: Mapping[str, float]) -> None:
        """Take the seconds of a step, and their phases."""
        self._steps.append((seconds, phases))

    def record(self, memory: Mapping[str, Mapping[str, int]], peak: int) -> dict[str, Any]:
        """The comparison for a line of metrics: `[predicted, measured]` of each term.

        `memory` are measured bytes by tier and purpose, as in the line of a step, and `peak` those of the process.
        """
        steps = self._steps[1:] or self._steps or [(0.0, {})]
        phases = {
            str(phase): [
                self.prediction.phases.get(phase, 0.0),
                median(seconds.get(phase, 0.0) for _, seconds in steps),
            ]
            for phase in StepPhase
        }
        whole = [sum(self.prediction.phases.values()), median(seconds for seconds, _ in steps)]
        highest = [self.prediction.peak, peak]
        tiers = self._memory(memory, highest)
        self.result = {
            "layout": self.prediction.layout,
            "seconds": whole,
            "phases": {name: pair for name, pair in phases.items() if any(pair)},
            "memory": tiers,
            "peak": highest,
        }
        return self.result

    def _memory(self, memory: Mapping[str, Mapping[str, int]], peak: list[int]) -> dict[str, dict[str, list[int]]]:
        """Bytes by tier and purpose; what of the peak no purpose of the device has is `uncounted` there."""
        found = {}
        for tier in {Tier.DEVICE: None, **self.prediction.memory}:
            said = {purpose.name.lower(): nbytes for purpose, nbytes in self.prediction.memory.get(tier, {}).items()}
            seen = memory.get(tier.value, {})
            found[tier.value] = {name: [said.get(name, 0), seen.get(name, 0)] for name in {**said, **seen}}
        here = found[Tier.DEVICE.value]
        here.pop(Purpose.ACTIVATIONS.name.lower(), None)  # They come and go, and nobody counts all of them.
        here[UNCOUNTED] = [highest - sum(pair[at] for pair in here.values()) for at, highest in enumerate(peak)]
        return found
