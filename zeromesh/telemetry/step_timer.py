"""`StepTimer`: where the time of a step goes. No torch and no processes; on CUDA it is given marks that are events.

    clock.begin()
    with clock.span(Span.FORWARD): ...        spans may lie inside each other
    clock.take()      {"data": 0.004, "forward": 0.120, "backward": 0.251, "communication": 0.018, ...}

A moment belongs to the innermost span that is open, so that the seconds of all add up to those of the step. What was spent waiting
for bytes of another tier is told by a counter, and belongs to no span but its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from types import TracebackType
from typing import Any

from zeromesh import profiler_ranges


class StepPhase(StrEnum):
    """What a rank does in a step."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    OFFLOAD_WAIT = "offload_wait"
    OTHER = "other"


Mark = Callable[[], Any]
"""A moment: a number of seconds, or an event on a device's stream."""
Between = Callable[[Any, Any], float | None]
"""Seconds from one mark to another; None where the second has not come yet."""


def _seconds(begin: float, end: float) -> float | None:
    return end - begin


class StepTimer:
    """Of one rank. Outside of `begin` and `take` it stands still, and costs a look at a flag.

    With events for marks nothing waits for the device: what it has not done when `take` asks belongs to the next step's seconds.
    """

    def __init__(self, mark: Mark = time.perf_counter, between: Between = _seconds) -> None:
        self._mark = mark
        self._between = between
        self._waited: Callable[[], float] = float
        self._pieces: deque[tuple[StepPhase, Any, Any, float]] = deque()
        self._open: list[StepPhase] = []
        self._last: Any = None
        self._waited_before = 0.0

    def begin(self, waited: Callable[[], float] = float) -> None:
        """A step begins. `waited()`: seconds that this rank has waited for bytes of another tier so far."""
        self._waited = waited
        self._waited_before = waited()
        self._open = [StepPhase.OTHER]
        self._last = self._mark()

    def span(self, span: StepPhase, name: str = "") -> AbstractContextManager[None]:
        """A block that belongs to `span`; where ranges are recorded, it is one of this name."""
        return _TimedBlock(self, span, name)

    def take(self) -> dict[str, float]:
        """The step is over: its seconds by span, those without any left out. Empty where none has begun."""
        if self._open:
            self._count()
        self._open = []
        found: dict[StepPhase, float] = {}
        while self._pieces:
            span, begin, end, waited = self._pieces[0]
            seconds = self._between(begin, end)
            if seconds is None:
                break
            self._pieces.popleft()
            found[span] = found.get(span, 0.0) + max(0.0, seconds - waited)
            if waited:
                found[StepPhase.OFFLOAD_WAIT] = found.get(StepPhase.OFFLOAD_WAIT, 0.0) + waited
        return {span.value: found[span] for span in StepPhase if span in found}

    def enter(self, span: StepPhase) -> None:
        """A block of `span` begins."""
        if self._open:
            self._count()
            self._open.append(span)

    def leave(self) -> None:
        """It ends."""
        if len(self._open) > 1:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        """What was since the last mark belongs to the innermost span."""
        now, waited = self._mark(), self._waited()
        self._pieces.append((self._open[-1], self._last, now, waited - self._waited_before))
        self._last, self._waited_before = now, waited


class _TimedBlock:
    __slots__ = ("_clock", "_name", "_range", "_span")

    def __init__(self, clock: StepTimer, span: StepPhase, name: str) -> None:
        self._clock = clock
        self._span = span
        self._name = name

    def __enter__(self) -> None:
        self._range = profiler_ranges.named(self._name or self._span.value)
        self._range.__enter__()
        self._clock.enter(self._span)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clock.leave()
        self._range.__exit__(kind, error, trace)
