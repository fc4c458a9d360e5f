"""The rank processes of one start on this host: starting and stopping them, and reporting the error that ended them."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any

from zeromesh.environment import LINE, MEMORIES, RECOVERS, RankRange, die_with_parent, process_state, worker_environment
from zeromesh.errors import CollectiveError, ZeromeshError, ranks_text, refused_path
from zeromesh.launch.line import line_to_launcher
from zeromesh.launch.nursery import Fork, Nursery
from zeromesh.launch.signals import STOP_SIGNALS

_CAUSE_SECONDS = 2.0  # to wait for the error of the rank that failed first, once others have ended that noticed it
_STOP_SECONDS = 30.0  # for ranks to end after a failure, before they are killed
_CLOSE_SECONDS = 10.0  # for ranks that rest to end by their errors
USERS_MISTAKE = 2  # the exit code after an error that would recur, such as one in the configuration
_KILLED = {128 + int(number) for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)}
STOPPED = {128 + int(number): number.name for number in STOP_SIGNALS}


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
    limit: int = 0
    """The recoveries in an hour in which ranks that did not fail themselves may go on (`recovery.limit`); 0: there are none."""
    step: int = 0  # the latest step after which a rank has left the mesh; 0: unknown
    left_out: int = 0  # the number of ranks of a host that compute wrongly, without which a run goes on

    def __str__(self) -> str:
        if not self.ranks:
            return self.message
        process = f" (pid {self.pid})" if self.pid else ""
        return f"{ranks_text(self.ranks)}{process}: {self.message}"


@dataclass(kw_only=True, slots=True, eq=False)
class _RankProcess:
    """The process of one rank, and this end of its line (see `line`)."""

    rank: int
    process: Fork
    line: Connection
    memories: tuple[int, ...]
    """The descriptors of memory for the rank's states and for copies of them, which outlives it."""
    told: dict[str, Any] = field(default_factory=dict)
    """Its words: the `error`; `recovers`, the limit and its patience; if it `trains` still; `step`; why it `rests`."""
    ended: float = 0.0
    killed: bool = False

    def look(self) -> None:
        """Take note of the messages that have come, and of the end of the process."""
        ended = self.process.poll() is not None  # Its messages have all come then.
        with suppress(EOFError, OSError):
            while self.line.poll():
                self.told |= json.loads(self.line.recv_bytes())
        self.ended = self.ended or ended * time.time()

    @property
    def rests(self) -> bool:
        return "rests" in self.told and not self.ended

    @property
    def patience(self) -> float:
        """Seconds after which the rank has noticed that others are lost, and rests; 0: it ends."""
        return float(self.told.get("recovers", {}).get("patience", 0.0))

    def tell(self, **message: Any) -> None:
        with suppress(OSError):
            self.line.send_bytes(json.dumps(message).encode())

    def close(self) -> None:
        """Give back this end of the line, without which a process that rests ends by its error, and the memory."""
        self.line.close()
        for memory in self.memories:
            os.close(memory)

    def place(self, rank: int, variables: Mapping[str, str]) -> None:
        """Give a rank that rests a place in the next start."""
        self.rank, self.killed = rank, False
        self.told = {"recovers": self.told.get("recovers", {})}  # It can leave the next start too, even before it has joined.
        self.tell(place=variables)

    def stands_still(self) -> bool:
        """Return True if the process is stopped, as by SIGSTOP, so that no signal but SIGKILL ends it."""
        with suppress(OSError):
            return process_state(self.process.pid) in ("T", "t")
        return False

    def end(self) -> WorkersFailed:
        """Return the error that the process has told, why it rests, or else the way in which it ended."""
        ranks = (self.rank,)
        if "error" in self.told:
            return WorkersFailed(**self.told["error"], ranks=ranks)
        if self.rests:
            return WorkersFailed(message=self.told["rests"], exit_code=1, ranks=ranks, distance=1, time=time.time())
        code, distance = self.process.wait(), 0
        if code >= 0:
            stopped = STOPPED.get(code)
            message = f"was stopped by {stopped}" if stopped else f"ended with exit code {code} and no Python error"
        else:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            distance = 2 if name == "SIGTERM" or self.killed else 0
            hint = "; the kernel kills like this when memory runs out (see dmesg)" * (name == "SIGKILL" and not self.killed)
            message, code = f"was killed by {name}{hint}", 128 - code
        end = WorkersFailed(message=message, exit_code=code or 1, ranks=ranks, distance=distance)
        return replace(end, time=self.ended, pid=self.process.pid)


