"""A checkpoint of any layout loads in any other bit by bit, and in transformers; what it holds is what one process has."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.workers import Pool, Workers
from zeromesh.checkpoint.loader import merge, open_parts

from .recipe import LEARNING_RATE, Layout, Problem
from .stores import stored

FULL = pytest.mark.full
Stop = tuple[int, dict[str, int], Layout]
"""Ranks, sizes of axes, and the rest of a layout."""

DATA: Stop = (2, {}, Layout(stage=3))
TENSOR: Stop = (2, {"tensor": 2}, Layout(stage=1))
TENSOR_4: Stop = (4, {"tensor": 4}, Layout(stage=2))
PIPELINE: Stop = (2, {"pipeline": 2}, Layout(stage=2))
INTERLEAVED: Stop = (2, {"pipeline": 2}, Layout(stage=1, schedule="interleaved", chunks=2))
DATA_TENSOR: Stop = (4, {"tensor": 2}, Layout(stage=3))
REPLICAS: Stop = (4, {"tensor": 2, "replicate": 2}, Layout(stage=1))
DATA_PIPELINE: Stop = (4, {"pipeline": 2}, Layout(stage=3))
TENSOR_PIPELINE: Stop = (4, {"tensor": 2, "pipeline": 2}, Layout(stage=1, sequence=True))
ALONE: Stop = (1, {}, Layout(stage=1))

SHORT = (TENSOR, PIPELINE, TENSOR_PIPELINE, DATA)
LONG = (
    *(TENSOR_4, INTERLEAVED, DATA_TENSOR, PIPELINE, TENSOR, TENSOR_PIPELINE, DATA, DATA_PIPELINE, REPLICAS, ALONE),
    *(TENSOR_PIPELINE, TENSOR_4, DATA_PIPELINE, TENSOR, INTERLEAVED, REPLICAS, DATA, TENSOR),
)
TIED = {
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "gemma": {"lm_head.weight": "model.embed_tokens.weight"},
    "llama-odd": {"lm_head.weight": "model.embed_tokens.weight"},
}


def check_relay(workers: Workers, folder: Path, problem: Problem, stops: tuple[Stop, ...], steps: int) -> Path:
    """Train by one layout after the other, each going on from the last one's checkpoint; the last checkpoint."""
    case = {"problem": asdict(problem), "folder": str(folder), "steps": steps}
    checkpoint = folder
    for number, (size, axes, layout) in enumerate(stops):
        first = number * steps
        found = workers.run(size, "tests.conformance.stores:relay", layout=asdict(layout), first=first, **axes, **case)
        assert [rank["wrong"] for rank in found] == [[]] * size, (size, axes)
        assert any(rank["exchanged"] for rank in found) == (axes.get("tensor", 1) > 1)
        assert found[0]["aliases"] == TIED.get(problem.model.removesuffix("-deep"), {})
        if first:
            check_same(stored(checkpoint), stored(folder / "mirror" / checkpoint.name))
        checkpoint = folder / f"step-{first + steps:08d}"
        assert json.loads((checkpoint / "manifest.json").read_text())["aliases"] == found[0]["aliases"]
    return checkpoint


