"""Starts a command as several workers on this host, restarts them where that is wanted, and reports what stopped them.

The launching process only waits, and loads no torch for that. It ends its workers when one of them fails or when it is
interrupted. Each worker records its error for it, so that one message is shown, of the rank that failed first, and not a
traceback of each process.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence

from zeromesh.environment import kept_environment, worker_environment
from zeromesh.launch.rank_processes import (
    RankProcesses,
    RankRange,
    StopSignals,
    WorkersFailed,
    become_worker,
    noted_signals,
)
from zeromesh.launch.rendezvous import Nodes, meeting

ALONE = Nodes()
_TICK_SECONDS = 0.05
_REST_SECONDS = 300.0
"""How long ranks may take to save and end when they are to start again."""


def _to_stderr(line: str) -> None:
    sys.stderr.write(f"zeromesh: {line}\n")


def launch_workers(
    arguments: Sequence[str], *, processes: int, nodes: Nodes = ALONE, notify: Callable[[str], None] = _to_stderr
) -> WorkersFailed | int:
    """Run `python ARGUMENTS` as `processes` ranks on this host, beside those of other nodes, and wait for all of them.

    `notify` gets a line for a person when all start again. Returns 0 when all succeed, the failure when one does not, and 128
    plus the signal's number when this process got a signal to stop; the workers are gone then.

    Raises:
        ConfigError: when this host is to serve the endpoint, and cannot.
    """
    with kept_environment(worker_environment(processes, alone=nodes.alone)), noted_signals() as requests:
        others = meeting(nodes, processes, notify, lambda: bool(requests.first))
        try:
            found = others.first_start()
            while isinstance(found, RankRange) and not requests.first:
                ranks = RankProcesses(arguments, found)
                try:
                    _run(ranks, others.poll, requests)
                    found = others.next_start(ranks.failure())
                finally:
                    ranks.close()
        finally:
            others.close()
        return requests.exit_code() or (0 if isinstance(found, RankRange) else found)


def _run(ranks: RankProcesses, poll: Callable[[], bool], requests: StopSignals) -> None:
    """Wait until all ranks have ended. The first signal is passed on to them, a second one ends them at once."""
    while not ranks.over():
        if poll():
            ranks.stop(signal.SIGTERM, _REST_SECONDS)
        while requests.pending:
            number = requests.pending.pop(0)
            if requests.passed_on:
                ranks.send(signal.SIGKILL)
            else:
                ranks.stop(number, _REST_SECONDS)
            requests.passed_on = True
        time.sleep(_TICK_SECONDS)


__all__ = ["Nodes", "WorkersFailed", "become_worker", "launch_workers"]
