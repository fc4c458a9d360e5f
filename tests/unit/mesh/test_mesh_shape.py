"""Rank arithmetic: coordinates, groups, misfits; the order of ranks, and the picture of who is where. Pure functions."""

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromesh.errors import ConfigError, LayoutError
from zeromesh.mesh.mesh_shape import AXES, Axis, MeshShape, axes_of
from zeromesh.mesh.rank_order import WIDTH, ProcessLocation, mesh_picture, rank_order, tensor_groups_warning

sizes = st.integers(min_value=1, max_value=3)
shapes = st.builds(MeshShape, pipeline=sizes, replicate=sizes, shard=sizes, tensor=sizes)
some_axes = st.lists(st.sampled_from(AXES), unique=True).map(tuple)
places_of = st.lists(
    st.builds(ProcessLocation, host=st.sampled_from(["a", "b", "c"]), island=st.integers(0, 2)), min_size=1, max_size=12
)


@given(shapes)
def test_rank_and_coordinate_are_inverse(shape: MeshShape) -> None:
    coordinates = [shape.coordinate(rank) for rank in range(shape.world_size)]
    assert len({str(at) for at in coordinates}) == shape.world_size
    assert [shape.rank(at) for at in coordinates] == list(range(shape.world_size))


@settings(deadline=None)
@given(shapes, some_axes)
def test_groups_hold_every_rank_once(shape: MeshShape, axes: tuple[Axis, ...]) -> None:
    groups = shape.groups(*axes)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(shape.world_size))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    for group in groups:
        assert len(group) == math.prod(getattr(shape, axis) for axis in axes)
        assert list(group) == sorted(group)
        for rank in group:
            assert shape.group_of(rank, *axes) == group
        for axis in set(AXES) - set(axes):
            assert len({shape.coordinate(rank)[axis] for rank in group}) == 1
    assert shape.groups(*reversed(axes)) == groups


def test_what_axes_divide_says_who_sums_what() -> None:
    assert axes_of("batch") == ("replicate", "shard")
    assert axes_of("states") == ("shard", "context")
    assert axes_of("batch", but=["states"]) == ("replicate",)
    assert axes_of("sequence", but=["layers"]) == ("context",)
    assert axes_of("blocks", "layers") == ("pipeline", "tensor")
    shape = MeshShape(pipeline=2, shard=2)
    assert [shape.divides(what) for what in ("blocks", "layers", "states", "batch")] == [True, False, True, True]
    assert shape.model_size == 2


def test_experts_of_one_sample_may_all_be_on_ranks_that_compute_it() -> None:
    for swaps, shape in (
        (True, MeshShape(shard=2, expert=2)),
        (False, MeshShape(shard=2)),
        (False, MeshShape(shard=2, context=2, expert=2)),
        (True, MeshShape(shard=2, context=2, expert=4)),
        (False, MeshShape(replicate=2, context=2, tensor=2, expert=2)),
        (True, MeshShape(shard=2, context=3, expert=2)),
    ):
        assert shape.swaps_tokens is swaps, shape


@given(shapes)
def test_resolve_finds_the_shard_axis(shape: MeshShape) -> None:
    others = {axis: getattr(shape, axis) for axis in AXES if axis != "shard"}
    assert MeshShape.resolve(shape.world_size, **others) == shape
    assert MeshShape.resolve(shape.world_size, shard=shape.shard, **others) == shape


