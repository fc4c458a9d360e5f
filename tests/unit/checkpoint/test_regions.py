"""Regions of tensors: every run is where numpy says it is, and whatever way a tensor is cut, each element comes once."""

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.errors import LayoutError
from zeromesh.flat.layout import Region, Tile, share_of
from zeromesh.intervals import Interval, round_up

# A tensor without elements now and then is enough.
sizes = st.sampled_from([0, *range(1, 7), *range(1, 7), *range(1, 7)])
shapes = st.lists(sizes, max_size=4).map(tuple)
Slices = tuple[Interval, ...]


@st.composite
def slices_of(draw: st.DrawFn, size: int) -> list[Interval]:
    """A dim cut anywhere, some slices without elements, in any order."""
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=4)))
    slices = [Interval(start=a, end=b) for a, b in pairwise([0, *cuts, size])]
    return draw(st.one_of(st.just(slices), st.permutations(slices)))


@st.composite
def regions(draw: st.DrawFn) -> Region:
    """Some slices of every dim: whole tensors, boxes, strided and packed parts."""
    shape = draw(shapes)
    dims: list[Slices] = []
    for size in shape:
        slices = draw(slices_of(size))
        taken = draw(st.integers(0, 2 * len(slices)))
        dims.append((Interval(start=0, end=size),) if taken == 0 else tuple(slices[: taken - 1]))
    return Region(shape=shape, dims=tuple(dims))


@st.composite
def intervals_of(draw: st.DrawFn, length: int) -> Interval:
    start = draw(st.one_of(st.just(0), st.integers(0, length)))
    return Interval(start=start, end=draw(st.one_of(st.just(length), st.integers(start, length))))


def oracle(region: Region) -> np.ndarray:
    """The logical position of each element of the flattened local tensor."""
    indices = [[i for slice_ in slices for i in range(slice_.start, slice_.end)] for slices in region.dims]
    return np.ravel(np.arange(prod(region.shape)).reshape(region.shape)[np.ix_(*indices)])


@given(region=regions(), data=st.data())
def test_runs_are_where_numpy_has_the_elements_and_as_long_as_they_can_be(region: Region, data: st.DataObject) -> None:
    expected = oracle(region)
    assert region.local_shape == tuple(sum(each.length for each in slices) for slices in region.dims)
    assert region.numel == len(expected)
    interval = data.draw(intervals_of(region.numel))
    runs = list(region.runs(interval))
    logical = [run.logical + offset for run in runs for offset in range(run.length)]
    assert logical == expected[interval.start : interval.end].tolist()
    local = [run.local + offset for run in runs for offset in range(run.length)]
    assert local == list(range(interval.start, interval.end))
    assert all(run.length > 0 for run in runs)
    assert all(first.logical + first.length != second.logical for first, second in pairwise(runs))
    if region.is_whole:
        assert len(runs) == bool(interval.length)


@given(shape=shapes, world=st.integers(1, 7), alignment=st.sampled_from([1, 4]), copies=st.integers(1, 3), data=st.data())
def test_tensor_parallel_and_data_parallel_ranks_hold_every_element_once(
    shape: tuple[int, ...], world: int, alignment: int, copies: int, data: st.DataObject
) -> None:
    held = np.zeros(prod(shape), dtype=int)
    for region in tensor_parallel(shape, data):
        length = round_up(region.numel, world * alignment) // world
        everything = Interval(start=0, end=region.numel)
        for rank in range(world):
            own = Interval(start=min(rank * length, region.numel), end=(rank + 1) * length).intersect(everything)
            for copy in range(copies):
                for run in region.runs(share_of(own, copies, copy, alignment)):
                    held[run.logical : run.logical + run.length] += 1
    assert (held == 1).all()


