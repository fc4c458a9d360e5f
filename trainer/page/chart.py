"""What a chart is: series over steps, on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zeromesh.trainer.page.figures import Scale, Unit, line_scale, median

COLORS = 10
"""Colors that page.css has for series; a stack has no more of them, and draws those with least as one."""
_LOG_FROM = 50.0
"""Highest over lowest value from which on a logarithmic scale shows more."""
_BEYOND = 3.0
"""Times the median sum of a stack that its scale reaches to at least; single steps beyond 4 times it are cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Values over steps, both of one length, steps ascending. `color` is the number of one, and taken modulo `COLORS`."""

    name: str
    color: int
    xs: Sequence[float]
    ys: Sequence[float]
    style: Literal["line", "faint", "dots", "dashed"] = "line"
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
        if self.kind != "lines":
            return Scale(0.0, 1.06 * self._reach())
        values = [value for each in self.series for value in each.ys] or [0.0]
        low, high = min(values), max(values)
        log = not self.zero and low > 0 and high / low >= _LOG_FROM
        return line_scale(low, high, zero=self.zero, log=log)

    def totals(self) -> list[float]:
        """The sums of a stack, by step."""
        return [sum(column) for column in zip(*(each.ys for each in self.series), strict=True)]

    def _reach(self) -> float:
        """The highest sum of a stack that is to be seen whole."""
        totals = self.totals()
        usual = median(totals)
        if 0 < 4 * usual < max(totals):
            return max(_BEYOND * usual, *(total for total in totals if total <= 4 * usual))
        return max(totals) or 1.0

    def beyond(self) -> list[tuple[float, float]]:
        """Steps of a stack that do not fit into the picture, and their sums."""
        if self.kind == "lines":
            return []
        high = self.scale().high
        return [(x, total) for x, total in zip(self.series[0].xs, self.totals(), strict=True) if total > high]