@given(shapes, st.integers(min_value=1, max_value=100))
def test_resolve_fills_the_world_or_names_it(shape: MeshShape, world_size: int) -> None:
    others = {axis: getattr(shape, axis) for axis in AXES if axis != "shard"}
    rest, left = divmod(world_size, shape.world_size // shape.shard)
    if left:
        with pytest.raises(LayoutError, match=f"the world of {world_size} rank"):
            MeshShape.resolve(world_size, **others)
    else:
        assert MeshShape.resolve(world_size, **others) == MeshShape(shard=rest, **others)
    if left or rest != shape.shard:
        with pytest.raises(LayoutError, match=rf"= {shape.world_size}, but the run has {world_size} rank"):
            MeshShape.resolve(world_size, shard=shape.shard, **others)


def test_the_tensor_axis_is_innermost() -> None:
    shape = MeshShape(pipeline=2, shard=2, tensor=2)
    assert shape.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert shape.groups("shard") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert shape.groups("pipeline") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert shape.groups() == tuple((rank,) for rank in range(8))
    assert shape.coordinate(5) == {"pipeline": 1, "replicate": 0, "shard": 0, "context": 0, "tensor": 1}


def test_a_misfit_names_the_product_and_what_to_change() -> None:
    with pytest.raises(LayoutError) as caught:
        MeshShape.resolve(6, replicate=2, shard=4)
    assert str(caught.value) == (
        "pipeline 1 x replicate 2 x shard 4 x context 1 x tensor 1 = 8, but the run has 6 ranks; "
        "set parallel.shard to 3 or auto, or start 8 ranks"
    )
    with pytest.raises(LayoutError) as caught:
        MeshShape.resolve(4, replicate=3)
    assert str(caught.value) == (
        "pipeline 1 x replicate 3 x context 1 x tensor 1 = 3, which does not divide the world of 4 ranks; "
        "start 6 ranks, or change parallel.replicate"
    )
    with pytest.raises(LayoutError, match=r"tensor 8 = 8, but the run has 1 rank; .*parallel\.tensor"):
        MeshShape.resolve(1, tensor=8, shard=1)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1, True, 1.5, "2", None])
def test_a_size_is_a_positive_integer(axis: str, size: object) -> None:
    auto = ", or auto" if axis == "shard" else ""
    with pytest.raises(LayoutError, match=rf"parallel\.{axis}: got {size!r}; allowed is an integer >= 1{auto}$"):
        MeshShape.resolve(2, **{axis: size})  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=f"parallel.{axis}"):
        MeshShape(**{axis: size})  # type: ignore[arg-type]


def test_what_is_outside_the_mesh_is_refused() -> None:
    shape = MeshShape(shard=2)
    with pytest.raises(LayoutError, match=r"rank 2 is not in the mesh .*: ranks are 0 to 1$"):
        shape.coordinate(2)
    for wrong in (0, True, 1.5):
        with pytest.raises(LayoutError, match=f"at least 1 rank, got {wrong}"):
            MeshShape.resolve(wrong)  # type: ignore[arg-type]


def test_it_loads_without_torch() -> None:
    code = "import sys, zeromesh.mesh.mesh_shape, zeromesh.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
        runs = [each for each, _ in itertools.groupby(map(key, placed))]
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
    assert "2 of 2 tensor groups span hosts (ranks 0, 1; ranks 2, 3)" in tensor_groups_warning(shape, places)
    ordered = [places[each] for each in rank_order(places)]
    assert tensor_groups_warning(shape, ordered) == ""
    for count, ranks, sizes in ((3, "ranks 4, 5), and", "1, 1, 1)"), (4, "ranks 4, 5 ...), and", "1, 1, 1 and 2 more)")):
        text = tensor_groups_warning(MeshShape(shard=count, tensor=2), cyclic(2 * count, 2 * count))
        assert f"(ranks 0, 1; ranks 2, 3; {ranks}" in text
        assert text.endswith(f"(1, 1, 1, {sizes}")
    uneven = [ProcessLocation(host="a")] * 3 + [ProcessLocation(host="b")]
    assert "divides the processes of every host (3, 1)" in tensor_groups_warning(shape, uneven)


def test_a_small_mesh_is_drawn_whole() -> None:
    places = [ProcessLocation(host=each, name=each) for each in ("node-a", "node-a", "node-b", "node-b")]
    shape = MeshShape(pipeline=2, tensor=2)
    assert mesh_picture(shape, places, here=2, processes=(0, 2, 1, 3)).splitlines() == [
        "pipeline 2 x replicate 1 x shard 1 x context 1 x tensor 2: 4 ranks on 2 hosts",
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
    group = shape.group_of(rank, axis)
    index = group.index(rank) + step
    wanted = group[index] if 0 <= index < len(group) else None
    assert shape.neighbour(rank, axis, step) == wanted
    assert shape.neighbour(rank, axis, step, wrap=True) == group[index % len(group)]
