"""A plan as a picture: memory over a step, and of its first rows memory by purpose and time by phase."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from zeromesh.trainer.planning.estimate import Moment
from zeromesh.trainer.planning.planner import GIB, Plan
from zeromesh.trainer.planning.report import SHOWN
from zeromesh.trainer.tools.html_report.charts import COLORS, kept

_LABEL = 48
"""Characters of a line of a layout beside its bars."""


def plan_picture(plan: Plan, moments: Sequence[Moment], *, shown: int = SHOWN) -> str:
    """A page of HTML: the memory of the first row's rank over a step (`moments`), and of the first rows the memory by purpose and
    the seconds of a step by phase."""
    return str(plan_figure(plan, moments, shown=shown).to_html(include_plotlyjs=True))


def plan_figure(plan: Plan, moments: Sequence[Moment], *, shown: int = SHOWN) -> go.Figure:
    """The charts of `plan_picture`."""
    rows = plan.rows[:shown]
    names = ["<br>".join(textwrap.wrap(str(row.estimate.layout), _LABEL)) for row in rows]
    titles = (
        f"memory of a rank over a step, GiB: {rows[0].estimate.layout}",
        "highest memory of a rank, GiB",
        "seconds of a step",
    )
    specs: list[list[dict[str, int] | None]] = [[{"colspan": 2}, None], [{}, {}]]
    figure = make_subplots(rows=2, cols=2, specs=specs, subplot_titles=titles, row_heights=[0.5, 0.5])
    purposes = list(dict.fromkeys(name for row in rows for name in row.estimate.device))
    # What stays lies below what comes and goes.
    purposes.sort(key=lambda name: len({each.device.get(name, 0) for each in moments}))
    moments = _drawn(moments)
    for color, purpose in zip(cycle(COLORS), purposes, strict=False):
        same = {"name": purpose, "legendgroup": purpose, "legend": "legend"}
        over = [each.device.get(purpose, 0) / GIB for each in moments]
        if any(over):
            figure.add_trace(_area(moments, over, fillcolor=color, showlegend=False, **same), row=1, col=1)
        values = [row.estimate.device.get(purpose, 0) / GIB for row in rows]
        figure.add_trace(go.Bar(y=names, x=values, orientation="h", marker_color=color, **same), row=2, col=1)
    phases = dict.fromkeys(phase for row in rows for phase in row.estimate.phases)
    for color, phase in zip(cycle(reversed(COLORS)), phases, strict=False):
        times = [row.estimate.phases.get(phase, 0.0) for row in rows]
        bar = go.Bar(name=str(phase), y=names, x=times, orientation="h", marker_color=color, legend="legend2")
        figure.add_trace(bar, row=2, col=2)
    room = plan.room.device / GIB
    figure.add_vline(x=room, line_dash="dot", row=2, col=1)
    if max(row.estimate.device_bytes for row in rows) > 0.3 * plan.room.device:
        figure.add_hline(y=room, line_dash="dot", row=1, col=1)
    figure.update_xaxes(title_text="seconds", row=1, col=1)
    figure.update_yaxes(rangemode="tozero", row=1, col=1)
    figure.update_yaxes(autorange="reversed", automargin=True, row=2)
    figure.update_yaxes(showticklabels=False, row=2, col=2)
    figure.update_layout(
        barmode="stack",
        height=1000,
        title=f"{plan.subject} on {plan.ranks} ranks of {plan.machine}",
        hovermode="closest",
        legend={"orientation": "h", "y": -0.05, "x": 0.0, "xanchor": "left", "yanchor": "top"},
        legend2={"orientation": "h", "y": -0.05, "x": 1.0, "xanchor": "right", "yanchor": "top"},
    )
    return figure


def _drawn(moments: Sequence[Moment]) -> list[Moment]:
    """As many moments as a screen shows, each later than the one before, the highest among them."""
    places = kept([sum(each.device.values()) for each in moments])
    little = moments[-1].seconds * 1e-9
    return [replace(moments[place], seconds=moments[place].seconds + little * place) for place in places]


def _area(moments: Sequence[Moment], over: Sequence[float], **looks: Any) -> go.Scatter:
    """Bytes of one purpose over a step, on top of those before."""
    return go.Scatter(
        x=[each.seconds for each in moments],
        y=over,
        text=[each.action for each in moments],
        hovertemplate="%{y:.3~f} GiB, %{text}",
        mode="none",
        stackgroup="memory",
        hoveron="points",
        **looks,
    )
