"""`Trainer.generate` gives the tokens of the library's own `generate` in one process, under every layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import PoolOptions, Workers

ALL = ["greedy", "sampling", "beams", "uncached"]
STAGED = ["greedy", "sampling", "uncached"]
LAYOUTS: list[Any] = [
    (2, "llama", 3, {"tensor": 2}, ["sampling", "beams"]),
    (2, "gpt2", 3, {"pipeline": 2}, ["sampling", "uncached"]),
    pytest.param(2, "llama", 3, {}, ["beams"], marks=pytest.mark.full),
    (4, "gpt2", 2, {"pipeline": 2, "tensor": 2, "sequence": True}, ["sampling", "greedy"]),
    (2, "t5", 3, {"tensor": 2}, ["greedy"]),
    pytest.param(
        *(2, "llama-deep", 2, {"pipeline": 2, "schedule": "interleaved", "chunks": 2}, ["greedy"]),
        marks=pytest.mark.full,
    ),
    pytest.param(4, "llama", 1, {"pipeline": 2, "tensor": 2}, STAGED, marks=pytest.mark.full),
    pytest.param(4, "llama", 3, {"pipeline": 2}, STAGED, marks=pytest.mark.full),
    pytest.param(4, "gpt2", 3, {"tensor": 2}, ALL, marks=pytest.mark.full),
    pytest.param(4, "gpt2", 2, {"tensor": 2, "sequence": True}, ALL, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("ranks", "model", "stage", "parallel", "ways"), LAYOUTS)
def test_generation_is_that_of_one_process(
    workers: Workers, tmp_path: Path, ranks: int, model: str, stage: int, parallel: dict[str, Any], ways: list[str]
) -> None:
    arguments = {"folder": str(tmp_path), "model": model, "ways": ways, "stage": stage, "parallel": parallel}
    results = workers.run(ranks, "generate_cases:agrees", timeout=120.0, **arguments)
    for found in results:
        assert not found["wrong"]
        assert found["kept"] == [True, True, True]
        assert found["drawn"][0] != found["drawn"][1]
        assert found["drawn"] == results[0]["drawn"]
    lengths = {tuple(found["lengths"]) for found in results}
    divided = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    assert len(lengths) == ranks // divided, "data-parallel ranks have generated as much as each was asked for"


def test_what_the_layout_does_not_allow(workers: Workers, tmp_path: Path) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5)) as pool:
        for messages in pool.run("generate_cases:refuses", folder=str(tmp_path)):
            where = "is not possible under parallel.pipeline"
            wanted = [
                "beam_search is not", f"output_hidden_states {where}", "max_time ends ranks", "synced_gpus is decided here",
                f"inputs_embeds {where}", "assisted_generation is not", f"cache_implementation: static {where}",
                "pad prompts on the left", "compute one batch together (parallel.tensor, parallel.pipeline); give all",
            ]  # fmt: skip
            for message, text in zip(messages, wanted, strict=True):
                assert text in message
