"""Evaluations that generate: averaged weights, few samples, several sets, ways of searching, and the tokenizer of the data."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.inference.test_generator import LAYOUTS
from tests.support.workers import Workers

# Weights of a training are not read from files, and the model has too few blocks for interleaved stages.
EVERY = [name for name in LAYOUTS if name not in ("file", "stored", "interleaved")]


def marked(names: list[str], short: str) -> list[Any]:
    """Layouts, of which one is tried in the short run."""
    return [pytest.param(name, marks=() if name == short else pytest.mark.full) for name in names]


@pytest.mark.parametrize("layout", marked(EVERY, "sharded"))
def test_averaged_weights_generate(workers: Workers, tmp_path: Path, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    for found in workers.run(ranks, "evaluation_detail_cases:averages", folder=str(tmp_path), sections=sections):
        assert not found["wrong"]
        assert found["evaluations"] == 2
        assert found["apart"], "averages generate what the weights do, and the test shows nothing"


@pytest.mark.parametrize("layout", marked(EVERY, "data"))
def test_several_sets_with_fewer_samples_than_ranks(workers: Workers, tmp_path: Path, layout: str) -> None:
    ranks, sections = LAYOUTS[layout]
    for found in workers.run(ranks, "evaluation_detail_cases:several", folder=str(tmp_path), sections=sections):
        assert not found["wrong"]
        assert found["samples"] == [1, 3]
        assert found["loss"] < 1e-9


@pytest.mark.parametrize("layout", marked([name for name in EVERY if "pipeline" not in name], "tensor"))
@pytest.mark.parametrize("model", ["llama", pytest.param("t5", marks=pytest.mark.full)])
def test_beams_do_not_depend_on_neighbours(workers: Workers, tmp_path: Path, layout: str, model: str) -> None:
    ranks, sections = LAYOUTS[layout]
    arguments: dict[str, Any] = {"folder": str(tmp_path), "sections": sections, "model": model}
    for found in workers.run(ranks, "evaluation_detail_cases:beams", **arguments):
        assert not found["wrong"]
        assert model != "t5" or {each[0] for each in found["wanted"]} == {5}


@pytest.mark.full
def test_what_is_drawn_does_not_depend_on_the_layout(workers: Workers, tmp_path: Path) -> None:
    drawn = []
    for layout in EVERY:
        ranks, sections = LAYOUTS[layout]
        arguments: dict[str, Any] = {"folder": str(tmp_path / layout), "sections": sections}
        drawn += workers.run(ranks, "evaluation_detail_cases:draws", **arguments)
    assert all(each == drawn[0] for each in drawn), drawn


def test_the_tokenizer_of_the_data_ends_and_pads(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(2, "evaluation_detail_cases:tokenized", folder=str(tmp_path)):
        assert not found["wrong"]
        assert found["ended"]
