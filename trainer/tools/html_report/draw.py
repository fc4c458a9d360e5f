"""A chart as a figure: SVG for lines and areas, HTML for all that is text, so that text keeps its size on any screen.

The picture is 1000 x 1000 units and is stretched to the room that there is; strokes keep their width (`non-scaling-stroke`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from zeromesh.trainer.tools.html_report.chart import COLORS, Chart, Series
from zeromesh.trainer.tools.html_report.figures import Scale, between, shown, ticks_shown
from zeromesh.trainer.tools.html_report.markup import Html, element

_SIZE = 1000
_DIGITS = 7
"""Of numbers that the page's script gets."""


def figure(chart: Chart, domain: tuple[float, float]) -> Html:
    """The figure of a chart; over the steps of `domain`, of which the second is higher, if it is one over steps."""
    steps, values = Scale(*_domain(chart, domain)), chart.scale()
    ticks = values.ticks(chart.unit, 5)
    marks = [
        element("span", text, style=f"bottom:{100 * values.part(tick):.2f}%")
        for tick, text in zip(ticks, ticks_shown(ticks, chart.unit), strict=True)
    ]
    moments = [tick for tick in steps.ticks("plain", 7) if chart.seconds or tick == int(tick)]
    below = [
        element("span", text, style=f"left:{100 * steps.part(tick):.2f}%")
        for tick, text in zip(moments, ticks_shown(moments, "seconds" if chart.seconds else "count"), strict=True)
    ]
    grid = "".join(f"M0 {_y(values, tick)}H{_SIZE}" for tick in ticks)
    picture = element(
        "svg",
        element("path", d=grid, class_="grid", vector_effect="non-scaling-stroke"),
        _lines(chart, steps, values) if chart.kind == "lines" else _areas(chart, steps, values),
        viewBox=f"0 0 {_SIZE} {_SIZE}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{chart.title}: {_described(chart)}",
    )
    return element(
        "figure",
        element("figcaption", element("h3", chart.title, _alone(chart)), element("p", _note(chart))),
        element("ul", *[_legend(chart, each) for each in _named(chart)], class_="legend")
        if not _alone(chart)
        else None,
        element(
            "div",
            element("div", *marks, class_="ys", aria_hidden="true"),
            element("div", picture, class_="picture"),
            element("div", *below, class_="xs", aria_hidden="true"),
            class_="plot",
        ),
        class_=f"chart {chart.kind}",
        id=f"chart-{chart.identifier}",
    )


def _domain(chart: Chart, domain: tuple[float, float]) -> tuple[float, float]:
    return domain if chart.seconds is None else (0.0, chart.seconds)


def data(chart: Chart, domain: tuple[float, float]) -> dict[str, Any]:
    """The same values for the page's script. Charts of one `over` are looked at together."""
    scale = chart.scale()
    return {
        "over": "step" if chart.seconds is None else f"seconds of {chart.identifier}",
        "domain": [float(f"{each:.{_DIGITS}g}") for each in _domain(chart, domain)],
        "id": f"chart-{chart.identifier}",
        "unit": chart.unit,
        "kind": chart.kind,
        "low": scale.low,
        "high": scale.high,
        "log": scale.log,
        "series": [
            {
                "name": each.name,
                "color": each.color % COLORS,
                "style": each.style,
                "x": _short(each.xs),
                "y": _short(each.ys),
                "breaks": _short(each.breaks),
            }
            for each in chart.series
        ],
    }


def _short(values: Sequence[float]) -> list[float]:
    """The values with as many digits as anybody reads."""
    return [int(value) if value == int(value) else float(f"{value:.{_DIGITS}g}") for value in values]


def _x(steps: Scale, step: float) -> str:
    return f"{_SIZE * steps.part(step):.1f}".removesuffix(".0")


def _y(values: Scale, value: float) -> str:
    return f"{_SIZE * (1 - values.part(value)):.1f}".removesuffix(".0")


# Lines


def _lines(chart: Chart, steps: Scale, values: Scale) -> list[Html]:
    found = []
    for number, each in enumerate(chart.series):
        color = f"c{each.color % COLORS}"
        points = [(_x(steps, x), _y(values, y)) for x, y in zip(each.xs, each.ys, strict=True)]
        parts = [_path(f"line {each.style} {color}", _route(points, each), number)]
        if each.style == "dots" or len(points) == 1:
            parts.append(_path(f"dot {color}", "".join(f"M{x} {y}h0" for x, y in points), number))
        if each.breaks and each.style != "faint":
            parts.append(
                _path("broken", "".join(f"M{_x(steps, x)} {_SIZE}V{0.94 * _SIZE:.0f}" for x in each.breaks), number)
            )
        found += parts
    return found


