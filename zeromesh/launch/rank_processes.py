"""The processes of one start on this host, and what stopped them. Nothing of it stays on a disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from zeromesh.environment import ERRORS, LaunchEnvironment, die_with_launcher, exported, rank_variables, setting
from zeromesh.errors import CollectiveError, ZeromeshError

_CAUSE_SECONDS = 2.0
"""How long the cause may stay away when ranks end since they noticed that another one is gone or wrong."""
_STOP_SECONDS = 30.0
"""How long ranks may take to end when one has failed, before they are killed."""
_STOPPED = {128 + int(number): number.name for number in (signal.SIGINT, signal.SIGTERM)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersFailed:
    """Why the workers ended: what the rank that failed first has to say, and the exit code for the command."""

    ranks: tuple[int, ...]
    message: str
    exit_code: int
    noticed: bool = False
    """Whether these ranks only noticed that others are gone or wrong."""
    apart: bool = False
    """Whether there were no ranks yet, since this host did not come together with the others."""
    pid: int = 0
    """The process of a rank that ended without an error of its own."""

    def __str__(self) -> str:
        if not self.ranks:
            return self.message
        who = "rank" if len(self.ranks) == 1 else "ranks"
        process = f" (pid {self.pid})" if self.pid else ""
        return f"{who} {', '.join(map(str, self.ranks))}{process}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRange:
    """Which ranks this host has in a start: `processes` from `first` on, of `world_size`, and where rank 0 is found."""

    first: int
    processes: int
    world_size: int
    master_address: str
    master_port: int
    run_id: str
    restart: int = 0

    def environment(self, local_rank: int) -> LaunchEnvironment:
        """The place of one process."""
        return LaunchEnvironment(
            rank=self.first + local_rank,
            world_size=self.world_size,
            local_rank=local_rank,
            local_world_size=self.processes,
            master_address=self.master_address,
            master_port=self.master_port,
            launcher="torchrun",
        )


class RankProcesses:
    """The processes `python ARGUMENTS` of one start on this host, in sessions of their own, away from the terminal's Ctrl-C.

    Each writes its error into a file in memory that this process holds, so nothing has to be removed when it is killed.
    """

    def __init__(self, arguments: Sequence[str], place: RankRange) -> None:
        self._first = place.first
        self._errors: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, float] = {}
        self._cause_until: float | None = None
        self._stop_until: float | None = None
        for local_rank in range(place.processes):
            error = os.memfd_create(f"zeromesh-error-{local_rank}")
            self._errors.append(error)
            variables = rank_variables(place.environment(local_rank), run_id=place.run_id, restart=place.restart)
            with exported({**variables, ERRORS: f"/proc/{os.getpid()}/fd/{error}"}):
                self._processes.append(subprocess.Popen([sys.executable, *arguments], start_new_session=True))

    def over(self) -> bool:
        """Whether all processes have ended. To be asked again and again: after a failure it has the others ended."""
        now = time.monotonic()
        for index, process in enumerate(self._processes):
            if index not in self._ended and process.poll() is not None:
                self._ended[index] = time.time()
        if len(self._ended) == len(self._processes):
            return True
        if self._stop_until is None and (failed := [each for each in self._ended if self._processes[each].returncode]):
            self._cause_until = self._cause_until or now + _CAUSE_SECONDS
            if now > self._cause_until or any(self._said(each).distance == 0 for each in failed):
                self.stop(signal.SIGTERM)
        if self._stop_until is not None and now > self._stop_until:
            self.send(signal.SIGKILL)
        return False

    def stop(self, number: int, seconds: float = _STOP_SECONDS) -> None:
        """Send a signal, and SIGKILL to those that have not ended after so many seconds."""
        if self._stop_until is None:
            self._stop_until = time.monotonic() + seconds
            self.send(number)

    def send(self, number: int) -> None:
        """Send a signal to the processes that run, and what they have started in their sessions."""
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def failure(self) -> WorkersFailed | None:
        """The failure that the others follow from, once all are over; None when there is none.

        Peers of a dead rank notice that and fail too, or are stopped.
        """
        said = {index: self._said(index) for index, process in enumerate(self._processes) if process.returncode}
        if not said:
            return None
        first = min(said, key=lambda index: (said[index].distance, said[index].time, index))
        same = tuple(self._first + index for index in sorted(said) if said[index].text == said[first].text)
        return WorkersFailed(
            ranks=same,
            message=said[first].text,
            exit_code=said[first].exit_code,
            noticed=said[first].distance > 0,
            pid=self._processes[first].pid if said[first].silent and len(same) == 1 else 0,
        )

    def close(self) -> None:
        """End what still runs, at once, and give the files back."""
        self.send(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        while self._errors:
            os.close(self._errors.pop())

    def _said(self, index: int) -> _Said:
        size = os.fstat(self._errors[index]).st_size
        found = _recorded(os.pread(self._errors[index], size, 0))
        return found or _silent_end(self._processes[index].returncode, self._ended[index])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    """What a worker left behind, when (seconds of the clock), and how far it is from the cause.

    Distance 0 may be the cause, 1 has noticed that a peer failed, 2 was stopped by the launcher. `silent`: it left no error.
    """

    text: str
    time: float
    exit_code: int
    distance: int
    silent: bool = False


def _recorded(data: bytes) -> _Said | None:
    """What `become_worker` wrote; None when there is nothing, or no more than a part of it."""
    try:
        return _Said(**json.loads(data))
    except (ValueError, TypeError):
        return None


def _silent_end(code: int, when: float) -> _Said:
    if code >= 0:
        stopped = _STOPPED.get(code)
        text = f"was stopped by {stopped}" if stopped else f"ended with exit code {code} and no Python error"
        return _Said(text=text, time=when, exit_code=code or 1, distance=0, silent=True)
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = "; the kernel kills like this when memory runs out (see dmesg)" if name == "SIGKILL" else ""
    distance = 2 if name == "SIGTERM" else 0
    return _Said(text=f"was killed by {name}{hint}", time=when, exit_code=128 - code, distance=distance, silent=True)


def become_worker(exit_code_of: Callable[[BaseException], int]) -> None:
    """Make this process a worker of `launch_workers`: it dies with its parent, and leaves its errors to it.

    `exit_code_of` says with which code the launching command should exit after an error.
    """
    die_with_launcher()

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            text = "".join(traceback.format_exception(kind, error, trace))
            _record(error, text, exit_code_of(error))

    sys.excepthook = leave


def _record(error: BaseException, trace: str, exit_code: int) -> None:
    """Write `error` where the launcher looks for it."""
    path = setting(ERRORS)
    if path is None:
        sys.stderr.write(trace)
        return
    details: dict[str, Any] = {
        "text": str(error) if isinstance(error, ZeromeshError) else f"{type(error).__name__}\n{trace.rstrip()}",
        "time": time.time(),
        "exit_code": exit_code,
        "distance": int(isinstance(error, CollectiveError)),
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(descriptor, json.dumps(details).encode())
    finally:
        os.close(descriptor)
