"""The figures of communication: the kinds of collectives, sums over steps, and a table. No torch and no processes.

run = added(run, recorder.take_traffic())
print(traffic_table(run, steps=10))
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

Figures = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By axis and collective: `calls`, `bytes` and `seconds`."""


class Collective(StrEnum):
    """What ranks do together. An agreement is a small exchange between hosts' memories: sums of the loss, the norm, barriers."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point to point"
    AGREEMENT = "agreement"


def added(total: Figures, more: Figures) -> dict[str, dict[str, dict[str, float]]]:
    """The sum of two results of `StepRecorder.take_traffic`."""
    out = {axis: {name: dict(row) for name, row in rows.items()} for axis, rows in total.items()}
    for axis, rows in more.items():
        for name, row in rows.items():
            sums = out.setdefault(axis, {}).setdefault(name, {})
            for key, value in row.items():
                sums[key] = sums.get(key, 0) + value
    return out


def traffic_table(figures: Figures, *, steps: int = 1) -> str:
    """A table of `figures`, which are sums over `steps` steps: calls, MiB and milliseconds of one step on average."""
    rows = [("axis", "collective", "calls", "MiB", "ms")]
    for axis, collectives in figures.items():
        for name, row in collectives.items():
            calls, nbytes, seconds = (row[key] / max(1, steps) for key in ("calls", "bytes", "seconds"))
            rows.append((axis, name, f"{calls:,.1f}", f"{nbytes / 2**20:,.2f}", f"{seconds * 1e3:,.2f}"))
    if len(rows) == 1:
        return "no communication"
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for cells in rows:
        words = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
        lines.append("  ".join(words + numbers))
    return "\n".join(lines)
