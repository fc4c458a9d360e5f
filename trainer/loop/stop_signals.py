"""Stopping in order: a first signal to stop ends the run after the step that is going on, a second one at once.

SIGHUP, of a terminal that is gone, and SIGUSR1, which schedulers send on request, are as SIGTERM.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from zeromesh.launch.rank_processes import STOP_SIGNALS, handled_signals

_SAME_SECONDS = 1.0
"""A terminal and a launcher both pass the same Ctrl-C on; within this time it is one."""


class StopRequest:
    """The request to this process to stop, with the signal that made it."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.signal = 0
        self._show = show
        self._at = 0.0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Remember the first request; leave at the second."""
        now = time.monotonic()
        if not self.signal:
            self.signal, self._at = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, now
            name = signal.Signals(number).name
            self._show(f"{name}: stopping after this step; a second one stops at once")
        elif now - self._at > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def stop_requests(show: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside the block signals become requests, where nobody else handles them; `show` is called with a line for a person."""
    request, ends = StopRequest(show), (signal.SIG_DFL, signal.default_int_handler)
    with handled_signals([each for each in STOP_SIGNALS if signal.getsignal(each) in ends], request.receive):
        yield request


def leave(number: int) -> NoReturn:
    """End as a process ends that the signal has ended, but through `finally` blocks.

    Raises:
        KeyboardInterrupt: for SIGINT.
        SystemExit: else, with 128 plus the signal's number.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
