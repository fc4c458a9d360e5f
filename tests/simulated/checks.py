"""What the simulated device does to programs that are wrong on a real one: cases for its own tests, each in a worker."""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.simulated import collectives, device
from tests.simulated.device import ops
from zeromesh.mesh.process_mesh import Mesh

COUNT = 1000


def reads_before_the_copy(mesh: Mesh) -> None:
    """A copy of a side stream is used without an order: what is read is not there yet, and the race has a name."""
    source, target = torch.ones(COUNT, pin_memory=True), torch.zeros(COUNT, device=mesh.device)
    side = torch.Stream(mesh.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        target.copy_(source, non_blocking=True)
    early = target.sum().item()
    torch.accelerator.current_stream().wait_stream(side)
    assert (early, target.sum().item()) == (0.0, 1000.0)
    (race,) = _races()
    assert "aten::sum (reads) on stream 0 is not ordered after copy in" in race


def overwrites_what_is_copied_out(mesh: Mesh) -> None:
    """The host changes nothing, but the compute stream does, while a side stream copies."""
    source, target = torch.ones(COUNT, device=mesh.device), torch.zeros(COUNT, pin_memory=True)
    side = torch.Stream(mesh.device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        target.copy_(source, non_blocking=True)
    source.fill_(2.0)
    side.synchronize()
    assert target.sum().item() == 2000.0
    assert [race.split(" on stream")[0] for race in _races()] == ["aten::fill_ (writes)"]


def frees_what_is_copied_out(mesh: Mesh) -> None:
    """Memory goes back to the allocator while a side stream still reads it; recorded on that stream, it may."""
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
        assert [race.split(" on stream")[0] for race in _races()] == ([] if recorded else ["freeing"])


def waits_of_the_host(mesh: Mesh) -> None:
    """What the host waits for is counted, by kind."""
    values, pinned = torch.ones(COUNT, device=mesh.device), torch.ones(COUNT, pin_memory=True)
    cases: tuple[tuple[Callable[[], object], list[str]], ...] = (
        (lambda: values.sum().item(), ["item"]),
        (values.cpu, ["copy out"]),
        (lambda: torch.ones(COUNT).to(mesh.device), ["copy in"]),
        (lambda: pinned.to(mesh.device, non_blocking=True), []),
        (values.nonzero, ["aten::nonzero"]),
        (lambda: (values * 2).softmax(0), []),
        (lambda: torch.accelerator.current_stream().record_event().synchronize(), ["an event"]),
    )
    for case, waits in cases:
        device.clear()
        case()
        assert device.waits() == waits


def arrives_late(mesh: Mesh) -> None:
    """What a collective brings is there once something waits for it; until then a host that asks hears "not yet"."""
    ops.set("patience", 10**9)
    values = torch.full((COUNT,), float(mesh.rank + 1), device=mesh.device)
    work = dist.all_reduce(values, group=_group(mesh), async_op=True)
    asked = [work.is_completed() for _ in range(50)]
    early = values[0].item()
    work.wait()
    ops.set("patience", 20)
    assert not any(asked)
    assert (early, values[0].item()) == (mesh.rank + 1.0, 3.0)
    assert _races(), "reading before the wait is a race"


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
        dist.all_reduce(torch.ones(2 + groups.index(group), device=mesh.device), group=group, async_op=True) for group in order
    ]:
        work.wait()


def _group(mesh: Mesh) -> None:
    return dist.new_group(list(range(mesh.world_size)), backend="simccl")


def _races() -> list[str]:
    """The races so far, which the case was made to have."""
    races = device.races()
    device.clear()
    return races
