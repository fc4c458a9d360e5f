"""Streams dealt by index: every sample once, and found again, by the stream's own state or without it."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from zeromesh.errors import CheckpointError, DataError
from zeromesh.trainer.data.streaming import StreamedDataset, digest, is_read_once, is_stream


class Numbers:
    """A stream without a state, of another order in each epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch, self.read = length, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(self.length):
            self.read += 1
            # The picture is represented by its address, and the label has no dim.
            yield {"x": 100 * self.epoch + number, "picture": object(), "label": torch.tensor(number)}


def stream(length: int = 10, shards: int = 2) -> IterableDataset:
    return Dataset.from_dict({"x": list(range(length))}).to_iterable_dataset(num_shards=shards)


def values(dataset: StreamedDataset, indices: range) -> list[int]:
    return [dataset[index]["x"] for index in indices]


def test_a_stream_goes_on_over_epochs() -> None:
    dataset = StreamedDataset(Numbers(5), block=4)
    assert values(dataset, range(12)) == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104, 200, 201]
    assert values(dataset, range(8, 12)) == [103, 104, 200, 201]
    assert dataset[0]["x"] == 0
    assert is_stream(Numbers(1))
    assert not is_stream([1])
    assert is_stream({1})
    assert is_stream(DataLoader([1], None))
    assert not is_stream(DataLoader([1]))
    assert not is_stream(DataLoader(Dataset.from_dict({"x": [1]}).to_iterable_dataset(), 1))


class Stateful:
    """A stream of one's own whose state leads `short` samples before the place where it was taken."""

    def __init__(self, length: int, short: int = 0) -> None:
        self.length, self.short, self.place, self.loaded = length, short, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {"place": max(0, self.place - self.short)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
        self.loaded += 1

    def __iter__(self) -> Iterator[dict[str, int]]:
        while self.place < self.length:
            self.place += 1
            yield {"x": self.place - 1}
        self.place = 0


class Drawn:
    """A stream that draws from the global generators, and drops what it draws."""

    def __iter__(self) -> Iterator[dict[str, float]]:
        yield from ({"x": random.random() + float(torch.rand(()))} for _ in range(40) if np.random.rand() < 0.5)


def two(shuffled: bool = False) -> list[IterableDataset]:
    """Two streams, of which the first may be shuffled in a buffer."""
    first = Dataset.from_dict({"x": list(range(100, 130))}).to_iterable_dataset(num_shards=3)
    return [first.shuffle(seed=1, buffer_size=8) if shuffled else first, stream(20)]


def mixed(strategy: str, **options: Any) -> IterableDataset:
    return interleave_datasets(two(shuffled=True), stopping_strategy=strategy, **options)  # type: ignore[type-var]


KINDS: dict[str, Any] = {
    "without a state": lambda: Numbers(10),
    "plain": lambda: stream(40, 4),
    "shuffled": lambda: stream(40, 4).shuffle(seed=3, buffer_size=10),
    "interleaved": lambda: mixed("first_exhausted"),
    "interleaved with probabilities": lambda: mixed("first_exhausted", probabilities=[0.3, 0.7], seed=2),
    "all exhausted": lambda: mixed("all_exhausted", probabilities=[0.6, 0.4], seed=2),
    "mapped, filtered": lambda: stream(60).map(lambda row: {"x": 3 * row["x"]}).filter(lambda row: row["x"] % 2 == 0),
    "mapped in batches": lambda: stream(40).map(lambda rows: {"x": rows["x"][::-1]}, batched=True, batch_size=7),
    "taken and left": lambda: stream(60).shuffle(seed=4, buffer_size=6).skip(5).take(33),
    "concatenated": lambda: concatenate_datasets(two(shuffled=True)),
    "repeated": lambda: stream(9).shuffle(seed=5, buffer_size=4).repeat(3),
    "several epochs": lambda: stream(7).shuffle(seed=6, buffer_size=5),
    "a node's part": lambda: split_dataset_by_node(stream(80, 4).shuffle(seed=7, buffer_size=6), rank=1, world_size=2),
    "one's own": lambda: Stateful(17),
    "one's own, near": lambda: Stateful(17, short=1),
    "drawn": Drawn,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "proof"),
    [
        pytest.param(kind, proof, marks=[] if (number + place) % 2 else pytest.mark.full, id=f"{way}-{kind}")
        for number, kind in enumerate(KINDS)
        for place, (way, proof) in enumerate({"read again": 4096, "by the state": 12}.items())
    ],
)
def test_a_stream_of_any_kind_goes_on_at_the_very_next_sample(kind: str, proof: int) -> None:
    whole = values(StreamedDataset(KINDS[kind](), block=4), range(60))
    for position, further in ((0, 3), (4, 0), (8, 3), (10, 3), (12, 0), (20, 0), (24, 3), (32, 0)):
        first = StreamedDataset(KINDS[kind](), block=4, proof=proof)
        values(first, range(position + further))
        state = json.loads(json.dumps(first.state(position)))
        second = StreamedDataset(KINDS[kind](), block=4, proof=proof)
        second[0]  # The first batch is checked before.
        second.restore(state, "here")
        assert values(second, range(position, 40)) == whole[position:40]
        again = StreamedDataset(KINDS[kind](), block=4, proof=proof)
        again.restore(second.state(40), "here")
        assert values(again, range(40, 60)) == whole[40:]


