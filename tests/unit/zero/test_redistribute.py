"""One verb moves a flat tensor from any placement over the ranks to any other, by the collective that fits."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.stored_cases import Axis, in_threads
from zeromesh.errors import LayoutError
from zeromesh.flat.layout import ParameterSpec, Region, build_layout
from zeromesh.flat.redistribute import (
    FlatPlacement,
    Spans,
    bucket_placement,
    join_regions,
    one_after_another,
    redistribute,
    replicated,
)
from zeromesh.intervals import Interval
from zeromesh.telemetry.step_recorder import Collective


def _values(placement: Spans) -> torch.Tensor:
    return torch.cat([torch.empty(0), *(torch.arange(each.start, each.end, dtype=torch.float32) for each in placement)])


def _moving(before: FlatPlacement, after: FlatPlacement) -> Callable[[Any], torch.Tensor]:
    return lambda rank: redistribute(_values(before[rank.index]), before, after, rank, "test")


@st.composite
def placements(draw: st.DrawFn, numel: int, ranks: int) -> FlatPlacement:
    """Every element is somewhere, some on several ranks, in any order."""
    cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=6))})
    pieces = [Interval(start=start, end=end) for start, end in itertools.pairwise(cuts)]
    held: list[list[Interval]] = [[] for _ in range(ranks)]
    for piece in draw(st.permutations(pieces)):
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(piece)
    return tuple(map(tuple, held))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), numel=st.integers(1, 40))
def test_any_placement_becomes_any_other(data: st.DataObject, ranks: int, numel: int) -> None:
    before, after = (data.draw(placements(numel, ranks)) for _ in range(2))
    found, _ = in_threads(ranks, _moving(before, after))
    assert [each.tolist() for each in found] == [_values(each).tolist() for each in after]


@pytest.mark.parametrize(
    ("before", "after", "collectives"),
    [
        (one_after_another([4, 4]), replicated(8, 2), [Collective.ALL_GATHER]),
        (one_after_another([5, 3]), replicated(8, 2), [Collective.ALL_GATHER]),
        (one_after_another([0, 8]), replicated(8, 2), [Collective.BROADCAST]),
        (one_after_another([4, 4]), one_after_another([8, 0]), [Collective.ALL_TO_ALL]),
        (replicated(8, 2), one_after_another([4, 4]), []),
        (replicated(8, 2), replicated(8, 2), []),
    ],
)
def test_a_change_is_a_collective(before: FlatPlacement, after: FlatPlacement, collectives: list[Collective]) -> None:
    _, ranks = in_threads(2, _moving(before, after))
    assert [rank.started for rank in ranks] == [collectives] * 2


def test_what_no_rank_holds_is_refused() -> None:
    move = _moving(one_after_another([4, 0]), one_after_another([0, 6]))

    def refused(rank: Axis) -> None:
        with pytest.raises(LayoutError, match="no rank holds element 4"):
            move(rank)

    in_threads(2, refused)


def test_columns_of_ranks_become_the_whole_tensor() -> None:
    first, second, third, last = (Interval(start=a, end=b) for a, b in ((0, 2), (2, 4), (4, 5), (5, 6)))
    columns = [(first, third), (second, last)]
    regions = [Region(shape=(3, 6), dims=((Interval(start=0, end=3),), each)) for each in columns]
    whole = torch.arange(18.0).view(3, 6)
    local = [torch.cat([whole[:, each.start : each.end] for each in taken], 1).reshape(-1) for taken in columns]
    found, _ = in_threads(2, lambda rank: join_regions(local[rank.index], regions, rank, "test"))
    assert all(torch.equal(each, whole) for each in found)


def test_a_bucket_is_in_shards_or_whole_on_all_ranks() -> None:
    layout = build_layout("b", [ParameterSpec(fqn="p", shape=(70,), dtype=torch.float32, requires_grad=True)], 2)
    first, second, whole = (Interval(start=a, end=b) for a, b in ((0, 64), (64, 128), (0, 128)))
    assert bucket_placement(layout, 2, whole=False) == ((first,), (second,)) == one_after_another([64, 64])
    assert bucket_placement(layout, 2, whole=True) == ((whole,), (whole,)) == replicated(128, 2)
