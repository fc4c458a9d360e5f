"""Cases on transports alone: buffers gathered and reduced, without an engine or a model."""

import ctypes
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zeromesh.comm.shm_transport import open_transport
from zeromesh.comm.transport import BufferRequest, Transport, choose_transport
from zeromesh.errors import ConfigError
from zeromesh.flat.redistribute import one_after_another, redistribute, replicated
from zeromesh.intervals import Interval
from zeromesh.mesh.process_mesh import Mesh, exchange_locations
from zeromesh.offload import TieredTensor
from zeromesh.offload.memory.allocation import PAGE

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
_LENGTH = 64 * 12


def _values(rank: int, number: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def _open(
    mesh: Mesh, name: str, dtype: torch.dtype, persistent: bool, slots: int = 2, length: int = _LENGTH
) -> Transport:
    request = BufferRequest(name="b", padded=length, dtype=dtype, persistent=persistent)
    empty = BufferRequest(name="none", padded=0, dtype=dtype, persistent=persistent)
    return open_transport(name, mesh.shard, mesh.device, [request, empty], slots, _LENGTH * 8)


def two_on_one_device(mesh: Mesh) -> list[str]:
    """What ranks that would compute on one accelerator are told; by its second number it would be another one."""
    told = []
    for index in (mesh.device.index or 0, 0):
        store = dist.PrefixStore(f"devices {len(told)}", dist.distributed_c10d._get_default_store())
        try:
            exchange_locations(store, mesh.rank, mesh.world_size, torch.device(mesh.device.type, index), {})
            told.append("")
        except ConfigError as error:
            told.append(str(error))
    return told


def gathers(mesh: Mesh, name: str, dtype: str, persistent: bool) -> list[bool]:
    """Several generations of a buffer, written by all and read by all. Ranks read at different speeds."""
    kind, group = _DTYPES[dtype], mesh.shard
    transport = _open(mesh, name, kind, persistent)
    length = _LENGTH // group.size
    equal = []
    views = [buffer.carve([Interval(start=0, end=buffer.full.numel())])[0] for buffer in transport.buffers]
    for number in range(4):
        shard = _values(group.index, number, length, kind)
        for buffer in transport.buffers:
            part = shard if buffer.full.numel() else shard[:0]
            if persistent:
                buffer.begin_write()
                buffer.own().copy_(part)
                buffer.end_write()
            buffer.gather(TieredTensor.of(part))
        wanted = torch.cat([_values(rank, number, length, kind) for rank in range(group.size)])
        for buffer, view, expected in zip(transport.buffers, views, (wanted, wanted[:0]), strict=True):
            buffer.wait()
            equal += [torch.equal(buffer.full, expected), torch.equal(view, expected)]
            buffer.retire()
            buffer.release()
        transport.poll()
    transport.close()
    return equal


def reductions(mesh: Mesh, name: str, dtype: str, sums: str, whole: bool, slots: int) -> list[bool]:
    """Sums over ranks, some of them added to what was there, against sums in rank order."""
    kind, wide, group = _DTYPES[dtype], _DTYPES[sums], mesh.shard
    transport = _open(mesh, name, kind, persistent=True, slots=slots)
    reducer, length = transport.reducer, _LENGTH // group.size
    out = torch.zeros(_LENGTH if whole else length, dtype=wide, device=mesh.device)
    wanted = torch.zeros(_LENGTH, dtype=wide)
    equal = []
    for sequence in range(2 * slots + 3):
        add = sequence % 3 == 1
        slot = reducer.acquire(sequence, block=True)
        assert slot is not None
        filled = slot[: _LENGTH * kind.itemsize].view(kind)
        filled.copy_(_values(group.index, sequence, _LENGTH, kind))
        reduction = reducer.launch(sequence, filled, out, add=add)
        reduction.finish()
        reduction.settle()
        parts = [_values(rank, sequence, _LENGTH, kind) for rank in range(group.size)]
        wanted = wanted if add else torch.zeros_like(wanted)
        for part in parts:
            wanted = wanted + part.to(wide)
        shard = slice(group.index * length, (group.index + 1) * length)
        equal.append(torch.equal(out.cpu(), wanted if whole else wanted[shard]))
    transport.close()
    return equal


def slots_are_taken(mesh: Mesh, name: str) -> dict[str, bool]:
    """A slot is free again when every rank has summed what it held, and not before."""
    transport = _open(mesh, name, torch.float32, persistent=True)
    reducer = transport.reducer
    out = torch.zeros(_LENGTH // mesh.shard.size)
    flying = []
    for sequence in range(2):
        slot = reducer.acquire(sequence)
        assert slot is not None
        flying.append(reducer.launch(sequence, slot[: _LENGTH * 4].view(torch.float32).zero_(), out, add=False))
    found = {"taken": reducer.acquire(2) is None}
    mesh.world.barrier("all have launched")
    for reduction in flying:
        reduction.finish()
    found["free"] = reducer.acquire(2, block=True) is not None
    mesh.world.barrier("all are done")
    transport.close()
    return found


def released_memory(mesh: Mesh, name: str) -> dict[str, Any]:
    """Bytes that a buffer holds: gathered, released by this rank, released by all."""
    length = 2 * PAGE // 8
    transport = _open(mesh, name, torch.float64, persistent=False, length=length * mesh.shard.size)
    buffer = transport.buffers[0]
    found = {}

    def measure(moment: str) -> None:
        mesh.world.barrier(moment)
        transport.poll()
        mesh.world.barrier(moment)
        found[moment] = _bytes_held(transport)
        mesh.world.barrier(moment)

    measure("before")
    buffer.gather(TieredTensor.of(torch.ones(length, dtype=torch.float64)))
    buffer.wait()
    measure("gathered")
    buffer.release()
    measure("released")
    transport.close()
    return found


def _bytes_held(transport: Transport) -> int:
    segments = getattr(transport, "_segments", None)
    if segments is not None:
        return os.fstat(segments[0].descriptor).st_blocks * 512
    return sum(resident(buffer.full) for buffer in transport.buffers)


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's pages that are in memory, by mincore(2)."""
    start = tensor.data_ptr() // PAGE * PAGE
    pages = -(-(tensor.data_ptr() + tensor.nbytes - start) // PAGE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * PAGE), found) == 0
    return PAGE * sum(each & 1 for each in found)


def refusals(mesh: Mesh) -> dict[str, str]:
    """What `choose_transport` says of each name, its choice or its error."""

    def attempt(call: Callable[[], str]) -> str:
        try:
            return call()
        except ValueError as error:
            return str(error)

    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    names: tuple[Any, ...] = ("auto", "shared", "gloo", "nccl")
    found = {name: attempt(lambda n=name: choose_transport(n, mesh.shard, cpu)) for name in names}
    return found | {f"{name} on cuda": attempt(lambda n=name: choose_transport(n, mesh.shard, cuda)) for name in names}


def agreements(mesh: Mesh) -> dict[str, Any]:
    """The small agreements of a process set."""
    world = mesh.world
    values = torch.tensor([float(mesh.rank + 1)], dtype=torch.float64)
    shards = torch.full((3,), float(mesh.rank))
    held, everywhere = one_after_another([3] * world.size), replicated(3 * world.size, world.size)
    full = redistribute(shards, held, everywhere, world, "shards")
    total = torch.full((5,), float(mesh.rank))
    world.all_reduce_async(total, "sum")()
    return {
        "sum": world.all_reduce(values.clone(), "sum").item(),
        "max": world.all_reduce_max(values.clone(), "max").item(),
        "integers": world.gather_integers([mesh.rank, -mesh.rank]),
        "full": full.tolist(),
        "large": total.tolist(),
        "coordinates": [mesh.shard.index, mesh.replicate.index, mesh.data_index],
    }


def interleaved_runs(mesh: Mesh) -> list[bool]:
    """Two transports of one group at once do not disturb each other."""
    first, second = (_open(mesh, "shared", torch.float32, persistent=True) for _ in range(2))
    length, equal = _LENGTH // mesh.shard.size, []
    for number, transport in enumerate((first, second, first, second)):
        buffer = transport.buffers[0]
        buffer.begin_write()
        buffer.own().copy_(_values(mesh.rank, number, length, torch.float32))
        buffer.end_write()
        buffer.gather(TieredTensor.of(buffer.own()))
        buffer.wait()
        parts = [_values(rank, number, length, torch.float32) for rank in range(mesh.shard.size)]
        equal.append(torch.equal(buffer.full, torch.cat(parts)))
        buffer.retire()
    first.close()
    second.close()
    return equal


def threads_of_meshes(mesh: Mesh, end: str) -> list[int]:
    """How many threads this process has after each of a few meshes that ended in the way named."""
    counts = []
    for _ in range(4):
        other = Mesh(mesh.shape, mesh.environment, device=mesh.device, timeout_seconds=10)
        other.world.barrier("a moment together")
        if end == "closed":
            other.close()
        elif end == "refused":
            other.refuse(ValueError("not begun"))
        del other
        gc.collect()
        mesh.world.barrier("between two meshes")
        counts.append(len(os.listdir("/proc/self/task")))
    return counts
