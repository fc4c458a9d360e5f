"""The charts of runs as plotly figures: lines of several runs in one chart, and stacked areas of one run."""

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import isfinite, log, nan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from zeromesh.errors import ConfigError, counted, printable
from zeromesh.trainer.config.yaml_reader import read_texts
from zeromesh.trainer.formatting import human_bytes, human_count, human_seconds
from zeromesh.trainer.tools.html_report.runs import RunRecord

try:
    import plotly.graph_objects as go
    from plotly.io.json import to_json_plotly
    from plotly.offline import get_plotlyjs
except ImportError as error:
    raise ConfigError("charts need one more package: pip install 'zeromesh[report]'") from error

__all__ = ["COLORS", "Chart", "Line", "chart_of", "charts_of", "get_plotlyjs", "to_json_plotly"]

MOST_POINTS, MOST_STACKED = 1200, 300
"""The largest numbers of points of a line and of a stacked area; a screen has fewer columns."""
_SMOOTHED_FROM, _DOTS_UP_TO = 60, 40
"""The least points of a loss that is smoothed, and the most points of evaluations drawn as dots."""
_LOG_FROM = 50.0  # The ratio of the highest and the lowest value from which on a logarithmic axis is used.
_OUTLIER_FACTOR, _MOST_OUTLIERS = 2.5, 2
"""The multiple of the median above which seconds of a step are cut off, and the most such steps, or a fiftieth of all."""

_UNITS: dict[str, tuple[Callable[[float], str], str, str, str]] = {
    "plain": ("{:.4g}".format, "~r", ".5~r", ""),
    "count": (human_count, "~s", ".4~s", ""),
    "bytes": (human_bytes, "~r", ".4~r", ""),
    "seconds": (human_seconds, "~s", ".4~s", "s"),
    "percent": ("{:.1%}".format, "~%", ".3~%", ""),
}
"""The format of a number in a legend, of ticks and of hover values in d3's notation, and the suffix of both."""
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_TABLES = read_texts(Path(__file__).with_name("charts.yaml"))
COLORS, LAYOUT = _TABLES["colors"], _TABLES["layout"]


class Line(NamedTuple):
    """Values by step, or of the look `levels` by second within a step; values that are not finite interrupt the line."""

    name: str
    values: Mapping[Any, float]
    color: int
    look: str = "line"


class Chart(NamedTuple):
    """A figure and its caption. `over_steps` is False for an axis of seconds within a step; `log` allows a logarithmic axis."""

    name: str
    title: str
    note: str
    figure: go.Figure
    over_steps: bool
    log: bool


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """Return all charts for which the runs have values. Those over steps share one range of steps."""
    charts = [chart_of(*each) for each in _curves(runs) if any(any(line.values.values()) for line in each[-1])]
    for index, run in enumerate(runs):
        end, of = (f"-{index}", f": {run.name}") if len(runs) > 1 else ("", "")
        for name, title, unit, note, parts, look in _stacks(run):
            some = {part.replace("_", " "): values for part, values in parts.items() if any(values.values())}
            lines = [Line(part, values, color, look) for color, (part, values) in enumerate(some.items())]
            charts += [chart_of(name + end, title + of, unit, note, lines)] if lines else []
    steps = {line["step"] for run in runs for line in run.lines}
    for chart in charts:
        if chart.over_steps and len(steps) > 1:
            chart.figure.update_xaxes(range=[min(steps), max(steps)], dtick=1 if len(steps) < 8 else None)
    return charts


