"""What the simulated device does to programs that are wrong on a real one: cases for its own tests, each in a worker."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.simulated import collectives, device
from tests.simulated.device import ops
from zeromesh.mesh.process_mesh import Mesh

COUNT = 1000


def reads_before_the_copy(mesh: Mesh) -> Any:
    """A copy of a side stream is used without an order: what is read is not there yet, and the race has a name."""
    source, target = torch.ones(COUNT, pin_memory=True), torch.zeros(COUNT, device=mesh.device)
    side = torch.Stream(mesh.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        target.copy_(source, non_blocking=True)
    early = target.sum().item()
    torch.accelerator.current_stream().wait_stream(side)
    return _found(early=early, late=target.sum().item())


def overwrites_what_is_copied_out(mesh: Mesh) -> Any:
    """The host changes nothing, but the compute stream does, while a side stream copies."""
    source, target = torch.ones(COUNT, device=mesh.device), torch.zeros(COUNT, pin_memory=True)
    side = torch.Stream(mesh.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        target.copy_(source, non_blocking=True)
    source.fill_(2.0)
    side.synchronize()
    return _found(copied=target.sum().item())


def frees_what_is_copied_out(mesh: Mesh) -> Any:
    """Memory goes back to the allocator while a side stream still reads it; recorded on that stream, it may."""
    found: dict[str, Any] = {}
    for recorded in (False, True):
        device.clear()
        source, target = torch.ones(COUNT, device=mesh.device), torch.zeros(COUNT, pin_memory=True)
        side = torch.Stream(mesh.device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            target.copy_(source, non_blocking=True)
        if recorded:
            source.record_stream(side)
        del source
        side.synchronize()
        found["recorded" if recorded else "freed"] = device.races()
    device.clear()
    return found


def waits_of_the_host(mesh: Mesh) -> Any:
    """What the host waits for is counted, by kind."""
    values, pinned = torch.ones(COUNT, device=mesh.device), torch.ones(COUNT, pin_memory=True)
    cases: dict[str, Callable[[], object]] = {
        "item": lambda: values.sum().item(),
        "to the host": values.cpu,
        "from pageable memory": lambda: torch.ones(COUNT).to(mesh.device),
        "from pinned memory": lambda: pinned.to(mesh.device, non_blocking=True),
        "nonzero": values.nonzero,
        "computing": lambda: (values * 2).softmax(0),
        "an event": lambda: torch.accelerator.current_stream().record_event().synchronize(),
    }
    found = {}
    for name, case in cases.items():
        device.clear()
        case()
        found[name] = device.waits()
    return found


def arrives_late(mesh: Mesh) -> Any:
    """What a collective brings is there once something waits for it; until then a host that asks hears "not yet"."""
    ops.set("patience", 10**9)
    values = torch.full((COUNT,), float(mesh.rank + 1), device=mesh.device)
    work = dist.all_reduce(values, group=_group(mesh), async_op=True)
    asked = [work.is_completed() for _ in range(50)]
    early = values[0].item()
    work.wait()
    ops.set("patience", 20)
    return _found(asked=any(asked), early=early, late=values[0].item())


def first_use_alone(mesh: Mesh) -> str:
    """A rank that uses a group first, alone, waits for the others to make the communicator."""
    group, collectives.RENDEZVOUS_SECONDS = _group(mesh), 0.5
    try:
        if mesh.rank == 0:
            dist.all_reduce(torch.ones(1, device=mesh.device), group=group, async_op=True)
    except dist.DistBackendError as error:
        return str(error)
    finally:
        collectives.RENDEZVOUS_SECONDS = 10.0
    return ""


def waits_in_slices(mesh: Mesh) -> str:
    """A wait with a timeout that runs out ends the communicator."""
    group = _group(mesh)
    dist.all_reduce(torch.ones(1, device=mesh.device), group=group)
    found = ""
    if mesh.rank == 0:
        work = dist.all_reduce(torch.ones(1, device=mesh.device), group=group, async_op=True)
        try:
            work.wait(timedelta(seconds=0.1))
        except dist.DistBackendError as error:
            found = str(error)
    mesh.world.barrier("the other rank's wait")
    return found


def parts_from_the_others(mesh: Mesh) -> None:
    """Ranks launch on two groups in different orders."""
    groups = [_group(mesh), _group(mesh)]
    values = torch.ones(1, device=mesh.device)
    for group in groups:
        dist.all_reduce(values, group=group)
    order = groups if mesh.rank == 0 else groups[::-1]
    for work in [
        dist.all_reduce(torch.ones(2 + groups.index(group), device=mesh.device), group=group, async_op=True)
        for group in order
    ]:
        work.wait()


def _group(mesh: Mesh) -> Any:
    return dist.new_group(list(range(mesh.world_size)), backend="simccl")


def _found(**values: Any) -> Any:
    """The values and the races so far, which the case was made to have."""
    races = device.races()
    device.clear()
    return values | {"races": races}
