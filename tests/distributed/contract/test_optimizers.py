"""Optimizers of any class under `shard`: equal to the loop in plain PyTorch, with states divided among ranks, or refused."""

from pathlib import Path

import pytest

from tests.distributed.contract.optimizer_cases import MAKERS
from tests.support.workers import Workers

WHOLE = {"Muon", "Muon and AdamW", "Adafactor", "transformers", "Lamb"}
ALIKE = {"Adam decoupled", "SGD dampened", "RAdam", "Adamax", "Adadelta", "Lion"}
"""Element by element, with states such as those of another: AdamW, Adam, SGD, NAdam, RMSprop."""


@pytest.mark.parametrize(
    ("name", "every"),
    [
        pytest.param(name, every, marks=pytest.mark.full if every or name in ALIKE else (), id=f"{name}-{stages}")
        for name in MAKERS
        for every, stages in ((False, "some"), (True, "every stage"))
    ],
)
def test_updates_are_those_of_plain_pytorch(workers: Workers, tmp_path: Path, name: str, every: bool) -> None:
    stages = [0, 1, 2, 3] if every else [0, 3] if name in WHOLE else [3]
    arguments = {"name": name, "stages": stages, "folder": str(tmp_path)}
    both = workers.run(4 if every else 2, "optimizer_cases:trained", **arguments)
    alone = workers.run(1, "optimizer_cases:trained", **arguments)[0]  # It goes on from what both have saved.
    for found in (*both, alone):
        assert found["off"] < 1e-9
        assert found["moved"] > 1e-4
    for stage, whole, *shares in zip(stages, alone["bytes"], *(found["bytes"] for found in both), strict=True):
        assert whole > 0
        if name in WHOLE:  # Each tensor lies on one of the ranks, at stage 0 too.
            assert sum(shares) == whole
            assert max(shares) < 0.75 * whole
        elif stage:
            assert max(shares) < 0.8 * whole  # Small buckets have much padding.


@pytest.mark.parametrize("name", ["NAdam", "Adafactor"])
def test_states_rest_on_files(workers: Workers, tmp_path: Path, name: str) -> None:
    arguments = {"name": name, "stages": [1], "folder": str(tmp_path), "offload": "file"}
    for ranks in (2, 1):
        assert max(found["off"] for found in workers.run(ranks, "optimizer_cases:trained", **arguments)) < 1e-9


def test_states_of_another_optimizer_are_refused(workers: Workers, tmp_path: Path) -> None:
    for first, second in workers.run(2, "optimizer_cases:exchanged", folder=str(tmp_path)):
        assert "exp_avg, exp_avg_sq of its optimizer" in first
        assert "has no exp_avg in it" in second


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("closure", "LBFGS: a trial of its step"),
        ("sparse", "SparseAdam: a trial of its step"),
        ("global norm", "depends on others"),
        ("own count", "keeps count outside"),
        ("slow weights", "keeps slow outside"),
        ("two modes", "has train() and eval()"),
        ("narrow", "keeps torch.int8 as 'codes'"),
        ("filled", "initial_accumulator_value"),
        ("differentiable", "differentiable"),
        ("used", "before the first update"),
    ],
)
def test_what_cannot_be_right_is_refused(workers: Workers, name: str, said: str) -> None:
    assert said in workers.run(1, "optimizer_cases:refused", name=name)[0]


def test_whole_tensors_are_not_divided_by_a_tensor_axis(workers: Workers) -> None:
    for said in workers.run(2, "optimizer_cases:refused", name="Lamb", tensor=2):
        assert "tensor parallelism divides inner.1.weight" in said
