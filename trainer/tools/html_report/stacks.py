"""Charts of values that add up, one on top of the other: of one run each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from zeromesh.trainer.tools.html_report.chart import COLORS, Chart, Series
from zeromesh.trainer.tools.html_report.figures import kept, picked, shown
from zeromesh.trainer.tools.html_report.runs import RunRecord, number, value_at

_MOST_BARS = 300


def stacks_of(run: RunRecord, place: int | None) -> list[Chart]:
    """What adds up in a run, of which there are values. `place`: its number among several; None: it is the only one."""
    return [chart for chart in _stacks(run, place) if chart is not None]


def _stacks(run: RunRecord, place: int | None) -> Iterator[Chart | None]:
    end, of = (f"-{place}", f": {run.name}") if place is not None else ("", "")
    note = "seconds of the first rank in a step"
    yield _stack(run, _phases, Chart(identifier=f"phases{end}", title=f"Time by phase{of}", unit="seconds", note=note))
    tiers = dict.fromkeys(tier for line in run.lines if isinstance(line.get("memory"), dict) for tier in line["memory"])
    for tier in tiers:
        note = "of the first rank, the most of each purpose in a step"
        chart = Chart(identifier=f"memory-{tier}{end}", title=f"Memory by purpose, {tier}{of}", unit="bytes", note=note)
        yield _stack(run, partial(_held, tier), chart)
    yield from _over_a_step(run, end, of)
    note = "seconds that the first rank spent in starting collectives and waiting for them"
    chart = Chart(identifier=f"communication{end}", title=f"Communication by axis{of}", unit="seconds", note=note)
    yield _stack(run, _told, chart)


_PHASES = ("data", "forward", "backward", "communication", "optimizer", "offload_wait")


def _phases(line: Mapping[str, Any]) -> dict[str, float]:
    found = _numbers(line.get("phases"))
    whole = number(line.get("step_seconds"))
    named = {name.replace("_", " "): found[name] for name in (*_PHASES, *found) if name in found}
    if named and whole is not None and math.isfinite(whole):
        rest = whole - sum(named.values())
        if rest > 0.01 * whole:
            named["other"] = rest
    return named


def _held(tier: str, line: Mapping[str, Any]) -> dict[str, float]:
    """Bytes by purpose on a tier."""
    found = _numbers(value_at(("memory", tier), line))
    return {name.replace("_", " "): nbytes for name, nbytes in found.items()}


def _told(line: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by axis and collective."""
    found = {}
    axes = line.get("communication")
    for axis, collectives in axes.items() if isinstance(axes, dict) else ():
        for name, row in collectives.items() if isinstance(collectives, dict) else ():
            for seconds in _numbers({"seconds": row.get("seconds")} if isinstance(row, dict) else {}).values():
                found[f"{axis}: {name}"] = seconds
    return found


def _numbers(values: object) -> dict[str, float]:
    """The finite numbers of a mapping; none is below 0."""
    found = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        each = number(value)
        if each is not None and math.isfinite(each):
            found[name] = max(0.0, each)
    return found


def _over_a_step(run: RunRecord, end: str, of: str) -> Iterator[Chart]:
    """Bytes by purpose over the step that was recorded, for each tier on which they change."""
    memory = run.step_memory
    if memory is None:
        return
    for tier in dict.fromkeys(tier for _, tier, _, _ in memory.events):
        now: dict[str, float] = {}
        moments: dict[float, dict[str, float]] = {}
        for at, where, purpose, nbytes in memory.events:
            if where == tier:
                now[purpose.replace("_", " ")] = nbytes
                moments[at] = dict(now)
        if len(moments) < 2:
            continue
        sums = [sum(row.values()) for row in moments.values()]
        places = kept(sums)
        xs = picked(list(moments), places)
        rows = [list(moments.values())[place] for place in places]
        series = [
            Series(name=name, color=color, xs=xs, ys=[row.get(name, 0.0) for row in rows])
            for color, name in enumerate(now)
        ]
        yield Chart(
            identifier=f"step-memory-{tier}{end}",
            title=f"Memory over step {memory.step}, {tier}{of}",
            unit="bytes",
            series=series,
            kind="levels",
            seconds=max(memory.seconds, xs[-1]),
            note=f"bytes that the first rank has allocated there; the most together {shown(max(sums), 'bytes')}",
        )


def _stack(run: RunRecord, rows: Callable[[Mapping[str, Any]], dict[str, float]], chart: Chart) -> Chart | None:
    """Values by name of every line that has them; a name that a line does not have counts as 0 there."""
    found = [(float(line["step"]), row) for line in run.lines if (row := rows(line))]
    sums: dict[str, float] = {}
    for _, row in found:
        for name, value in row.items():
            sums[name] = sums.get(name, 0.0) + value
    if not any(sums.values()):
        return None
    names = [name for name, total in sums.items() if total]
    most = sorted(names, key=lambda name: -sums[name])[: COLORS - 1 if len(names) > COLORS else COLORS]
    shown_rows = [found[place] for place in kept([sum(row.values()) for _, row in found], _MOST_BARS)]
    columns = {name: [row.get(name, 0.0) for _, row in shown_rows] for name in names if name in most}
    if len(names) > len(most):
        others = [sum(value for name, value in row.items() if name not in most) for _, row in shown_rows]
        columns[f"{len(names) - len(most)} others"] = others
    xs = [x for x, _ in shown_rows]
    series = [Series(name=name, color=color, xs=xs, ys=ys) for color, (name, ys) in enumerate(columns.items())]
    return replace(chart, series=series, kind="stack")
