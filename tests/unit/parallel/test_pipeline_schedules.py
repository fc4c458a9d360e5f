"""Pipeline schedules and cuts: pure arithmetic."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_picture import render
from torch.distributed.pipelining import schedules as torch_schedules

from zeromesh.errors import LayoutError
from zeromesh.pipeline.schedule import (
    Action,
    Kind,
    PipelineSchedule,
    ScheduleError,
    make_schedule,
    message_order,
    simulate,
    validate,
)
from zeromesh.pipeline.stages.build import cut_by_cost
from zeromesh.settings.keys import ScheduleName


def peak_in_flight(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Return the most activations that each rank keeps: microbatches of its chunks between forward and the end of backward."""
    peaks = []
    for actions in schedule.actions:
        split = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
        last = Kind.BACKWARD_WEIGHT if split else Kind.BACKWARD
        changes = ((action.kind is Kind.FORWARD) - (action.kind is last) for action in actions)
        peaks.append(max(accumulate(changes), default=0))
    return tuple(peaks)


RANKS = st.integers(1, 6)
MICROBATCHES = st.integers(1, 14)
PLAIN: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "zero_bubble")


@settings(max_examples=60)
@given(RANKS, MICROBATCHES, st.sampled_from(PLAIN))
def test_a_schedule_runs_and_lasts_as_long_as_its_paper_says(ranks: int, microbatches: int, name: ScheduleName) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches)
    validate(schedule)
    bubble = (ranks - 1) * (1 if name == "zero_bubble" else 3)
    duration = simulate(schedule).duration
    # With fewer microbatches than ranks, gradients of weights cannot fill all of it.
    assert duration == 3 * microbatches + bubble or (name == "zero_bubble" and microbatches < ranks)
    assert duration <= 3 * microbatches + 3 * (ranks - 1)


@given(RANKS, MICROBATCHES)
def test_activations_in_flight(ranks: int, microbatches: int) -> None:
    for name, peaks in (
        ("1f1b", [min(microbatches, ranks - rank) for rank in range(ranks)]),
        ("gpipe", [microbatches] * ranks),
        ("zero_bubble", [min(microbatches, ranks)] * ranks),
    ):
        assert peak_in_flight(make_schedule(name, ranks=ranks, microbatches=microbatches)) == tuple(peaks)


@settings(max_examples=60)
@given(RANKS, MICROBATCHES, st.integers(1, 4))
def test_interleaved_is_sound_and_in_full_rounds_divides_the_bubble(ranks: int, microbatches: int, chunks: int) -> None:
    schedule = make_schedule("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks)
    validate(schedule)
    assert max(peak_in_flight(schedule)) <= (chunks + 1) * (2 * ranks - 1)
    if microbatches % ranks == 0:
        # Times of a chunk; in times of the whole model on a rank the bubble is `chunks` times smaller.
        assert simulate(schedule).duration == 3 * microbatches * chunks + 3 * (ranks - 1)
    if microbatches % ranks == 0 and chunks > 1:
        # Ranks are so far ahead that messages of further rounds are on their way beside computing.
        longer = make_schedule("interleaved", ranks=ranks, microbatches=2 * microbatches, chunks=chunks)
        few, many = (simulate(each, transfer=0.25).duration for each in (schedule, longer))
        assert many - few == 3 * microbatches * chunks


@settings(max_examples=40)
@given(RANKS, MICROBATCHES, st.integers(1, 3))
def test_forward_only(ranks: int, microbatches: int, chunks: int) -> None:
    schedule = make_schedule("forward", ranks=ranks, microbatches=microbatches, chunks=chunks)
    validate(schedule)
    if microbatches % ranks == 0:
        assert simulate(schedule).duration == microbatches * chunks + ranks - 1


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 7), (4, 4), (4, 9)])
def test_1f1b_has_the_order_of_torch(ranks: int, microbatches: int) -> None:
    schedule = make_schedule("1f1b", ranks=ranks, microbatches=microbatches)
    for rank in range(ranks):
        ours = [(action.kind.value, action.microbatch) for action in schedule.actions[rank]]
        theirs = _torch_order(rank, ranks, microbatches)
        if rank == ranks - 1:  # there torch 2.13 counts forwards from 1
            assert [kind for kind, _ in ours] == [kind for kind, _ in theirs]
        else:
            assert ours == theirs


