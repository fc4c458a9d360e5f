"""Which attention heads a rank has: arithmetic on integers.

Query heads that share a key-value head stay together with it. With fewer key-value heads than ranks, several ranks have the same
key-value head and divide its query heads.

    9 query heads, 3 key-value heads, 2 ranks      rank 0: q 0-5, kv 0 1        rank 1: q 6-8, kv 2
    8 query heads, 2 key-value heads, 4 ranks      rank 0: q 0 1, kv 0   rank 1: q 2 3, kv 0   rank 2: q 4 5, kv 1   ...
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from zeromesh.errors import LayoutError
from zeromesh.flat.split import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShare:
    """Query and key-value heads of one rank."""

    queries: Interval
    keys: Interval


def balanced(length: int, parts: int) -> tuple[Interval, ...]:
    """`length` cut into `parts` that differ by one at most, the longer ones first."""
    base, longer = divmod(length, parts)
    ends = [number * base + min(number, longer) for number in range(parts + 1)]
    return tuple(Interval(start=start, end=end) for start, end in pairwise(ends))


def share_heads(queries: int, keys: int, ranks: int, where: str) -> tuple[HeadShare, ...]:
    """The heads of every rank.

    Raises:
        LayoutError: when some rank would have none, naming `where`; and when key-value heads do not divide the query heads.
    """
    if keys < 1 or queries % keys:
        raise LayoutError(f"{where}: {keys} key-value heads do not divide {queries} query heads")
    group = queries // keys
    if keys >= ranks:
        return tuple(
            HeadShare(queries=Interval(start=own.start * group, end=own.end * group), keys=own)
            for own in balanced(keys, ranks)
        )
    crowds = balanced(ranks, keys)
    if max(crowd.length for crowd in crowds) > group:
        raise LayoutError(
            f"{where}: {queries} query heads cannot be divided among {ranks} ranks; parallel.tensor may be at most {queries}"
        )
    shares = []
    for key, crowd in enumerate(crowds):
        for own in balanced(group, crowd.length):
            start = key * group
            queries_here = Interval(start=start + own.start, end=start + own.end)
            shares.append(HeadShare(queries=queries_here, keys=Interval(start=key, end=key + 1)))
    return tuple(shares)


def scaled(interval: Interval, width: int) -> Interval:
    """An interval of heads as one of features, `width` of each head."""
    return Interval(start=interval.start * width, end=interval.end * width)


def moved(interval: Interval, by: int) -> Interval:
    return Interval(start=interval.start + by, end=interval.end + by)
