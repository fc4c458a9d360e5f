"""The order in which units are gathered, recorded in one pass and replayed for prefetch in the next.

An order belongs to a kind of pass (training, evaluation). A pass that leaves it gathers on demand and is recorded anew; only
ranks that disagree with each other are in error, and the watch finds that.
"""

from __future__ import annotations

from collections.abc import Sequence


class GatherOrder:
    """Orders by kind of pass, and where the present pass is in its own."""

    def __init__(self) -> None:
        self._orders: dict[str, list[int]] = {}
        self._recorded: Sequence[int] = ()
        self._now: list[int] = []
        self._kind = ""
        self._left = False

    def begin(self, kind: str) -> None:
        """Begin a pass of this kind."""
        self._kind = kind
        self._recorded = self._orders.get(kind, ())
        self._now = []
        self._left = not self._recorded

    def visit(self, unit: int) -> bool:
        """Note that `unit` is needed next; returns whether the recorded order says so too."""
        place = len(self._now)
        self._now.append(unit)
        if not self._left and (place >= len(self._recorded) or self._recorded[place] != unit):
            self._left = True
        return not self._left

    def upcoming(self, count: int) -> Sequence[int]:
        """The next `count` units that the record expects; none once the pass has left it."""
        if self._left:
            return ()
        place = len(self._now)
        return self._recorded[place : place + count]

    def end(self) -> None:
        """The pass is over: what it did is the record."""
        if self._left or len(self._now) != len(self._recorded):
            self._orders[self._kind] = self._now
