"""`Counters`: how far every rank of a set is, in memory that all of them see.

A counter only grows and has one writer, so reading it needs no lock. Stores must be seen in order, as on x86-64.
"""

from __future__ import annotations

from zeromesh.mesh.futex import Futex
from zeromesh.mesh.groups import ProcessSet
from zeromesh.mesh.watch import Watch

LINE = 8
"""Words in a cache line: counters of different writers never share one."""


class Counters:
    """One growing counter per rank, in shared words, a cache line apart."""

    def __init__(self, words: memoryview, base: int, group: ProcessSet, watch: Watch) -> None:
        self._words = words
        self._places = [base + rank * LINE for rank in range(group.size)]
        self._mine = self._places[group.index]
        self._ranks = group.ranks
        self._watch = watch
        self._futexes = [Futex(words, place) for place in self._places]
        self._bell = self._futexes[group.index]

    def set(self, value: int) -> None:
        """Set this rank's counter, and wake those that wait for it."""
        self._words[self._mine] = value
        self._bell.wake()

    def own(self) -> int:
        """This rank's counter."""
        return self._words[self._mine]

    def lowest(self) -> int:
        """Where the last of the ranks is."""
        words = self._words
        return min(words[place] for place in self._places)

    def reached(self, value: int) -> bool:
        """Whether all ranks have got to `value`."""
        words = self._words
        for place in self._places:  # noqa: SIM110 - a third of the time of `all`, in the loop of every wait
            if words[place] < value:
                return False
        return True

    def wait(self, value: int, what: str) -> None:
        """Wait until all ranks have got to `value`; the ranks that have not are the ones that an error names."""
        if self.reached(value):
            return
        words = self._words
        behind = [rank for rank, place in zip(self._ranks, self._places, strict=True) if words[place] < value]

        def pause(seconds: float) -> None:
            for place, futex in zip(self._places, self._futexes, strict=True):
                if (seen := words[place]) < value:
                    futex.wait(seen, seconds)
                    return

        self._watch.wait(lambda: self.reached(value), behind, what, pause)
