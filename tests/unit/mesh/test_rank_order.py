"""The order of ranks, the picture of who is where, where parts of a model live: pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.errors import ConfigError
from zeromesh.mesh.mesh_shape import AXES, MeshShape
from zeromesh.mesh.rank_order import WIDTH, ProcessLocation, far_warning, mesh_picture, rank_order

places_of = st.lists(
    st.builds(ProcessLocation, host=st.sampled_from(["a", "b", "c"]), island=st.integers(0, 2)), min_size=1, max_size=12
)
sizes = st.integers(min_value=1, max_value=3)
shapes = st.builds(MeshShape, pipeline=sizes, replicate=sizes, shard=sizes, tensor=sizes)


def cyclic(processes: int, hosts: int, islands: int = 1) -> list[ProcessLocation]:
    """Processes dealt out to hosts in turn, and within them to islands in turn."""
    return [
        ProcessLocation(host=f"node-{each % hosts}", name=f"node-{each % hosts}", island=each // hosts % islands)
        for each in range(processes)
    ]


@given(places_of)
def test_ranks_run_through_hosts_and_islands(places: list[ProcessLocation]) -> None:
    order = rank_order(places)
    assert sorted(order) == list(range(len(places)))
    assert order[0] == 0
    placed = [places[each] for each in order]
    for key in (lambda place: place.host, lambda place: (place.host, place.island)):
        runs = [
            key(place) for number, place in enumerate(placed) if not number or key(placed[number - 1]) != key(place)
        ]
        assert len(runs) == len(set(runs))
    assert rank_order(placed) == tuple(range(len(places))), "a second time changes nothing"


@given(places_of)
def test_processes_of_one_island_keep_their_order(places: list[ProcessLocation]) -> None:
    order = rank_order(places)
    for place in set(places):
        mine = [each for each in order if places[each] == place]
        assert mine == sorted(mine)


def test_an_order_is_given_or_the_launcher_s() -> None:
    places = cyclic(4, 2)
    assert rank_order(places) == (0, 2, 1, 3)
    assert rank_order(places, "launch") == (0, 1, 2, 3)
    assert rank_order(places, [0, 3, 1, 2]) == (0, 3, 1, 2)
    for wrong in ([0, 1, 2], [0, 1, 2, 2], [1, 0, 2, 3]):
        with pytest.raises(ConfigError, match="allowed are topology, launch, or the numbers 0 to 3"):
            rank_order(places, wrong)


def test_tensor_groups_that_span_hosts_are_named() -> None:
    shape = MeshShape(shard=2, tensor=2)
    places = cyclic(4, 2)
    assert "2 of 2 tensor groups span hosts (ranks 0, 1; ranks 2, 3)" in far_warning(shape, places)
    ordered = [places[each] for each in rank_order(places)]
    assert far_warning(shape, ordered) == ""
    uneven = [ProcessLocation(host="a")] * 3 + [ProcessLocation(host="b")]
    assert "divides the processes of every host (3, 1)" in far_warning(shape, uneven)


def test_a_small_mesh_is_drawn_whole() -> None:
    places = [ProcessLocation(host=each, name=each) for each in ("node-a", "node-a", "node-b", "node-b")]
    shape = MeshShape(pipeline=2, tensor=2)
    assert mesh_picture(shape, places, here=2, processes=(0, 2, 1, 3)).splitlines() == [
        "pipeline 2 x replicate 1 x shard 1 x tensor 2: 4 ranks on 2 hosts",
        "  node-a",
        "    rank 0   pipeline 0  tensor 0",
        "    rank 1   pipeline 0  tensor 1  (launched as 2)",
        "  node-b",
        "    rank 2   pipeline 1  tensor 0  <- here  (launched as 1)",
        "    rank 3   pipeline 1  tensor 1",
    ]


def test_a_large_mesh_is_drawn_in_short() -> None:
    shape = MeshShape(pipeline=4, replicate=4, shard=16, tensor=8)
    places = cyclic(2048, 128, islands=2)
    order = rank_order(places)
    text = mesh_picture(shape, [places[each] for each in order], here=1000, processes=order)
    lines = text.splitlines()
    assert len(lines) < 80
    assert max(map(len, lines)) <= WIDTH
    assert "  ... 58 more hosts" in lines
    assert "    ... 8 more ranks" in lines
    (here,) = [line for line in lines if "<- here" in line]
    said = "rank 1000 pipeline 1 replicate 3 shard 13 tensor 0 island 1 <- here (launched as 190)"
    assert " ".join(here.split()) == said


@given(shapes, st.data())
def test_a_picture_fits_and_shows_the_reader(shape: MeshShape, data: st.DataObject) -> None:
    world = shape.world_size
    hosts = data.draw(st.lists(st.sampled_from(["a", "b", "c" * 90]), min_size=world, max_size=world))
    places = [ProcessLocation(host=host, name="same name", island=0) for host in hosts]
    here = data.draw(st.integers(0, world - 1))
    lines = mesh_picture(shape, places, here=here).splitlines()
    assert max(map(len, lines)) <= WIDTH
    (mine,) = [line.split() for line in lines if "<- here" in line]
    assert mine[1] == str(here)
    names = [line for line in lines[1:] if line.startswith("  same name")]
    assert len(names) == len(set(names)) == len(set(hosts))


@given(shapes, st.sampled_from(AXES), st.integers(-4, 4), st.data())
def test_neighbours_are_where_a_step_leads(shape: MeshShape, axis: str, step: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, shape.world_size - 1))
    group = shape.group_of(rank, axis)  # type: ignore[arg-type]
    index = group.index(rank) + step
    wanted = group[index] if 0 <= index < len(group) else None
    assert shape.neighbour(rank, axis, step) == wanted  # type: ignore[arg-type]
    assert shape.neighbour(rank, axis, step, wrap=True) == group[index % len(group)]  # type: ignore[arg-type]
