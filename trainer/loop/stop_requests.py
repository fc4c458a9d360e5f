"""Signals as requests to stop: the first one ends a run after the current step, the second one at once. SIGHUP and SIGUSR1 are
treated as SIGTERM."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from zeromesh.launch.rank_processes import STOP_SIGNALS, handled_signals

_REPEAT_SECONDS = 1.0
"""Seconds in which repeated signals count as one: a terminal and a launcher both forward the same Ctrl-C."""


@dataclass(slots=True)
class StopRequest:
    """A request to stop this process after the current step, and its signal: SIGINT, SIGTERM, or 0 without a request."""

    show: Callable[[str], None]
    signal: int = 0
    at: float = 0.0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: record the first one, and let a second one end the process by its default action."""
        now = time.monotonic()
        if not self.signal:
            self.signal, self.at = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, now
            self.show(f"{signal.Signals(number).name}: stopping after this step; a second one stops at once")
        elif now - self.at > _REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def stop_requests(show: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside the block signals become requests, unless a handler is installed already; `show` receives a line for the console."""
    request, ends = StopRequest(show), (signal.SIG_DFL, signal.default_int_handler)
    with handled_signals([each for each in STOP_SIGNALS if signal.getsignal(each) in ends], request.receive):
        yield request
