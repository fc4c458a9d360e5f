"""Cases on exchanges of activations: every collective against what one process computes."""

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

from zeromesh.comm.activation_collectives import Exchange, open_exchange
from zeromesh.mesh.process_mesh import Mesh

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64")


def _values(rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(8).to(dtype)


def _summed(parts: list[torch.Tensor]) -> torch.Tensor:
    narrow = parts[0].dtype in (torch.bfloat16, torch.float16)
    total = parts[0].float() if narrow else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def collectives(mesh: Mesh, kind: Any) -> dict[str, bool]:
    """Each collective on several dtypes and shapes, contiguous or not, against the same without ranks."""
    exchange = open_exchange(mesh.world, mesh.device, kind)
    found = {}
    for number, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        for shape in ((3, 4, 12), (1, 4, 40_000), (), (0, 4, 12)):
            found |= {f"{name} {list(shape)} {key}": ok for key, ok in _at(exchange, number, shape, dtype).items()}
    return found


def _at(exchange: Exchange, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, bool]:
    size, index = exchange.size, exchange.index
    parts = [_values(rank, number, shape, dtype) for rank in range(size)]
    mine = parts[index].clone()
    found = {"sum": torch.equal(exchange.all_reduce_async(mine).wait(), _summed(parts))}
    if not shape:
        return found
    uneven = [1] * (size - 1) + [shape[1] + 1 - size]
    for dim in (0, 1, -1):
        found[f"gather {dim}"] = torch.equal(exchange.all_gather_async(mine, dim).wait(), torch.cat(parts, dim))
    ragged = [part.narrow(1, 0, uneven[rank]) for rank, part in enumerate(parts)]
    gathered = exchange.all_gather_async(mine.narrow(1, 0, uneven[index]), 1, sizes=uneven).wait()
    found["gather uneven"] = torch.equal(gathered, torch.cat(ragged, 1))
    whole = _summed(parts)
    step = shape[2] // size if shape[2] % size == 0 else 0
    if step:
        share = whole.narrow(2, step * index, step)
        found["scatter"] = torch.equal(exchange.reduce_scatter_async(mine, -1).wait(), share)
        turned = exchange.reduce_scatter_async(mine.transpose(0, 2), 0).wait()
        found["scatter of a transpose"] = torch.equal(turned, whole.transpose(0, 2).narrow(0, step * index, step))
    found["sum of a transpose"] = torch.equal(
        exchange.all_reduce_async(mine.transpose(0, 1)).wait(), whole.transpose(0, 1)
    )
    found["left as it was"] = torch.equal(mine, parts[index])
    return found


def in_any_order(mesh: Mesh, kind: Any, flying: int) -> list[bool]:
    """Results may be waited for in another order than the one they were started in, by each rank as it likes; or not at all."""
    exchange = open_exchange(mesh.world, mesh.device, kind)
    shapes = [(1 + number % 5, 1000 * (number % 3) + 7) for number in range(flying)]
    pending = [
        exchange.all_reduce_async(_values(mesh.rank, number, shape, torch.float32))
        for number, shape in enumerate(shapes)
    ]
    order = list(range(flying))
    if mesh.rank % 2:
        order.reverse()
    equal = {}
    for number in order:
        if number % 7 != 3:
            parts = [_values(rank, number, shapes[number], torch.float32) for rank in range(exchange.size)]
            equal[number] = torch.equal(pending[number].wait(), _summed(parts))
    mesh.world.barrier("all have waited")
    return list(equal.values())


def refusals(mesh: Mesh, kind: Any) -> dict[str, str]:
    """What is said of shares that do not fit, and of a result asked for twice."""
    exchange = open_exchange(mesh.world, mesh.device, kind)
    tensor = torch.zeros(3, 5)

    def attempt(call: Callable[[], Any]) -> str:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    pending = exchange.all_reduce_async(tensor)
    pending.wait()
    found = {
        "scatter": attempt(lambda: exchange.reduce_scatter_async(tensor, 0)),
        "gather sizes": attempt(lambda: exchange.all_gather_async(tensor, 1, sizes=[1, 1])),
        "dim": attempt(lambda: exchange.all_gather_async(tensor, 2)),
        "twice": attempt(pending.wait),
    }
    mesh.world.barrier("all were refused")
    return found


def memory_of_slots(mesh: Mesh) -> dict[str, Any]:
    """What an exchange in shared memory keeps: two slots however many exchanges there were, as large as the largest."""
    exchange = open_exchange(mesh.world, mesh.device, "shared")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        exchange.all_reduce_async(torch.ones(20_000 * (1 + number % 7))).wait()
    mesh.world.barrier("all have summed")
    slots = [slot.segment.nbytes for slot in exchange._ring.own]  # type: ignore[attr-defined]
    found = {"slots": slots, "descriptors": len(os.listdir("/proc/self/fd")) - before}
    mesh.world.barrier("all have looked")
    del exchange
    gc.collect()
    found["left"] = len(os.listdir("/proc/self/fd")) - before
    return found


def goes_wrong(mesh: Mesh, kind: Any, fault: str) -> float:
    """The last rank ends, is late, or exchanges something else."""
    exchange = open_exchange(mesh.world, mesh.device, kind)
    tensor = torch.ones(4, 6)
    if fault != "gone before it was read":
        exchange.all_reduce_async(tensor).wait()
    if mesh.rank == mesh.world_size - 1:
        if fault == "gone before it was read":
            exchange.all_reduce_async(tensor)
        if fault in ("killed", "gone before it was read"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "late":
            time.sleep(4)
        elif fault == "other collective":
            return float(exchange.all_gather_async(tensor, 1).wait().sum())
        elif fault == "other shape":
            return float(exchange.all_reduce_async(tensor[:3]).wait().sum())
        elif fault == "other shares":
            return float(exchange.all_gather_async(tensor, 0, sizes=[3, 4]).wait().sum())
    if fault == "other shares":
        return float(exchange.all_gather_async(tensor, 0).wait().sum())
    if fault == "gone before it was read":
        time.sleep(0.5)
    return float(exchange.all_reduce_async(tensor).wait().sum())


def forgotten(mesh: Mesh) -> list[bool]:
    """A rank that has its result may forget the exchange; the others still read from it, now or later."""
    equal = []
    for number in range(20):
        exchange = open_exchange(mesh.world, mesh.device, "shared")
        pending = exchange.all_reduce_async(torch.full((1000,), mesh.rank + 1.0))
        del exchange
        if number % mesh.world_size == mesh.rank:
            time.sleep(0.01)
        equal.append(pending.wait()[0].item() == sum(range(1, mesh.world_size + 1)))
        del pending
    return equal
