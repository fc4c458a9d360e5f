"""Evaluations that generate give the tokens of the library's own `generate` in one process, under every layout."""

from pathlib import Path
from typing import Any

import pytest
from test_generator import IMPOSSIBLE, LAYOUTS
from workers import Workers

SHORT = {("llama", "sharded"), ("t5", "tensor")}
CASES: list[Any] = [
    pytest.param(model, layout, marks=() if (model, layout) in SHORT else pytest.mark.full)
    for model in ("llama", "gpt2", "t5", "bart")
    for layout in LAYOUTS
    if layout not in IMPOSSIBLE.get(model, ()) and layout != "stored"
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
