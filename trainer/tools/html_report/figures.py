"""Arithmetic of charts: fewer points with the same extremes, smoothing, scales, ticks and numbers for people. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal

from zeromesh.trainer.formatting import human_bytes, human_count, human_seconds

MOST_POINTS = 1200
"""Of a line; a screen has fewer columns."""

Unit = Literal["plain", "count", "bytes", "seconds", "percent"]


def kept(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Indices of at most `most` (4 or more) values: of stretches of equal length the first, lowest, highest and last one."""
    count = len(values)
    if count <= most:
        return list(range(count))
    stretches = most // 4
    found: list[int] = []
    for number in range(stretches):
        begin, end = number * count // stretches, (number + 1) * count // stretches
        inside = range(begin, end)
        found += sorted({begin, min(inside, key=values.__getitem__), max(inside, key=values.__getitem__), end - 1})
    return found


def picked(values: Sequence[float], places: Iterable[int]) -> list[float]:
    """The values at some indices."""
    return [values[place] for place in places]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Means over `window` values around each one; fewer at both ends, so that the curve does not lag."""
    half = window // 2
    sums = [0.0, *accumulate(values)]
    found = []
    for place in range(len(values)):
        reach = min(half, place, len(values) - 1 - place)
        begin, end = place - reach, place + reach + 1
        found.append((sums[end] - sums[begin]) / (end - begin))
    return found


def median(values: Sequence[float]) -> float:
    """The middle one of the values, of which there is at least one; of an even number the higher of the two."""
    return sorted(values)[len(values) // 2]


def nearest(xs: Sequence[float], x: float) -> int:
    """The index of the value next to `x` in ascending `xs`, of which there is at least one."""
    place = min(bisect_left(xs, x), len(xs) - 1)
    return place - 1 if place and x - xs[place - 1] < xs[place] - x else place


def between(xs: Sequence[float], first: float, last: float) -> int:
    """How many of ascending `xs` lie above `first` and below `last`."""
    return max(0, bisect_left(xs, last) - bisect_right(xs, first))


class Scale:
    """Values from `low` to `high`, as 0 to 1, evenly or by their logarithm. `high` is above `low`, which is positive for `log`."""

    def __init__(self, low: float, high: float, *, log: bool = False) -> None:
        self.low, self.high, self.log = low, high, log
        self._begin, self._end = self._plain(low), self._plain(high)

    def _plain(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def part(self, value: float) -> float:
        """Where a value lies; outside of the scale at its nearer end."""
        if value <= self.low:
            return 0.0
        return min(1.0, (self._plain(value) - self._begin) / (self._end - self._begin))

    def ticks(self, unit: Unit, most: int = 6) -> list[float]:
        """Round values on the scale, at most `most` of them if it is even."""
        if self.log:
            return _decades(self.low, self.high, most)
        step = _round_step((self.high - self.low) / max(1, most - 1), unit)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def line_scale(low: float, high: float, *, zero: bool, log: bool) -> Scale:
    """The scale of lines between two values, with some air around them; from 0 on where `zero` says so."""
    if log:
        return Scale(low / 1.15, high * 1.15, log=True)
    if zero and low >= 0:
        return Scale(0.0, high * 1.06 if high else 1.0)
    air = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low - air, high + air)


def _round_step(least: float, unit: Unit) -> float:
    """The smallest round number that is not below `least`."""
    if unit == "bytes" and least > 1:
        base = 1024.0 ** math.floor(math.log(least, 1024))
        return base * min(
            each
            for each in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50, 64, 100, 128, 200, 256, 512, 1024)
            if each >= least / base
        )
    base = 10.0 ** math.floor(math.log10(least))
    return base * next((each for each in (1, 2, 2.5, 5) if each * base >= least * (1 - 1e-9)), 10)


def _decades(low: float, high: float, most: int) -> list[float]:
    """Powers of ten; where there are fewer than three of them, their doubles and fives too."""
    powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    if len(powers) >= 3:
        return [10.0**power for power in powers[:: math.ceil(len(powers) / most)]]
    around = range(powers.start - 1, powers.stop + 1)
    found = [factor * 10.0**power for power in around for factor in (1.0, 2.0, 5.0)]
    return [value for value in found if low <= value <= high]


def shown(value: float, unit: Unit) -> str:
    """A number for people, as on an axis."""
    if not value:
        return "0"
    if unit == "bytes":
        return human_bytes(value)
    if unit == "seconds":
        return human_seconds(value)
    if unit == "percent":
        return f"{100 * value:.3g} %"
    if unit == "count" and abs(value) >= 1:
        return human_count(value)
    return f"{value:.4g}"


def ticks_shown(values: Sequence[float], unit: Unit) -> list[str]:
    """Numbers of one axis, all of them with as many digits as tell them apart."""
    if unit == "count" and values and max(map(abs, values)) >= 1000:
        for digits in range(4):
            texts = [_thousands(value, digits) for value in values]
            if len(set(texts)) == len(texts):
                return texts
    if unit == "seconds":
        return [_plain_seconds(value) for value in values]
    texts = [shown(value, "plain" if unit == "count" else unit) for value in values]
    return [text.replace(".0 ", " ") for text in texts]


def _thousands(value: float, digits: int) -> str:
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.{digits}f}{letter}"
    return f"{value:.0f}"


def _plain_seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.4g} ms" if value else "0"
    return f"{value:.4g} s" if value < 600 else human_seconds(value)
