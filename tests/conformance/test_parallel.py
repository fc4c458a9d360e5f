"""Tensor parallelism with ZeRO around it equals one plain process: models x axes x stages x accumulation, in float64 throughout."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from .checks import Laboratory, check_equal
from .recipe import Layout, Problem

AXES = {"tensor 2": (2, {"tensor": 2}), "tensor 4": (4, {"tensor": 4}), "data 2 x tensor 2": (4, {"tensor": 2})}
MODELS = ("llama", "llama-1kv", "qwen3", "gemma", "gpt2", "moe")
STAGES = (1, 2, 3)


def cases() -> list[Any]:
    """The whole product; a diagonal of it in the short run."""
    found = []
    for number, (axes, model, stage, accumulation, sequence) in enumerate(
        product(AXES, MODELS, STAGES, (1, 4), (False, True))
    ):
        marks = () if number % 11 == 0 else (pytest.mark.full,)
        name = f"{model}, {axes}, stage {stage}, {accumulation} microbatches{', sequence' if sequence else ''}"
        found.append(pytest.param(axes, model, stage, accumulation, sequence, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("axes", "model", "stage", "accumulation", "sequence"), cases())
def test_a_divided_model_trains_as_one_process(
    laboratory: Laboratory, axes: str, model: str, stage: int, accumulation: int, sequence: bool
) -> None:
    size, sizes = AXES[axes]
    problem = Problem(model=model, clip=0.3, samples=8, wide=True)
    layout = Layout(stage=stage, accumulation=accumulation, sequence=sequence)
    found = laboratory.train(size, problem, layout, **sizes)
    check_equal(found, laboratory.reference(problem), problem)
