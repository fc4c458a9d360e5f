"""Integer arithmetic of splitting a flat buffer. The one owner of how an uneven length is divided."""

from __future__ import annotations

from dataclasses import dataclass

from zeromesh.errors import LayoutError

ALIGNMENT = 64
"""Elements. A parameter and a shard begin at a multiple of it, so that both begin on a cache line in every dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Half-open interval `[start, end)` of elements."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise LayoutError(f"interval [{self.start}, {self.end}) is not in order or begins below 0")

    @property
    def length(self) -> int:
        return self.end - self.start

    def after(self, origin: int) -> Interval:
        """The same elements, counted from `origin` on."""
        return Interval(start=self.start - origin, end=self.end - origin)

    def intersect(self, other: Interval) -> Interval:
        """The common part; empty (at the later start) when there is none."""
        start = max(self.start, other.start)
        return Interval(start=start, end=max(start, min(self.end, other.end)))


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def padded_length(numel: int, parts: int, alignment: int = ALIGNMENT) -> int:
    """Length of a buffer of `numel` elements after padding, so that `parts` aligned shards of one length fill it."""
    return round_up(numel, parts * alignment)


def shard_interval(padded: int, parts: int, index: int) -> Interval:
    """Elements that part `index` of `parts` owns in a buffer that `padded_length` has made divisible."""
    length = padded // parts
    return Interval(start=index * length, end=(index + 1) * length)
