"""Graceful stops: the first signal ends the run after the current step, the second one at once.

SIGHUP, of a lost terminal, and SIGUSR1, which schedulers send on request, are treated as SIGTERM.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from zeromesh.launch.rank_processes import STOP_SIGNALS, handled_signals

_REPEAT_SECONDS = 1.0
"""Seconds in which repeated signals count as one: a terminal and a launcher both forward the same Ctrl-C."""


class StopRequest:
    """A request to stop this process, and its signal."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.signal = 0
        self._show = show
        self._at = 0.0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: record the first one, and let a second one end the process by its default action."""
        now = time.monotonic()
        if not self.signal:
            self.signal, self._at = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, now
            name = signal.Signals(number).name
            self._show(f"{name}: stopping after this step; a second one stops at once")
        elif now - self._at > _REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def stop_requests(show: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside the block signals become requests, unless a handler is installed already; `show` receives a line for the console."""
    request, ends = StopRequest(show), (signal.SIG_DFL, signal.default_int_handler)
    with handled_signals([each for each in STOP_SIGNALS if signal.getsignal(each) in ends], request.receive):
        yield request


def leave(number: int) -> NoReturn:
    """End the process as the signal does by default, but through `finally` blocks.

    Raises:
        KeyboardInterrupt: for SIGINT.
        SystemExit: else, with 128 plus the signal's number.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
