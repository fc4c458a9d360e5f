"""A run whose ranks NVIDIA's resiliency extension (NVRx) keeps: `python scripts/bench/nvrx.py RANKS SECONDS CONFIG KEY=VALUE ...`.

zeromesh's `Trainer(...).fit()` is inside `inprocess.Wrapper`: when a rank is lost, the wrapper enters the function anew in the
processes of the others, with one rank less, and the run goes on from its newest checkpoint. All of the wrapper's intervals are
SECONDS, of which its own default is 1. Before each entry a rank forgets the process groups in which the lost rank was, since NVRx
itself ends only those of NCCL. Needs nvidia-resiliency-ext, which is no requirement of zeromesh."""

import ctypes
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from zeromesh.environment import LOOPBACK, die_with_parent, export, launched_by, worker_environment

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


def main(ranks: int, seconds: float, words: Sequence[str]) -> int:
    """Start the ranks, or be one of them; returns the number of ranks that have failed."""
    if "RANK" in os.environ:
        die_with_parent()
        _train(seconds, words)
        return 0
    # The wrapper starts a process for each rank that leaves its parent; whoever measures finds it among this one's children.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, str(ranks), str(seconds), *words]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    processes = []
    for rank in range(ranks):
        given = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        variables = {**os.environ, **worker_environment(ranks, alone=True), **given, **launched_by(os.getpid())}
        # A session of its own, as zeromesh's ranks have, is given as much of a busy machine as each of theirs.
        processes.append(subprocess.Popen(command, env=variables, start_new_session=True))
    return sum(process.wait() != 0 for process in processes)


def _train(seconds: float, words: Sequence[str]) -> None:
    # Only ranks import these, not the process that starts them.
    from nvidia_resiliency_ext.inprocess import Wrapper
    from nvidia_resiliency_ext.inprocess.initialize import Initialize

    from zeromesh import Trainer
    from zeromesh.mesh.process_groups import forget_groups
    from zeromesh.trainer.config.load import load_config

    class Meets(Initialize):
        """Prepares a rank to meet the others of an entry, with the numbers that the wrapper has given them."""

        def __call__(self, state: Any) -> Any:
            forget_groups()
            place = {"LOCAL_RANK": state.active_rank, "LOCAL_WORLD_SIZE": state.active_world_size}
            place["TORCHELASTIC_RESTART_COUNT"] = state.iteration
            export({name: str(value) for name, value in place.items()})
            return state

    interval = timedelta(seconds=seconds)
    names = ("monitor_thread", "monitor_process", "heartbeat", "progress_watchdog")
    intervals: dict[str, Any] = {f"{name}_interval": interval for name in names}

    @Wrapper(initialize=Meets(), abort=None, last_call_wait=interval, **intervals)
    def train() -> None:
        Trainer(config=load_config(words[0], words[1:])).fit()

    train()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
