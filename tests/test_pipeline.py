"""Pipelines of several ranks: losses and gradients are those of one process over the same microbatches."""

from __future__ import annotations

from typing import Any

import pytest
from workers import Workers

EXACT = 1e-9


def run(workers: Workers, ranks: int, case: str, **arguments: Any) -> list[Any]:
    return workers.run(ranks, f"pipeline_cases:{case}", **arguments)


@pytest.mark.parametrize(
    ("ranks", "model", "schedule", "microbatches", "chunks"),
    [
        (2, "llama", "1f1b", 4, 1),
        (2, "gpt2", "1f1b", 7, 1),
        (4, "llama", "1f1b", 2, 1),
        (2, "qwen3", "gpipe", 4, 1),
        (2, "gemma", "interleaved", 7, 2),
        (2, "mixtral", "interleaved", 4, 2),
        (4, "gpt2", "zero_bubble", 7, 1),
        (2, "mixtral", "zero_bubble", 1, 1),
    ],
)
def test_training_is_that_of_one_process(
    workers: Workers, ranks: int, model: str, schedule: str, microbatches: int, chunks: int
) -> None:
    arguments = {"model": model, "schedule": schedule, "microbatches": microbatches, "chunks": chunks}
    results = run(workers, ranks, "trains", **arguments)
    for found in results:
        assert found["difference"] <= EXACT
        assert found["calls"] == [2 * microbatches]
    assert len({name for found in results for name in found["names"]}) == sum(len(found["names"]) for found in results)


@pytest.mark.parametrize(
    ("model", "chunks", "microbatches", "cached"),
    [("llama", 1, 1, True), ("gpt2", 2, 2, True), ("gemma3", 2, 3, True), ("mixtral", 1, 2, False)],
)
def test_generation_is_that_of_one_process(
    workers: Workers, model: str, chunks: int, microbatches: int, cached: bool
) -> None:
    arguments = {"model": model, "chunks": chunks, "microbatches": microbatches, "cached": cached}
    for found in run(workers, 2, "generates", **arguments):
        assert found["found"] == found["wanted"]
        first = found["wanted"][0]
        assert found["ended"] == first[: first.index(found["end"], 5) + 1]
