"""Integer arithmetic for splitting a flat buffer, the only place that decides how an uneven length is divided; and groups."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from zeromesh.errors import LayoutError

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

ALIGNMENT = 64  # of parameters and shards, in elements, so that both begin on a cache line in every dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """The half-open interval `[start, end)` of elements."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise LayoutError(f"interval [{self.start}, {self.end}) is not in order or begins below 0")

    @property
    def length(self) -> int:
        return self.end - self.start

    def after(self, origin: int) -> "Interval":
        """Return the interval with its positions counted from `origin`, that is shifted by -origin."""
        return Interval(start=self.start - origin, end=self.end - origin)

    def intersect(self, other: "Interval") -> "Interval":
        """Return the common part; empty (at the later start) if there is none."""
        start = max(self.start, other.start)
        return Interval(start=start, end=max(start, min(self.end, other.end)))


def balanced(length: int, parts: int) -> tuple[Interval, ...]:
    """Split `length` into `parts` intervals whose lengths differ by at most one, the longer ones first."""
    base, longer = divmod(length, parts)
    ends = [number * base + min(number, longer) for number in range(parts + 1)]
    return tuple(Interval(start=start, end=end) for start, end in pairwise(ends))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the sorted union of intervals, with neighbours joined and empty ones left out."""
    found: list[Interval] = []
    for interval in sorted(intervals, key=lambda each: each.start):
        if found and interval.start <= found[-1].end:
            found[-1] = Interval(start=found[-1].start, end=max(found[-1].end, interval.end))
        else:
            found.append(interval)
    return [interval for interval in found if interval.length]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return the values of each key, both in the order in which they come."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
