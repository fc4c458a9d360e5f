"""Pipelines of several ranks: losses and gradients are those of one process over the same microbatches."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.support.devices import DEVICE
from tests.support.pipeline_cases import build
from tests.support.tables import row, tried
from tests.support.workers import PoolOptions, Workers
from zeromesh.comm import point_to_point
from zeromesh.errors import CollectiveError

EXACT = 1e-9


def run(workers: Workers, ranks: int, case: str, **arguments: Any) -> list[Any]:
    return workers.run(ranks, f"pipeline_cases:{case}", **arguments)


MATRIX = [
    (ranks, model, schedule, microbatches, chunks)
    for ranks in (2, 4)
    for model in ("llama", "qwen3", "gemma", "gpt2", "mixtral")
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1))
    for microbatches in (1, 2, 4, 7)
    if ranks * chunks <= 4
]
USUAL = [
    (2, "llama", "1f1b", 4, 1),
    (2, "gpt2", "1f1b", 7, 1),
    (4, "llama", "1f1b", 2, 1),
    (2, "qwen3", "gpipe", 4, 1),
    (2, "gemma", "interleaved", 7, 2),
    (2, "mixtral", "interleaved", 4, 2),
    (4, "gpt2", "zero_bubble", 7, 1),
    (2, "mixtral", "zero_bubble", 1, 1),
    (2, "shared", "interleaved", 2, 2),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "model", "schedule", "microbatches", "chunks", "recompute"),
    [
        *((*case, False) for case in USUAL),
        *((2, "llama", schedule, 3, 1, True) for schedule in ("1f1b", "zero_bubble")),
        *(pytest.param(*case, False, marks=pytest.mark.full) for case in MATRIX if case not in USUAL),
    ],
)
def test_training_is_that_of_one_process(
    workers: Workers, ranks: int, model: str, schedule: str, microbatches: int, chunks: int, recompute: bool
) -> None:
    arguments = {"model": model, "schedule": schedule, "microbatches": microbatches, "chunks": chunks}
    results = run(workers, ranks, "trains", recompute=recompute, **arguments)
    names = [name for found in results for name in found["names"]]
    whole = sorted(name for name, _ in build(model, 4).named_parameters(remove_duplicate=False))
    assert sorted(names) == whole, "every parameter is on one rank, a tied one under each of its names"
    for found in results:
        assert found["difference"] <= EXACT
        assert found["called"] == len(found["names"])
        assert found["calls"] == [2 * microbatches], "gradients arrive once for each microbatch of two steps"
        assert found["spans"] == microbatches * chunks * (3 if schedule == "zero_bubble" else 2)
        assert all(0 <= part < 1 for part in found["bubble"])
        last = str(ranks * chunks - 1)
        tied = {"gpt2": "transformer.wte.weight", "gemma": "model.embed_tokens.weight"}.get(model)
        ties = [[tied, "lm_head.weight"]] if tied else []
        if model == "shared":
            leaves = [f"mlp.{each}_proj.{leaf}" for each in ("gate", "up", "down") for leaf in ("weight", "bias")]
            ties = [[f"model.layers.{number}.{leaf}" for number in (0, 3)] for leaf in leaves]
        assert found["ties"] == [[names, {"0": names[0], last: names[1]}] for names in ties]


@pytest.mark.parametrize(("model", "chunks"), [("mixtral", 2), ("gpt2", 1)])
def test_evaluation_is_that_of_one_process(workers: Workers, model: str, chunks: int) -> None:
    assert max(run(workers, 2, "evaluates", model=model, microbatches=3, chunks=chunks)) <= EXACT


GENERATES = (("llama", 1, 1, True), ("gpt2", 2, 2, True), ("gemma3", 2, 3, True), ("mixtral", 1, 2, False))
test_channels_and_generation = tried(
    "pipeline_cases",
    [
        # On a device a receive waits for the shapes of its message, so these orders are for hosts alone.
        *((row(4, "channels_carry"), row(2, "channels_forget")) if DEVICE.type == "cpu" else ()),
        row(2, "disagrees"),
        *(
            row(2, "generates", model=model, chunks=chunks, microbatches=microbatches, cached=cached)
            for model, chunks, microbatches, cached in GENERATES
        ),
    ],
    folder=False,
)


def test_a_message_that_has_failed_is_named_by_the_next_one() -> None:
    """The other end's death has ended it."""

    def failed(kind: object, call: Any) -> Mock:
        return Mock(wait=Mock(side_effect=CollectiveError(f"rank 1 is gone; {call.what}")))

    pair = SimpleNamespace(start=failed, on_stream=False, index=0)
    channel = point_to_point._Channel(pair, torch.device("cpu"))  # type: ignore[arg-type]
    channel.send(torch.ones(2), "the first")
    with pytest.raises(CollectiveError, match="rank 1 is gone; the first"):
        channel.send(torch.ones(2), "the second")


@pytest.mark.skipif(DEVICE.type == "sim", reason="what moves the simulated device's tensors says itself who is gone")
def test_a_rank_that_is_gone_is_named(workers: Workers) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5)) as pool:
        first, second = pool.outcomes("pipeline_cases:loses_a_rank")
    assert second.error == "died"
    assert first.error == "CollectiveError"
    assert "rank 1 is gone" in first.message
    assert "of microbatch" in first.message