def tensor_parallel(shape: tuple[int, ...], data: st.DataObject) -> list[Region]:
    """What every tensor-parallel rank has: the slices of each dim dealt to some ranks, a packed one getting several."""
    dealt: list[list[Slices]] = []
    for size in shape:
        slices = data.draw(slices_of(size))
        ranks = data.draw(st.integers(1, 3))
        dealt.append([tuple(slices[rank::ranks]) for rank in range(ranks)])
    return [Region(shape=shape, dims=dims) for dims in product(*dealt)]


def test_the_picture_of_the_module_is_right() -> None:
    dims = ((Interval(start=0, end=4),), (Interval(start=0, end=2), Interval(start=4, end=6)))
    region = Region(shape=(4, 6), dims=dims)
    assert region.local_shape == (4, 4)
    found = [(run.local, run.logical, run.length) for run in region.runs(Interval(start=2, end=9))]
    assert found == [(2, 4, 4), (6, 10, 3)]


def test_a_scalar_and_a_tensor_without_elements_are_regions_too() -> None:
    scalar = Region.whole(())
    assert (scalar.local_shape, scalar.numel) == ((), 1)
    assert list(scalar.runs(Interval(start=0, end=1))) == [Tile(local=0, logical=0, length=1)]
    empty = Region(shape=(3, 0, 2), dims=((Interval(start=1, end=3),), (), (Interval(start=0, end=2),)))
    assert (empty.local_shape, empty.numel) == ((2, 0, 2), 0)
    assert list(empty.runs(Interval(start=0, end=0))) == []


def test_a_few_elements_of_a_vast_tensor_cost_no_more_than_their_rows() -> None:
    size = 10**9
    half = (Interval(start=size // 2, end=size),)
    region = Region(shape=(size, size), dims=((Interval(start=0, end=size),), half))
    start = region.numel - size // 2 - 3
    runs = list(region.runs(Interval(start=start, end=start + 7)))
    last = (size - 1) * size
    assert [(run.logical, run.length) for run in runs] == [(last - 3, 3), (last + size // 2, 4)]


@given(start=st.integers(0, 500), length=st.integers(0, 500), parts=st.integers(1, 9), alignment=st.sampled_from([1, 3, 8, 64]))
def test_shares_tile_the_interval(start: int, length: int, parts: int, alignment: int) -> None:
    interval = Interval(start=start, end=start + length)
    shares = [share_of(interval, parts, index, alignment) for index in range(parts)]
    assert (shares[0].start, shares[-1].end) == (interval.start, interval.end)
    assert all(first.end == second.start for first, second in pairwise(shares))
    assert all((share.start - start) % alignment == 0 for share in shares if share.length)
    assert max(share.length for share in shares) < -(-length // parts) + alignment


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([(0, 3), (2, 4)], r"dim 1 of 5: \[2, 4\) overlaps"),
        ([(2, 4), (0, 3)], r"dim 1 of 5: \[2, 4\) overlaps"),
        ([(1, 3), (1, 3)], r"dim 1 of 5: \[1, 3\) overlaps"),
        ([(0, 5), (2, 3)], r"dim 1 of 5: \[2, 3\) overlaps"),
        ([(4, 6)], r"dim 1 of 5: \[4, 6\) .*ends beyond"),
        ([(7, 7)], r"dim 1 of 5: \[7, 7\) .*ends beyond"),
    ],
)
def test_slices_that_overlap_or_leave_their_dim_are_refused(slices: list[tuple[int, int]], message: str) -> None:
    dims = ((Interval(start=0, end=2),), tuple(Interval(start=a, end=b) for a, b in slices))
    with pytest.raises(LayoutError, match=message):
        Region(shape=(2, 5), dims=dims)
    with pytest.raises(LayoutError, match=r"a region of 1 dims in a tensor of shape \[2, 5\]"):
        Region(shape=(2, 5), dims=dims[:1])


@given(region=regions(), beyond=st.integers(1, 3))
def test_elements_beyond_the_local_tensor_are_refused(region: Region, beyond: int) -> None:
    with pytest.raises(LayoutError, match=f"of a local tensor of {region.numel}"):
        list(region.runs(Interval(start=0, end=region.numel + beyond)))
