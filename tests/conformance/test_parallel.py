"""Tensor and pipeline parallelism with ZeRO around them equal one plain process, in float64 throughout."""

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
        marks = () if number % 17 == 0 else (pytest.mark.full,)
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


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
PIPELINES = {
    "pipeline 2": (2, {"pipeline": 2}),
    "data 2 x pipeline 2": (4, {"pipeline": 2}),
    "pipeline 4": (4, {"pipeline": 4}),
    "tensor 2 x pipeline 2": (4, {"pipeline": 2, "tensor": 2}),
    "data 2 x tensor 2 x pipeline 2": (8, {"pipeline": 2, "tensor": 2}),
}


def pipeline_cases() -> list[Any]:
    """The whole product; a diagonal of it in the short run."""
    found = []
    for number, (axes, schedule, model, stage, accumulation) in enumerate(
        product(PIPELINES, SCHEDULES, MODELS, STAGES, (1, 4))
    ):
        marks = () if number % 47 == 0 else (pytest.mark.full,)
        name = f"{model}, {axes}, {schedule}, stage {stage}, {accumulation} microbatches"
        found.append(pytest.param(axes, schedule, model, stage, accumulation, marks=marks, id=name))
    return found


@pytest.mark.parametrize(("axes", "schedule", "model", "stage", "accumulation"), pipeline_cases())
def test_a_model_in_stages_trains_as_one_process(
    laboratory: Laboratory, axes: str, schedule: str, model: str, stage: int, accumulation: int
) -> None:
    size, sizes = PIPELINES[axes]
    deep = f"{model}-deep" if size == 4 or schedule == "interleaved" else model
    problem = Problem(model=deep, clip=0.3, samples=8, wide=True)
    chunks = 2 if schedule == "interleaved" else 1
    sequence = "tensor" in sizes and schedule != "gpipe"
    layout = Layout(stage=stage, accumulation=accumulation, schedule=schedule, chunks=chunks, sequence=sequence)
    found = laboratory.train(size, problem, layout, **sizes)
    check_equal(found, laboratory.reference(problem), problem)
