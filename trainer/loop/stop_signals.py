"""Stopping in order: a first signal to stop ends the run after the step that is going on, a second one at once.

SIGHUP, of a terminal that is gone, and SIGUSR1, which schedulers send on request, are as SIGTERM.

Processes that are forked meanwhile, such as workers of a dataset, have the handlers that were there before: a signal ends them.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from zeromesh.launch.rank_processes import STOP_SIGNALS

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


_REPLACED: dict[int, Any] = {}
"""The handlers for which those of the run stand in, by signal."""


def _restore() -> None:
    """Begin a forked process with the handlers that the run has replaced."""
    while _REPLACED:
        signal.signal(*_REPLACED.popitem())


os.register_at_fork(after_in_child=_restore)


@contextmanager
def stop_requests(show: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside the block signals become requests, where nobody else handles them; `show` is called with a line for a person."""
    request = StopRequest(show)
    replaced = []
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler):
                replaced.append(number)
                _REPLACED[number] = handler
                signal.signal(number, request.receive)
    try:
        yield request
    finally:
        for number in replaced:
            signal.signal(number, _REPLACED.pop(number))


def leave(number: int) -> NoReturn:
    """End as a process ends that the signal has ended, but through `finally` blocks.

    Raises:
        KeyboardInterrupt: for SIGINT.
        SystemExit: else, with 128 plus the signal's number.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
