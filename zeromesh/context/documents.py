"""The documents of a batch, and the parts of attention within them: integers alone, made on the host from what a batch says."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeromesh.errors import DataError
from zeromesh.intervals import grouped

_TILE = 256  # queries of a band at once: a mask of [256, window + 256] elements


class Span(NamedTuple):
    """A document of a row: tokens `begin` to `end`, and the padding behind it, up to `stop`, which sees it and is not seen."""

    row: int
    begin: int
    end: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """The documents of a batch `[rows, length]`, by row and begin. Tokens outside of all spans see nothing, and are not seen."""

    rows: int
    length: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        ends = [0] * self.rows
        for span in self.spans:
            row, begin, end, stop = span
            if not (row < self.rows and ends[row] <= begin < end <= stop <= self.length):
                raise ValueError(f"{span} is out of order in {self.rows} rows of {self.length} tokens")
            ends[row] = stop

    @classmethod
    def of(cls, position_ids: Tensor, attention_mask: Tensor | None = None) -> "Documents | None":
        """Return the documents of a batch on the CPU, from integers `position_ids`, which may be one row for all, and
        `attention_mask` `[rows, length]`. A document begins where positions fall, or repeat the row's lowest one, and after padding
        (a mask of 0). Positions may be left out, and tokens may share one, as those of a picture do. Returns None if positions tell
        that padding is inside of rows that are one document each, and raises `DataError` if it is inside of packed documents."""
        real = (torch.ones_like(position_ids) if attention_mask is None else attention_mask).bool()
        positions, (rows, length) = position_ids.expand_as(real), real.shape
        after_padding, steps = ~pad(real[:, :-1], (1, 0)), positions.diff(dim=1)
        lowest = positions.where(real, positions.max()).amin(1, keepdim=True)
        restarts = pad((steps < 0) | ((steps == 0) & (positions[:, 1:] == lowest)), (1, 0))
        begins = (real & (after_padding | restarts)).nonzero().tolist()
        counted = pad(real.flatten().cumsum(0), (1, 0)).tolist()
        spans, holes, firsts = list[Span](), 0, {row for row, _ in begins}
        for (row, begin), (next_row, following) in zip(begins, [*begins[1:], [rows, 0]], strict=False):
            stop = following if next_row == row else length
            end = begin + counted[row * length + stop] - counted[row * length + begin]
            spans.append(Span(row, begin, end, stop))
            holes += int(end < stop < length and positions[row, stop] > positions[row, end - 1])
        if holes and len(begins) > len(firsts) + holes:
            why = "a batch has padding (attention_mask) inside of a document of a packed sequence, by its position_ids"
            raise DataError(f"{why}; pad at an end, or let positions begin at 0 after padding")
        return None if holes else cls(rows=rows, length=length, spans=tuple(spans))

    @property
    def packed(self) -> bool:
        """True if a row has several documents."""
        return len({span.row for span in self.spans}) < len(self.spans)

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the number of each token's document, -1 for padding, and its place in it: int64 `[rows, length]` on `device`."""
        numbers, places = torch.full((self.rows, self.length), -1), torch.arange(self.length).repeat(self.rows, 1)
        for number, (row, begin, end, stop) in enumerate(self.spans):
            numbers[row, begin:end] = number
            places[row, begin:stop] -= begin
        return numbers.to(device, non_blocking=True), places.to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """The keys of its document that a query sees: at most `left` before it and `right` behind it (None: all), inside its chunk of
    `chunk` tokens from the document's begin (None: the document is one chunk). By default, causal attention."""

    left: int | None = None
    right: int | None = 0
    chunk: int | None = None

    def both(self, other: "Pattern") -> "Pattern":
        """Return the pattern of what both let through; of two chunks the smaller one has to divide the larger one."""
        pairs = (self.left, other.left), (self.right, other.right), (self.chunk, other.chunk)
        left, right, chunk = (min((each for each in pair if each is not None), default=None) for pair in pairs)
        return Pattern(left=left, right=right, chunk=chunk)


class Part(NamedTuple):
    """Keys `begin` to `end` that queries see: all, or if `causal` those up to theirs, or so many of a `band` before and behind."""

    begin: int
    end: int
    causal: bool = False
    band: tuple[int, int] | None = None


class Block(NamedTuple):
    """Queries `begin` to `end` of the sequence, in rows `first` to `last`, which stand at `at` among those given, and the parts of
    keys that they see. Each query sees a key of every part."""

    first: int
    last: int
    at: int
    begin: int
    end: int
    parts: tuple[Part, ...]


@lru_cache(maxsize=64)
def blocks(documents: Documents, pattern: Pattern, queries: tuple[tuple[int, int], ...]) -> tuple[Block, ...]:
    """Return the blocks of attention for the intervals `queries` of the sequence, given one after another. Their work is that of
    documents; a query is in one block at most. Equal spans of neighbouring rows share blocks."""
    rows = grouped(((span.begin, span.end, span.stop), span.row) for span in documents.spans)
    found: list[Block] = []
    for (first, last, limit), where in rows.items():
        firsts = [row for row in where if row - 1 not in where]
        lasts = [row + 1 for row in where if row + 1 not in where]
        at = 0
        for begin, end in queries:
            for chunk in _chunks(first, last, limit, pattern.chunk):
                for start, stop, parts in _parts(*chunk, pattern, max(begin, chunk[0]), min(end, chunk[2])):
                    places = zip(firsts, lasts, strict=True)
                    found += [Block(first, last, at + start - begin, start, stop, parts) for first, last in places]
            at += end - begin
    return tuple(found)


def _chunks(begin: int, end: int, stop: int, size: int | None) -> Iterator[tuple[int, int, int]]:
    for start in range(begin, end, size or end - begin):
        last = stop if size is None else start + size
        yield start, min(last, end), min(last, stop)


def _parts(begin: int, end: int, stop: int, pattern: Pattern, first: int, last: int) -> Iterator[tuple[int, int, tuple[Part, ...]]]:
    """Yield begins, ends and parts of keys of the blocks of one document for its queries `first` to `last`."""
    left, right = pattern.left, pattern.right
    if right == 0:
        # No key is too far from queries before it. Padding has no keys of its own.
        reached = min(last, end) if left is None else min(last, end, begin + left + 1)
        if first < reached:
            prefix = (Part(begin, first),) if begin < first else ()
            yield first, reached, (*prefix, Part(first, reached, causal=True))
            first = reached
    elif left is right is None:
        if first < last:
            yield first, last, (Part(begin, end),)
        return
    if left is not None:
        last = min(last, end + left)  # Padding that is further away sees nothing.
    for start in range(first, last, _TILE):
        until = min(start + _TILE, last)
        low = begin if left is None else max(begin, start - left)
        high = end if right is None else min(end, until + right)
        band = stop if left is None else left, stop if right is None else right
        yield start, until, (Part(low, high, band=band),)
