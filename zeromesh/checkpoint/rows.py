"""Columns of rows: what a rank has of a tensor that is divided inside of its rows, moved by whole blocks of rows.

    logical rows of 6         columns [0, 2) and [4, 6)         local rows of 4
      0  1  .  .  4  5                                            0  1  2  3
      6  7  .  . 10 11                                            4  5  6  7
     12 13  .  . 16 17                                            8  9 10 11

Columns are in order, so elements have one order in both: those of a stretch of the logical tensor are a stretch of the local one.
Whatever the number of rows, a stretch is a few tiles, each of which is copied at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from zeromesh.errors import LayoutError
from zeromesh.flat.split import Interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """`rows` runs of `length` elements each: the first from `local` and from `logical` on, the next ones a row further in both."""

    local: int
    logical: int
    rows: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The same `columns` of each of `count` logical rows of `width` elements.

    Raises:
        LayoutError: at construction, for columns that are empty, not in order or beyond the row.
    """

    count: int
    width: int
    columns: tuple[Interval, ...]

    def __post_init__(self) -> None:
        ordered = all(one.end <= other.start for one, other in pairwise(self.columns))
        empty = not self.columns or any(not column.length for column in self.columns)
        if empty or not ordered or self.columns[-1].end > self.width:
            raise LayoutError(
                f"columns {self.columns} of rows of {self.width}: they are to be in order, and inside of a row"
            )

    @property
    def taken(self) -> int:
        """Elements of a local row."""
        return sum(column.length for column in self.columns)

    def before(self, logical: int) -> int:
        """How many local elements come before a logical position, which is also the place of the first one from there on."""
        row, at = divmod(min(max(logical, 0), self.count * self.width), self.width)
        return row * self.taken + sum(min(max(at - column.start, 0), column.length) for column in self.columns)

    def hull(self, interval: Interval) -> Interval:
        """The logical stretch from the first to the last of some local elements, of which there is one at least."""
        return Interval(start=self._logical(interval.start), end=self._logical(interval.end - 1) + 1)

    def _logical(self, local: int) -> int:
        row, at = divmod(local, self.taken)
        for column in self.columns:
            if at < column.length:
                return row * self.width + column.start + at
            at -= column.length
        raise LayoutError(f"element {local} lies beyond the columns of its row")

    def tiles(self, interval: Interval) -> Iterator[Tile]:
        """What local elements `interval` consist of: the rest of a row, whole rows, the beginning of a row."""
        first, start = divmod(interval.start, self.taken)
        last, end = divmod(interval.end, self.taken)
        if first == last:
            yield from self._tiles(first, 1, start, end)
            return
        if start:
            yield from self._tiles(first, 1, start, self.taken)
            first += 1
        yield from self._tiles(first, last - first, 0, self.taken)
        yield from self._tiles(last, 1, 0, end)

    def _tiles(self, row: int, rows: int, start: int, end: int) -> Iterator[Tile]:
        """Elements [start, end) of local rows."""
        at = 0
        for column in self.columns:
            first, last = max(start, at), min(end, at + column.length)
            if rows and first < last:
                logical = row * self.width + column.start + first - at
                yield Tile(local=row * self.taken + first, logical=logical, rows=rows, length=last - first)
            at += column.length

    def take(self, window: torch.Tensor, start: int, interval: Interval, out: torch.Tensor) -> None:
        """Put local elements `interval` into `out`, 1-D, from `window`: the logical tensor from position `start` on, 1-D."""
        for tile in self.tiles(interval):
            there = _block(window, tile.logical - start, tile, self.width)
            _block(out, tile.local - interval.start, tile, self.taken).copy_(there)


def _block(flat: torch.Tensor, at: int, tile: Tile, stride: int) -> torch.Tensor:
    """A tile in memory, `[rows, length]`."""
    return flat.as_strided((tile.rows, tile.length), (stride, 1), flat.storage_offset() + at)
