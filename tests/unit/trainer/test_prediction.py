"""Outputs of an evaluation are put together piece by piece: padded where lengths differ, and without copies on the way."""

import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zeromesh.errors import DataError
from zeromesh.trainer.loop.prediction import Collector

ALONE: Any = SimpleNamespace(
    world=SimpleNamespace(gather_bytes=lambda payload, what: [payload], ranks=[0]),
    shape=SimpleNamespace(data_index=lambda rank: 0),
)


def collected(*outputs: Any, of: Callable[..., Any] = lambda found: found) -> Collector:
    collector = Collector(ALONE, (), None)
    for each in outputs:
        collector.add([collector.part(of(each), {"labels": torch.arange(2)})])
    return collector


def test_pieces_of_several_lengths_are_padded() -> None:
    found = collected(
        torch.ones(2, 3, 4), torch.zeros(1, 5, 4), of=lambda each: {"logits": each, "state": (each[:, 0], None)}
    )
    logits, state = found.result().predictions
    assert (logits.shape, state[0].shape, state[1]) == ((3, 5, 4), (3, 4), None)
    assert logits[:2, :3].min() == 1
    assert (logits[:2, 3:] == -100).all()
    assert (logits[2] == 0).all()


def test_pieces_that_do_not_go_together_are_refused() -> None:
    for outputs in ((torch.ones(2, 3, 4), torch.ones(2, 3, 1)), (torch.ones(2), (torch.ones(2), torch.ones(2)))):
        with pytest.raises(DataError, match="cannot be put together"):
            collected(*outputs).result()


def test_pieces_are_put_right_into_the_whole() -> None:
    found = collected(*(torch.full((2, 64, 1000), float(number)) for number in range(16)))
    assert found.nbytes >= 16 * 2 * 64 * 1000 * 4
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    whole = found.result().predictions
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert [float(each) for each in whole[::2, 0, 0]] == list(range(16))
    assert peak <= 1.2 * whole.nbytes
    assert isinstance(whole, np.ndarray)
