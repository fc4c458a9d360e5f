"""Streams dealt by index: every sample once, and found again, by the stream's own state or without it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from zeromesh.errors import DataError
from zeromesh.trainer.data.streaming import StreamedDataset, is_stream


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


@pytest.mark.parametrize("make", [lambda: Numbers(10), stream], ids=["without a state", "datasets"])
@pytest.mark.parametrize("position", [0, 4, 8, 10, 24])
def test_a_stream_is_found_again(make: Any, position: int) -> None:
    first = StreamedDataset(make(), block=4)
    values(first, range(position + 3))
    state = first.state(position)
    wanted = values(first, range(position, position + 13))
    second = StreamedDataset(make(), block=4)
    second.restore(state, "here")
    assert values(second, range(position, position + 13)) == wanted


def test_a_state_spares_reading() -> None:
    first = StreamedDataset(stream(), block=2)
    values(first, range(8))
    assert first.state(8)["stream"] is not None
    plain = Numbers(10)
    again = StreamedDataset(plain, block=2)
    again.restore(StreamedDataset(Numbers(10), block=2).state(6), "here")
    assert plain.read == 7


def test_a_state_that_leads_elsewhere_is_found_out() -> None:
    first = StreamedDataset(stream(), block=4)
    values(first, range(9))
    state = {**first.state(8), "stream": StreamedDataset(stream(), block=4).state(0)["stream"]}
    second = StreamedDataset(stream(), block=4)
    second.restore(state, "here")
    assert values(second, range(8, 12)) == values(first, range(8, 12))


def test_another_stream_is_refused() -> None:
    state = StreamedDataset(Numbers(10), block=4).state(8)
    with pytest.raises(DataError, match="sample 8 of the stream is not what it was"):
        StreamedDataset(Numbers(7), block=4).restore(state, "here")
    with pytest.raises(DataError, match="has no samples"):
        StreamedDataset(Numbers(0), block=4)[0]
