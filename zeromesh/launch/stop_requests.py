"""Signals to stop that a launching process has got: it passes them on instead of ending."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class StopSignals:
    """Signals that this process has received, and whether one was passed on to the processes that it has started."""

    def __init__(self) -> None:
        self.first = 0
        self.passed_on = False
        self.pending: list[int] = []

    def receive(self, number: int, frame: object) -> None:
        """Note one; a signal handler."""
        self.first = self.first or number
        self.pending.append(number)

    def exit_code(self) -> int:
        """128 plus the number of the first signal, or 0."""
        return self.first and 128 + self.first


@contextmanager
def noted_signals() -> Iterator[StopSignals]:
    """Note signals to stop instead of ending, and put the handlers back."""
    requests = StopSignals()
    kept = {number: signal.signal(number, requests.receive) for number in _SIGNALS}
    try:
        yield requests
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)
