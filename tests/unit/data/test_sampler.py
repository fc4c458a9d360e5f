"""Samples of a step and their order: the same for every number of ranks, every sample once per epoch."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.errors import ConfigError
from zeromesh.trainer.data.sampler import BatchPlan, Microbatch, SampleOrder, blocks_of_tokens, integer_weights, shares_by

ORDER_OF_TEN = [3, 5, 9, 4, 2, 8, 6, 0, 7, 1, 8, 2, 1, 9, 7, 0, 5, 3, 4, 6]


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    micro = draw(st.integers(1, 9))
    return BatchPlan(global_size=draw(st.integers(micro, 70)), micro_size=micro, data_ranks=draw(st.integers(1, 8)))


def weighted(plan: BatchPlan, step: int) -> list[Microbatch]:
    """Those of all ranks that count."""
    return [each for rank in range(plan.data_ranks) for each in plan.microbatches(step, rank) if each.weight]


@given(plan=plans(), step=st.integers(0, 10_000))
def test_weighted_microbatches_are_the_global_batch(plan: BatchPlan, step: int) -> None:
    real = sorted(weighted(plan, step), key=lambda each: each.first_sample)
    samples = [sample for each in real for sample in each.samples]
    assert samples == list(range(step * plan.global_size, (step + 1) * plan.global_size))
    assert len(real) == math.ceil(plan.global_size / plan.micro_size)
    assert all(len(each.samples) == plan.micro_size for each in real[:-1])
    assert all(each.first_sample == each.samples[0] for each in real)


@given(
    seconds=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), micro=st.integers(1, 4), cap=st.sampled_from([1.0, 2.0, 9.0])
)
def test_no_other_shares_end_earlier(seconds: list[float], micro: int, cap: float) -> None:
    """Among all that have 1 to the most samples of each rank."""
    ranks, most = len(seconds), max(1, min(int(cap * micro), micro * len(seconds)))
    found = shares_by(seconds, micro * ranks, most)
    others = [each for each in itertools.product(range(1, most + 1), repeat=ranks) if sum(each) == micro * ranks]
    ends = {each: max(map(math.prod, zip(each, seconds, strict=True))) for each in others}
    assert ends[found] == min(ends.values())


@given(plan=plans(), step=st.integers(0, 1000), data=st.data())
def test_shares_cut_the_samples_of_each_round_in_their_order(plan: BatchPlan, step: int, data: st.DataObject) -> None:
    seconds = data.draw(st.lists(st.floats(0.1, 10.0), min_size=plan.data_ranks, max_size=plan.data_ranks))
    shares = shares_by(seconds, plan.round_size, plan.round_size)
    cut = replace(plan, shares=shares)
    rounds = [[cut.microbatch(step, rank, index) for rank in range(plan.data_ranks)] for index in range(plan.rounds_of(step))]
    counted = [each for one in rounds for each in one if each.weight]
    assert [sample for each in counted for sample in each.samples] == [*plan.samples_of(step)]
    assert [[len(each.samples) for each in one] for one in rounds[:-1]] == [[*shares]] * (len(rounds) - 1)
    assert all(0 < len(each.samples) <= share for one in rounds for each, share in zip(one, shares, strict=True))
    even = replace(plan, shares=(plan.micro_size,) * plan.data_ranks)
    assert even.microbatches(step, 0) == plan.microbatches(step, 0)


@given(plan=plans(), other_ranks=st.integers(1, 8), step=st.integers(0, 1000))
def test_blocks_do_not_depend_on_the_number_of_ranks(plan: BatchPlan, other_ranks: int, step: int) -> None:
    other = BatchPlan(global_size=plan.global_size, micro_size=plan.micro_size, data_ranks=other_ranks)
    assert {*weighted(plan, step)} == {*weighted(other, step)}


@given(plan=plans(), step=st.integers(0, 1000))
def test_all_ranks_run_accumulation_many_and_padding_is_the_first_block(plan: BatchPlan, step: int) -> None:
    first = plan.microbatches(step, 0)[0]
    blocks = math.ceil(plan.global_size / plan.micro_size)
    for rank in range(plan.data_ranks):
        mine = plan.microbatches(step, rank)
        assert len(mine) == plan.accumulation
        for turn, each in enumerate(mine):
            block = turn * plan.data_ranks + rank
            assert each.weight == (1 if block < blocks else 0)
            if not each.weight:
                assert (each.first_sample, each.samples) == (first.first_sample, first.samples)
    assert (plan.accumulation - 1) * plan.data_ranks < blocks <= plan.accumulation * plan.data_ranks


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((16, 2, 2), "global 16 = micro 2 x accumulation 4 x data-parallel 2"),
        ((10, 2, 3), "global 10 = micro 2 x accumulation 2 x data-parallel 3 - 2 zero-weight samples"),
        ((11, 2, 3), "global 11 = micro 2 x accumulation 2 x data-parallel 3 - 1 zero-weight sample"),
        ((1, 1, 4), "global 1 = micro 1 x accumulation 1 x data-parallel 4 - 3 zero-weight samples"),
    ],
)
def test_the_equation_holds_in_one_line(sizes: tuple[int, int, int], line: str) -> None:
    plan = BatchPlan(global_size=sizes[0], micro_size=sizes[1], data_ranks=sizes[2])
    assert plan.equation() == line


def test_a_microbatch_that_is_larger_than_the_global_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="is larger than"):
        BatchPlan(global_size=4, micro_size=8, data_ranks=1)


@given(length=st.integers(1, 300), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_every_epoch_holds_every_sample_once(length: int, seed: int, epoch: int) -> None:
    order = SampleOrder(length=length, seed=seed)
    samples = range(epoch * length, (epoch + 1) * length)
    assert sorted(map(order.dataset_index, samples)) == list(range(length))


def test_a_length_beyond_memory_costs_nothing() -> None:
    order = SampleOrder(length=10**15, seed=0)
    seen = {order.dataset_index(sample) for sample in range(1000)}
    assert len(seen) == 1000
    assert max(seen) > 9 * 10**14
    assert min(seen) < 10**14


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def epoch(number: int, seed: int) -> list[int]:
        order = SampleOrder(length=100, seed=seed)
        return [order.dataset_index(number * 100 + i) for i in range(100)]

    assert epoch(0, 0) == epoch(0, 0)
    assert epoch(0, 0) != epoch(1, 0)
    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != list(range(100))
    mixed = SampleOrder(length=100, seed=0, parts=((50, 1), (50, 1)))
    found = [mixed.dataset_index(sample) for sample in range(100)]
    assert [index + 50 for index in found if index < 50] != [index for index in found if index >= 50]
    assert len({SampleOrder(length=2, seed=seed).dataset_index(0) for seed in range(40)}) == 2


def test_without_shuffle_the_order_is_the_dataset_s() -> None:
    order = SampleOrder(length=5, seed=3, shuffle=False)
    assert [order.dataset_index(sample) for sample in range(12)] == [0, 1, 2, 3, 4] * 2 + [0, 1]
    stream = SampleOrder(length=5, seed=3, shuffle=False, endless=True)
    assert [stream.dataset_index(sample) for sample in range(12)] == list(range(12))
    # Of four samples of a mixture one is of the first part, evenly among the others.
    mixed = SampleOrder(length=8, seed=3, shuffle=False, parts=((2, 1), (6, 3)))
    assert [mixed.dataset_index(sample) for sample in range(8)] == [2, 0, 3, 4, 5, 1, 6, 7]
    assert integer_weights([0.5, 0.25]) == (2, 1)
    assert sum(integer_weights([(1 << 20) - 1, 1])) == 1 << 20


def test_a_stream_is_shuffled_in_blocks() -> None:
    order = SampleOrder(length=50, seed=3, endless=True)
    blocks = [[order.dataset_index(sample) for sample in range(at, at + 50)] for at in (0, 50)]
    assert [sorted(block) for block in blocks] == [list(range(50)), list(range(50, 100))]
    assert blocks[0] != sorted(blocks[0])
    assert blocks[1] != [index + 50 for index in blocks[0]]


def test_the_order_is_the_same_for_ever() -> None:
    """A run that is resumed with another version of this project must see the data it would have seen."""
    order = SampleOrder(length=10, seed=0)
    assert [order.dataset_index(sample) for sample in range(20)] == ORDER_OF_TEN
    large = SampleOrder(length=1000, seed=7)
    assert [large.dataset_index(sample) for sample in (0, 1, 999, 1000, 54_321)] == [610, 487, 586, 894, 41]
    mixed = SampleOrder(length=30, seed=7, parts=((10, 2), (20, 1)))
    assert [mixed.dataset_index(sample) for sample in range(12)] == [0, 19, 4, 6, 18, 7, 8, 21, 1, 3, 24, 9]


def test_all_orders_of_a_small_dataset_are_about_equally_likely() -> None:
    """120 orders, 100 expected of each: chi-square has mean 119 and standard deviation 15.4."""
    seen = Counter(tuple(map(SampleOrder(length=5, seed=seed).dataset_index, range(5))) for seed in range(12_000))
    assert len(seen) == 120
    assert sum((count - 100) ** 2 / 100 for count in seen.values()) < 119 + 5 * 15.4


def test_neighbours_in_the_dataset_are_not_neighbours_in_the_order() -> None:
    order = SampleOrder(length=10_000, seed=0)
    indices = [order.dataset_index(sample) for sample in range(10_000)]
    adjacent = sum(abs(a - b) == 1 for a, b in itertools.pairwise(indices))
    assert adjacent < 12  # 2 expected


@st.composite
def epochs_of(draw: st.DrawFn) -> BatchPlan:
    micro, last = draw(st.integers(1, 5)), draw(st.sampled_from(["partial", "drop"]))
    size = draw(st.integers(micro, 40))
    least = size if last == "drop" else 1
    length = draw(st.integers(least, 120))
    ranks = draw(st.integers(1, 4))
    return BatchPlan(global_size=size, micro_size=micro, data_ranks=ranks, epoch_size=length, last=last)


@given(plan=epochs_of(), epochs=st.integers(1, 4))
def test_every_epoch_has_its_own_samples_once(plan: BatchPlan, epochs: int) -> None:
    steps = plan.steps_of(epochs)
    length, whole = plan.epoch_size or 0, plan.global_size
    seen = [sample for step in range(steps) for each in weighted(plan, step) for sample in each.samples]
    kept = length if plan.last == "partial" else length - length % whole
    assert sorted(seen) == [epoch * length + sample for epoch in range(epochs) for sample in range(kept)]
    ends = [step for step in range(steps) if plan.ends_epoch(step)]
    assert len(ends) == epochs
    assert ends[-1] == steps - 1
    assert plan.epoch_after(steps) == epochs
    assert [plan.next_epoch(step) for step in (0, ends[0] + 1)] == [0, ends[0] + 1]
    if ends[0] > 0:
        assert plan.next_epoch(1) == ends[0] + 1


@given(micro=st.integers(1, 5), rounds=st.integers(1, 5), length=st.integers(1, 120), ranks=st.integers(1, 4))
def test_parts_of_an_epoch_are_those_of_transformers(micro: int, rounds: int, length: int, ranks: int) -> None:
    """Which counts the batches of a rank, and takes so many at a time for a step."""
    size = micro * rounds * ranks
    plan = BatchPlan(global_size=size, micro_size=micro, data_ranks=ranks, epoch_size=length, last="partial")
    loader = math.ceil(math.ceil(length / micro) / ranks)
    done, step = 0, 0
    for epoch in range(2):
        while done < loader * (epoch + 1):
            done += plan.rounds_of(step)
            step += 1
            assert plan.epoch_after(step) == pytest.approx(done / loader, rel=1e-12)
    assert step == 2 * (plan.steps_per_epoch or 0)


@given(size=st.integers(1, 20), length=st.integers(1, 90), epochs=st.floats(0.1, 4))
def test_carried_batches_pass_over_the_data_as_often_as_asked(size: int, length: int, epochs: float) -> None:
    plan = BatchPlan(global_size=size, micro_size=1, data_ranks=1, epoch_size=length)
    steps = plan.steps_of(epochs)
    assert (steps - 1) * size < max(1, epochs * length) * (1 + 1e-9)
    assert steps * size >= epochs * length * (1 - 1e-9)
    assert sum(plan.ends_epoch(step) for step in range(steps)) <= steps * size // length


def test_epochs_without_a_step_are_refused() -> None:
    with pytest.raises(ConfigError, match="an epoch of 3 samples has no whole global batch of 4"):
        BatchPlan(global_size=4, micro_size=1, data_ranks=1, epoch_size=3, last="drop")
    with pytest.raises(ConfigError, match=r"run\.epochs: the training data has no length"):
        BatchPlan(global_size=4, micro_size=1, data_ranks=1).steps_of(2)
    dropped = BatchPlan(global_size=4, micro_size=1, data_ranks=1, epoch_size=10, last="drop")
    assert [dropped.epoch_after(step) for step in range(3)] == [0.0, 0.5, 1.0]


def test_a_stream_has_no_next_epoch_to_wait_for() -> None:
    plan = BatchPlan(global_size=8, micro_size=2, data_ranks=2)
    assert [plan.next_epoch(step) for step in (0, 1, 7)] == [0, 1, 7]


def test_epochs_are_counted_in_integers() -> None:
    """15 epochs of 25 samples in threes are 125 steps: in floating point they were 126."""
    plan = BatchPlan(global_size=3, micro_size=1, data_ranks=1, epoch_size=25)
    assert plan.steps_of(15) == 125
    assert plan.steps_of(0.1) == 1
    for size, samples, epochs in itertools.product(range(1, 40), range(1, 60), (1, 3, 7, 15, 0.1, 2.3)):
        plan = BatchPlan(global_size=size, micro_size=1, data_ranks=1, epoch_size=samples)
        assert plan.steps_of(epochs) == max(1, -(-round(10 * epochs) * samples // (10 * size)))
    assert [step for step in range(20) if plan.ends_epoch(step)] == [
        step for step in range(20) if (step + 1) * 39 // 59 > step * 39 // 59
    ]


def test_a_microbatch_is_found_whatever_the_length() -> None:
    """The first of a billion samples, and the last, without making those between."""
    plan = BatchPlan(global_size=10**9, micro_size=4, data_ranks=2)
    assert plan.microbatch(0, 0, 0).samples == (0, 1, 2, 3)
    assert plan.microbatch(0, 1, plan.accumulation - 1).samples == tuple(range(10**9 - 4, 10**9))


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), tokens=st.integers(60, 200), ranks=st.integers(1, 5))
def test_blocks_of_tokens_hold_every_sample_once_within_the_budget(lengths: list[int], tokens: int, ranks: int) -> None:
    samples = range(7, 7 + len(lengths))
    blocks = blocks_of_tokens(samples, lengths, tokens)
    assert sorted(each for block in blocks for each in block) == list(samples)
    longest = [max(lengths[each - 7] for each in block) for block in blocks]
    assert all(len(block) * most <= tokens for block, most in zip(blocks, longest, strict=True))
    assert longest == sorted(longest, reverse=True)
    assert all(list(block) == sorted(block) for block in blocks)
    # Every rank runs as many, and those past the end have no weight.
    plan = BatchPlan(global_size=len(lengths), micro_size=1, data_ranks=ranks, tokens=tokens, blocks=lambda step: blocks)
    mine = [plan.microbatches(0, rank) for rank in range(ranks)]
    assert {len(each) for each in mine} == {plan.rounds_of(0)} == {-(-len(blocks) // ranks)}
    dealt = [each.samples for row in zip(*mine, strict=True) for each in row if each.weight]
    assert tuple(dealt) == blocks
    assert {each.samples for row in mine for each in row if not each.weight} <= {blocks[-1]}
    assert plan.equation() == f"global {len(lengths)} in microbatches of {tokens} tokens"
