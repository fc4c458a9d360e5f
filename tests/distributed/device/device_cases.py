"""Cases on collectives of a device: launched in one order, connected from the start, waited for without an end by nobody."""

import threading
import time
from concurrent.futures import Future
from typing import Any

import torch

from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.comm.shm_transport import open_transport
from zeromesh.comm.transport import BufferRequest
from zeromesh.flat.redistribute import one_after_another, redistribute, replicated
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import TieredTensor, Transfer

_LENGTH = 96


def _values(rank: int, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(device)


def waits_for_a_late_rank(mesh: Mesh, seconds: float) -> dict[str, bool]:
    """Rank 1 comes `seconds` late to each kind of collective that others wait for, more than a slice of a wait on a CPU."""
    world, device = mesh.shard, mesh.device
    parts = [_values(rank, (8,), device) for rank in range(world.size)]
    placement, everywhere = one_after_another([8] * world.size), replicated(8 * world.size, world.size)
    halves, found = one_after_another([4] * 2 * world.size), {}
    crosswise = tuple(
        tuple(span for half in halves[index :: world.size] for span in half) for index in range(world.size)
    )

    def late() -> None:
        time.sleep(seconds * mesh.rank)

    late()
    full = redistribute(parts[mesh.rank], placement, everywhere, world, "a gather")
    found["gather"] = torch.equal(full, torch.cat(parts))
    late()
    found["broadcast"] = torch.equal(world.broadcast(parts[mesh.rank].clone(), 1, "a broadcast"), parts[1])
    late()
    taken = redistribute(parts[mesh.rank], placement, crosswise, world, "an exchange")
    found["exchange"] = torch.equal(taken, torch.cat([part.chunk(2)[mesh.rank] for part in parts]))
    late()
    total = parts[mesh.rank].clone()
    world.all_reduce_async(total, "a sum")()
    found["sum"] = torch.equal(total, parts[0] + parts[1])
    return found


def exchanges(mesh: Mesh) -> dict[str, bool]:
    """Every exchange of activations against what one process computes; none changes, or returns, what it was given."""
    exchange = open_exchange(mesh.shard, mesh.device)
    size, index = exchange.size, exchange.index
    found = {}
    for shape in ((2, 4, 6), (0, 4, 6)):
        parts = [_values(rank, shape, mesh.device) for rank in range(size)]
        total = parts[0] + parts[1]
        mine = parts[index].clone()
        version, given = mine._version, mine.clone()
        made = {"sum": (exchange.all_reduce_async(mine), total)}
        for dim in range(3):
            made[f"gather {dim}"] = exchange.all_gather_async(mine, dim), torch.cat(parts, dim)
        for dim in (1, 2):
            made[f"scatter {dim}"] = exchange.reduce_scatter_async(mine, dim), total.chunk(size, dim)[index]
        uneven = [1, 3]
        ragged = [part.narrow(1, 0, length) for part, length in zip(parts, uneven, strict=True)]
        made["gather uneven"] = exchange.all_gather_async(ragged[index], 1, sizes=uneven), torch.cat(ragged, 1)
        for name, (pending, wanted) in made.items():
            result = pending.wait()
            apart = not result.numel() or result.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr()
            found[f"{name} {list(shape)}"] = torch.equal(result, wanted) and apart
        found[f"untouched {list(shape)}"] = mine._version == version and torch.equal(mine, given)
    return found


def launches_without_others(mesh: Mesh, seconds: float) -> list[float]:
    """How long rank 0 takes to launch the first collective of each group, to which rank 1 comes `seconds` later."""
    later = mesh.process_sets.declare({"first": [0, 1], "second": [1, 0]})
    took = []
    for group in (mesh.shard, *later.values()):
        tensor = torch.ones(3, device=mesh.device)
        mesh.world.barrier("a moment")
        time.sleep(seconds * mesh.rank)
        began = time.monotonic()
        finish = group.all_reduce_async(tensor, "a sum")
        took.append(time.monotonic() - began)
        finish()
        assert tensor.tolist() == [2.0] * 3
    for each in later.values():
        mesh.process_sets.remove(each)
    return took


class _Slow(TieredTensor):
    """A shard that a thread reads within `seconds`."""

    def __init__(self, shard: torch.Tensor, seconds: float) -> None:
        self._shard, self._seconds = shard, seconds

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        piece: Future[None] = Future()
        out.copy_(self._shard)
        threading.Timer(self._seconds, piece.set_result, [None]).start()
        return Transfer([piece])


def gathers_from_files(mesh: Mesh, seconds: float) -> list[bool]:
    """Gathers whose shards are read at once on rank 0, and within `seconds` on rank 1, with a reduction amid them."""
    group = mesh.shard
    requests = [BufferRequest(name=name, padded=_LENGTH, dtype=torch.float64, persistent=False) for name in "abc"]
    transport = open_transport("nccl", group, mesh.device, requests, 2, _LENGTH * 8)
    parts = [_values(rank, (_LENGTH // group.size,), mesh.device) for rank in range(group.size)]
    out = torch.zeros(_LENGTH // group.size, dtype=torch.float64, device=mesh.device)
    shard = _Slow(parts[mesh.rank], mesh.rank * seconds)
    first, *others = transport.buffers
    first.gather(shard)
    time.sleep(seconds / 2)
    transport.poll()
    slot = transport.reducer.acquire(0)
    assert slot is not None
    reduction = transport.reducer.launch(0, slot[: _LENGTH * 8].view(torch.float64).fill_(1.0), out, add=False)
    for buffer in others:
        buffer.gather(shard)
        transport.poll()
    equal = []
    for buffer in transport.buffers:
        buffer.wait()
        equal.append(torch.equal(buffer.full, torch.cat(parts)))
        buffer.release()
    reduction.finish()
    equal.append(out.tolist() == [float(group.size)] * len(out))
    transport.close()
    return equal


def hangs(mesh: Mesh) -> dict[str, Any]:
    """Rank 1 does not come to a gather; rank 0 reads what is computed after it."""
    began, found = time.monotonic(), ""
    own = torch.ones(4, device=mesh.device)
    try:
        with mesh.call("a step"):
            if mesh.rank == 1:
                time.sleep(5)
                return {}
            full = redistribute(
                own, one_after_another([4, 4]), replicated(8, 2), mesh.shard, "all-gather of unit layers.3"
            )
            float(full.sum())
    except RuntimeError as error:
        found = f"{type(error).__name__}: {error}"
    return {"error": found, "seconds": time.monotonic() - began}