def _route(points: Sequence[tuple[str, str]], series: Series) -> str:
    """The path through points, which begins anew where values between them are not finite."""
    if not points:
        return ""
    words = [f"M{points[0][0]} {points[0][1]}"]
    for (before, after), (x, y) in zip(pairwise(series.xs), points[1:], strict=True):
        broken = series.breaks and between(series.breaks, before, after)
        words.append(f"{'M' if broken else 'L'}{x} {y}")
    return "".join(words)


def _path(classes: str, route: str, number: int) -> Html:
    return element("path", d=route, class_=classes, data_series=number, vector_effect="non-scaling-stroke")


# Areas


def _edges(chart: Chart, steps: Scale) -> list[float]:
    """Where the bar of each value begins, and the last one ends: between steps, but levels hold from their own moment on."""
    xs = chart.series[0].xs
    if chart.kind == "levels":
        return [*xs, steps.high]
    if len(xs) == 1:
        return [steps.low, steps.high]
    inner = [(one + two) / 2 for one, two in pairwise(xs)]
    return [max(steps.low, 2 * xs[0] - inner[0]), *inner, min(steps.high, 2 * xs[-1] - inner[-1])]


def _areas(chart: Chart, steps: Scale, values: Scale) -> list[Html]:
    xs = chart.series[0].xs
    borders = [_x(steps, edge) for edge in _edges(chart, steps)]
    below = [0.0] * len(xs)
    found = []
    for number, each in enumerate(chart.series):
        above = [base + value for base, value in zip(below, each.ys, strict=True)]
        route = "".join(
            f"{'V' if place else f'M{borders[0]} '}{_y(values, y)}H{borders[place + 1]}"
            for place, y in enumerate(above)
        )
        back = "".join(f"V{_y(values, y)}H{borders[place]}" for place, y in reversed(list(enumerate(below))))
        found.append(element("path", d=f"{route}{back}Z", class_=f"area c{each.color % COLORS}", data_series=number))
        below = above
    return found


# Words


def _named(chart: Chart) -> list[tuple[int, Series]]:
    """Series with their numbers, without those that only lie behind another."""
    return [(number, each) for number, each in enumerate(chart.series) if each.style != "faint"]


def _alone(chart: Chart) -> Html | None:
    """The last value of a chart whose only series needs no name."""
    named = _named(chart)
    if len(named) > 1 or named[0][1].name != chart.title.lower():
        return None
    return element("b", _figure(chart, named[0][1]))


def _legend(chart: Chart, numbered: tuple[int, Series]) -> Html:
    number, series = numbered
    name = series.name.removesuffix(", smoothed")
    return element(
        "li",
        element(
            "button",
            element("i", class_=f"swatch {series.style} c{series.color % COLORS}"),
            name,
            element("b", _figure(chart, series)),
            type="button",
            aria_pressed="true",
            data_series=number,
        ),
    )


def _figure(chart: Chart, series: Series) -> str:
    """What is said of a series beside its name: its part of a stack's seconds, else its last value."""
    if not series.ys:
        return "not finite"
    if chart.kind == "stack" and chart.unit == "seconds":
        return f"{sum(series.ys) / (sum(top for _, top in chart.tops()) or 1):.0%}"
    if chart.kind == "levels":
        return f"up to {shown(max(series.ys), chart.unit)}"
    return shown(series.ys[-1], chart.unit)


def _note(chart: Chart) -> str:
    words = [chart.note] if chart.note else []
    beyond = chart.beyond()
    if beyond:
        step, most = max(beyond, key=lambda each: each[1])
        count = f"{len(beyond)} value{'s' * (len(beyond) > 1)}"
        words.append(f"{count} beyond the picture, the most {shown(most, chart.unit)} in {_moment(chart, step)}")
    broken = sum(len(each.breaks) for each in chart.series if each.style != "faint")
    if broken:
        words.append(f"not finite in {broken} step{'s' * (broken > 1)} (red)")
    if chart.scale().log:
        words.append("logarithmic scale")
    return "; ".join(words)


def _described(chart: Chart) -> str:
    """The chart in words, for who cannot see it."""
    words = []
    for _, each in _named(chart):
        if each.ys:
            first, last = (f"{shown(each.ys[end], chart.unit)} in {_moment(chart, each.xs[end])}" for end in (0, -1))
            words.append(f"{each.name} from {first} to {last}")
    return "; ".join(words)


def _moment(chart: Chart, x: float) -> str:
    return f"step {x:.0f}" if chart.seconds is None else f"second {x:.3g}"
