"""Where this process runs, as it finds out from the system; and where all others do, through the rendezvous store."""

import json
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from zeromesh.errors import ConfigError
from zeromesh.mesh.process_set import differences
from zeromesh.mesh.rank_order import ProcessLocation
from zeromesh.telemetry.status_board import Store

_NODES = Path("/sys/devices/system/node")


def exchange_locations(
    store: Store, process: int, processes: int, device: torch.device, asked: Mapping[str, object]
) -> list[ProcessLocation]:
    """The places of all processes, in the order of the launch. Each of them calls this; it waits for the last.

    Raises:
        ConfigError: when processes have asked for different meshes, with which of them has `asked` for what.
    """
    place = {"host": host_identity(), "name": socket.gethostname(), "island": island_of(device)}
    store.set(f"place/{process}", json.dumps([place, {name: str(value) for name, value in asked.items()}]))
    found = [json.loads(store.get(f"place/{each}")) for each in range(processes)]
    different = differences([each[1] for each in found], range(processes))
    if different:
        raise ConfigError(
            f"ranks ask for different meshes: {'; '.join(different)}. Give all of them the same configuration"
        )
    return [ProcessLocation(**each[0]) for each in found]


def host_identity() -> str:
    """Equal for processes that can share memory: same boot of the same kernel, same process namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {platform.machine()} {os.getpid()}"


def island_of(device: torch.device) -> int:
    """The part of the host that this process computes in: 0 where that is not known, or the process is not bound to one.

    A CPU process is in the NUMA node that holds all cores it may run on. A CUDA process is in that of the devices that reach each
    other's memory directly (NVLink, or one PCIe switch): the lowest of them names it.
    """
    if device.type == "cuda":
        own = device.index or 0
        near = (other for other in range(own) if torch.cuda.can_device_access_peer(own, other))
        return next(near, own)
    own_cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    for folder in sorted(_NODES.glob("node[0-9]*")):
        cores = {int(core.name.removeprefix("cpu")) for core in folder.glob("cpu[0-9]*")}
        if own_cores and own_cores <= cores:
            return int(folder.name.removeprefix("node"))
    return 0
