"""Cases on a mesh of several axes: its sets, neighbours, torch's object for it, ranks in another order, what it has told."""

import gc
import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.support.mesh_cases import _open
from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.comm.transport import choose_transport
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.run_store import run_store
from zeromesh.offload import TieredTensor


def axes(mesh: Mesh) -> dict[str, Any]:
    """The sets of a mesh of pipeline 2 x tensor 2, by every name that they have."""
    sets = {name: mesh.group(name) for name in ("world", "data", "pipeline", "replicate", "shard", "tensor")}
    found: dict[str, Any] = {
        "ranks": {name: list(group.ranks) for name, group in sets.items()},
        "linked": [name for name, group in sets.items() if group.groups is not None],
        "sums": {name: group.all_reduce(torch.tensor([mesh.rank]), "sum").item() for name, group in sets.items()},
        "same": [
            mesh["tensor"] is mesh.tensor,
            mesh["replicate", "shard"] is mesh.data,
            mesh["pipeline"] is mesh.pipeline,
        ],
        "at": mesh.coordinate,
        "next": [mesh.neighbour("pipeline", 1), mesh.neighbour("pipeline", 1, wrap=True), mesh.neighbour("tensor", -1)],
        "lines": str(mesh).splitlines(),
    }
    stages = mesh["tensor", "pipeline"]
    found["both"] = [
        stages is mesh["pipeline", "tensor"],
        list(stages.ranks),
        stages.name,
        stages.gather_integers([mesh.rank]),
    ]
    try:
        mesh.group("tensor", "elsewhere")
    except ValueError as error:
        found["error"] = str(error)
    return found


def torch_mesh(mesh: Mesh) -> dict[str, Any]:
    """A mesh of its own gives torch's object for it, and takes that object's groups with it when it is closed."""
    threads = []
    found: dict[str, Any] = {}
    for _ in range(3):
        other = Mesh(mesh.shape, mesh.environment, device=mesh.device, timeout_seconds=10)
        made = other.device_mesh
        total = torch.tensor([mesh.rank])
        dist.all_reduce(total, group=made.get_group("tensor"))
        found["names"], found["shape"] = list(made.mesh_dim_names or ()), list(made.mesh.shape)
        found["coordinate"], found["sum"] = made.get_coordinate(), total.item()
        found["sub"] = made["tensor"].mesh.tolist()
        del made
        other.close()
        del other
        gc.collect()
        mesh.world.barrier("between two meshes")
        threads.append(len(os.listdir("/proc/self/task")))
    return found | {"threads": threads}


def another_order(mesh: Mesh) -> dict[str, Any]:
    """Processes were dealt out to two hosts in turn; ranks run through one host after the other."""
    exchange = open_exchange(mesh.tensor, mesh.device)
    again = Mesh(
        mesh.shape,
        replace(mesh.environment, rank=mesh.processes[mesh.rank]),
        device=mesh.device,
        timeout_seconds=10,
    )
    # A launcher that knows of one host only, as of processes that cannot share memory.
    launched = replace(again.environment, rank=mesh.processes[mesh.rank], local_world_size=mesh.world_size)
    run_store(launched)
    apart = Mesh(mesh.shape, launched, device=mesh.device, timeout_seconds=10)
    refused = ""
    try:
        Mesh(mesh.shape, mesh.environment, device=mesh.device, timeout_seconds=10, order=[0, 2, 1, 3])
    except ValueError as error:
        refused = str(error)
    found = {
        "rank": [mesh.rank, mesh.environment.rank, again.rank, apart.rank, dist.get_rank()],
        "processes": list(mesh.processes),
        "kinds": [choose_transport("auto", group, mesh.device) for group in (mesh.tensor, mesh.shard, mesh.world)],
        "sum": exchange.all_reduce_async(torch.tensor([float(mesh.rank)])).wait().item(),
        "ranks": [row[0] for row in mesh.world.gather_integers([mesh.rank])],
        "refused": refused,
    }
    for other in (again, apart):
        other.world.barrier("all are there")
        other.close()
    return found


def told(mesh: Mesh, kind: Any) -> dict[str, Any]:
    """What is counted of each collective on two ranks, and that it is counted once."""
    mesh.recorder.take_traffic()
    exchange = open_exchange(mesh.world, mesh.device, kind)
    tensor = torch.ones(3, 1000)
    exchange.all_reduce_async(tensor).wait()
    exchange.all_gather_async(tensor, 0).wait()
    exchange.reduce_scatter_async(tensor, 1).wait()
    transport = _open(mesh, kind, torch.float32, persistent=False)
    buffer, out = transport.buffers[0], torch.zeros(buffer_length := transport.buffers[0].full.numel() // 2)
    for sequence in range(3):
        buffer.gather(TieredTensor.of(torch.ones(buffer_length)))
        buffer.wait()
        buffer.wait()
        buffer.release()
        slot = transport.reducer.acquire(sequence, block=True)
        assert slot is not None
        filled = slot[: 8 * buffer_length].view(torch.float32).fill_(1)
        reduction = transport.reducer.launch(sequence, filled, out, add=False)
        reduction.finish()
        reduction.finish()
        reduction.settle()
    mesh.shard.all_reduce_async(torch.ones(50), "sum")()
    found = mesh.recorder.take_traffic()
    rest = mesh.recorder.take_traffic()
    mesh.world.barrier("all have looked")
    transport.close()
    return {"taken": found, "rest": rest, "length": buffer_length}
