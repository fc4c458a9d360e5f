"""Rank arithmetic: every rank has one coordinate, every group holds every rank once, misfits are named."""

import itertools
import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromesh.errors import LayoutError
from zeromesh.mesh.mesh_shape import AXES, Axis, MeshShape, axes_of

sizes = st.integers(min_value=1, max_value=3)
shapes = st.builds(MeshShape, pipeline=sizes, replicate=sizes, shard=sizes, tensor=sizes)
some_axes = st.lists(st.sampled_from(AXES), unique=True).map(tuple)


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
    assert axes_of("states") == ("shard",)
    assert axes_of("batch", but=["states"]) == ("replicate",)
    assert axes_of("blocks", "layers") == ("pipeline", "tensor")
    shape = MeshShape(pipeline=2, shard=2)
    assert [shape.divides(what) for what in ("blocks", "layers", "states")] == [True, False, True]
    assert shape.model_size == 2


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
        with pytest.raises(LayoutError, match=rf"= {shape.world_size}, but the world has {world_size} rank"):
            MeshShape.resolve(world_size, shard=shape.shard, **others)


def test_the_tensor_axis_is_innermost() -> None:
    shape = MeshShape(pipeline=2, shard=2, tensor=2)
    assert shape.groups("tensor") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert shape.groups("shard") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert shape.groups("pipeline") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert shape.groups() == tuple((rank,) for rank in range(8))
    assert shape.coordinate(5) == {"pipeline": 1, "replicate": 0, "shard": 0, "tensor": 1}


def test_a_misfit_names_the_product_and_what_to_change() -> None:
    with pytest.raises(LayoutError) as caught:
        MeshShape.resolve(4, replicate=2, shard=3)
    assert str(caught.value) == (
        "pipeline 1 x replicate 2 x shard 3 x tensor 1 = 6, but the world has 4 ranks; "
        "set parallel.shard to 2 or auto, or start 6 ranks"
    )
    with pytest.raises(LayoutError) as caught:
        MeshShape.resolve(4, replicate=3)
    assert str(caught.value) == (
        "pipeline 1 x replicate 3 x tensor 1 = 3, which does not divide the world of 4 ranks; "
        "start 6 ranks, or change parallel.replicate"
    )
    with pytest.raises(LayoutError, match=r"tensor 8 = 8, but the world has 1 rank; .*parallel\.tensor"):
        MeshShape.resolve(1, tensor=8, shard=1)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1, True, 1.5, "2", None])
def test_a_size_is_a_positive_integer(axis: str, size: object) -> None:
    with pytest.raises(LayoutError, match=rf"parallel\.{axis}: got {size!r}; allowed is an integer >= 1"):
        MeshShape.resolve(2, **{axis: size})  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=f"parallel.{axis}"):
        MeshShape(**{axis: size})  # type: ignore[arg-type]


def test_what_is_outside_the_mesh_is_refused() -> None:
    shape = MeshShape(shard=2)
    with pytest.raises(LayoutError, match="rank 2 is not in the mesh"):
        shape.coordinate(2)
    with pytest.raises(LayoutError, match="at least 1 rank, got 0"):
        MeshShape.resolve(0)


def test_it_loads_without_torch() -> None:
    code = "import sys, zeromesh.mesh.mesh_shape, zeromesh.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
