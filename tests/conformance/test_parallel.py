"""Tensor and pipeline parallelism with ZeRO around them equal one plain process, in float64 throughout."""

import json
from collections.abc import Callable

import pytest

from .checks import Laboratory, whole_product
from .recipe import Layout, Problem

Record = Callable[[str, object], None]
"""What is recorded goes into a table of docs/conformance.md."""

MODELS = ("llama", "llama-1kv", "qwen3", "gemma", "gpt2", "moe")
STAGES = (1, 2, 3)
ACCUMULATIONS = (1, 4)
LAYERS = {"tensor 2": (2, {"tensor": 2}), "tensor 4": (4, {"tensor": 4}), "data 2 x tensor 2": (4, {"tensor": 2})}
PIPELINES = {
    "pipeline 2": (2, {"pipeline": 2}),
    "data 2 x pipeline 2": (4, {"pipeline": 2}),
    "pipeline 4": (4, {"pipeline": 4}),
    "tensor 2 x pipeline 2": (4, {"pipeline": 2, "tensor": 2}),
    "data 2 x tensor 2 x pipeline 2": (8, {"pipeline": 2, "tensor": 2}),
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("axes", "regions", "model", "stage", "accumulation"),
    whole_product(61, LAYERS, ("whole sequences", "shared sequences"), MODELS, STAGES, ACCUMULATIONS),
)
def test_a_divided_model_trains_as_one_process(
    laboratory: Laboratory, axes: str, regions: str, model: str, stage: int, accumulation: int, record_property: Record
) -> None:
    size, sizes = LAYERS[axes]
    problem = Problem(model=model, clip=0.3, samples=8, wide=True)
    layout = Layout(stage=stage, accumulation=accumulation, sequence=regions == "shared sequences")
    record_property("row", json.dumps({"model": model, "column": f"{axes}, {regions}"}))
    record_property("difference", laboratory.check(size, problem, layout, **sizes))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("axes", "schedule", "model", "stage", "accumulation"), whole_product(251, PIPELINES, SCHEDULES, MODELS, STAGES, ACCUMULATIONS)
)
def test_a_model_in_stages_trains_as_one_process(
    laboratory: Laboratory, axes: str, schedule: str, model: str, stage: int, accumulation: int, record_property: Record
) -> None:
    size, sizes = PIPELINES[axes]
    interleaved = schedule == "interleaved"
    problem = Problem(model=f"{model}-deep" if size == 4 or interleaved else model, clip=0.3, samples=8, wide=True)
    layout = Layout(
        stage=stage,
        accumulation=accumulation,
        schedule=schedule,
        chunks=2 if interleaved else 1,
        sequence="tensor" in sizes and schedule != "gpipe",
    )
    record_property("row", json.dumps({"model": model, "column": axes}))
    record_property("difference", laboratory.check(size, problem, layout, **sizes))


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.full)])
def test_shares_of_a_single_sample(laboratory: Laboratory, schedule: str) -> None:
    """GPT-2 gives what comes out of its blocks the shape of what went in; a share of one sample is half a sample."""
    chunks = 2 if schedule == "interleaved" else 1
    problem = Problem(model="gpt2-deep", clip=0.3, samples=4, steps=3, wide=True)
    layout = Layout(stage=2, accumulation=4, schedule=schedule, chunks=chunks, sequence=True)
    laboratory.check(4, problem, layout, pipeline=2, tensor=2)
