"""The rank processes of one start on this host: starting and stopping them, and reporting the error that ended them."""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from zeromesh.environment import ERRORS, RankRange, die_with_parent, setting, worker_environment
from zeromesh.errors import CollectiveError, ZeromeshError, ranks_text, refused_path
from zeromesh.launch.nursery import Fork, Nursery

_CAUSE_SECONDS = 2.0  # to wait for the error of the rank that failed first, once others have ended that noticed it
_STOP_SECONDS = 30.0  # for ranks to end after a failure, before they are killed
USERS_MISTAKE = 2  # the exit code after an error that would recur, such as one in the configuration
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a process to end in order, including SIGHUP of a closed terminal and SIGUSR1, which Slurm users often choose."""
_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
_STOPPED = {128 + int(number): number.name for number in STOP_SIGNALS}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersFailed:
    """The failure of some workers: the error of the rank that failed first, and the exit code for the command."""

    message: str
    exit_code: int
    ranks: tuple[int, ...] = ()
    distance: int = 0
    """The distance from the cause: 0 for a possible cause, 1 for ranks that noticed a peer's failure, 2 for stopped ranks."""
    time: float = 0.0  # the time of the failure, in seconds of the clock
    pid: int = 0  # the process id of a rank that ended without recording an error

    def __str__(self) -> str:
        if not self.ranks:
            return self.message
        process = f" (pid {self.pid})" if self.pid else ""
        return f"{ranks_text(self.ranks)}{process}: {self.message}"


@dataclass(kw_only=True, slots=True, eq=False)
class _RankProcess:
    """The process of one rank, and the file in memory that it writes its error into."""

    rank: int
    process: Fork
    error: int
    ended: float = 0.0
    killed: bool = False

    def end(self) -> WorkersFailed:
        """Return the error that the process has recorded, or else the way in which it ended."""
        ranks = (self.rank,)
        try:
            return WorkersFailed(**json.loads(os.pread(self.error, os.fstat(self.error).st_size, 0)), ranks=ranks)
        except (ValueError, TypeError):  # The record is missing or incomplete.
            code, distance = self.process.wait(), 0
        if code >= 0:
            stopped = _STOPPED.get(code)
            message = f"was stopped by {stopped}" if stopped else f"ended with exit code {code} and no Python error"
        else:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            distance = 2 if name == "SIGTERM" or self.killed else 0
            unasked = name == "SIGKILL" and not self.killed
            hint = "; the kernel kills like this when memory runs out (see dmesg)" * unasked
            message, code = f"was killed by {name}{hint}", 128 - code
        end = WorkersFailed(message=message, exit_code=code or 1, ranks=ranks, distance=distance)
        return replace(end, time=self.ended, pid=self.process.pid)


