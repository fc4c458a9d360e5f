"""Exchanges of activations: the same bits on all ranks and over every kind, in any order of waiting; errors that name a rank."""

import gc
import os
import signal
import time
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.support.tables import row, tried
from tests.support.workers import Outcome, PoolOptions, Workers
from zeromesh.comm.activation_collectives import Exchange, SharedExchange, open_exchange
from zeromesh.comm.shm_transport import IN_FLIGHT
from zeromesh.errors import CollectiveError, LayoutError, StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.memory.allocation import PAGE

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64")
KINDS = pytest.mark.parametrize("kind", ["shared", "gloo"])


def _values(rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(8).to(dtype)


def _summed(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float() if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


test_exchanges = tried(
    "test_activation_collectives",
    [
        *(row(size, "collectives", kind=kind) for size in (2, 3) for kind in ("shared", "gloo")),
        *(row(2, "in_any_order", kind=kind, flying=2 * IN_FLIGHT + 9) for kind in ("shared", "gloo")),
        *(row(2, "refusals", kind=kind) for kind in ("shared", "gloo")),
        *(row(2, case) for case in ("memory_of_slots", "forgotten")),
    ],
    folder=False,
)


def collectives(mesh: Mesh, kind: Any) -> None:
    """Each collective on several dtypes and shapes, contiguous or not, against the same without ranks."""
    exchange = open_exchange(mesh.world, mesh.device, kind)
    for number, name in enumerate(DTYPES):
        for shape in ((3, 4, 12), (1, 4, 40_000), (), (0, 4, 12)):
            found = _at(exchange, number, shape, getattr(torch, name))
            assert len(found) >= (8 if shape else 1)
            assert [key for key, pair in found.items() if not torch.equal(*pair)] == [], (name, shape)


def _at(
    exchange: Exchange, number: int, shape: tuple[int, ...], dtype: torch.dtype
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what the exchange gives and what one process computes."""
    size, index = exchange.size, exchange.index
    parts = [_values(rank, number, shape, dtype) for rank in range(size)]
    mine, whole = parts[index].clone(), _summed(parts)
    found = {"sum": (exchange.all_reduce_async(mine).wait(), whole)}
    if not shape:
        return found
    uneven = [1] * (size - 1) + [shape[1] + 1 - size]
    for dim in (0, 1, -1):
        found[f"gather {dim}"] = exchange.all_gather_async(mine, dim).wait(), torch.cat(parts, dim)
    ragged = [part.narrow(1, 0, length) for part, length in zip(parts, uneven, strict=True)]
    gathered = exchange.all_gather_async(mine.narrow(1, 0, uneven[index]), 1, sizes=uneven).wait()
    found["gather uneven"] = gathered, torch.cat(ragged, 1)
    scattered = exchange.reduce_scatter_async(mine, 1, sizes=uneven).wait()
    found["scatter uneven"] = scattered, whole.split(uneven, 1)[index]
    if shape[2] % size == 0:
        share = whole.chunk(size, 2)[index]
        found["scatter"] = exchange.reduce_scatter_async(mine, -1).wait(), share
        turned = exchange.reduce_scatter_async(mine.transpose(0, 2), 0).wait()
        found["scatter of a transpose"] = turned, share.transpose(0, 2)
    turned = exchange.all_reduce_async(mine.transpose(0, 1)).wait()
    return found | {"sum of a transpose": (turned, whole.transpose(0, 1)), "left as it was": (mine, parts[index])}


def in_any_order(mesh: Mesh, kind: Any, flying: int) -> None:
    """Results may be waited for in another order than the one they were started in, by each rank as it likes; or not at all."""
    exchange = open_exchange(mesh.world, mesh.device, kind)
    shapes = [(1 + number % 5, 1000 * (number % 3) + 7) for number in range(flying)]
    parts = [[_values(rank, number, shape, torch.float32) for rank in range(exchange.size)] for number, shape in enumerate(shapes)]
    pending = [exchange.all_reduce_async(each[mesh.rank]) for each in parts]
    order = [number for number in range(flying) if number % 7 != 3][:: -1 if mesh.rank % 2 else 1]
    equal = [torch.equal(pending[number].wait(), _summed(parts[number])) for number in order]
    mesh.world.barrier("all have waited")
    assert len(equal) > IN_FLIGHT, "an exchange in shared memory keeps as many under way"
    assert all(equal)


def refusals(mesh: Mesh, kind: Any) -> None:
    """Shares that do not fit, and a result asked for twice."""
    exchange, tensor = open_exchange(mesh.world, mesh.device, kind), torch.zeros(3, 5)
    pending = exchange.all_reduce_async(tensor)
    pending.wait()
    scatter, gather = exchange.reduce_scatter_async, exchange.all_gather_async
    for call, said in (
        (lambda: scatter(tensor, 0), r"scattered sum of \[3, 5\] along dim 0: 3 is no multiple of 2 ranks"),
        (lambda: scatter(tensor, 0, sizes=[1, 1]), "allowed are 2 that add up to 3"),
        (lambda: gather(tensor, 1, sizes=[1, 1]), r"sizes are \[1, 1\]; allowed are 2 of them"),
        (lambda: gather(tensor, 2), r"a tensor of shape \[3, 5\] has no dim 2"),
    ):
        with pytest.raises(LayoutError, match=said):
            call()
    with pytest.raises((ValueError, RuntimeError), match="asked for twice"):
        pending.wait()
    mesh.world.barrier("all were refused")


def test_alone_everything_is_a_copy() -> None:
    exchange, tensor = Exchange(), torch.arange(6.0).view(2, 3)
    for pending in [
        exchange.all_reduce_async(tensor),
        exchange.all_gather_async(tensor, 1),
        exchange.reduce_scatter_async(tensor, 0),
    ]:
        result = pending.wait()
        assert torch.equal(result, tensor)
        assert result.data_ptr() != tensor.data_ptr()
    with pytest.raises(LayoutError, match="allowed are 1 that add up to 2"):
        exchange.reduce_scatter_async(tensor, 0, sizes=[1])


def memory_of_slots(mesh: Mesh) -> None:
    """What an exchange in shared memory keeps: two slots however many exchanges there were, as large as the largest."""
    exchange = open_exchange(mesh.world, mesh.device, "shared")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        exchange.all_reduce_async(torch.ones(20_000 * (1 + number % 7))).wait()
    mesh.world.barrier("all have summed")
    slots = [slot.segment.nbytes for slot in exchange._ring.own]  # type: ignore[attr-defined]
    assert 1 <= len(slots) <= 2
    assert max(slots) == -(-20_000 * 7 * 4 // PAGE) * PAGE
    # A mapping has a descriptor of its own; and there are two slots of the peer.
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * len(slots) + 2
    mesh.world.barrier("all have looked")
    del exchange
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) < before  # the counters' own goes as well


def spoiled(workers: Workers, kind: str, fault: str) -> list[Outcome]:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=1.0)) as pool:
        return pool.outcomes("test_activation_collectives:goes_wrong", timeout=30, kind=kind, fault=fault)


def goes_wrong(mesh: Mesh, kind: Any, fault: str) -> float:
    """The last rank ends, is late, or exchanges something else."""
    exchange = open_exchange(mesh.world, mesh.device, kind)
    tensor, last = torch.ones(4, 6), mesh.rank == mesh.world_size - 1
    unread = fault == "gone before it was read"
    if not unread or last:
        pending = exchange.all_reduce_async(tensor)
        if not unread:
            pending.wait()
    if last and (unread or fault == "killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if unread:
        time.sleep(0.5)
    elif fault == "late":
        time.sleep(1.8 * last)
    elif fault == "other shares":
        return float(exchange.reduce_scatter_async(tensor, 0, sizes=[3, 1] if last else None).wait().sum())
    if last and fault == "other collective":
        return float(exchange.all_gather_async(tensor, 1).wait().sum())
    return float(exchange.all_reduce_async(tensor[:3] if last and fault == "other shape" else tensor).wait().sum())


@pytest.mark.parametrize(("kind", "fault"), [("shared", "killed"), ("gloo", "killed"), ("shared", "gone before it was read")])
def test_a_rank_that_is_gone_is_named(workers: Workers, kind: str, fault: str) -> None:
    survivor, victim = spoiled(workers, kind, fault)
    assert victim.error == "died"
    assert survivor.error == "CollectiveError"
    assert "sum of activations over axis world cannot end: rank 1 is gone (killed or exited)" in survivor.message


@KINDS
def test_a_rank_that_is_late_is_named(workers: Workers, kind: str) -> None:
    waiting, _ = spoiled(workers, kind, "late")
    assert waiting.error == "CollectiveError"
    assert "sum of activations over axis world did not end within 1 seconds" in waiting.message
    assert "rank 1 (pid " in waiting.message


@pytest.mark.parametrize(
    ("fault", "first", "second"),
    [
        ("other collective", "sum of float32 [4, 6]", "gather along dim 1 of float32 [4, 6]"),
        ("other shape", "sum of float32 [4, 6]", "sum of float32 [3, 6]"),
        ("other shares", "scattered sum along dim 0 of float32 [4, 6]", "scattered sum along dim 0 of float32 [4, 6]"),
    ],
)
def test_ranks_that_exchange_something_else_are_named(workers: Workers, fault: str, first: str, second: str) -> None:
    """In shared memory; gloo itself cannot tell."""
    for rank, outcome in enumerate(spoiled(workers, "shared", fault)):
        own, other = (first, second) if rank == 0 else (second, first)
        assert outcome.error == "CollectiveError"
        assert f"rank {1 - rank} asked for a {other}, rank {rank} for a {own}" in outcome.message


def test_ranks_that_exchange_something_else_are_named_though_another_has_ended() -> None:
    """Of three ranks the last one has seen the disagreement first: its memory is gone before this rank reads."""
    exchange = SharedExchange.__new__(SharedExchange)
    group = MagicMock(ranks=(0, 1, 2), size=3, index=1)
    Exchange.__init__(exchange, group)
    own: list[Any] = []

    def read(rank: int, _sequence: int) -> tuple[Any, list[int]]:
        if rank == 2:
            raise StorageError("it cannot be mapped")
        return MagicMock(), own[0] if rank == 1 else [0, *own[0][1:]]

    ring = MagicMock(next=0, room=IN_FLIGHT, read=read)
    ring.publish = lambda _number, about: own.append(about)
    exchange._group, exchange._ring, exchange._pending = group, ring, {}
    with pytest.raises(CollectiveError, match="rank 0 asked for a sum of float32"):
        exchange.all_reduce_async(torch.ones(4)).wait()
    group.watch.examine.assert_not_called()


def forgotten(mesh: Mesh) -> None:
    """A rank that has its result may forget the exchange; the others still read from it, now or later."""
    for number in range(20):
        exchange = open_exchange(mesh.world, mesh.device, "shared")
        pending = exchange.all_reduce_async(torch.full((1000,), mesh.rank + 1.0))
        del exchange
        if number % mesh.world_size == mesh.rank:
            time.sleep(0.01)
        assert pending.wait()[0].item() == sum(range(1, mesh.world_size + 1))
        del pending