def lines(dataset: StreamedDataset) -> list[str]:
    shown: list[str] = []
    dataset.show(shown.append, lambda text: None)
    return shown


def test_a_state_spares_reading() -> None:
    first = StreamedDataset(Stateful(1000), block=4, proof=16)
    state = first.state(600)
    assert state["earlier"]["position"] == 584
    source = Stateful(1000)
    second = StreamedDataset(source, block=4, proof=16)
    second.restore(state, "here")
    assert (second[600]["x"], source.loaded, second.reading[1]) == (600, 1, 16)
    assert "goes on from its own state" in lines(second)[0]
    near = StreamedDataset(Stateful(1000, short=1), block=4, proof=16)
    state = near.state(600)
    near.restore(state, "here")
    assert (near[600]["x"], near.reading[1]) == (600, 600)
    assert "does not lead to its very next sample" in lines(near)[0]
    assert lines(near) == []


def test_a_state_is_taken_as_it_is_on_request() -> None:
    state = StreamedDataset(Stateful(100, short=1), block=4).state(40)
    taken = StreamedDataset(Stateful(100), block=4, resume="state")
    taken.restore(state, "here")
    assert taken[40]["x"] == 39
    assert "samples may be missing, or come twice" in lines(taken)[0]
    again = StreamedDataset(Stateful(100), block=4, resume="state")
    again.restore({**state, "stream": {}}, "here")
    assert again[40]["x"] == 40


@pytest.mark.parametrize("others", [{}, {"y": 1}], ids=["alone", "before a number"])
def test_a_state_that_nothing_proves_is_not_trusted(others: dict[str, Any]) -> None:
    """A digest says nothing of an object that is represented by its address."""

    class Objects(Stateful):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from ({"x": object(), **others} for _ in super().__iter__())

    assert StreamedDataset(Objects(100), block=4, proof=4).state(40)["earlier"] is None
    arrays = StreamedDataset([{"x": np.arange(5000)}, {"x": np.arange(5000) % 4000}], block=2)
    others = StreamedDataset([{"x": np.arange(5000)}, {"x": np.arange(5000) % 3000}], block=2)
    assert arrays.state(2)["chain"] != others.state(2)["chain"]


def test_an_iterator_is_read_on() -> None:
    first, second = (StreamedDataset(iter(Numbers(40)), block=4) for _ in range(2))
    state = first.state(12)
    second[0]
    second.restore(state, "here")
    assert values(second, range(12, 20)) == list(range(12, 20))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("make", [lambda: Stateful(40), lambda: stream(40)])
def test_a_stream_that_was_read_in_this_process_is_read_from_its_beginning(make: Any, begun: bool) -> None:
    source = make()
    values(StreamedDataset(source, block=4), range(6))
    later = StreamedDataset(source, block=4)  # As in a process that stays when other ranks are lost.
    if begun:
        later.begin_again()
    assert values(later, range(4)) == [0, 1, 2, 3]
    state = StreamedDataset(make(), block=4).state(8)
    last = StreamedDataset(source, block=4)
    last.restore(state, "here")
    assert values(last, range(8, 12)) == [8, 9, 10, 11]


def test_an_iterator_without_a_state_is_read_once() -> None:
    assert is_read_once(iter(Numbers(4)))
    assert not any(is_read_once(each) for each in (Numbers(4), Stateful(4), stream(4), [1], None))


