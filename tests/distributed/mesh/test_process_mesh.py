"""A mesh of several axes, joined: its sets by name, torch's object for it, ranks that follow the hosts, the account of traffic."""

import pytest
import torch

from tests.support.workers import PoolOptions, Workers
from zeromesh.environment import read_environment
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.telemetry.step_recorder import Collective, StepRecorder, added
from zeromesh.trainer.monitoring.step_stats import traffic_table


def test_sets_of_all_axes(workers: Workers) -> None:
    for rank, found in enumerate(workers.run(4, "process_mesh_cases:axes", pipeline=2, tensor=2)):
        tensor, pipeline = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        alone = {name: [rank] for name in ("data", "replicate", "shard")}
        assert found["ranks"] == {"world": [0, 1, 2, 3], "tensor": tensor, "pipeline": pipeline, **alone}
        assert found["linked"] == ["world", "pipeline", "tensor"]
        assert found["sums"] == {name: sum(ranks) for name, ranks in found["ranks"].items()}
        assert all(found["same"])
        assert found["at"] == {"pipeline": rank // 2, "replicate": 0, "shard": 0, "tensor": rank % 2}
        further = rank + 2 if rank < 2 else None
        assert found["next"] == [further, (rank + 2) % 4, rank - 1 if rank % 2 else None]
        assert found["both"] == [True, [0, 1, 2, 3], "pipeline x tensor", [[0], [1], [2], [3]]]
        assert "allowed are world, data, axes (pipeline, replicate, shard, tensor)" in found["error"]
        (here,) = [line for line in found["lines"] if "<- here" in line]
        assert here.split()[1] == str(rank)


def test_torch_s_own_object(workers: Workers) -> None:
    for rank, found in enumerate(workers.run(4, "process_mesh_cases:torch_mesh", pipeline=2, tensor=2)):
        assert found["names"] == ["pipeline", "replicate", "shard", "tensor"]
        assert (found["shape"], found["coordinate"]) == ([2, 1, 1, 2], [rank // 2, 0, 0, rank % 2])
        assert found["sub"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found["sum"] == sum(found["sub"])
        assert found["threads"] == found["threads"][:1] * 3


def test_ranks_follow_the_hosts(workers: Workers) -> None:
    """Tensor groups are within a host, and share its memory, though the launcher dealt processes out in turn."""
    with workers.fresh(PoolOptions(size=4, tensor=2, hosts=-2)) as pool:
        for process, found in enumerate(pool.run("process_mesh_cases:another_order")):
            rank = [0, 2, 1, 3][process]
            assert found["rank"] == [rank] * 5
            assert found["processes"] == [0, 2, 1, 3]
            assert found["kinds"] == ["shared", "gloo", "gloo"]
            assert found["sum"] == (1.0 if rank < 2 else 5.0)
            assert found["ranks"] == [0, 1, 2, 3]
            assert "order of ranks: [0, 2, 1, 3] was asked for" in found["refused"]
            assert "numbers the processes [0, 1, 2, 3], which stays" in found["refused"]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_rank_alone_is_its_own_sum(shape: tuple[int, ...]) -> None:
    world = Mesh(MeshShape(), read_environment({}), device=torch.device("cpu"), timeout_seconds=5).world
    values = torch.full(shape, 2.5)
    world.all_reduce_async(values, "sum")()
    for found in (world.all_reduce(values, "sum"), world.all_reduce_max(values, "maximum")):
        assert torch.equal(found, torch.full(shape, 2.5))


@pytest.mark.parametrize("kind", ["shared", "gloo"])
def test_what_ranks_tell_each_other_is_counted(workers: Workers, kind: str) -> None:
    for found in workers.run(2, "process_mesh_cases:told", kind=kind):
        world, shard, length = found["taken"]["world"], found["taken"]["shard"], found["length"]
        assert (world["all-reduce"]["calls"], world["all-reduce"]["bytes"]) == (1, 12_000)
        assert (world["all-gather"]["calls"], world["all-gather"]["bytes"]) == (1, 12_000)
        assert (world["reduce-scatter"]["calls"], world["reduce-scatter"]["bytes"]) == (1, 6_000)
        assert (shard["all-gather"]["calls"], shard["all-gather"]["bytes"]) == (3, 3 * length * 4)
        assert (shard["reduce-scatter"]["calls"], shard["reduce-scatter"]["bytes"]) == (3, 3 * length * 4)
        assert (shard["all-reduce"]["calls"], shard["all-reduce"]["bytes"]) == (1, 200)
        assert all(row["seconds"] >= 0 for row in [*world.values(), *shard.values()])
        assert found["rest"] == {}


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
