"""A trial launch: two processes of this host connect to a mesh and sum a tensor, to test that this works and how
fast. `try_exchange` runs this module as a command, which launches itself as two ranks."""

import json
import subprocess
import sys
import timeit
from dataclasses import dataclass

from zeromesh.environment import python_arguments, read_environment
from zeromesh.errors import CollectiveError
from zeromesh.launch.rank_processes import become_worker
from zeromesh.launch.rendezvous import launch_workers

_MODULE = "zeromesh.launch.self_test"
_RANKS = 2
_NBYTES = 1 << 20
_TIMES = 9  # sums, of whose seconds the median counts
_WAIT_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The result of a trial: `seconds` of a 1 MiB all-reduce over gloo, and whether the ranks share memory, or the `failure`."""

    seconds: float = 0.0
    shares_memory: bool = False
    failure: str = ""


def try_exchange(timeout_seconds: float = 60.0) -> Trial:
    """Launch two processes on this host, which connect as the ranks of a run do."""
    command = [sys.executable, *python_arguments(_MODULE, ())]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return Trial(failure=f"the two were not done after {timeout_seconds:g} seconds")
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        return Trial(failure=lines[-1] if lines else "they ended without a message")
    return Trial(**json.loads(ended.stdout))


def _exchange() -> None:
    """Run one rank of the trial; rank 0 prints the result to standard output as JSON."""
    import torch

    from zeromesh.mesh.mesh_shape import MeshShape
    from zeromesh.mesh.process_mesh import Mesh

    environment, shape, device = read_environment(), MeshShape(shard=_RANKS), torch.device("cpu")
    mesh = Mesh(shape, environment, device=device, timeout_seconds=_WAIT_SECONDS, order="launch")
    tensor = torch.ones(_NBYTES // 4)
    times = timeit.repeat(lambda: mesh.world.all_reduce(tensor, "sum of the trial"), number=1, repeat=_TIMES)
    mesh.close()
    if not bool((tensor == float(_RANKS**_TIMES)).all()):
        raise CollectiveError("the sum was wrong")
    if environment.rank == 0:
        sys.stdout.write(json.dumps({"seconds": sorted(times)[_TIMES // 2], "shares_memory": mesh.world.one_host}))


def main() -> int | str:
    """Run the command: without an argument the launcher, with one a rank."""
    if sys.argv[1:]:
        become_worker(lambda error: 1)
        _exchange()
        return 0
    arguments, modules = python_arguments(_MODULE, ("rank",)), ("zeromesh.mesh.process_mesh",)
    result = launch_workers(arguments, processes=_RANKS, modules=modules)
    return result if isinstance(result, int) else str(result)


if __name__ == "__main__":
    sys.exit(main())
