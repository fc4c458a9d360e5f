"""One verb moves a flat tensor from any placement over the ranks to any other, by the collective that fits."""

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeromesh.errors import LayoutError
from zeromesh.flat.layout import Region
from zeromesh.flat.redistribute import (
    FlatPlacement,
    Spans,
    join_regions,
    on_one_rank,
    one_after_another,
    redistribute,
    replicated,
)
from zeromesh.intervals import Interval
from zeromesh.mesh.collectives import CollectiveCall
from zeromesh.telemetry.step_recorder import Collective


class _Threads:
    """Ranks that are threads: `started` has the collectives that each rank has begun."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.started: list[list[Collective]] = [[] for _ in range(size)]
        self._barrier = threading.Barrier(size, timeout=20)
        self._board: list[Any] = [None] * size

    def run(self, work: Any) -> list[Any]:
        found: list[Any] = [None] * self.size

        def one(index: int) -> None:
            try:
                found[index] = work(index, self._rank(index))
            except LayoutError as error:
                found[index] = error

        threads = [threading.Thread(target=one, args=(index,)) for index in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found

    def _rank(self, index: int) -> Any:
        def start(kind: Collective, call: CollectiveCall) -> Any:
            self.started[index].append(kind)
            given = call.given.clone()
            self._board[index] = list(torch.split(given, list(call.sent))) if call.sent else [given] * self.size
            self._barrier.wait()
            parts = [each[index] for each in self._board]
            there = [part for part, length in zip(parts, call.received, strict=True) if length]
            call.out.copy_(torch.cat(there or [call.out]))
            self._barrier.wait()
            return SimpleNamespace(wait=lambda: None)

        return SimpleNamespace(size=self.size, index=index, start=start, on_stream=False)


def _values(placement: Spans) -> torch.Tensor:
    return torch.cat([torch.empty(0), *(torch.arange(each.start, each.end, dtype=torch.float32) for each in placement)])


@st.composite
def placements(draw: st.DrawFn, numel: int, ranks: int) -> FlatPlacement:
    cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=6))})
    pieces = [Interval(start=start, end=end) for start, end in itertools.pairwise(cuts)]
    held: list[list[Interval]] = [[] for _ in range(ranks)]
    for piece in draw(st.permutations(pieces)):
        for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append(piece)
    return tuple(map(tuple, held))


def _moved(threads: _Threads, before: FlatPlacement, after: FlatPlacement) -> list[Any]:
    return threads.run(lambda index, group: redistribute(_values(before[index]), before, after, group, "test"))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), numel=st.integers(1, 40))
def test_any_placement_becomes_any_other(data: st.DataObject, ranks: int, numel: int) -> None:
    before, after = (data.draw(placements(numel, ranks)) for _ in range(2))
    found = _moved(_Threads(ranks), before, after)
    assert [each.tolist() for each in found] == [_values(each).tolist() for each in after]


@pytest.mark.parametrize(
    ("before", "after", "collectives"),
    [
        (one_after_another([4, 4]), replicated(8, 2), [Collective.ALL_GATHER]),
        (one_after_another([5, 3]), replicated(8, 2), [Collective.ALL_GATHER]),
        (on_one_rank(8, 2, 1), replicated(8, 2), [Collective.BROADCAST]),
        (one_after_another([4, 4]), on_one_rank(8, 2, 0), [Collective.ALL_TO_ALL]),
        (replicated(8, 2), one_after_another([4, 4]), []),
        (replicated(8, 2), replicated(8, 2), []),
    ],
)
def test_a_change_of_placement_is_a_collective(
    before: FlatPlacement, after: FlatPlacement, collectives: list[Collective]
) -> None:
    threads = _Threads(2)
    _moved(threads, before, after)
    assert threads.started == [collectives] * 2


def test_what_no_rank_holds_is_refused() -> None:
    before, after = on_one_rank(4, 2, 0), on_one_rank(6, 2, 1)
    found = _moved(_Threads(2), before, after)
    assert all(isinstance(each, LayoutError) and "no rank holds element 4" in str(each) for each in found)


def test_columns_of_ranks_become_the_whole_tensor() -> None:
    columns = [
        (Interval(start=0, end=2), Interval(start=4, end=5)),
        (Interval(start=2, end=4), Interval(start=5, end=6)),
    ]
    regions = [Region(shape=(3, 6), dims=((Interval(start=0, end=3),), each)) for each in columns]
    whole = torch.arange(18.0).view(3, 6)
    local = [torch.cat([whole[:, each.start : each.end] for each in taken], 1).reshape(-1) for taken in columns]
    found = _Threads(2).run(lambda index, group: join_regions(local[index], regions, group, "test"))
    assert all(torch.equal(each, whole) for each in found)