class RankProcesses:
    """The processes `python ARGUMENTS` of this host's ranks, in separate sessions, away from the terminal's Ctrl-C. Those that rest
    after a start (see `line`) are ranks of the next one, in the same process."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._ranks: list[_RankProcess] = []
        self._placeless: list[_RankProcess] = []  # those of earlier starts, which end by themselves
        self._cause_until: float | None = None
        self._stop_until: float | None = None
        self.recover: bool | None = None
        """True while ranks of a `fit` that has trained do not all train: they cannot save what is in memory. None: no such fit."""

    def start(self, assigned: RankRange, nursery: Nursery) -> None:
        """Begin a start: place the processes that rest, and have the nursery fork the others. No process may be running."""
        self._cause_until = self._stop_until = None
        before, self._ranks = sorted(self._ranks, key=lambda each: each.told.get("error", {}).get("left_out", 0)), []
        shared = worker_environment(assigned.processes, alone=assigned.processes == assigned.world_size)
        shared |= {RECOVERS: "1"} if self.recover else {}
        # Copies of the states of another host have no place where there is none.
        names = MEMORIES if assigned.hosts > 1 else MEMORIES[:-1]
        for local_rank in range(assigned.processes):
            rank, variables = assigned.first + local_rank, {**shared, **assigned.variables(local_rank)}
            each = before[local_rank] if local_rank < len(before) else None
            if each is not None and each.rests:
                each.place(rank, variables)
            else:
                line, theirs = Pipe()
                new = (os.memfd_create(f"{name}-{local_rank}".lower()) for name in names)
                memories = tuple(new if each is None else map(os.dup, each.memories))
                with theirs:
                    handles = dict(zip((LINE, *names), (theirs.fileno(), *memories), strict=True))
                    process = nursery.fork(self._arguments, variables, handles)
                each = _RankProcess(rank=rank, process=process, line=line, memories=memories)
            self._ranks.append(each)
        self._placeless += (placeless := [each for each in before if each not in self._ranks])
        for each in placeless:
            each.close()

    def over(self) -> bool:
        """Return True if all processes have ended or rest. Call it repeatedly: after a failure it also stops the others."""
        now = time.monotonic()
        for each in self._ranks:
            each.look()
        told = [each.told.get("trains") for each in self._ranks]
        # Who ends by a signal that asks to stop has saved.
        lost = any(each.rests or (each.process.returncode or 0) not in (0, *STOPPED) for each in self._ranks)
        self.recover = None if False in told or (self.recover is None and (lost or not all(told))) else lost or not all(told)
        running = [each for each in self._ranks if not (each.ended or each.rests)]
        if not running:
            return True
        # A process that has told its error may not end while a stopped peer holds its connections.
        ended = [each for each in self._ranks if each.ended and each.process.returncode]
        if self._stop_until is None and (ended or any(each.rests or "error" in each.told for each in self._ranks)):
            self._cause_until = self._cause_until or now + _CAUSE_SECONDS
            known = any(each.end().distance == 0 for each in ended) or all(each.stands_still() for each in running)
            if known or now > self._cause_until:
                self.leave(_STOP_SECONDS, str(self.failure() or "a rank has failed"))
        if self._stop_until is not None:
            self.send(signal.SIGKILL, [each for each in running if now > self._stop_until or each.stands_still()])
        return False

    def leave(self, seconds: float, reason: str = "", after_step: bool = False) -> None:
        """Have all processes end within `seconds`; later they are killed. Ranks that can go on without others, or with more, rest
        instead if there is a `reason`: what others are lost, or why they rest after their present step and its checkpoint. With no
        time and no reason, processes that are ending are killed too. Nobody leaves for others that come once a `fit` is over."""
        if after_step and any(each.told.get("trains") is False for each in self._ranks):
            return
        if self._stop_until is not None and (seconds or reason or time.monotonic() >= self._stop_until):
            return
        running = [each for each in self._ranks if not (each.ended or each.rests)]
        stay = [each for each in running if each.patience and reason]
        # Who does not rest after its own patience is late by its own rules.
        patience = max((each.patience for each in stay), default=0.0)
        self._stop_until = time.monotonic() + max(patience, seconds * (after_step or len(stay) < len(running)))
        for each in stay:
            each.tell(**{"asked" if after_step else "lost": reason})
        for each in running:
            if each not in stay:
                # Who recovers has nothing to save, and leaves other signals to this process.
                waits = self.recover and "trains" not in each.told
                self.send(signal.SIGTERM if seconds and not waits else signal.SIGKILL, [each])

    def stop(self, number: int, seconds: float) -> None:
        """Send a signal to all processes, and SIGKILL to those that have not ended after `seconds`."""
        if self._stop_until is None:
            self._stop_until = time.monotonic() + seconds
            self.send(number)

    def send(self, number: int, ranks: Iterable[_RankProcess] | None = None) -> None:
        """Send a signal to processes, by default all, and to all that they have started in their sessions."""
        for each in self._ranks if ranks is None else ranks:
            if each.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(each.process.pid, number)
                    each.killed |= number == signal.SIGKILL

    def failure(self) -> WorkersFailed | None:
        """Return the failure that caused the others, since peers of a dead rank fail too or are stopped; None if there is none."""
        ends = [each.end() for each in self._ranks if each.rests or each.process.returncode]
        if not ends:
            return None
        # Who has lost a peer raises any error in a loop that uses torch's groups, but is not killed by it.
        first = min(ends, key=lambda each: (each.distance, each.exit_code not in _KILLED, each.time))
        same = tuple(rank for each in ends if each.message == first.message for rank in each.ranks)
        limit = max(each.told.get("recovers", {}).get("limit", 0) for each in self._ranks)
        return replace(
            first,
            ranks=same,
            pid=first.pid if len(same) == 1 else 0,
            limit=limit if any(each.distance for each in ends) else 0,
            step=max(each.told.get("step", 0) for each in self._ranks),
            left_out=sum(each.left_out for each in ends),
        )

    def close(self) -> None:
        """End all processes: those that rest by their own errors, since there is no next start."""
        for each in self._ranks:
            each.close()
        every, until = [*self._ranks, *self._placeless], time.monotonic() + _CLOSE_SECONDS
        while any(each.rests and each.process.poll() is None for each in every) and time.monotonic() < until:
            time.sleep(0.01)
        self.send(signal.SIGKILL, every)
        for each in every:
            each.process.wait()
        self._ranks = []


def become_worker(exit_code_of: Callable[[BaseException], int], *, whole: bool = False) -> None:
    """Make this process a worker of `launch_workers`: it dies with its parent and records its error for it, with the exit code of
    the launching command. `whole`: errors have their tracebacks even where the message says all."""
    die_with_parent()

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, OSError) and not whole:
            error = refused_path(error) or error
        if isinstance(error, KeyboardInterrupt):
            return
        text, line = "".join(traceback.format_exception(kind, error, trace)), line_to_launcher()
        if line is None:
            sys.stderr.write(text)
            return
        message = str(error) if isinstance(error, ZeromeshError) and not whole else f"{type(error).__name__}\n{text.rstrip()}"
        code, distance = exit_code_of(error), int(isinstance(error, CollectiveError))
        kind_of_end = {"distance": distance, "left_out": int(getattr(error, "left_out", False))}
        line.tell(error={"message": message, "time": time.time(), "exit_code": code, **kind_of_end})

    sys.excepthook = record
