"""What a chart is: series over steps, on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zeromesh.trainer.tools.html_report.figures import Scale, Unit, line_scale, median

COLORS = 10
"""Colors that page.css has for series; a stack has no more of them, and draws those with least as one."""
_LOG_FROM = 50.0
"""Highest over lowest value from which on a logarithmic scale shows more."""
_FAR, _FEW = 2.5, 2
"""Times the median from which on seconds of a step, at most so many or a fiftieth of all, are cut off."""


Style = Literal["line", "faint", "dots", "dashed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Values over steps, both of one length, steps ascending. `color` is the number of one, and taken modulo `COLORS`."""

    name: str
    color: int
    xs: Sequence[float]
    ys: Sequence[float]
    style: Style = "line"
    breaks: Sequence[float] = ()
    """Steps whose value is not finite: the line is broken there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One picture. The series of a `stack` have the same steps and are drawn on top of each other, the first at the bottom."""

    identifier: str
    title: str
    unit: Unit
    series: Sequence[Series] = ()
    kind: Literal["lines", "stack", "levels"] = "lines"
    """`levels` is a stack whose values hold from their moment to the next one."""
    seconds: float | None = None
    """Where a chart is over the seconds of one step and not over steps: how many there are."""
    note: str = ""
    zero: bool = False
    """Whether the scale begins at 0."""

    def scale(self) -> Scale:
        """The vertical one."""
        tops = [value for _, value in self.tops()] or [0.0]
        if self.kind != "lines":
            return Scale(0.0, 1.06 * (_reach(tops) if self.kind == "stack" else max(tops)) or 1.0)
        low, high = min(tops), max(tops)
        if self.zero and self.unit == "seconds":
            high = _reach(tops)
        log = not self.zero and low > 0 and high / low >= _LOG_FROM
        return line_scale(low, high, zero=self.zero, log=log)

    def tops(self) -> list[tuple[float, float]]:
        """The points of lines; of a stack, its sums over their steps."""
        if self.kind == "lines":
            return [point for each in self.series for point in zip(each.xs, each.ys, strict=True)]
        sums = (sum(column) for column in zip(*(each.ys for each in self.series), strict=True))
        return list(zip(self.series[0].xs, sums, strict=True))

    def beyond(self) -> list[tuple[float, float]]:
        """The tops that do not fit into the picture."""
        high = self.scale().high
        return [(x, top) for x, top in self.tops() if top > high]


def _reach(tops: Sequence[float]) -> float:
    """The highest of the tops that is to be seen: a few that lie far above all others would make these flat."""
    near = [top for top in tops if top <= _FAR * median(tops)]
    few = 0 < len(tops) - len(near) <= max(_FEW, len(tops) // 50)
    return max(near) if few and near else max(tops)
