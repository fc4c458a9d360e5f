"""A mesh of several axes, joined: its sets by name, torch's object for it, ranks that follow the hosts, the account of traffic."""

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.mesh.test_transports import open_buffers
from tests.support.tables import row, tried
from tests.support.workers import PoolOptions, Workers
from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.comm.transport import choose_transport
from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.mesh import process_groups
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.mesh.run_store import run_store
from zeromesh.offload import TieredTensor
from zeromesh.overrides import override
from zeromesh.telemetry.step_recorder import Collective, StepRecorder, added
from zeromesh.trainer.monitoring.step_stats import traffic_table

test_a_joined_mesh = tried(
    "test_process_mesh",
    [
        *(row(4, case, pipeline=2, tensor=2) for case in ("axes", "torch_mesh", "left_at_once")),
        *(row(2, "told", kind=kind) for kind in ("shared", "gloo")),
    ],
    folder=False,
)


def axes(mesh: Mesh) -> None:
    """The sets of a mesh of pipeline 2 x tensor 2, by every name that they have."""
    stage, column = divmod(mesh.rank, 2)
    alone = dict.fromkeys(("data", "replicate", "shard"), (mesh.rank,))
    ranks = {"world": (0, 1, 2, 3), "pipeline": (column, column + 2), "tensor": (2 * stage, 2 * stage + 1), **alone}
    for name, wanted in ranks.items():
        group = mesh.group(name)
        assert group.ranks == wanted, name
        assert (group.groups is not None) == (name not in alone), name
        assert group.all_reduce(torch.tensor([mesh.rank]), "sum").item() == sum(wanted), name
    assert mesh["tensor"] is mesh.tensor
    assert mesh["replicate", "shard"] is mesh.data
    assert mesh["pipeline"] is mesh.pipeline
    assert mesh.coordinate == {"pipeline": stage, "replicate": 0, "shard": 0, "context": 0, "tensor": column}
    assert mesh.neighbour("pipeline", 1) == (None if stage else mesh.rank + 2)
    assert mesh.neighbour("pipeline", 1, wrap=True) == (mesh.rank + 2) % 4
    assert mesh.neighbour("tensor", -1) == (mesh.rank - 1 if column else None)
    both = mesh["tensor", "pipeline"]
    assert both is mesh["pipeline", "tensor"]
    assert (both.ranks, both.name) == ((0, 1, 2, 3), "pipeline x tensor")
    assert both.gather_integers([mesh.rank]) == [[0], [1], [2], [3]]
    with pytest.raises(LayoutError, match=r"allowed are world, data, axes \(pipeline, replicate, shard, context, tensor\)"):
        mesh.group("tensor", "elsewhere")
    (here,) = [line for line in str(mesh).splitlines() if "<- here" in line]
    assert here.split()[1] == str(mesh.rank)


