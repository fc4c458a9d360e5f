"""Measures the machine of this launch in about a minute, with the kernels and collectives of a training run.

All ranks call `measure_machine` together. While one rank measures, the others wait without computing; collectives and host memory
are measured by as many ranks as have a core or a device each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.comm.transport import TransportName
from zeromesh.environment import available_cores
from zeromesh.errors import counted
from zeromesh.mesh.process_mesh import ProcessMesh
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.offload.memory.ledger import cpu_name, machine_bytes
from zeromesh.trainer.planning.machine import Machine
from zeromesh.trainer.planning.measuring.device_meter import DeviceMeter, MeasureSizes

_ROUNDS, _COUNT = 15, 4
"""The rounds of a collective, and its repetitions in each. The minimum of the rounds counts, as other load slows some down."""


def measure_machine(mesh: ProcessMesh, sizes: MeasureSizes, directory: Path, say: Callable[[str], None]) -> Machine:
    """Measure everything; all ranks call it, and rank 0 broadcasts the machine. Rank 0 passes progress to `say`.

    Raises:
        StorageError: when the disk cannot be written.
    """
    places: dict[str, list[int]] = {}
    for rank, place in enumerate(mesh.places):
        places.setdefault(place.host, []).append(rank)
    hosts, on_device = list(places.values()), is_accelerator(mesh.device)

    def measured(what: str, call: Callable[[], Any], ranks: Sequence[int] = (0,)) -> Any:
        """Return the result of `call` on these ranks, which run it while the others wait; None on the others."""
        if mesh.rank == 0:
            say(f"measuring {what}")
        mesh.world.barrier(f"the beginning of {what}")
        found = call() if mesh.rank in ranks else None
        mesh.world.barrier(f"measuring {what}")
        return found

    alone = DeviceMeter(mesh.device, sizes)
    library = alone.library()
    device = measured("products, memory and launches", alone.rates)
    update = measured("updates", alone.updates)
    disk = measured("the disk", partial(alone.disk, directory))
    # Ranks that share a core would measure scheduling.
    busy = hosts[0] if on_device else hosts[0][: max(2, available_cores())]
    host_memory = DeviceMeter(torch.device("cpu"), sizes).bandwidth
    part = measured("the host's memory", host_memory, (0,) if on_device else busy)
    parts = mesh.world.gather_json(part, "bytes a second of memory")
    links = {"inside": _links(mesh, "inside", busy, sizes, measured), "between": {}}
    if len(hosts) > 1:
        firsts = [ranks[0] for ranks in hosts]
        links["between"] = _links(mesh, "between", firsts, sizes, measured)
    data = None
    if mesh.rank == 0:
        for link in links["between"].values():
            link["bandwidth"] /= 1 if on_device else len(hosts[0])  # Ranks of a host share its network.
        memory = accelerator.device_memory(mesh.device).total if on_device else machine_bytes()
        data = {
            "name": _name(mesh, len(hosts[0])),
            "sources": [_source(mesh, len(hosts))],
            "device": {"kind": mesh.device.type, "memory_bytes": memory, **device},
            "host": {
                "devices": len(hosts[0]),
                "cores": available_cores(),
                "memory_bytes": machine_bytes(),
                "memory_bandwidth": sum(filter(None, parts)),
            },
            "links": links,
            "disk": disk,
            "update": update,
            "library": library,
        }
    found = json.dumps(mesh.world.gather_json(data, "measurements")[0])
    return Machine.model_validate(json.loads(found, parse_float=lambda number: float(f"{float(number):.4g}")))


def _name(mesh: ProcessMesh, ranks: int) -> str:
    on_device = is_accelerator(mesh.device)
    name = accelerator.device_name(mesh.device) if on_device else cpu_name()
    return f"{name}, {ranks} {'devices' if on_device else 'ranks'} a host"


def _source(mesh: ProcessMesh, hosts: int) -> str:
    threads = "" if is_accelerator(mesh.device) else f" of {torch.get_num_threads()} threads"
    date = time.strftime("%Y-%m-%d", time.gmtime())
    ranks = f"{counted(mesh.world_size, 'rank')}{threads} on {counted(hosts, 'host')}"
    return f"zeromesh plan --measure, {date}: {ranks}, torch {torch.__version__}"


def _links(
    mesh: ProcessMesh, where: str, ranks: Sequence[int], sizes: MeasureSizes, measured: Callable[..., Any]
) -> dict[str, Any]:
    """Return the figures of the links between these ranks by transport, as in a machine file. All ranks of the world call it."""
    names: tuple[TransportName, ...] = ("nccl",) if is_accelerator(mesh.device) else ("shared", "gloo")
    found: dict[str, Any] = {}
    for name in names if where == "inside" and mesh.one_host else names[-1:]:
        if len(ranks) > 1:
            group = mesh.process_sets.add(ranks, name=f"{name} {where}")
            found[name] = measured(f"{name} {where}", partial(_link, group, mesh.device, name, sizes.exchanged), ranks)
            mesh.process_sets.remove(group)
    return found


def _link(group: ProcessSet, device: torch.device, name: TransportName, sizes: tuple[int, int]) -> dict[str, float]:
    exchange, times = open_exchange(group, device, name), []
    for nbytes in sizes:
        tensor, rounds = torch.zeros(nbytes // 4, device=device), []
        for _ in range(_ROUNDS):
            group.barrier("the beginning of a round")
            began = time.perf_counter()
            for _ in range(_COUNT):
                exchange.all_reduce_async(tensor).wait()
            if is_accelerator(device):
                accelerator.synchronize(device)
            rounds.append((time.perf_counter() - began) / _COUNT)
        times.append(max(group.gather_json(min(rounds), "seconds of an exchange")))
    (latency, seconds), messages = times, 2 * (group.size - 1)
    # Each message of a ring carries 1/ranks of the tensor.
    moved = messages / group.size * sizes[-1]
    return {"latency_seconds": latency / messages, "bandwidth": moved / max(seconds - latency, seconds / 2)}
