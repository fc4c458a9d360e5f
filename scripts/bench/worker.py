"""One rank of one system: `python -m bench.worker SYSTEM WORKLOAD`, started by `launch.py` with torchrun's variables.

Prints one line that begins with `RESULT` and holds this rank's measurement as JSON.
"""

import ctypes
import json
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from bench.probe import Probe
from bench.workload import Workload

RESULT = "RESULT "
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def main() -> None:
    """Join the group, train, print."""
    system, workload = sys.argv[1], Workload.from_json(sys.argv[2])
    die_with_parent()
    torch.set_num_threads(1)
    run = _zeromesh if system.startswith("zeromesh-") else _peer
    print(RESULT + json.dumps(run(system, workload).found.record()), flush=True)
    dist.destroy_process_group()


def die_with_parent() -> None:
    """Nothing of a run is left behind when the benchmark is ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL))


def _zeromesh(system: str, workload: Workload) -> Probe:
    from bench import ours

    probe = _join(workload, dist.init_process_group)
    ours.train(workload, int(system.removeprefix("zeromesh-")), probe)
    return probe


def _peer(system: str, workload: Workload) -> Probe:
    from bench import peers

    join: Callable[[str], None] = dist.init_process_group
    if system.startswith("deepspeed-"):
        import deepspeed

        def join(backend: str) -> None:
            deepspeed.init_distributed(dist_backend=backend)

    probe = _join(workload, join)
    device = _device(workload)
    step = peers.make_peer(system, workload, device)
    rank = dist.get_rank()
    tokens = workload.tokens()[:, rank * workload.micro : (rank + 1) * workload.micro]
    probe.training()
    for number in range(workload.steps):
        batch = tokens[number].to(device)
        probe.begin()
        loss = step(batch).float()
        dist.all_reduce(loss)
        probe.end(loss.item() / workload.ranks)
    probe.close()
    return probe


def _device(workload: Workload) -> torch.device:
    return torch.device(workload.device, torch.cuda.current_device() if workload.device == "cuda" else None)


def _join(workload: Workload, join: Callable[[str], None]) -> Probe:
    """Join the process group; what is in memory then is the system's base."""
    if workload.device == "cuda":
        torch.cuda.set_device(dist_local_rank())
        join("cpu:gloo,cuda:nccl")
    else:
        join("gloo")
    dist.barrier()
    return Probe(workload, dist.get_rank(), dist.barrier)


def dist_local_rank() -> int:
    """This process's number on its host."""
    return int(dist.get_node_local_rank())


if __name__ == "__main__":
    main()
