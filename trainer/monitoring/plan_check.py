"""The comparison of a run with its plan at its end, by phase and by purpose of bytes. Reports read it without torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from zeromesh.trainer.formatting import human_bytes, human_seconds, table_lines

UNCOUNTED = "uncounted"  # The name of peak bytes that no purpose of the ledger covers.
_TERM_TEXTS = {UNCOUNTED: "activations and libraries"}
PlanTable = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Column names, the layout first, and for each term its name, predicted and measured value, and the plan's error, as text."""


@dataclass(kw_only=True, slots=True)
class PlanCheck:
    """A plan's prediction for one rank's step, and the measurements. Seconds are medians of the steps after the first."""

    layout: str
    phases: Mapping[str, float]
    memory: Mapping[str, Mapping[str, int]]
    """Predicted bytes of states and buffers at the end of a step, by tier and purpose."""
    peak: int  # The predicted peak bytes of the process, or of its accelerator.
    steps: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)
    """The measured seconds of each step, and of its phases."""
    result: dict[str, Any] = field(default_factory=dict)

    def record(self, memory: Mapping[str, Mapping[str, int]], peak: int) -> dict[str, Any]:
        """Return `[predicted, measured]` of each term, for a line of metrics, by measured bytes by tier and purpose and `peak`."""
        steps = self.steps[1:] or self.steps or [(0.0, {})]
        names = dict.fromkeys([*self.phases, *(name for _, phases in steps for name in phases)])
        medians = {name: median(phases.get(name, 0.0) for _, phases in steps) for name in names}
        phases = {name: [self.phases.get(name, 0.0), measured] for name, measured in medians.items()}
        highest, tiers = [self.peak, peak], {}
        for tier in {"device": None, **self.memory}:
            expected, actual = self.memory.get(tier, {}), memory.get(tier, {})
            tiers[tier] = {name: [expected.get(name, 0), actual.get(name, 0)] for name in {**expected, **actual}}
        device = tiers["device"]
        device.pop("activations", None)  # Activations are transient, and only partly in the ledger.
        device[UNCOUNTED] = [most - sum(pair[at] for pair in device.values()) for at, most in enumerate(highest)]
        self.result = {
            "layout": self.layout,
            "seconds": [sum(self.phases.values()), median(seconds for seconds, _ in steps)],
            "phases": {name: pair for name, pair in phases.items() if any(pair)},
            "memory": tiers,
            "peak": highest,
        }
        return self.result


def comparison_table(record: Mapping[str, Any]) -> PlanTable:
    """Return the terms of a record as a table. Raises `ValueError`, `LookupError` or `TypeError` for a malformed record."""
    terms: list[tuple[str, Callable[[float], str], Sequence[float]]] = [("step", human_seconds, record["seconds"])]
    terms += [(f"step: {name}", human_seconds, pair) for name, pair in dict(record["phases"]).items()]
    terms.append(("highest memory", human_bytes, record["peak"]))
    for tier, purposes in dict(record["memory"]).items():
        for name, pair in dict(purposes).items():
            terms.append((f"{tier}: {_TERM_TEXTS.get(name, name.replace('_', ' '))}", human_bytes, pair))
    rows = [(name, shown(plan), shown(run), f"{plan / run - 1:+.0%}" if run else "") for name, shown, (plan, run) in terms]
    return (str(record["layout"]), "predicted", "measured", "off"), [*rows]


def comparison_lines(record: Mapping[str, Any]) -> Iterator[str]:
    (layout, *columns), rows = comparison_table(record)
    yield from table_lines((f"plan of {layout}", *columns), rows, right=columns)
