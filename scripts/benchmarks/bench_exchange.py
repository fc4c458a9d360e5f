"""Sums of activations between ranks of one host: in shared memory, over gloo, and gloo's own all-reduce.

    torchrun --nproc-per-node 2 scripts/benchmarks/bench_exchange.py

Prints a table of milliseconds, the least of many sums each, taken in turn: other processes of the machine only ever add to them.
All give a new tensor. `bare` is gloo's all-reduce in place, which overwrites the summand and so need not.
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.environment import read_environment
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh

_SIZES = (0.25, 1, 4, 8)
_ROUNDS = 15


def main() -> None:
    """Join the others, measure, print."""
    torch.set_num_threads(1)
    environment = read_environment()
    shape = MeshShape.resolve(environment.world_size, tensor=environment.world_size)
    mesh = Mesh(shape, environment, device=torch.device("cpu"), timeout_seconds=60)
    shared, gloo = (open_exchange(mesh.tensor, mesh.device, kind) for kind in ("shared", "gloo"))
    group = mesh.tensor.groups["data"] if mesh.tensor.groups else None
    if mesh.rank == 0:
        print("| dtype | MiB | shared | gloo | all-reduce | bare | all-reduce / shared | bare / shared |")
        print("|---|---|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for mebibytes in _SIZES:
            given = torch.randn(int(mebibytes * 2**20) // dtype.itemsize).to(dtype)
            place = torch.zeros_like(given)
            ways: dict[str, Callable[[], object]] = {
                "shared": lambda given=given: shared.all_reduce_async(given).wait(),
                "gloo": lambda given=given: gloo.all_reduce_async(given).wait(),
                "all-reduce": lambda given=given: dist.all_reduce(given.clone(), group=group),
                "bare": lambda place=place: dist.all_reduce(place, group=group),
            }
            found = _measured(mesh, ways, count=max(10, int(20 / max(mebibytes, 0.5))))
            if mesh.rank == 0:
                cells = [f"{found[name]:.3f}" for name in ways]
                ratios = [f"{found[name] / found['shared']:.1f}" for name in ("all-reduce", "bare")]
                print(f"| {str(dtype)[6:]} | {mebibytes} | {' | '.join([*cells, *ratios])} |", flush=True)
    mesh.close()


def _measured(mesh: Mesh, ways: dict[str, Callable[[], object]], count: int) -> dict[str, float]:
    """The least milliseconds of each way on this rank."""
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(_ROUNDS):
        for name, way in ways.items():
            way()
            mesh.world.barrier("beginning of a round")
            for _ in range(count):
                began = time.perf_counter()
                way()
                found[name] = min(found[name], 1e3 * (time.perf_counter() - began))
    return found


if __name__ == "__main__":
    main()
