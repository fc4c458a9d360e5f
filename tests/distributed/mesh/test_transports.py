"""Transports alone: buffers gathered and reduced, without an engine or a model; what a mesh leaves behind."""

import ctypes
import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.simulated import device
from tests.support.tables import row, tried
from zeromesh.comm.shm_transport import open_transport
from zeromesh.comm.transport import BufferRequest, Transport, choose_transport
from zeromesh.errors import ConfigError
from zeromesh.flat.redistribute import one_after_another, redistribute, replicated
from zeromesh.intervals import Interval
from zeromesh.mesh.process_mesh import Mesh, exchange_locations
from zeromesh.offload import TieredTensor
from zeromesh.offload.memory.allocation import PAGE

_LENGTH = 64 * 12
SIMULATED = pytest.mark.skipif(device.compiler() is None, reason="the simulated device needs a C++ compiler")


def _parts(mesh: Mesh, number: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    seeds = [torch.Generator().manual_seed(1000 * rank + number) for rank in range(mesh.shard.size)]
    return [torch.randn(length, generator=seed, dtype=torch.float64).to(dtype) for seed in seeds]


def open_buffers(mesh: Mesh, name: str, dtype: torch.dtype, persistent: bool, slots: int = 2, length: int = _LENGTH) -> Transport:
    """A transport with a buffer, and with one of nothing."""
    requests = [
        BufferRequest(name=label, padded=padded, dtype=dtype, persistent=persistent)
        for label, padded in (("b", length), ("none", 0))
    ]
    return open_transport(name, mesh.shard, mesh.device, requests, slots, _LENGTH * 8)


def gathers(mesh: Mesh, name: str, dtype: str, persistent: bool) -> None:
    """Several generations of a buffer, written by all and read by all. Ranks read at different speeds."""
    kind, group = getattr(torch, dtype), mesh.shard
    transport = open_buffers(mesh, name, kind, persistent)
    views = [buffer.make_views([Interval(start=0, end=buffer.full.numel())])[0] for buffer in transport.buffers]
    for number in range(4):
        parts = _parts(mesh, number, _LENGTH // group.size, kind)
        for buffer in transport.buffers:
            part = parts[group.index] if buffer.full.numel() else torch.zeros(0, dtype=kind)
            if persistent:
                buffer.begin_write()
                buffer.own().copy_(part)
                buffer.end_write()
            buffer.gather(TieredTensor.of(part))
        wanted = torch.cat(parts)
        for buffer, view, expected in zip(transport.buffers, views, (wanted, wanted[:0]), strict=True):
            buffer.wait()
            assert torch.equal(buffer.full, expected)
            assert torch.equal(view, expected)
            buffer.end_read()
            buffer.release()
        transport.poll()
    transport.close()


def reductions(mesh: Mesh, name: str, dtype: str, sums: str, whole: bool, slots: int) -> None:
    """Sums over ranks, some of them added to what was there, against sums in rank order, in the dtype of the sum: all transports
    give the same bits."""
    kind, wide, group = getattr(torch, dtype), getattr(torch, sums), mesh.shard
    transport = open_buffers(mesh, name, kind, persistent=True, slots=slots)
    reducer, length = transport.reducer, _LENGTH // group.size
    out = torch.zeros(_LENGTH if whole else length, dtype=wide, device=mesh.device)
    wanted = torch.zeros(_LENGTH, dtype=wide)
    for sequence in range(2 * slots + 3):
        add = sequence % 3 == 1
        slot = reducer.acquire(sequence, block=True)
        assert slot is not None
        parts = _parts(mesh, sequence, _LENGTH, kind)
        filled = slot[: _LENGTH * kind.itemsize].view(kind)
        filled.copy_(parts[group.index])
        reduction = reducer.launch(sequence, filled, out, add=add)
        reduction.finish()
        reduction.gather_sums()
        wanted = wanted if add else torch.zeros_like(wanted)
        for part in parts:
            wanted = wanted + part.to(wide)
        shard = slice(group.index * length, (group.index + 1) * length)
        assert torch.equal(out.cpu(), wanted if whole else wanted[shard])
    transport.close()


def slots_are_taken(mesh: Mesh, name: str) -> None:
    """A slot is free again when every rank has summed what it held, and not before."""
    transport = open_buffers(mesh, name, torch.float32, persistent=True)
    reducer = transport.reducer
    out = torch.zeros(_LENGTH // mesh.shard.size)
    flying = []
    for sequence in range(2):
        slot = reducer.acquire(sequence)
        assert slot is not None
        flying.append(reducer.launch(sequence, slot[: _LENGTH * 4].view(torch.float32).zero_(), out, add=False))
    assert reducer.acquire(2) is None
    mesh.world.barrier("all have launched")
    for reduction in flying:
        reduction.finish()
    assert reducer.acquire(2, block=True) is not None
    mesh.world.barrier("all are done")
    transport.close()


def released_memory(mesh: Mesh, name: str) -> None:
    """Bytes that a buffer holds: before, gathered, and released by all; in shared memory these are whole pages."""
    length = 2 * PAGE // 8
    transport = open_buffers(mesh, name, torch.float64, persistent=False, length=length * mesh.shard.size)
    buffer = transport.buffers[0]

    def held() -> int:
        mesh.world.barrier("all are here")
        transport.poll()
        mesh.world.barrier("all have polled")
        segments = getattr(transport, "_parts", None)
        if segments is not None:
            found = os.fstat(segments[0].descriptor).st_blocks * 512
        else:
            found = sum(resident(buffer.full) for buffer in transport.buffers)
        mesh.world.barrier("all have looked")
        return found

    assert held() == 0
    buffer.gather(TieredTensor.of(torch.ones(length, dtype=torch.float64)))
    buffer.wait()
    assert held() == 2 * 2 * PAGE
    buffer.release()
    assert held() == 0
    transport.close()


def resident(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's pages that are in memory, by mincore(2)."""
    start = tensor.data_ptr() // PAGE * PAGE
    pages = -(-(tensor.data_ptr() + tensor.nbytes - start) // PAGE)
    found = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * PAGE), found) == 0
    return PAGE * sum(each & 1 for each in found)


def choices(mesh: Mesh) -> None:
    """What `choose_transport` says of each name: its choice, or why it cannot be."""
    taken = {"cpu": {"auto": "shared", "shared": "shared", "gloo": "gloo"}, "cuda": {"auto": "nccl", "nccl": "nccl"}}
    names: tuple[Any, ...] = ("auto", "shared", "gloo", "nccl")
    for kind, choice in taken.items():
        for name in names:
            if name in choice:
                assert choose_transport(name, mesh.shard, torch.device(kind)) == choice[name]
                continue
            with pytest.raises(ConfigError, match=r"parallel\.transport is.*use auto"):
                choose_transport(name, mesh.shard, torch.device(kind))


def agreements(mesh: Mesh) -> None:
    """The small agreements of a process set."""
    world, rank = mesh.world, mesh.rank
    values = torch.tensor([float(rank + 1)], dtype=torch.float64)
    assert world.all_reduce(values.clone(), "sum").item() == 10
    assert world.all_reduce_max(values.clone(), "max").item() == 4
    assert world.gather_integers([rank, -rank]) == [[0, 0], [1, -1], [2, -2], [3, -3]]
    held, everywhere = one_after_another([3] * world.size), replicated(3 * world.size, world.size)
    full = redistribute(torch.full((3,), float(rank)), held, everywhere, world, "shards")
    assert full.tolist() == [float(n // 3) for n in range(12)]
    total = torch.full((5,), float(rank))
    world.all_reduce_async(total, "sum").wait()
    assert total.tolist() == [6.0] * 5
    assert [mesh.shard.index, mesh.replicate.index, mesh.data_index] == [rank % 2, rank // 2, rank]


def interleaved_runs(mesh: Mesh) -> None:
    """Two transports of one group at once do not disturb each other."""
    first, second = (open_buffers(mesh, "shared", torch.float32, persistent=True) for _ in range(2))
    for number, transport in enumerate((first, second, first, second)):
        buffer, parts = transport.buffers[0], _parts(mesh, number, _LENGTH // mesh.shard.size, torch.float32)
        buffer.begin_write()
        buffer.own().copy_(parts[mesh.rank])
        buffer.end_write()
        buffer.gather(TieredTensor.of(buffer.own()))
        buffer.wait()
        assert torch.equal(buffer.full, torch.cat(parts))
        buffer.end_read()
    first.close()
    second.close()


def threads_of_meshes(mesh: Mesh, end: str) -> None:
    """How many threads this process has after each of a few meshes that ended in the way named."""
    counts = []
    for _ in range(4):
        other = Mesh(mesh.shape, mesh.environment, device=mesh.device, timeout_seconds=10)
        other.world.barrier("a moment together")
        if end == "closed":
            other.close()
        elif end == "refused":
            other.publish_failed_start(ValueError("not begun"))
        del other
        gc.collect()
        mesh.world.barrier("between two meshes")
        counts.append(len(os.listdir("/proc/self/task")))
    assert counts == counts[:1] * 4


def two_on_one_device(mesh: Mesh) -> None:
    """What ranks that would compute on one accelerator are told; by its second number it would be another one.

    NCCL would refuse them too, when all have been connected, and as a library that names no rank.
    """

    def ask(name: str, index: int) -> None:
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        exchange_locations(store, mesh.rank, mesh.world_size, torch.device(mesh.device.type, index), {})

    ask("devices", mesh.device.index or 0)
    with pytest.raises(ConfigError, match=r"ranks 0, 1 on .* would compute on the same SIM device"):
        ask("a device", 0)


NAMES = ("shared", "gloo")
SUMS = [(name, *pair, "") for name in NAMES for pair in (("float64", "float64"), ("bfloat16", "float32"))]
test_buffers = pytest.mark.sampled(2)(
    tried(
        "test_transports",
        [
            *(
                row(size, "gathers", name=name, dtype=dtype, persistent=persistent)
                for size in (2, 3)
                for name in NAMES
                for dtype in ("float32", "bfloat16")
                for persistent in (True, False)
            ),
            *(row(2, case, name=name) for case in ("slots_are_taken", "released_memory") for name in NAMES),
            row(2, "choices"),
            row(4, "agreements", replicate=2),
            row(2, "interleaved_runs"),
            *(row(2, "threads_of_meshes", end=end) for end in ("closed", "refused", "forgotten")),
            row(2, "two_on_one_device", SIMULATED, device="sim"),
        ],
        folder=False,
    )
)
test_sums_run_in_the_order_of_ranks = tried(
    "test_transports",
    [
        row(3, "reductions", *marks, name=name, dtype=dtype, sums=sums, whole=whole, slots=slots, device=device)
        for name, dtype, sums, device, *marks in (*SUMS, ("nccl", "bfloat16", "float32", "sim", SIMULATED))
        for whole in (True, False)
        for slots in (1, 2)
    ],
    folder=False,
)
