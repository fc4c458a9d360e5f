"""Starts a command as several workers on this host through torch's elastic launcher, and says what stopped them.

The launching process only waits: it holds the rendezvous store, and it ends its workers when one of them
fails or when it is interrupted. Each worker leaves its error in the file that the launcher reads, so that
one message comes out, from the rank that failed first, and not one traceback per process.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from zeromesh.errors import CollectiveError, ZeromeshError
from zeromesh.mesh.launch import LOOPBACK, die_with_launcher, exported, launcher_variables, setting, worker_environment

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_RENDEZVOUS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With the shared store a launcher that joins later never learns where the workers' store is (torch 2.13)."""
_STOPPED = {128 + int(number): number.name for number in (signal.SIGINT, signal.SIGTERM)}
MEETING_SECONDS = 120
"""How long launchers with numbers wait for each other; they start together."""
_LAST_CALL_SECONDS = 1
"""How long launchers wait for further ones once enough are there. torch's 30 seconds pass after every change."""


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

    def __str__(self) -> str:
        if not self.ranks:
            return self.message
        who = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{who} {', '.join(map(str, self.ranks))}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Launchers that start a run together, each its own workers, and that may come and go while it runs.

    `endpoint` is `HOST:PORT` of the launcher that the others find; all give the same `run_id`. After a failure, and when
    launchers come or go, all workers start again, failures at most `max_restarts` times.

    With a `rank` the launchers are `most`, numbered from 0, which serves the endpoint, and so are the ranks of their workers.
    None of them comes or goes, and none starts workers again.
    """

    least: int = 1
    most: int = 1
    endpoint: str = f"{LOOPBACK}:0"
    run_id: str = ""
    max_restarts: int = 0
    rank: int | None = None

    @property
    def alone(self) -> bool:
        """Whether there is one launcher."""
        return self.most == 1

    @property
    def meeting(self) -> dict[str, Any]:
        """How torch's launcher finds the others: its fields."""
        if self.rank is not None:
            return {"rdzv_backend": "static", "rdzv_configs": {"rank": self.rank, "timeout": MEETING_SECONDS}}
        return {"rdzv_backend": "c10d", "rdzv_configs": {"last_call_timeout": _LAST_CALL_SECONDS}}


def launch_workers(arguments: Sequence[str], *, processes: int, nodes: Nodes = Nodes()) -> WorkersFailed | int:
    """Run `python ARGUMENTS` as `processes` ranks on this host, with those of other nodes, and wait for all of them.

    Returns 0 when all succeed, what failed when one does not, and 128 plus the signal's number when this
    process was told to stop; the workers are gone then.
    """
    variables = {**worker_environment(processes, alone=nodes.alone), **_RENDEZVOUS, **launcher_variables()}
    with exported(variables), _quiet_elastic(), _kept_signal_handlers():
        config = LaunchConfig(
            min_nodes=nodes.least,
            max_nodes=nodes.most,
            nproc_per_node=processes,
            run_id=nodes.run_id or uuid.uuid4().hex,
            rdzv_endpoint=nodes.endpoint,
            **nodes.meeting,
            local_addr=LOOPBACK if nodes.endpoint.rpartition(":")[0] in (LOOPBACK, "localhost") else None,
            max_restarts=nodes.max_restarts,
            monitor_interval=0.1,
        )
        try:
            elastic_launch(config, sys.executable)(*arguments)
        except ChildFailedError as error:
            return _first_failure(error.failures)
        except (RendezvousError, DistError) as error:
            return WorkersFailed(ranks=(), message=_lost_meeting(nodes, error), exit_code=1, apart=True)
        except SignalException as error:
            return 128 + int(error.sigval)
        except KeyboardInterrupt:
            return 128 + int(signal.SIGINT)
    return 0


def _lost_meeting(nodes: Nodes, error: Exception) -> str:
    if nodes.rank is not None:
        reason = str(error).splitlines()[0]
        if nodes.rank == 0:
            return f"the launchers of {nodes.most} hosts could not meet at {nodes.endpoint}, here ({reason})"
        return f"{nodes.endpoint}, where the hosts meet, cannot be reached from here ({reason})"
    if isinstance(error, RendezvousTimeoutError):
        return f"fewer than {nodes.least} of the hosts (--nnodes) have come to {nodes.endpoint} in time"
    return (
        f"the launcher at {nodes.endpoint}, which the others meet at, cannot be reached ({str(error).splitlines()[0]}); start it "
        "and the others again, and the run goes on from its newest checkpoint"
    )


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
    """Write `error` where the launcher looks for it, in torch's format with a few keys more."""
    path = setting("TORCHELASTIC_ERROR_FILE")
    if path is None:
        sys.stderr.write(trace)
        return
    name = type(error).__name__
    details = {
        "py_callstack": trace,
        "timestamp": str(int(time.time())),
        "zeromesh_text": str(error) if isinstance(error, ZeromeshError) else f"{name}\n{trace.rstrip()}",
        "zeromesh_time": time.time(),
        "zeromesh_exit_code": exit_code,
        "zeromesh_distance": int(isinstance(error, CollectiveError)),
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": f"{name}: {error}", "extraInfo": details}}, file)


def _first_failure(failures: dict[int, ProcessFailure]) -> WorkersFailed:
    """The failure that the others follow from: peers of a dead rank notice it and fail too, or are stopped."""
    said = {rank: _said(failure) for rank, failure in failures.items()}
    first = min(said, key=lambda rank: (said[rank].distance, said[rank].time, rank))
    same = tuple(sorted(rank for rank in said if said[rank].text == said[first].text))
    return WorkersFailed(
        ranks=same, message=said[first].text, exit_code=said[first].exit_code, noticed=said[first].distance > 0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Said:
    """What a worker left behind, when (seconds of the clock), and how far it is from the cause.

    Distance 0 may be the cause, 1 has noticed that a peer failed, 2 was stopped by the launcher.
    """

    text: str
    time: float
    exit_code: int
    distance: int


def _said(failure: ProcessFailure) -> _Said:
    message: Any = failure.message  # text, or the "message" of the file that `_record` wrote
    details: dict[str, Any] = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    if "zeromesh_text" in details:
        return _Said(
            text=str(details["zeromesh_text"]),
            time=float(details["zeromesh_time"]),
            exit_code=int(details["zeromesh_exit_code"]),
            distance=int(details["zeromesh_distance"]),
        )
    if failure.exitcode >= 0:
        stopped = _STOPPED.get(failure.exitcode)
        return _Said(
            text=f"was stopped by {stopped}"
            if stopped
            else f"ended with exit code {failure.exitcode} and no Python error",
            time=float(failure.timestamp),
            exit_code=failure.exitcode or 1,
            distance=0,
        )
    name = failure.signal_name()
    hint = "; the kernel kills like this when memory runs out (see dmesg)" if name == "SIGKILL" else ""
    return _Said(
        text=f"was killed by {name}{hint}",
        time=float(failure.timestamp),
        exit_code=128 - failure.exitcode,
        distance=2 if name == "SIGTERM" else 0,
    )


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep the launcher's own log, which tells every failure again, away from the terminal."""
    loggers = [logging.getLogger(f"torch.distributed.{name}") for name in ("elastic", "launcher")]
    kept = [logger.propagate for logger in loggers]
    quiet = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(quiet)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, kept, strict=True):
            logger.propagate = propagate
            logger.removeHandler(quiet)


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Put the signal handlers back that the launcher replaces."""
    kept = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if handler is not None:
                signal.signal(number, handler)
