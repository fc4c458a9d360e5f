"""Integer arithmetic of byte intervals in a file: unions, whole disk blocks, the grid of checksums, and what overlaps what."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar

from zeromesh.intervals import Interval, round_up
from zeromesh.offload.io.direct_io import BLOCK

GRID = 4 << 20
"""Bytes between checksum boundaries."""


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, in order, with neighbours as one interval and none of them empty."""
    found: list[Interval] = []
    for interval in sorted(intervals, key=lambda each: each.start):
        if found and interval.start <= found[-1].end:
            found[-1] = Interval(start=found[-1].start, end=max(found[-1].end, interval.end))
        else:
            found.append(interval)
    return [interval for interval in found if interval.length]


def minus(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The union of intervals without the union of others, in order."""
    found, gone = [], merged(others)
    for interval in merged(intervals):
        start = interval.start
        for other in gone[max(0, bisect_right(gone, start, key=attrgetter("start")) - 1) :]:
            if other.start >= interval.end:
                break
            if other.start > start:
                found.append(Interval(start=start, end=other.start))
            start = max(start, other.end)
        if start < interval.end:
            found.append(Interval(start=start, end=interval.end))
    return found


def starts_in_blocks_of_others(extents: Sequence[Interval]) -> list[Interval]:
    """The beginnings of merged extents that lie in a disk block whose first byte belongs to another extent."""
    found = []
    for extent in extents:
        end = min(extent.end, round_up(extent.start, BLOCK))
        if end > extent.start:
            found.append(Interval(start=extent.start, end=end))
    return found


def written_blocks(extents: Sequence[Interval], nbytes: int) -> list[Interval]:
    """The disk blocks whose first byte lies in one of the merged extents, in a file of `nbytes` bytes."""
    found = []
    for extent in extents:
        start = round_up(extent.start, BLOCK)
        if start < extent.end:
            found.append(Interval(start=start, end=min(round_up(extent.end, BLOCK), nbytes)))
    return merged(found)


def cut_at_grid(interval: Interval) -> Iterator[Interval]:
    """An interval cut at multiples of `GRID`."""
    start = interval.start
    while start < interval.end:
        end = min(interval.end, (start // GRID + 1) * GRID)
        yield Interval(start=start, end=end)
        start = end


class Extent(Protocol):
    """Anything that lies at bytes [begin, end) of a file."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...


_Member = TypeVar("_Member", bound=Extent)


def overlapping(members: Sequence[_Member], begin: int, end: int) -> Iterator[_Member]:
    """The members that have a byte in [begin, end), of members that are disjoint and in order."""
    at = max(0, bisect_right(members, begin, key=attrgetter("begin")) - 1)
    while at < len(members) and members[at].begin < end:
        if members[at].end > begin:
            yield members[at]
        at += 1