class RankProcesses:
    """The processes `python ARGUMENTS` of one start on this host, which the nursery forks, in separate sessions, away from the
    terminal's Ctrl-C. Each writes its error into an anonymous file in memory, so nothing has to be removed after a kill."""

    def __init__(self, arguments: Sequence[str], assigned: RankRange, nursery: Nursery) -> None:
        self._arguments, self._assigned, self._nursery = arguments, assigned, nursery
        self._cause_until: float | None = None
        self._stop_until: float | None = None
        self._ranks = [self._start(local_rank) for local_rank in range(assigned.processes)]

    def _start(self, local_rank: int) -> _RankProcess:
        """Start the process of one rank: all that a rank is given when it starts is given here."""
        assigned, error = self._assigned, os.memfd_create(f"zeromesh-error-{local_rank}")
        shared = worker_environment(assigned.processes, alone=assigned.processes == assigned.world_size)
        variables = {**shared, **assigned.variables(local_rank), ERRORS: f"/proc/{os.getpid()}/fd/{error}"}
        fork = self._nursery.fork(self._arguments, variables)
        return _RankProcess(rank=assigned.first + local_rank, process=fork, error=error)

    def over(self) -> bool:
        """Return True if all processes have ended. Call it repeatedly: after a failure it also stops the other processes."""
        now = time.monotonic()
        for each in self._ranks:
            if not each.ended and each.process.poll() is not None:
                each.ended = time.time()
        if all(each.ended for each in self._ranks):
            return True
        failed = [each for each in self._ranks if each.ended and each.process.returncode]
        # A process that has recorded its error may not end while a stopped peer holds its connections.
        recorded = any(os.fstat(each.error).st_size for each in self._ranks)
        if self._stop_until is None and (failed or recorded):
            self._cause_until = self._cause_until or now + _CAUSE_SECONDS
            if now > self._cause_until or any(each.end().distance == 0 for each in failed):
                self.stop(signal.SIGTERM)
        if self._stop_until is not None and now > self._stop_until:
            self.send(signal.SIGKILL)
        return False

    def stop(self, number: int, seconds: float = _STOP_SECONDS) -> None:
        """Send a signal to all processes, and SIGKILL to those that have not ended after `seconds`."""
        if self._stop_until is None:
            self._stop_until = time.monotonic() + seconds
            self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to the running processes and to all that they have started in their sessions."""
        for each in self._ranks:
            if each.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(each.process.pid, number)
                    each.killed |= number == signal.SIGKILL

    def failure(self) -> WorkersFailed | None:
        """Return the failure that caused the others, since peers of a dead rank fail too or are stopped; None if there is none."""
        ends = [each.end() for each in self._ranks if each.process.returncode]
        if not ends:
            return None
        first = min(ends, key=lambda each: (each.distance, each.time))
        same = tuple(rank for each in ends if each.message == first.message for rank in each.ranks)
        return replace(first, ranks=same, pid=first.pid if len(same) == 1 else 0)

    def close(self) -> None:
        self.send(signal.SIGKILL)
        while self._ranks:
            each = self._ranks.pop()
            each.process.wait()
            os.close(each.error)


def become_worker(exit_code_of: Callable[[BaseException], int], *, whole: bool = False) -> None:
    """Make this process a worker of `launch_workers`: it dies with its parent and records its error for it, with the exit code of
    the launching command. `whole`: errors have their tracebacks even where the message says all."""
    die_with_parent()

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, OSError) and not whole:
            error = refused_path(error) or error
        if isinstance(error, KeyboardInterrupt):
            return
        text, path = "".join(traceback.format_exception(kind, error, trace)), setting(ERRORS)
        if path is None:
            sys.stderr.write(text)
            return
        says_all = isinstance(error, ZeromeshError) and not whole
        message = str(error) if says_all else f"{type(error).__name__}\n{text.rstrip()}"
        code, distance = exit_code_of(error), int(isinstance(error, CollectiveError))
        details = {"message": message, "time": time.time(), "exit_code": code, "distance": distance}
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
        os.write(descriptor, json.dumps(details).encode())
        os.close(descriptor)

    sys.excepthook = record


@dataclass(slots=True, eq=False)
class StopSignals:
    """Signals received and not yet passed on to child processes, and the number of those passed on. Signals `only_forwarded`
    do not ask this process to stop. Of others, the first `passes` let the child processes end in order, and one more kills them."""

    only_forwarded: Sequence[int] = ()
    passes: int = 1
    first: int = 0
    passed_on: int = 0
    pending: list[int] = field(default_factory=list)

    def receive(self, number: int, frame: object) -> None:
        if number not in self.only_forwarded:
            self.first = self.first or number
        self.pending.append(number)

    def pass_on(self, send: Callable[[int], None], kill: Callable[[], None]) -> None:
        """Pass on the received signals by `send`, or by `kill` where one too many asks to stop."""
        while self.pending:
            number = self.pending.pop(0)
            if number in self.only_forwarded or self.passed_on < self.passes:
                send(number)
            else:
                kill()
            self.passed_on += number not in self.only_forwarded

    def exit_code(self) -> int:
        return self.first and 128 + self.first


_REPLACED: dict[int, Any] = {}


def _restore() -> None:
    """Restore the replaced handlers in a forked process, such as a data loader's worker, so that signals end it."""
    while _REPLACED:
        signal.signal(*_REPLACED.popitem())


os.register_at_fork(after_in_child=_restore)


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