def thinned_indices(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Return the indices of at most `most` (4 or more) values: the first, lowest, highest and last of equal stretches."""
    if len(values) <= most:
        return list(range(len(values)))
    ends = [number * len(values) // (most // 4) for number in range(most // 4 + 1)]
    indices: set[int] = set()
    for begin, end in pairwise(ends):
        inside = range(begin, end)
        indices |= {begin, min(inside, key=values.__getitem__), max(inside, key=values.__getitem__), end - 1}
    return sorted(indices)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return centered moving averages over `window` values; fewer at both ends, so that the curve does not lag."""
    sums = [0.0, *accumulate(values)]
    reaches = [min(window // 2, index, len(values) - 1 - index) for index in range(len(values))]
    return [(sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1) for at, reach in enumerate(reaches)]


def _curves(runs: Sequence[RunRecord]) -> Iterator[tuple[str, str, str, str, list[Line]]]:
    several = len(runs) > 1
    losses: list[Line] = []
    for index, run in enumerate(runs):
        prefix, values, finite = f"{run.name}, " * several, run.columns.get(("loss",), {}), run.column("loss")
        if len(finite) >= _SMOOTHED_FROM:
            losses.append(Line(f"{prefix}training", values, index, "faint"))
            means = moving_average(list(finite.values()), max(5, len(finite) // 40))
            losses.append(Line(f"{prefix}training, smoothed", values | dict(zip(finite, means, strict=True)), index))
        elif values:
            losses.append(Line(f"{prefix}training", values, index))
        if evaluations := run.evaluation_losses():
            look = "dots" if len(evaluations) <= _DOTS_UP_TO else "line"
            losses.append(Line(f"{prefix}evaluation", evaluations, index if several else 1, look))
    note = "mean over the targets of a step" + "; bold: smoothed" * any(line.look == "faint" for line in losses)
    yield "loss", "Loss", "plain", note, losses
    paths = list(dict.fromkeys(keys for run in runs for keys in run.columns))
    evaluated = [key for key, *_ in paths if key.startswith("eval_") and key not in {"eval_loss", *_TABLES["curves"]}]
    curves = {name: (name, "plain", "of evaluations") for name in evaluated} | _TABLES["curves"]
    for name, (title, unit, note) in curves.items():
        lines = []
        for index, run in enumerate(runs):
            columns = [keys for keys in paths if keys[0] == name or (name[0] == "_" and keys[0].endswith(name))]
            for other, keys in enumerate(columns):
                values = run.columns.get(keys, {})
                words = [run.name if several else "", keys[0].removesuffix(name), *keys[1:]]
                look = "dots" if name.startswith("eval_") and len(values) <= _DOTS_UP_TO else "line"
                look = "dashed" if keys[-1] == "predicted" else look
                label = ", ".join(filter(None, words)) or title.lower()
                lines += [Line(label, values, index if several else other, look)] if values else []
        yield name, title, unit, note, lines


def _stacks(run: RunRecord) -> Iterator[tuple[str, str, str, str, dict[str, dict[Any, float]], str]]:
    """Yield the stacked charts of a run: name, title, unit, note, values by part and step, style."""
    columns = {keys: run.column(*keys) for keys in run.columns}
    phases = {keys[1]: values for keys, values in columns.items() if len(keys) == 2 and keys[0] == "phases"}
    timed = {step for values in phases.values() for step in values}
    whole = {step: seconds for step, seconds in run.column("step_seconds").items() if step in timed}
    rest = {step: seconds - sum(values.get(step, 0.0) for values in phases.values()) for step, seconds in whole.items()}
    phases["other"] = {step: seconds for step, seconds in rest.items() if seconds > 0.01 * whole[step]}
    yield "phases", "Time by phase", "seconds", "of the first rank in a step", phases, "stack"
    for tier in dict.fromkeys(keys[1] for keys in columns if len(keys) == 3 and keys[0] == "memory"):
        purposes = {keys[-1]: values for keys, values in columns.items() if keys[:2] == ("memory", tier)}
        note = "of the first rank, the most of each purpose in a step"
        yield f"memory-{tier}", f"Memory by purpose, {tier}", "bytes", note, purposes, "stack"
    number, seconds, events = run.step_memory or (0, 0.0, [])
    for tier in dict.fromkeys(tier for _, tier, _, _ in events):
        now: dict[str, float] = {}
        moments: dict[float, dict[str, float]] = {}
        for at, where, purpose, nbytes in events:
            if where == tier:
                now[purpose] = nbytes
                moments[at] = dict(now)
        if len(moments) > 1:
            moments.setdefault(max(seconds, *moments), now)
            levels = {purpose: {at: row.get(purpose, 0.0) for at, row in moments.items()} for purpose in now}
            note = "bytes that the first rank has allocated there"
            yield f"step-memory-{tier}", f"Memory over step {number}, {tier}", "bytes", note, levels, "levels"
    traffic = {": ".join(keys[1:3]): columns[keys] for keys in columns if keys[::3] == ("communication", "seconds")}
    note = "of the first rank in starting collectives and waiting for them"
    yield "communication", "Communication by axis", "seconds", note, traffic, "stack"


def chart_of(name: str, title: str, unit: str, note: str, lines: Sequence[Line]) -> Chart:
    """Return a chart of at least one line, or a stack from the bottom to the top."""
    shown, ticks, hover, suffix = _UNITS[unit]
    stacked, over_steps = lines[0].look in ("stack", "levels"), lines[0].look != "levels"
    tops = [(step, value) for line in lines for step, value in line.values.items() if isfinite(value)]
    if stacked:
        steps = sorted({step for line in lines for step in line.values})
        tops = [(step, sum(line.values.get(step, 0.0) for line in lines)) for step in steps]
        steps = [steps[index] for index in thinned_indices([top for _, top in tops], MOST_STACKED)]
    values = [value for _, value in tops] or [0.0]
    notes, high, factor = [note] if note else [], max(values), 1.0
    usual = median(values)
    near = [value for value in values if value <= _OUTLIER_FACTOR * usual]
    if unit == "seconds" and 0 < (far := len(values) - len(near)) <= max(_MOST_OUTLIERS, len(values) // 50):
        step = max(tops, key=lambda top: top[1])[0]
        notes.append(f"{counted(far, 'value')} above the picture, the highest {shown(high)} in step {step}")
        high = max(near, default=high)
    if unit == "bytes":
        power = min(4, int(log(max(high, 1.0), 1024)))
        factor, suffix = 1024.0**power, f" {_BYTES[power]}"
    figure = go.Figure(layout=LAYOUT)
    figure.update_yaxes(tickformat=ticks, hoverformat=hover, ticksuffix=suffix)
    broken: set[float] = set()
    for line in lines:
        finite = {step: value for step, value in line.values.items() if isfinite(value)}
        good, bad = list(finite), [step for step in line.values if step not in finite]
        broken.update(bad := [bad[index] for index in thinned_indices(bad)])
        xs = steps if stacked else sorted([*bad, *(good[index] for index in thinned_indices(list(finite.values())))])
        ys = [float(f"{line.values.get(x, 0.0) / factor:.7g}") for x in xs]
        last = shown([nan, *finite.values()][-1])
        if line.look == "levels":
            last = f"up to {shown(max(finite.values()))}"
        elif stacked and unit == "seconds":
            last = f"{sum(finite.values()) / (sum(values) or 1.0):.0%}"
        text = html.escape(printable(line.name), quote=False).replace("%{", "% {")
        color = COLORS[line.color % len(COLORS)]
        figure.add_scatter(
            x=xs if len(xs) > 1 or not stacked else [xs[0] - 0.5, xs[0] + 0.5],
            y=ys if len(xs) > 1 or not stacked else ys * 2,
            name=f"{text.removesuffix(', smoothed')}  {last}",
            hovertemplate=f"%{{y}}<extra>{text}</extra>",
            legendgroup=str(line.color),
            line_color=color,
            fillcolor=color,
            **_TABLES["looks"][line.look],
        )
    if broken:
        notes.append(f"not finite in {counted(len(broken), 'step')} (red)")
        path = "".join(f"M{step},0L{step},0.06" for step in sorted(broken))
        figure.add_shape(type="path", yref="paper", path=path, line={"color": "#d33a2f", "width": 2})
    from_zero = unit != "plain" or name == "lr"
    if from_zero:
        figure.update_yaxes(range=[0.0, 1.06 * high / factor or 1.0], rangemode="tozero")
    elif 0 < _LOG_FROM * min(values) <= high:
        figure.update_yaxes(type="log")
    if not over_steps:
        figure.update_xaxes(unifiedhovertitle_text="%{x}", tickformat="~s", ticksuffix="s")
    return Chart(name, title, "; ".join(notes), figure, over_steps, not from_zero and min(values) > 0)
