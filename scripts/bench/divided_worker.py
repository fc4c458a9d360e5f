"""One rank of a system that divides the model: `python -m bench.divided_worker SYSTEM WORKLOAD`, as `worker.py` is one otherwise.

All ranks train on the same tokens.
"""

import json
import sys

import torch
import torch.distributed as dist

from bench.probe import Probe
from bench.worker import RESULT, die_with_parent
from bench.workload import Workload

OURS = "zeromesh-"


def main() -> None:
    """Join the group, train, print."""
    system, workload = sys.argv[1], Workload.from_json(sys.argv[2])
    die_with_parent()
    torch.set_num_threads(1)
    if system.startswith(OURS):
        from bench import divided

        probe = _join(workload)
        divided.train(system.removeprefix(OURS), workload, probe)
    else:
        probe = _peer(system, workload)
    print(RESULT + json.dumps(probe.found.record()), flush=True)
    dist.destroy_process_group()


def _join(workload: Workload) -> Probe:
    """Join the process group; what is in memory then is the system's base."""
    dist.init_process_group("gloo")
    dist.barrier()
    return Probe(workload, dist.get_rank(), dist.barrier)


def _peer(system: str, workload: Workload) -> Probe:
    from bench import divided_peers

    probe = _join(workload)
    share, more = divmod(workload.layers, workload.ranks)
    step = divided_peers.make_peer(system, workload, tuple(share + (rank < more) for rank in range(workload.ranks)))
    tokens = workload.tokens()
    probe.training()
    for number in range(workload.steps):
        probe.begin()
        probe.end(float(step(tokens[number])))
    probe.close()
    return probe


if __name__ == "__main__":
    main()
