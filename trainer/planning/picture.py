"""A plan as a picture: of its first rows memory by purpose and time by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

from zeromesh.trainer.formatting import human_bytes, human_seconds
from zeromesh.trainer.planning.planner import GIB, Plan
from zeromesh.trainer.planning.report import SHOWN
from zeromesh.trainer.tools.html_report.charts import COLORS, LAYOUT, Chart, go
from zeromesh.trainer.tools.html_report.page import document, table_of


def plan_picture(plan: Plan, *, shown: int = SHOWN) -> str:
    """A page of HTML: a table of the first rows, their memory by purpose, and the seconds of their steps by phase."""
    charts = plan_charts(plan, shown=shown)
    estimates = [row.estimate for row in plan.rows[:shown]]
    rows = [
        (number, str(each.layout), human_bytes(each.device_bytes), human_seconds(each.seconds))
        for number, each in enumerate(estimates, start=1)
    ]
    table = table_of(("row", "layout", "memory", "step"), rows, numbers=(0, 2, 3))
    sections = {"Layouts, the fastest first": table, "Memory and time": charts}
    title = f"{plan.subject} on {plan.ranks} ranks of {plan.machine}"
    return document(title, sections, charts, f"A rank has room for {human_bytes(plan.room.device)}.")


def plan_charts(plan: Plan, *, shown: int = SHOWN) -> list[Chart]:
    """The charts of `plan_picture`."""
    estimates = [row.estimate for row in plan.rows[:shown]]
    purposes = dict.fromkeys(name for each in estimates for name, nbytes in each.device.items() if nbytes)
    memory = _bars([{name: each.device.get(name, 0) / GIB for name in purposes} for each in estimates], COLORS)
    if max(each.device_bytes for each in estimates) > 0.3 * plan.room.device:
        memory.add_vline(x=plan.room.device / GIB, line_dash="dot")
    phases = dict.fromkeys(phase for each in estimates for phase in each.phases)
    times = [{str(phase): each.phases.get(phase, 0.0) for phase in phases} for each in estimates]
    return [
        Chart("memory", "Highest memory of a rank", "GiB, by row", memory, False, False),
        Chart("seconds", "Time of a step", "seconds, by row", _bars(times, COLORS[::-1]), False, False),
    ]


def _bars(rows: Sequence[Mapping[str, float]], colors: Sequence[str]) -> go.Figure:
    """A bar for each row, made of its parts."""
    figure = go.Figure(layout=LAYOUT)
    numbers = list(range(1, len(rows) + 1))
    for color, name in zip(cycle(colors), rows[0], strict=False):
        lengths = [row[name] for row in rows]
        if any(lengths):
            figure.add_bar(y=numbers, x=lengths, orientation="h", marker_color=color, name=name)
    figure.update_layout(barmode="stack", hovermode="closest")
    figure.update_yaxes(autorange="reversed", tickmode="array", tickvals=numbers, showgrid=False)
    figure.update_xaxes(showgrid=True)
    return figure
