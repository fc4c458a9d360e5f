"""Which bytes of a file a rank writes: whole blocks, each with one writer, cut at a grid for checksums. Integers alone.

A rank's elements are extents of bytes, which begin and end anywhere. Of a block that several ranks share, the owner of its first
byte writes all, and gets the other ranks' bytes of it (edges) beforehand:

    block      |      0      |      1      |      2      |
    owner      | rank 0               | rank 1           |
    edge                      |  r1's |
    written by | rank 0      | rank 0      | rank 1      |

What a rank writes is cut at multiples of `GRID` bytes of the file into pieces, each with a checksum of its own, so that a reader
verifies what it reads and little more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from zeromesh.intervals import Interval, round_up
from zeromesh.offload.io.direct_io import BLOCK

GRID = 4 << 20
"""Bytes between checksum boundaries."""


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals in order, neighbours as one. They must not overlap."""
    found: list[Interval] = []
    for interval in sorted(intervals, key=lambda each: each.start):
        if not interval.length:
            continue
        if found and found[-1].end == interval.start:
            found[-1] = Interval(start=found[-1].start, end=interval.end)
        else:
            found.append(interval)
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """What any of the intervals has, in order; they may overlap."""
    found: list[Interval] = []
    for interval in sorted(intervals, key=lambda each: each.start):
        if found and interval.start <= found[-1].end:
            found[-1] = Interval(start=found[-1].start, end=max(found[-1].end, interval.end))
        else:
            found.append(interval)
    return [interval for interval in found if interval.length]


def minus(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What any of the intervals has, and none of the others, in order."""
    found, gone = [], union(others)
    for interval in union(intervals):
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


def edges(extents: Sequence[Interval]) -> list[Interval]:
    """The beginnings of merged extents that lie in a block whose first byte is another extent's."""
    found = []
    for extent in extents:
        end = min(extent.end, round_up(extent.start, BLOCK))
        if end > extent.start:
            found.append(Interval(start=extent.start, end=end))
    return found


def written_blocks(extents: Sequence[Interval], nbytes: int) -> list[Interval]:
    """The blocks whose first byte lies in one of the merged extents, of a file of `nbytes` bytes."""
    found = []
    for extent in extents:
        start = round_up(extent.start, BLOCK)
        if start < extent.end:
            found.append(Interval(start=start, end=min(round_up(extent.end, BLOCK), nbytes)))
    return merged(found)


def pieces(interval: Interval) -> Iterator[Interval]:
    """An interval cut at the grid."""
    start = interval.start
    while start < interval.end:
        end = min(interval.end, (start // GRID + 1) * GRID)
        yield Interval(start=start, end=end)
        start = end


class Extent(Protocol):
    """Whatever lies at bytes [begin, end) of a file."""

    @property
    def begin(self) -> int: ...

    @property
    def end(self) -> int: ...


_Member = TypeVar("_Member", bound=Extent)


def overlapping(members: Sequence[_Member], begin: int, end: int) -> Iterator[_Member]:
    """Those of disjoint members, in order, that have a byte in [begin, end)."""
    at = max(0, bisect_right(members, begin, key=attrgetter("begin")) - 1)
    while at < len(members) and members[at].begin < end:
        if members[at].end > begin:
            yield members[at]
        at += 1


class Extents(Generic[_Member]):
    """Members in order of their first byte; they may overlap."""

    def __init__(self, members: Iterable[_Member]) -> None:
        self._members = sorted(members, key=attrgetter("begin"))
        self._ends = list(accumulate((member.end for member in self._members), max))
        """Where the last one ends of each and those before it."""

    def __iter__(self) -> Iterator[_Member]:
        return iter(self._members)

    def touching(self, begin: int, end: int) -> Iterator[_Member]:
        """Those that have a byte in [begin, end), or bytes around it."""
        for at in range(bisect_right(self._ends, begin), len(self._members)):
            if self._members[at].begin >= end:
                break
            if self._members[at].end > begin:
                yield self._members[at]