def test_a_generator_that_has_ended_is_no_empty_dataset() -> None:
    stream = StreamedDataset(iter(Numbers(6)), block=4)
    assert values(stream, range(4)) == list(range(4))
    with pytest.raises(DataError, match="or is a generator, which is read but once"):
        stream[8]


def test_progress_of_reading_again_is_shown() -> None:
    state, shown = StreamedDataset(Numbers(40), block=4).state(16), list[str]()
    dataset = StreamedDataset(Numbers(40), block=4)
    dataset.waiting = lambda: dataset.show(shown.append, shown.append)
    dataset.restore(state, "here")
    assert shown == [
        "data: the stream is read again from its beginning (16 samples to read, without collating)",
        "reading the stream [                    ] 0 of 16 samples",
        "reading the stream [=====               ] 4 of 16 samples",
        "reading the stream [==========          ] 8 of 16 samples",
        "reading the stream [===============     ] 12 of 16 samples",
    ]


def test_the_latest_block_can_be_read_twice_at_no_cost() -> None:
    source = Numbers(40)
    dataset = StreamedDataset(source, block=4)
    values(dataset, range(9))
    read = source.read
    assert values(dataset, range(4, 9)) == [4, 5, 6, 7, 8]
    assert source.read == read
    assert values(dataset, range(2)) == [0, 1]
    assert source.read > read


def test_blocks_draw_numbers_of_their_own_and_none_of_the_process() -> None:
    def drawn(seed: int, order: list[int]) -> dict[int, float]:
        dataset = StreamedDataset(Drawn(), block=4, seed=seed)
        return {index: dataset[index]["x"] for index in order}

    before = (random.getstate(), torch.get_rng_state())
    first = drawn(1, list(range(12)))
    assert (random.getstate(), torch.equal(torch.get_rng_state(), before[1])) == (before[0], True)
    assert len({*first.values()}) == 12
    assert {*first.values()}.isdisjoint(drawn(2, list(range(12))).values())
    assert drawn(1, [9, 0, 5]) == {index: first[index] for index in (9, 0, 5)}


@pytest.mark.parametrize(
    "change", [{"position": -1}, {"chain": 1.5}, {"epoch": True}, {"begun": None}, {"earlier": {"position": 0}}, {"earlier": 3}]
)
def test_a_state_of_another_form_is_refused(change: dict[str, Any]) -> None:
    state = StreamedDataset(Stateful(40), block=4, proof=8).state(24)
    with pytest.raises(CheckpointError, match="there: the state of the training stream is not one that this version"):
        StreamedDataset(Stateful(40), block=4).restore({**state, **change}, "there")


def test_contents_tell_samples_apart() -> None:
    numbers, ones = torch.arange(6), np.ones(3, np.float32)
    different: list[Any] = [
        *({"x": numbers}, {"y": numbers}, {"x": numbers.flip(0)}, {"x": ones}, {"x": ones * 2}, {"x": "1"}, {"x": 1}),
        *({"x": None}, {"x": [1, 2]}, {"x": "<a at 0x1f>"}, {"x": "<a at 0x2f>"}, {}, [numbers], [numbers, numbers], 5, "5"),
        *({"x": np.array(["a"], object)}, {"x": np.array(["b"], object)}),
    ]
    assert len({digest(each) for each in different}) == len(different)
    assert digest({"x": object(), "y": 1}) == digest({"x": object(), "y": 1}) == digest({"y": 1})
    assert digest({"x": lambda: 1, "y": 1}) == digest({"y": 1}), "a local function has an address too"
    equal = [np.array(["".join(["a", "b"])], object) for _ in range(2)]  # of other addresses
    assert digest({"x": equal[0]}) == digest({"x": equal[1]})
    later = numbers.clone()
    later[4] = 9
    assert digest({"x": later}, 4) == digest({"x": numbers}, 4)
    assert digest({"x": later}, 5) != digest({"x": numbers}, 5)
    assert digest([numbers]) == digest((numbers,))


def test_another_stream_is_refused() -> None:
    state = StreamedDataset(Numbers(10), block=4).state(8)
    with pytest.raises(DataError, match="samples before sample 8 of the stream are not what they were"):
        StreamedDataset(Numbers(7), block=4).restore(state, "here")
    with pytest.raises(DataError, match="has no samples"):
        StreamedDataset(Numbers(0), block=4)[0]