def _torch_order(rank: int, ranks: int, microbatches: int) -> list[tuple[str, int]]:
    """What torch's 1F1B does on a rank, without its communication."""
    schedule = torch_schedules.Schedule1F1B.__new__(torch_schedules.Schedule1F1B)
    schedule._n_microbatches = microbatches
    schedule._num_stages = ranks
    order = schedule._get_pipeline_order()
    assert order is not None
    letters = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    actions = [action for action in order[rank] if action is not None and action.computation_type.name in letters]
    return [(letters[action.computation_type.name], int(action.microbatch_index or 0)) for action in actions]


@given(st.integers(0, 2**32))
def test_a_schedule_out_of_order_runs_or_is_refused(seed: int) -> None:
    """Whatever is swapped, `validate` says of it what happens when it is run."""
    choice = random.Random(seed)
    name = choice.choice(PLAIN)
    schedule = make_schedule(name, ranks=choice.randint(2, 4), microbatches=choice.randint(2, 5))
    actions = [list(each) for each in schedule.actions]
    moved = choice.choice(actions)
    one, other = choice.sample(range(len(moved)), 2)
    moved[one], moved[other] = moved[other], moved[one]
    changed = replace(schedule, actions=tuple(map(tuple, actions)))
    with nullcontext() if _runs(changed) else pytest.raises(ScheduleError):
        validate(changed)


def _runs(schedule: PipelineSchedule) -> bool:
    """By the definition: an action is done when those that it needs are, whichever rank moves first."""
    done: set[tuple[Kind, int, int]] = set()
    places = [0] * schedule.ranks
    last = schedule.ranks - 1

    def ready(rank: int, action: Action) -> bool:
        number = action.microbatch
        needs = {
            Kind.FORWARD: [(Kind.FORWARD, rank - 1, number)] if rank else [],
            Kind.BACKWARD: [(Kind.FORWARD, rank, number)] + [(Kind.BACKWARD, rank + 1, number)] * (rank < last),
            Kind.BACKWARD_INPUT: [(Kind.FORWARD, rank, number)] + [(Kind.BACKWARD_INPUT, rank + 1, number)] * (rank < last),
            Kind.BACKWARD_WEIGHT: [(Kind.BACKWARD_INPUT, rank, number)],
        }
        return done.issuperset(needs[action.kind])

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while places[rank] < len(actions) and ready(rank, actions[places[rank]]):
                action = actions[places[rank]]
                done.add((action.kind, rank, action.microbatch))
                places[rank] += 1
                moved = True
    return all(place == len(actions) for place, actions in zip(places, schedule.actions, strict=True))