def torch_mesh(mesh: Mesh) -> None:
    """A mesh of its own gives torch's object for it, and takes that object's groups with it when it is closed."""
    threads, pair = [], [mesh.rank // 2 * 2, mesh.rank // 2 * 2 + 1]
    for _ in range(3):
        other = Mesh(mesh.shape, mesh.environment, device=mesh.device, timeout_seconds=10)
        before = dict(process_groups._sockets)
        made = other.device_mesh
        assert process_groups._sockets != before, "its connections are cut too where ranks are lost"
        total = torch.tensor([mesh.rank])
        dist.all_reduce(total, group=made.get_group("tensor"))
        assert made.mesh_dim_names == ("pipeline", "replicate", "shard", "context", "tensor")
        assert made.mesh.shape == (2, 1, 1, 1, 2)
        assert [*(made.get_coordinate() or ())] == [mesh.rank // 2, 0, 0, 0, mesh.rank % 2]
        assert (made["tensor"].mesh.tolist(), total.item()) == (pair, sum(pair))
        del made
        other.close()
        del other
        gc.collect()
        mesh.world.barrier("between two meshes")
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads == threads[:1] * 3


def left_at_once(mesh: Mesh) -> None:
    """A rank has a group when all others are connected too, so that those are not failed by one that leaves it at once."""
    store, connect = dist.distributed_c10d._get_default_store(), process_groups.wait_for_ranks

    def connected_late(call: Callable[[], Any]) -> Any:
        found = connect(call)
        if mesh.rank == 2:
            time.sleep(0.5)
            store.set("the last is connected", "")
        return found

    with override(vars(process_groups), "wait_for_ranks", connected_late):
        made = process_groups.make_group(range(4), None, mesh.watch, 10.0)
    assert store.check(["the last is connected"])
    dist.destroy_process_group(made)


def test_ranks_follow_the_hosts(workers: Workers) -> None:
    """Tensor groups are within a host, and share its memory, though the launcher dealt processes out in turn."""
    with workers.fresh(PoolOptions(size=4, tensor=2, hosts=-2)) as pool:
        pool.run("test_process_mesh:another_order")
        pool.run("test_process_mesh:waits_in_the_store")


def another_order(mesh: Mesh) -> None:
    """Processes were dealt out to two hosts in turn; ranks run through one host after the other."""
    exchange, process = open_exchange(mesh.tensor, mesh.device), mesh.processes[mesh.rank]
    how: dict[str, Any] = {"device": mesh.device, "timeout_seconds": 10}
    again = Mesh(mesh.shape, replace(mesh.environment, rank=process), **how)
    # A launcher that knows of one host only, as of processes that cannot share memory.
    launched = replace(again.environment, rank=process, local_world_size=mesh.world_size)
    run_store(launched)
    apart = Mesh(mesh.shape, launched, **how)
    with pytest.raises(ConfigError, match=r"order of ranks: \[0, 2, 1, 3\] was asked for.* \[0, 1, 2, 3\], which stays"):
        Mesh(mesh.shape, mesh.environment, **how, order=[0, 2, 1, 3])
    assert mesh.processes == (0, 2, 1, 3)
    assert process == int(os.environ["RANK"])
    assert {mesh.environment.rank, again.rank, apart.rank, dist.get_rank()} == {mesh.rank}
    kinds = [choose_transport("auto", group, mesh.device) for group in (mesh.tensor, mesh.shard, mesh.world)]
    assert kinds == ["shared", "gloo", "gloo"]
    assert exchange.all_reduce_async(torch.tensor([float(mesh.rank)])).wait().item() == (1.0 if mesh.rank < 2 else 5.0)
    assert mesh.world.gather_integers([mesh.rank]) == [[0], [1], [2], [3]]
    for other in (again, apart):
        other.world.barrier("all are there")
        other.close()


def waits_in_the_store(mesh: Mesh) -> None:
    """The board, by which ranks find out who is lost, can be read while a thread waits for what a lost rank would have stored."""
    store = dist.distributed_c10d._get_default_store()

    def wait() -> None:
        with pytest.raises(RuntimeError):
            store.wait(["never"], timedelta(seconds=5))

    waits = threading.Thread(target=wait)
    waits.start()
    time.sleep(0.5)
    assert [mesh.watch.board.alive(rank) for rank in range(mesh.world_size)] == [True] * 4
    assert waits.is_alive()
    waits.join()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_rank_alone_is_its_own_sum(shape: tuple[int, ...]) -> None:
    world = Mesh(MeshShape(), read_environment({}), device=torch.device("cpu"), timeout_seconds=5).world
    values = torch.full(shape, 2.5)
    world.all_reduce_async(values, "sum").wait()
    for found in (world.all_reduce(values, "sum"), world.all_reduce_max(values, "maximum")):
        assert torch.equal(found, torch.full(shape, 2.5))


def told(mesh: Mesh, kind: Any) -> None:
    """What is counted of each collective on two ranks, and that it is counted once."""
    mesh.recorder.take_traffic()
    exchange = open_exchange(mesh.world, mesh.device, kind)
    tensor = torch.ones(3, 1000)
    exchange.all_reduce_async(tensor).wait()
    exchange.all_gather_async(tensor, 0).wait()
    exchange.reduce_scatter_async(tensor, 1).wait()
    transport = open_buffers(mesh, kind, torch.float32, persistent=False)
    buffer = transport.buffers[0]
    length = buffer.full.numel() // 2
    out = torch.zeros(length)
    for sequence in range(3):
        buffer.gather(TieredTensor.of(torch.ones(length)))
        buffer.wait()
        buffer.wait()
        buffer.release()
        slot = transport.reducer.acquire(sequence, block=True)
        assert slot is not None
        filled = slot[: 8 * length].view(torch.float32).fill_(1)
        reduction = transport.reducer.launch(sequence, filled, out, add=False)
        reduction.finish()
        reduction.gather_sums()
    mesh.shard.all_reduce_async(torch.ones(50), "sum").wait()
    taken = mesh.recorder.take_traffic()
    assert mesh.recorder.take_traffic() == {}
    for axis, name, calls, nbytes in (
        ("world", "all-reduce", 1, 12_000),
        ("world", "all-gather", 1, 12_000),
        ("world", "reduce-scatter", 1, 6_000),
        ("shard", "all-gather", 3, 3 * length * 4),
        ("shard", "reduce-scatter", 3, 3 * length * 4),
        ("shard", "all-reduce", 1, 200),
    ):
        assert (taken[axis][name]["calls"], taken[axis][name]["bytes"]) == (calls, nbytes), (axis, name)
    assert all(row["seconds"] >= 0 for rows in taken.values() for row in rows.values())
    mesh.world.barrier("all have looked")
    transport.close()


def test_an_account_knows_what_each_rank_sends() -> None:
    account = StepRecorder().account("shard", 4)
    for collective in Collective:
        account.count(collective, 1000)
    assert {name: (row["calls"], row["bytes"]) for name, row in account.take().items()} == {
        "all-gather": (1, 750),
        "reduce-scatter": (1, 750),
        "all-to-all": (1, 750),
        "all-reduce": (1, 1500),
        "broadcast": (1, 750),
        "point to point": (1, 1000),
        "agreement": (1, 750),
    }


def test_figures_are_taken_once_and_add_up() -> None:
    recorder = StepRecorder()
    account = recorder.account("tensor", 2)
    assert recorder.take_traffic() == {}
    account.count(Collective.ALL_REDUCE, 1 << 20)
    with account.timed(Collective.ALL_REDUCE):
        pass
    first = recorder.take_traffic()
    assert first["tensor"]["all-reduce"]["bytes"] == 1 << 20
    assert first["tensor"]["all-reduce"]["seconds"] >= 0
    assert recorder.take_traffic() == {}
    account.count(Collective.ALL_GATHER, 1 << 21)
    account.count(Collective.ALL_REDUCE, 1 << 20)
    both = added(first, recorder.take_traffic())
    assert [both["tensor"][name]["calls"] for name in ("all-reduce", "all-gather")] == [2, 1]
    assert both["tensor"]["all-reduce"]["bytes"] == 2 << 20
    assert first["tensor"]["all-reduce"]["calls"] == 1
    recorder.close_account("tensor")
    recorder.account("tensor", 4).count(Collective.ALL_REDUCE, 1000)
    assert recorder.take_traffic()["tensor"]["all-reduce"]["bytes"] == 1500


def test_a_table_says_what_a_step_tells() -> None:
    figures = {
        "tensor": {"all-reduce": {"calls": 960, "bytes": 80 << 20, "seconds": 0.5}},
        "shard": {"all-gather": {"calls": 10, "bytes": 1 << 20, "seconds": 0.01}},
    }
    assert traffic_table(figures, steps=10) == [
        "axis    collective  calls   MiB     ms",
        "tensor  all-reduce   96.0  8.00  50.00",
        "shard   all-gather    1.0  0.10   1.00",
    ]
