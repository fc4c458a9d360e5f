"""Free ranges of a file that only grows: taken, given back, and one again where they touch."""

from __future__ import annotations

from bisect import bisect_left


class Extents:
    """Ranges [begin, end) that are free, in order; no two of them touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    @property
    def free(self) -> int:
        """The sum of their lengths."""
        return sum(self._ends) - sum(self._begins)

    def take(self, length: int) -> int | None:
        """Where `length` begin that are free no longer: in the first range that is long enough. None where there is none."""
        for at, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if end - begin >= length:
                self._begins[at] += length
                if self._begins[at] == end:
                    del self._begins[at], self._ends[at]
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        """Make [begin, end) free. Raises `ValueError` where it is so already, in part, or has no length."""
        at = bisect_left(self._begins, begin)
        before = self._ends[at - 1] if at else begin
        after = self._begins[at] if at < len(self._begins) else end
        if not before <= begin < end <= after:
            raise ValueError(f"[{begin}, {end}) is free already, in part, or has no length")
        self._begins.insert(at, begin)
        self._ends.insert(at, end)
        self._join(at + 1)
        self._join(at)

    def reaching(self, end: int) -> int:
        """The length of the free range that ends at `end`; 0 where none does."""
        return end - self._begins[-1] if self._ends and self._ends[-1] == end else 0

    def _join(self, at: int) -> None:
        """Make a range and the one before it one, where they touch."""
        if 0 < at < len(self._begins) and self._ends[at - 1] == self._begins[at]:
            del self._begins[at], self._ends[at - 1]
