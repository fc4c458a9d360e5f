"""Split arithmetic and bucket layouts: every element is somewhere, once."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.errors import LayoutError
from zeromesh.flat.layout import (
    BucketLayout,
    ParameterPart,
    ParameterSlot,
    ParameterSpec,
    Region,
    StageCopies,
    StridedRows,
    build_layout,
)
from zeromesh.intervals import Interval, balanced, round_up
from zeromesh.options import STAGES, Placement

sizes = st.integers(min_value=0, max_value=5000)
parts = st.integers(min_value=1, max_value=17)
alignments = st.sampled_from([1, 2, 8, 64])


def spec(number: int, shape: tuple[int, ...], group: int = 0) -> ParameterSpec:
    return ParameterSpec(fqn=f"p{number}", shape=shape, dtype=torch.float32, requires_grad=True, group=group)


@st.composite
def layouts(draw: st.DrawFn) -> BucketLayout:
    """Buckets of a few parameters, some without elements, in up to three optimizer groups."""
    shapes = draw(st.lists(st.lists(st.integers(0, 23), max_size=3), min_size=1, max_size=9))
    groups = draw(st.lists(st.integers(0, 2), min_size=len(shapes), max_size=len(shapes)))
    specs = [spec(n, tuple(shape), group) for n, (shape, group) in enumerate(zip(shapes, groups, strict=True))]
    return build_layout("bucket", specs, draw(parts), draw(alignments))


@given(numel=sizes, count=parts, alignment=alignments)
def test_shards_tile_the_padded_buffer(numel: int, count: int, alignment: int) -> None:
    layout = build_layout("bucket", [spec(0, (numel,))], count, alignment)
    padded, shards = layout.padded, [layout.shard(index) for index in range(count)]
    assert shards[0].start == 0
    assert shards[-1].end == padded
    assert all(first.end == second.start for first, second in pairwise(shards))
    assert {shard.length % alignment for shard in shards} == {0}
    assert len({shard.length for shard in shards}) == 1
    assert numel <= padded < numel + count * alignment


@given(a=st.tuples(sizes, sizes), b=st.tuples(sizes, sizes))
def test_an_intersection_is_what_both_hold(a: tuple[int, int], b: tuple[int, int]) -> None:
    first, second = (Interval(start=min(pair), end=max(pair)) for pair in (a, b))
    common = first.intersect(second)
    held = set(range(first.start, first.end)) & set(range(second.start, second.end))
    assert common.length == len(held)
    assert not held or (common.start, common.end) == (min(held), max(held) + 1)


@given(layout=layouts())
def test_slots_are_aligned_in_order_and_apart(layout: BucketLayout) -> None:
    keys = [(slot.spec.group, int(slot.spec.fqn[1:])) for slot in layout.slots]
    assert keys == sorted(keys)  # Those of an optimizer group lie together.
    assert all(slot.where.start % layout.alignment == 0 for slot in layout.slots)
    assert all(slot.where.length == slot.spec.numel for slot in layout.slots)
    assert all(first.where.end <= second.where.start for first, second in pairwise(layout.slots))
    assert layout.padded == layout.shard_length * layout.parts


@given(layout=layouts())
def test_gaps_are_exactly_what_no_parameter_holds(layout: BucketLayout) -> None:
    held = [0] * layout.padded
    for where in (*(slot.where for slot in layout.slots), *layout.gaps()):
        for element in range(where.start, where.end):
            held[element] += 1
    assert all(count == 1 for count in held)
    assert all(gap.length for gap in layout.gaps())


@given(layout=layouts())
def test_shards_hold_every_element_of_every_parameter_once(layout: BucketLayout) -> None:
    places: dict[tuple[str, int], int] = {}
    for index in range(layout.parts):
        shard = layout.shard(index)
        for piece in layout.pieces(shard):
            assert piece.in_parameter.length == piece.in_shard.length > 0
            assert piece.in_shard.end <= shard.length
            for offset in range(piece.in_parameter.length):
                key = (piece.spec.fqn, piece.in_parameter.start + offset)
                assert key not in places
                places[key] = shard.start + piece.in_shard.start + offset
    wanted = {(slot.spec.fqn, at): slot.where.start + at for slot in layout.slots for at in range(slot.spec.numel)}
    assert places == wanted


@given(layout=layouts(), data=st.data())
def test_pieces_of_any_interval_are_those_of_the_whole(layout: BucketLayout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.padded))
    end = data.draw(st.integers(start, layout.padded))
    pieces = layout.pieces(Interval(start=start, end=end))
    inside = sum(slot.where.intersect(Interval(start=start, end=end)).length for slot in layout.slots)
    assert sum(piece.in_parameter.length for piece in pieces) == inside


@given(layout=layouts())
def test_segments_cut_a_shard_where_the_optimizer_group_changes(layout: BucketLayout) -> None:
    group_of = {at: slot.spec.group for slot in layout.slots for at in range(slot.where.start, slot.where.end)}
    for index in range(layout.parts):
        shard = layout.shard(index)
        segments = layout.segments(shard)
        assert sum(segment.where.length for segment in segments) == (shard.length if layout.slots else 0)
        assert all(first.where.end == second.where.start for first, second in pairwise(segments))
        assert all(first.group != second.group for first, second in pairwise(segments))
        for segment in segments:
            for element in range(segment.where.start, segment.where.end):
                assert group_of.get(shard.start + element, segment.group) == segment.group


def test_an_interval_is_in_order() -> None:
    for start, end in ((-1, 3), (4, 3)):
        with pytest.raises(LayoutError, match="not in order"):
            Interval(start=start, end=end)


def test_lengths_are_divided_and_rounded_exactly() -> None:
    def ends(length: int, parts: int) -> list[tuple[int, int]]:
        return [(each.start, each.end) for each in balanced(length, parts)]

    assert ends(8, 3) == [(0, 3), (3, 6), (6, 8)]
    assert ends(2, 3) == [(0, 1), (1, 2), (2, 2)]
    assert [round_up(value, 4) for value in (0, 1, 4, 5)] == [0, 4, 4, 8]
    buckets = [build_layout("bucket", [spec(0, (numel,))], 2) for numel in (1, 128, 129)]
    assert [each.padded for each in buckets] == [128, 128, 256]
    assert Interval(start=5, end=9).after(3) == Interval(start=2, end=6)
    apart = Interval(start=0, end=2), Interval(start=5, end=9)
    assert apart[0].intersect(apart[1]) == apart[1].intersect(apart[0]) == Interval(start=5, end=5)


def test_a_layout_proves_itself() -> None:
    for start, end in ((1, 5), (5, 9), (64, 67), (0, 4)):
        first = ParameterSlot(spec=spec(0, (4,)), where=Interval(start=0, end=4))
        second = ParameterSlot(spec=spec(1, (4,)), where=Interval(start=start, end=end))
        with pytest.raises(LayoutError, match="overlaps, is not aligned"):
            BucketLayout(name="b", parts=1, slots=(first, second))


def test_a_stage_is_a_row_of_placements() -> None:
    replicated, partial, sharded = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED
    table = {stage: (row.parameters, row.accumulating, row.gradients, row.optimizer) for stage, row in STAGES.items()}
    assert table == {
        0: (replicated, partial, replicated, replicated),
        1: (replicated, partial, sharded, sharded),
        2: (replicated, sharded, sharded, sharded),
        3: (sharded, sharded, sharded, sharded),
    }


def test_who_shares_and_counts_a_parameter_decides_its_bucket() -> None:
    halves = (Interval(start=0, end=4),), (Interval(start=0, end=2), Interval(start=2, end=4))
    region = Region(shape=(4, 6), dims=halves)
    assert region.rows() == StridedRows(count=4, width=6, columns=halves[1])
    assert Region(shape=(0, 6), dims=((Interval(start=0, end=0),), halves[1])).rows() is None
    equal, summed = (ParameterPart(region=region, holders=(1, 3), partial=partial) for partial in (False, True))
    copies = StageCopies(name="head", aliases=("x",), ranks=(1, 2))
    tensor, stages = ("tensor", (1, 3)), ("pipeline", (1, 2))
    keys = set()
    for part, copied, shared_by, counted_at in (
        (None, None, (), {"tensor": 0}),
        (equal, None, (), {"tensor": 1}),
        (summed, None, (tensor,), {"tensor": 1}),
        (None, copies, (stages,), {"tensor": 0, "pipeline": 1}),
        (summed, copies, (tensor, stages), {"tensor": 1, "pipeline": 1}),
    ):
        spec = ParameterSpec(
            fqn="w", shape=(4, 4), dtype=torch.float32, requires_grad=True, aliases=("y",), part=part, copies=copied
        )
        assert (spec.shared_by, spec.counted_at) == (shared_by, counted_at)
        assert (spec.name, spec.other_names) == (("head", ("x",)) if copied else ("w", ("y",)))
        others = replace(spec, requires_grad=False), replace(spec, dtype=torch.int8)
        keys |= {each.bucket_key for each in (spec, *others)}
        assert build_layout("b", [spec], parts=3).nbytes == 3 * 64 * 4
    assert len(keys) == 15
