"""Evaluations that generate give the tokens of the library's own `generate` in one process, under every layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.inference.test_generator import ALONE, IMPOSSIBLE, LAYOUTS
from tests.support.workers import PoolOptions, Workers

SHORT = {("llama", "sharded"), ("t5", "tensor")}
CASES: list[Any] = [
    pytest.param(model, layout, marks=() if (model, layout) in SHORT else pytest.mark.full)
    for model in ("llama", "gpt2", "t5", "bart")
    for layout in LAYOUTS
    if layout not in {*IMPOSSIBLE.get(model, ()), *set[str]().union(*ALONE.values()), "stored"}
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_predictions_are_those_of_one_process(workers: Workers, tmp_path: Path, model: str, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    if layout == "file":
        sections = {"offload": {"parameters": "file", "directory": str(tmp_path / "swap")}}
    arguments: dict[str, Any] = {"folder": str(tmp_path), "model": model, "sections": sections}
    for found in workers.run(ranks, "evaluation_cases:agrees", timeout=120.0, **arguments):
        assert not found["wrong"]
        assert found["kinds"] > 1, "prompts are continued by one text, which any mistake would give too"


def test_what_is_refused(workers: Workers, tmp_path: Path) -> None:
    for messages in workers.run(2, "evaluation_cases:refuses", timeout=60.0, folder=str(tmp_path)):
        wanted = {
            "no metrics": "predict_with_generate: what is generated is for compute_metrics",
            "no generation": "max_new_tokens: an evaluation generates with predict_with_generate=True",
            "field": "max_new_token is no field of transformers' GenerationConfig",
            "several": "num_return_sequences: 2: a sample has one prediction",
            "length": "max_length counts the padding of prompts; give max_new_tokens",
            "stop": "stop_strings needs a tokenizer",
            "beams": "beam_search is not possible under parallel.pipeline",
            "afterwards": "(5, 6)",
        }
        for name, text in wanted.items():
            assert text in messages[name], messages


@pytest.mark.full
def test_a_sample_without_a_prompt_is_named_on_all_ranks(workers: Workers, tmp_path: Path) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5)) as pool:
        for message in pool.run("evaluation_cases:lacks_a_prompt", timeout=60.0, folder=str(tmp_path)):
            assert "sample 3 has no prompt" in message


@pytest.mark.full
@pytest.mark.parametrize("layout", ["sharded", "tensor"])
@pytest.mark.parametrize("model", ["llama", "t5"])
def test_beams(workers: Workers, tmp_path: Path, model: str, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    arguments: dict[str, Any] = {"folder": str(tmp_path), "model": model, "sections": sections}
    for found in workers.run(
        ranks, "evaluation_cases:agrees", timeout=120.0, count=7, fields={"num_beams": 3}, **arguments
    ):
        assert not found["wrong"]


@pytest.mark.full
def test_fewer_samples_than_ranks(workers: Workers, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"folder": str(tmp_path), "model": "llama", "sections": LAYOUTS["sharded"][1]}
    for found in workers.run(4, "evaluation_cases:agrees", timeout=120.0, count=9, **arguments):
        assert not found["wrong"]


@pytest.mark.parametrize(
    "sections", [{"zero": {"stage": 3}}, {"parallel": {"pipeline": 2}}, {"parallel": {"tensor": 2}}]
)
def test_prompts_are_continued_while_training_stays_bit_for_bit_the_same(
    workers: Workers, tmp_path: Path, sections: dict[str, Any]
) -> None:
    found = workers.run(2, "evaluation_cases:samples_prompts", timeout=120.0, folder=str(tmp_path), sections=sections)
    for each in found:
        assert each["alike"] == {"weights": True, "losses": True, "states": True}
        assert [(line["step"], line["prompt"]) for line in each["lines"]] == [
            (n, p) for n in (2, 4) for p in ("2 times", "7 ")
        ]
        assert all(line["completion"] for line in each["lines"])


# Weights of a training are not read from files, and the model has too few blocks for interleaved stages.
EVERY = [name for name in LAYOUTS if name not in ("file", "stored", "interleaved")]


def marked(names: list[str], short: str) -> list[Any]:
    """Layouts, of which one is tried in the short run."""
    return [pytest.param(name, marks=() if name == short else pytest.mark.full) for name in names]


@pytest.mark.parametrize("layout", marked(EVERY, "sharded"))
def test_averaged_weights_generate(workers: Workers, tmp_path: Path, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    for found in workers.run(ranks, "evaluation_cases:averages", folder=str(tmp_path), sections=sections):
        assert not found["wrong"]
        assert found["evaluations"] == 2
        assert found["apart"], "averages generate what the weights do, and the test shows nothing"


@pytest.mark.parametrize("layout", marked(EVERY, "data"))
def test_several_sets_with_fewer_samples_than_ranks(workers: Workers, tmp_path: Path, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    for found in workers.run(ranks, "evaluation_cases:several", folder=str(tmp_path), sections=sections):
        assert not found["wrong"]
        assert found["samples"] == [1, 3]
        assert found["loss"] < 1e-9


@pytest.mark.parametrize("layout", marked([name for name in EVERY if "pipeline" not in name], "tensor"))
@pytest.mark.parametrize("model", ["llama", pytest.param("t5", marks=pytest.mark.full)])
def test_beams_do_not_depend_on_neighbours(workers: Workers, tmp_path: Path, layout: str, model: str) -> None:
    ranks, sections = LAYOUTS[layout]
    arguments: dict[str, Any] = {"folder": str(tmp_path), "sections": sections, "model": model}
    for found in workers.run(ranks, "evaluation_cases:beams", **arguments):
        assert not found["wrong"]
        assert model != "t5" or {each[0] for each in found["wanted"]} == {5}


@pytest.mark.full
def test_what_is_drawn_does_not_depend_on_the_layout(workers: Workers, tmp_path: Path) -> None:
    drawn = []
    for layout in EVERY:
        ranks, sections = LAYOUTS[layout]
        arguments: dict[str, Any] = {"folder": str(tmp_path / layout), "sections": sections}
        drawn += workers.run(ranks, "evaluation_cases:draws", **arguments)
    assert all(each == drawn[0] for each in drawn), drawn


def test_the_tokenizer_of_the_data_ends_and_pads(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(2, "evaluation_cases:tokenized", folder=str(tmp_path)):
        assert not found["wrong"]
        assert found["ended"]
