"""Signals: those that ask a run to stop, in the processes of ranks and in their launchers."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from zeromesh.environment import LINE, handed_over

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a process to end in order, including SIGHUP of a closed terminal and SIGUSR1, which Slurm users often choose."""
_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
_REPEAT_SECONDS = 1.0
"""Seconds in which repeated signals count as one: a terminal and a launcher both forward the same Ctrl-C."""


@dataclass(slots=True)
class StopRequest:
    """A request to stop this process after the current step, and its signal: SIGINT, SIGTERM, or 0 without a request."""

    show: Callable[[str], None]
    signal: int = 0
    at: float = 0.0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal, and end by a second one; where a launcher does so, it may pass on late what came here too."""
        now = time.monotonic()
        if not self.signal:
            self.signal, self.at = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, now
            self.show(f"{signal.Signals(number).name}: stopping after this step; a second one stops at once")
        elif now - self.at > _REPEAT_SECONDS and handed_over(LINE) is None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def stop_requests(show: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside the block signals become requests, unless a handler is installed already; `show` receives a line for the console."""
    hold_signals(False)
    request = StopRequest(show)
    with handled_signals([each for each in STOP_SIGNALS if signal.getsignal(each) in _ENDS], request.receive):
        yield request


@dataclass(slots=True, eq=False)
class StopSignals:
    """Signals received and not yet passed on to child processes, and the number of those passed on. Signals `only_forwarded`
    do not ask this process to stop. Of others, the first `passes` let the child processes end in order, and one more kills them.
    The first one alone waits while it `holds`, which is shown."""

    only_forwarded: Sequence[int] = ()
    passes: int = 1
    holds: Callable[[], bool] = bool
    show: Callable[[str], object] = str
    passed_on: int = 0
    pending: list[int] = field(default_factory=list)
    _first: int = 0
    _shown: bool = False
    _was_back: bool = False

    def receive(self, number: int, frame: object) -> None:
        self.pending.append(number)

    @property
    def first(self) -> int:
        """The signal by which this process is to stop; 0: none, or one that is held. Once there is one, it stays."""
        asked = [each for each in self.pending if each not in self.only_forwarded]
        if asked and not self._first:
            if len(asked) > 1 or not self.holds():
                self._first = asked[0]
            elif not self._shown:
                self._shown = True
                self.show(f"{signal.Signals(asked[0]).name}: stopping once all ranks train again; a second one stops at once")
        return self._first

    def take_back(self) -> None:
        """Let the only signal that was passed on wait again, once: the child processes have ended otherwise, and new ones go on."""
        if self.passed_on == 1 and not (self.pending or self._was_back):
            self.pending, self._first, self.passed_on, self._shown, self._was_back = [self._first], 0, 0, False, True

    def pass_on(self, send: Callable[[int], None], kill: Callable[[], None]) -> None:
        """Pass on the received signals by `send`, or by `kill` where one too many asks to stop."""
        while self.pending and (self.first or not self.holds()):
            number = self.pending.pop(0)
            if number in self.only_forwarded or self.passed_on < self.passes:
                send(number)
            else:
                kill()
            self.passed_on += number not in self.only_forwarded


_REPLACED: dict[int, Any] = {}


def _restore() -> None:
    """Restore the replaced handlers in a forked process, such as a data loader's worker, so that signals end it."""
    while _REPLACED:
        signal.signal(*_REPLACED.popitem())


os.register_at_fork(after_in_child=_restore)
_ENDS = (signal.SIG_DFL, signal.default_int_handler)


def _leave_to_launcher(*_: object) -> None:
    """Do nothing: the launcher has the signal too, and passes its own on once all ranks train."""


def hold_signals(holds: bool = True) -> None:
    """Leave signals that would end this rank while it recovers to the launcher, until `stop_requests` or `hold_signals(False)`."""
    for number in STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ():
        if holds and signal.getsignal(number) in _ENDS:
            _REPLACED[number] = signal.signal(number, _leave_to_launcher)
        elif not holds and signal.getsignal(number) is _leave_to_launcher:
            signal.signal(number, _REPLACED.pop(number))


@contextmanager
def handled_signals(numbers: Sequence[int], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Inside the block these signals call `handler`, if this is the main thread; SIGHUP stays ignored after `nohup`."""
    changes = threading.current_thread() is threading.main_thread()
    handled = [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) is not signal.SIG_IGN]
    kept = {number: signal.signal(number, handler) for number in handled} if changes else {}
    outermost = {number: before for number, before in kept.items() if before is not None and number not in _REPLACED}
    _REPLACED.update(outermost)
    try:
        yield
    finally:
        for number, before in kept.items():
            if before is not None:
                signal.signal(number, before)
        for number in outermost:
            _REPLACED.pop(number, None)


@contextmanager
def noted_signals(only_forwarded: Sequence[int] = (), passes: int = 1) -> Iterator[StopSignals]:
    """Inside the block, signals are recorded and do not end this process; see `StopSignals`."""
    requests = StopSignals(only_forwarded, passes)
    with handled_signals(_SIGNALS, requests.receive):
        yield requests
