"""A plan as a picture: memory over a step, and of its first rows memory by purpose and time by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import plotly.graph_objects as go

from zeromesh.trainer.formatting import human_bytes, human_seconds
from zeromesh.trainer.planning.estimate import Moment
from zeromesh.trainer.planning.planner import GIB, Plan
from zeromesh.trainer.planning.report import SHOWN
from zeromesh.trainer.tools.html_report.charts import COLORS, LAYOUT, Chart, kept
from zeromesh.trainer.tools.html_report.page import document, table_of


def plan_picture(plan: Plan, moments: Sequence[Moment], *, shown: int = SHOWN) -> str:
    """A page of HTML: the memory of the first row's rank over a step (`moments`), and of the first rows the memory by purpose and
    the seconds of a step by phase."""
    charts = plan_charts(plan, moments, shown=shown)
    estimates = [row.estimate for row in plan.rows[:shown]]
    rows = [
        (number, str(each.layout), human_bytes(each.device_bytes), human_seconds(each.seconds))
        for number, each in enumerate(estimates, start=1)
    ]
    table = table_of(("row", "layout", "memory", "step"), rows, numbers=(0, 2, 3))
    title = f"{plan.subject} on {plan.ranks} ranks of {plan.machine}"
    room = f"A rank has room for {human_bytes(plan.room.device)}."
    return document(title, {"Layouts, the fastest first": table, "Memory and time": charts}, charts, room)


def plan_charts(plan: Plan, moments: Sequence[Moment], *, shown: int = SHOWN) -> list[Chart]:
    """The charts of `plan_picture`. A purpose has one color in both charts of memory, and each chart names its own."""
    estimates = [row.estimate for row in plan.rows[:shown]]
    purposes = list(dict.fromkeys(name for each in estimates for name in each.device if any(each.device.values())))
    # What stays lies below what comes and goes.
    purposes.sort(key=lambda name: len({each.device.get(name, 0) for each in moments}))
    phases = list(dict.fromkeys(phase for each in estimates for phase in each.phases))
    moments = _drawn(moments)
    over = go.Figure(layout=LAYOUT)
    over.update_xaxes(unifiedhovertitle_text="%{x}", tickformat="~s", ticksuffix="s")
    for color, purpose in zip(cycle(COLORS), purposes, strict=False):
        heights = [each.device.get(purpose, 0) / GIB for each in moments]
        if any(heights):
            over.add_scatter(
                x=[each.seconds for each in moments],
                y=heights,
                name=purpose,
                text=[each.action for each in moments],
                hovertemplate="%{y:.3~f} GiB, %{text}",
                mode="none",
                stackgroup="memory",
                fillcolor=color,
            )
    memory = _bars([{name: each.device.get(name, 0) / GIB for name in purposes} for each in estimates], COLORS)
    times = [{str(phase): each.phases.get(phase, 0.0) for phase in phases} for each in estimates]
    room = plan.room.device / GIB
    if max(each.device_bytes for each in estimates) > 0.3 * plan.room.device:
        over.add_hline(y=room, line_dash="dot")
        memory.add_vline(x=room, line_dash="dot")
    return [
        Chart("over-step", "Memory of a rank over a step", f"GiB, of row 1: {estimates[0].layout}", over, False, False),
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


def _drawn(moments: Sequence[Moment]) -> list[Moment]:
    """As many moments as a screen shows, each later than the one before, the highest among them."""
    places = kept([sum(each.device.values()) for each in moments])
    little = moments[-1].seconds * 1e-9
    return [replace(moments[place], seconds=moments[place].seconds + little * place) for place in places]
