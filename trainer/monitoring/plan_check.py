"""A run beside its plan: predicted and measured seconds by phase, and bytes by purpose, at the end of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from zeromesh.offload import Purpose, Tier
from zeromesh.telemetry.step_recorder import StepPhase
from zeromesh.trainer.formatting import human_bytes, human_seconds, table_lines

TOLERANCE = 0.15
"""The part of what was measured by which a plan may be off before it says which term was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a plan says of a step of one rank."""

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
    _phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _seconds: list[float] = field(default_factory=list)

    def add(self, seconds: float, phases: Mapping[str, float]) -> None:
        """Take the seconds of a step, and their phases."""
        self._seconds.append(seconds)
        for phase in StepPhase:
            self._phases[phase].append(phases.get(phase, 0.0))

    def record(self, memory: Mapping[str, Mapping[str, int]], peak: int) -> dict[str, Any]:
        """The comparison for a line of metrics: `[predicted, measured]` of each term, and the term that was most off.

        `memory` are measured bytes by tier and purpose, as in the line of a step, and `peak` those of the process.
        """
        phases = {
            str(phase): [self.prediction.phases.get(phase, 0.0), self._middle(self._phases[phase])]
            for phase in StepPhase
        }
        tiers = {
            tier.value: {
                purpose.name.lower(): [nbytes, memory.get(tier.value, {}).get(purpose.name.lower(), 0)]
                for purpose, nbytes in purposes.items()
            }
            for tier, purposes in self.prediction.memory.items()
        }
        seconds = [sum(self.prediction.phases.values()), self._middle(self._seconds)]
        self.result = {
            "layout": self.prediction.layout,
            "seconds": seconds,
            "phases": {name: pair for name, pair in phases.items() if any(pair)},
            "memory": tiers,
            "peak": [self.prediction.peak, peak],
            "most_off": _most_off(seconds, phases) if _off(seconds) > TOLERANCE else None,
        }
        return self.result

    def _middle(self, values: list[float]) -> float:
        return median(values[1:] or values or [0.0])


def _off(pair: list[float]) -> float:
    predicted, measured = pair
    return abs(predicted - measured) / measured if measured else 0.0


def _most_off(whole: list[float], terms: Mapping[str, list[float]]) -> str:
    """The term whose difference makes up most of that of the whole."""
    sign = 1 if whole[0] > whole[1] else -1
    return max(terms, key=lambda name: sign * (terms[name][0] - terms[name][1]))


def comparison_lines(record: Mapping[str, Any]) -> Iterator[str]:
    """A record for a person."""
    rows = [("step", *map(human_seconds, record["seconds"]))]
    rows += [(name, *map(human_seconds, pair)) for name, pair in record["phases"].items()]
    for tier, purposes in record["memory"].items():
        rows += [(f"{tier}: {name.replace('_', ' ')}", *map(human_bytes, pair)) for name, pair in purposes.items()]
    rows.append(("highest memory", *map(human_bytes, record["peak"])))
    yield from table_lines(
        (f"plan of {record['layout']}", "predicted", "measured"), rows, right=("predicted", "measured")
    )
    if record["most_off"] is not None:
        predicted, measured = record["seconds"]
        yield f"the plan was {predicted / measured - 1:+.0%} off, most of it {record['most_off']}"