def check_same(left: dict[tuple[str, str], torch.Tensor], right: dict[tuple[str, str], torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [key for key, tensor in left.items() if not torch.equal(tensor, right[key])] == []


@pytest.mark.parametrize(
    ("model", "stops", "precision"),
    [
        ("llama", SHORT, "bfloat16"),
        pytest.param("gpt2", SHORT, "bfloat16", marks=FULL),
        pytest.param("moe", (TENSOR, PIPELINE, DATA), "bfloat16", marks=FULL),
        pytest.param("llama-odd", (TENSOR, TENSOR_PIPELINE, TENSOR), "bfloat16", marks=FULL),
        *(
            pytest.param(f"{model}-deep", LONG, precision, marks=FULL)
            for model in ("llama", "llama-1kv", "gpt2", "gemma", "moe", "qwen3")
            for precision in ("bfloat16", "float32")
        ),
    ],
)
def test_any_layout_loads_what_any_other_has_stored(
    workers: Workers, tmp_path: Path, model: str, stops: tuple[Stop, ...], precision: str
) -> None:
    problem = Problem(model=model, samples=8, precision=precision)
    checkpoint = check_relay(workers, tmp_path, problem, stops, 2)
    assert workers.run(1, "tests.conformance.stores:opened", checkpoint=str(checkpoint)) == [[]]


@pytest.mark.parametrize(
    ("model", "stops"),
    [
        ("gemma-deep", (INTERLEAVED, DATA_TENSOR)),
        pytest.param("gemma-deep", (INTERLEAVED, TENSOR_4, DATA_TENSOR), marks=FULL),
        pytest.param("llama-1kv", (TENSOR_4, TENSOR_PIPELINE), marks=FULL),
        *(pytest.param(f"{model}-deep", LONG, marks=FULL) for model in ("llama", "llama-1kv", "gpt2", "gemma", "moe", "qwen3")),
    ],
)
def test_what_is_stored_is_what_one_process_has(workers: Workers, tmp_path: Path, model: str, stops: tuple[Stop, ...]) -> None:
    """Parameters and moments: who trains in turns by many layouts, and who never stops."""
    problem = Problem(model=model, samples=8, wide=True)
    found = stored(check_relay(workers, tmp_path / "turns", problem, stops, 2))
    case: dict[str, Any] = {"problem": asdict(problem), "layout": asdict(Layout(stage=1)), "first": 0}
    steps = 2 * len(stops)
    workers.run(1, "tests.conformance.stores:relay", folder=str(tmp_path / "one"), steps=steps, **case)
    wanted = stored(tmp_path / "one" / f"step-{steps:08d}")
    assert found.keys() == wanted.keys()
    for (kind, name), value in wanted.items():
        scale = float(value.norm()) + (LEARNING_RATE * steps * value.numel() ** 0.5 if kind == "model" else 1e-6)
        assert float((found[kind, name] - value).norm()) <= 1e-9 * scale, (kind, name)


def test_what_one_rank_cannot_read_ends_the_save_of_all_before_it_is_a_checkpoint(workers: Workers, tmp_path: Path) -> None:
    for found in workers.run(2, "tests.conformance.stores:unread", tensor=2, folder=str(tmp_path)):
        assert "rank 1: the disk is gone" in found["failure"]
        assert found["left"] == []
        assert not found["again"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_hosts_with_a_disk_each(workers: Workers, fresh_pool: Callable[..., Pool], tmp_path: Path) -> None:
    """Tensor ranks on one host, shards on two: the parts make the checkpoint of one host, and load in another layout."""
    problem = Problem(model="llama", samples=8, precision="bfloat16")
    case: dict[str, Any] = {"problem": asdict(problem), "steps": 2}
    size, axes, layout = DATA_TENSOR
    one = {"folder": str(tmp_path / "one"), "first": 0, **case, "layout": asdict(layout)}
    two = {**one, "folder": str(tmp_path / "two"), "disks": [0, 0, 1, 1]}
    workers.run(size, "tests.conformance.stores:relay", **axes, **one)
    found = fresh_pool(size, hosts=2, **axes).run("tests.conformance.stores:relay", **two)
    assert any(rank["exchanged"] for rank in found)

    def merged(step: int, folder: Path) -> Path:
        parts = [tmp_path / "two" / f"disk-{disk}" / folder / f"step-{step:08d}" for disk in (0, 1)]
        whole = tmp_path / "two" / f"whole-{folder.name}-{step}"
        merge(open_parts(parts), whole, lambda nbytes: None)
        return whole

    whole = merged(2, Path())
    check_same(stored(whole), stored(tmp_path / "one" / "step-00000002"))
    size, axes, layout = PIPELINE
    two |= {"first": 2, "layout": asdict(layout), "disks": [1, 0], "whole": str(whole)}
    found = fresh_pool(size, hosts=1, **axes).run("tests.conformance.stores:relay", **two)
    assert [rank["wrong"] for rank in found] == [[], []]
    check_same(stored(whole), stored(merged(2, Path("mirror"))))