def test_what_is_wrong_is_named() -> None:
    schedule = make_schedule("1f1b", ranks=2, microbatches=2)
    first, second = schedule.actions
    swapped = tuple((each[0], each[2], each[1], each[3]) for each in schedule.actions)
    cases = {
        "on rank 1 F1 is missing": (first, tuple(a for a in second if str(a) != "F1")),
        "on rank 0 F0 occurs once too often": ((*first, first[0]), second),
        "on rank 1 B7 occurs once too often": (first, (*second, Action(kind=Kind.BACKWARD, chunk=0, microbatch=7))),
        "rank 1 for the F0 before B0": (first, (second[1], second[0], *second[2:])),
        "rank 0 for the gradients of microbatch 0 for stage 0 before B0": swapped,
        "whole and in halves": (first, (*second, Action(kind=Kind.BACKWARD_WEIGHT, chunk=0, microbatch=0))),
        "actions of 1 rank, not 2": (first,),
    }
    for text, actions in cases.items():
        with pytest.raises(ScheduleError, match=text):
            validate(replace(schedule, actions=actions))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "2f2b", "ranks": 2, "microbatches": 2}, "allowed are gpipe, 1f1b"),
        ({"name": "1f1b", "ranks": 2, "microbatches": 0}, "at least 1 of microbatches, got 0"),
        ({"name": "zero_bubble", "ranks": 0, "microbatches": 2}, "at least 1 of ranks"),
        ({"name": "gpipe", "ranks": True, "microbatches": 2}, "at least 1 of ranks, got True"),
        ({"name": "gpipe", "ranks": 2, "microbatches": 2, "chunks": 2}, "take interleaved"),
    ],
)
def test_what_makes_no_schedule_is_refused(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        make_schedule(**arguments)  # type: ignore[arg-type]


def test_a_transfer_and_slow_ranks_lengthen_the_step() -> None:
    schedule = make_schedule("gpipe", ranks=2, microbatches=1)
    assert simulate(schedule, transfer=0.5).duration == 6 + 2 * 0.5
    alone = make_schedule("interleaved", ranks=1, microbatches=2, chunks=2)
    assert (simulate(alone, transfer=0.5).duration, message_order(alone, 0)[0]) == (12, [])  # 4 forwards, 4 backwards
    assert simulate(schedule, lambda rank, _action: 1.0 + rank).duration == 6
    timeline = simulate(schedule, lambda rank, _action: 1.0 + rank)
    assert timeline.bubbles == pytest.approx((4 / 6, 2 / 6))
    assert timeline.bubble == pytest.approx(0.5)


@pytest.mark.parametrize("name", PLAIN)
def test_messages_of_one_moment_have_one_order_on_many_ranks(name: ScheduleName) -> None:
    """Ranks that launched them in different orders would wait for each other."""
    schedule = make_schedule(name, ranks=10, microbatches=12)
    for rank in range(schedule.ranks):
        order = [(moment, message.source) for moment, message in message_order(schedule, rank)[0]]
        assert order == sorted(order)


@settings(max_examples=40)
@given(RANKS, MICROBATCHES, st.integers(1, 3), st.integers(20, 140))
def test_pictures_fit(ranks: int, microbatches: int, chunks: int, columns: int) -> None:
    timeline = simulate(make_schedule("interleaved", ranks=ranks, microbatches=microbatches, chunks=chunks))
    lines = render(timeline, columns=columns).splitlines()
    assert len(lines) > ranks
    assert max(map(len, lines)) <= columns
    assert {len(line) for line in lines[:ranks]} == {len(lines[0])}


def test_a_picture() -> None:
    picture = render(simulate(make_schedule("1f1b", ranks=2, microbatches=2)), columns=60)
    assert picture.splitlines() == [
        "rank 0 0>>>1>>>........0<<<<<<<....1<<<<<<<",
        "rank 1 ....0>>>0<<<<<<<1>>>1<<<<<<<........",
        "bubble: 33 %, 33 %; all ranks 33.3 %",
    ]


COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@given(COSTS, st.integers(1, 5), st.integers(0, 30), st.integers(0, 30))
def test_a_cut_by_cost_is_the_best(costs: list[int], stages: int, first: int, last: int) -> None:
    if stages > len(costs):
        with pytest.raises(LayoutError, match=f"{len(costs)} blocks? cannot be cut into {stages}"):
            cut_by_cost(costs, stages=stages)
        return

    def largest(counts: Sequence[int]) -> int:
        sums = [sum(costs[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    cut = cut_by_cost(costs, stages=stages, first=first, last=last)
    assert sum(cut) == len(costs)
    ends = ((0, *each, len(costs)) for each in combinations(range(1, len(costs)), stages - 1))
    assert largest(cut) == min(largest([b - a for a, b in pairwise(each)]) for each in ends)


def test_equal_blocks_are_cut_evenly() -> None:
    assert cut_by_cost([1.0] * 8, stages=4) == (2, 2, 2, 2)
    assert cut_by_cost([1.0] * 10, stages=4, first=1, last=1) == (2, 3, 3, 2)
    assert cut_by_cost([1.0] * 6, stages=2, last=2) == (4, 2)
    with pytest.raises(LayoutError, match="a block cannot cost less than nothing"):
        cut_by_cost([1.0] * 6, stages=2, first=-1)
