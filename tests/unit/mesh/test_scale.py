"""What many ranks cost, counted in calls: a rank's part does not grow with the world, nor an action with its schedule."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from bench_scale import layouts_of, part_of, shape_of, world_of

from zeromesh.flat.layout import ParameterSpec, build_layout
from zeromesh.mesh.mesh_shape import Axis, MeshShape
from zeromesh.mesh.process_groups import groups_in_turn
from zeromesh.mesh.process_mesh import exchange_locations
from zeromesh.pipeline.schedule import make_schedule, simulate, validate


def calls_of(function: Callable[..., object], *arguments: object) -> int:
    """How many calls and elements of generators it takes."""
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(counted)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


def test_the_part_of_a_rank_does_not_grow_with_the_world() -> None:
    calls = []
    for ranks in (1024, 4096):
        shape = shape_of(ranks)
        layouts = layouts_of(shape)
        calls.append(sum(calls_of(part_of, shape, layouts, rank) for rank in range(0, ranks, ranks // 16)))
    assert calls[1] < 1.5 * calls[0]  # its group of replicas has four times as many ranks


def test_a_look_at_the_whole_world_grows_with_it() -> None:
    small, large = (calls_of(world_of, shape_of(ranks)) for ranks in (1024, 4096))
    assert large < 4 * 1.2 * small


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble", "gpipe"])
def test_simulating_takes_as_long_per_action_whatever_the_schedule(name: str) -> None:
    found = []
    for ranks, microbatches in ((4, 16), (16, 128)):
        chunks = 2 if name == "interleaved" else 1
        schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)  # type: ignore[arg-type]
        calls = calls_of(simulate, schedule) + calls_of(validate, schedule)
        found.append(calls / sum(map(len, schedule.actions)))
    assert found[1] < 1.2 * found[0]


@pytest.mark.parametrize("axes", [("shard",), ("replicate", "shard"), ("pipeline",), ("tensor",)])
def test_ranks_number_groups_alike_and_make_their_own(axes: tuple[Axis, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every rank had called torch for every group, which names it by how many came before."""
    shape, world = MeshShape(pipeline=2, replicate=3, shard=2, tensor=2), SimpleNamespace(group_count=0)
    default = SimpleNamespace(bound_device_id=None)
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: default)
    groups = shape.groups(*axes)
    for rank in range(shape.world_size):
        world.group_count = 5
        for ranks in groups_in_turn(shape, rank, axes, 3):
            assert rank in ranks
            assert world.group_count == 5 + 3 * groups.index(ranks)
            world.group_count += 3  # as `make_group` does, three times
        assert world.group_count == 5 + 3 * len(groups)
    default.bound_device_id = torch.device("cpu")
    assert tuple(groups_in_turn(shape, 0, axes, 3)) == groups


def test_a_shard_looks_at_its_own_parameters() -> None:
    """However many lie in the same bucket: one of 32 shards and one of 2,048, each of two parameters."""
    found = []
    for count in (64, 4096):
        spec = ParameterSpec(fqn="", shape=(64,), dtype=torch.float32, requires_grad=True)
        specs = [replace(spec, fqn=str(number)) for number in range(count)]
        layout = build_layout("many", specs, count // 2)
        found.append(calls_of(layout.pieces, layout.shard(7)))
        assert [piece.spec.fqn for piece in layout.pieces(layout.shard(7))] == ["14", "15"]
    assert found[1] < 2 * found[0]


class CountingStore(dict[str, str]):
    asked = 0
    set = dict.__setitem__

    def get(self, key: str) -> str:  # type: ignore[override]
        self.asked += 1
        return self[key]


def test_a_process_asks_the_store_once_for_the_places_of_all() -> None:
    store = CountingStore()
    row = json.dumps([{"host": "far", "name": "far", "island": 0}, {"order": "topology"}, ""])
    store.update({f"location/{process}": row for process in range(1, 64)})
    device, asked = torch.device("cpu"), {"order": "topology"}
    first = exchange_locations(store, 0, 64, device, asked)  # type: ignore[arg-type]
    assert store.asked == 64 + 1
    assert exchange_locations(store, 7, 64, device, asked) == first  # type: ignore[arg-type]
    assert store.asked == 64 + 2
    assert [place.host for place in first[1:]] == ["far"] * 63
