"""Precisions below float64: written tolerances (docs/numerics.md), and what is exact in spite of rounding."""

import copy
import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.mesh.process_mesh import Mesh

from . import reference
from .cases import Run
from .checks import Laboratory, Row, check_ranks_agree, check_same_bits, pairwise, whole_product
from .models import SUBJECTS, Stack
from .recipe import LEARNING_RATE, Extra, Layout, Problem
from .test_matrix import CORE

QUIET = Extra(gradient_step=-1)
FLOAT32_LOSS = 1e-5
BFLOAT16_LOSS = 1e-2
FLOAT16_LOSS = 2e-3
MAIN = ["llama", "gpt2", "bert", "moe", "frozen", "conv"]


class WideNorm(nn.Module):
    """A block in bf16 whose norm is kept in fp32, as its model wants it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.linear = nn.Linear(size, size).bfloat16()
        self.out = nn.Linear(size, 3 * size).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.linear(self.norm(x.float()).bfloat16()))
        return x + self.out(inner)[..., : x.shape[-1]]


def mixed_dtypes(mesh: Mesh) -> dict[str, Any]:
    """The engine, two microbatches a step, against a loop with fp32 master weights in one process."""
    torch.manual_seed(5)
    model = Stack([WideNorm(40) for _ in range(2)], [0, 1], 40)
    for part in (model.embedding, model.head, model.norm):
        part.bfloat16()
    plain = copy.deepcopy(model)
    problem = Problem(model="stack", decay=False, precision="bfloat16", steps=4, samples=8)
    run = Run.of(mesh, problem, Layout(stage=3), model)
    for step in range(problem.steps):
        run.step(step)
    wanted = _with_master_weights(plain, problem, mesh.data.size)
    found = run.parameters()
    dtypes = {str(bucket.dtype) for unit in run.engine.units for bucket in unit.buckets}
    run.engine.close()
    worst = max(float((found[name] - value).abs().max()) for name, value in wanted.items())
    return {"dtypes": sorted(dtypes), "worst": worst, "moved": float((wanted["norm.weight"] - 1).abs().max())}


def _with_master_weights(model: nn.Module, problem: Problem, microbatches: int) -> dict[str, torch.Tensor]:
    """Mixed precision as it is written by hand: gradients of microbatches are added to fp32 in turn."""
    subject = SUBJECTS[problem.model]
    masters = {name: nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    settings = problem.settings()
    optimizer = torch.optim.AdamW(
        list(masters.values()),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    for step in range(problem.steps):
        batch = reference.batch_of(problem, step)
        micro = problem.samples // microbatches
        for start in range(0, problem.samples, micro):
            loss = subject.loss_sum(model, reference.part(batch, start, start + micro))
            loss.backward(torch.full_like(loss, 1.0 / subject.count(batch)))
            for name, parameter in model.named_parameters():
                gradient, master = parameter.grad, masters[name]
                assert gradient is not None
                master.grad = gradient.float() if start == 0 else master.grad + gradient  # type: ignore[operator]
                parameter.grad = None
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name].data)
    return {name: master.detach() for name, master in masters.items()}


def idle(row: Row) -> set[str]:
    return {"transport"} if row.get("size") == 1 else set()


def name_of(row: Row) -> str:
    return "-".join(str(value) for value in row.values())


FACTORS = CORE | {"model": MAIN}
COVER = pairwise({name: values for name, values in FACTORS.items() if name != "model"}, idle)
DEFAULT = [{**row, "model": MAIN[number % len(MAIN)]} for number, row in enumerate(COVER)]
ROWS = [pytest.param(row, id=name_of(row)) for row in DEFAULT] + [
    pytest.param(row := dict(zip(FACTORS, values, strict=True)), id=f"all-{name_of(row)}", marks=pytest.mark.full)
    for values in product(*FACTORS.values())
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("row", ROWS)
def test_losses_in_float32(laboratory: Laboratory, row: Row) -> None:
    problem = Problem(model=row["model"], clip=0.3, precision="float32")
    transport = "auto" if row["size"] == 1 else row["transport"]
    layout = Layout(stage=row["stage"], accumulation=row["accumulation"], transport=transport)
    found, wanted = laboratory.train(row["size"], problem, layout, QUIET), laboratory.reference(problem)
    check_ranks_agree(found)
    assert found.losses == pytest.approx(wanted.losses, rel=FLOAT32_LOSS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "stage"), whole_product(4, ["llama", "gpt2", "conv"], [1, 2, 3]))
def test_bfloat16_compute_follows_float32(laboratory: Laboratory, model: str, stage: int) -> None:
    """bf16 keeps 8 bits; master weights in fp32 keep small updates, so losses stay close over many steps."""
    problem = Problem(model=model, clip=1.0, precision="bfloat16", steps=20)
    wanted = laboratory.reference(Problem(model=model, clip=1.0, precision="float32", steps=20))
    found = laboratory.train(2, problem, Layout(stage=stage, accumulation=2), QUIET)
    check_ranks_agree(found)
    assert found.losses == pytest.approx(wanted.losses, rel=BFLOAT16_LOSS)
    for name, value in wanted.parameters.items():
        assert found.parameters[name].dtype == torch.float32
        distance = float((found.parameters[name] - value).norm())
        assert distance <= LEARNING_RATE * problem.steps * value.numel() ** 0.5, name


def test_gradients_that_travel_in_bfloat16(laboratory: Laboratory) -> None:
    """What is bfloat16 already loses nothing on the way; float32 loses digits of summands, and no more."""
    problem = Problem(model="llama", clip=1.0, precision="bfloat16", steps=4, samples=24)
    layout = Layout(stage=3, accumulation=2, transport="gloo")
    narrow = replace(layout, reduce="bfloat16")
    check_same_bits(laboratory.train(2, problem, narrow, QUIET), laboratory.train(2, problem, layout, QUIET), "digests")
    wide = replace(problem, precision="float32")
    found, wanted = laboratory.train(2, wide, narrow, QUIET), laboratory.train(2, wide, layout, QUIET)
    assert found.norms != wanted.norms
    assert found.losses == pytest.approx(wanted.losses, rel=BFLOAT16_LOSS / 10)


def test_bfloat16_updates_are_not_lost(laboratory: Laboratory) -> None:
    """A step of 1e-3 is below the spacing of bf16 near 1: without fp32 master weights norms would stay at exactly 1."""
    problem = Problem(model="llama", precision="bfloat16", steps=3, samples=12)
    found = laboratory.train(2, problem, Layout(accumulation=1), QUIET)
    weight = found.parameters["model.norm.weight"]
    assert float((weight - 1).abs().max()) > 1e-3
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize(("stage", "transport"), [(1, "shared"), (2, "gloo"), (3, "shared")])
def test_float16_with_a_loss_scale(laboratory: Laboratory, stage: int, transport: str) -> None:
    """A scale of 2^26 overflows, is halved at each skipped step until gradients fit, and grows back after four good steps."""
    problem = Problem(model="llama", clip=1.0, precision="float16", steps=16)
    layout = Layout(stage=stage, transport=transport, scale=2.0**26)
    found = laboratory.train(2, problem, layout, QUIET)
    check_ranks_agree(found)
    first = found.ranks[0]
    skipped, scales, digests = first["skipped"], first["scales"], first["digests"]
    assert skipped[0]
    assert not all(skipped)
    good = 0
    for step in range(1, problem.steps):
        good = 0 if skipped[step - 1] else good + 1
        grown = scales[step - 1] * 2 if good and good % 4 == 0 else scales[step - 1]
        assert scales[step] == (scales[step - 1] / 2 if skipped[step - 1] else grown)
        assert (digests[step] == digests[step - 1]) == skipped[step]
        assert math.isfinite(found.norms[step]) != skipped[step]
    wanted = laboratory.reference(Problem(model="llama", clip=1.0, precision="float32", steps=16))
    assert found.losses[0] == pytest.approx(wanted.losses[0], rel=FLOAT16_LOSS)
    assert found.losses[-1] < found.losses[0]


def test_mixed_dtypes_keep_their_own(laboratory: Laboratory) -> None:
    """Parameters wider than the rest lie in buckets of their own and are not rounded."""
    (first, *_) = laboratory.workers.run(2, "test_precision:mixed_dtypes")
    assert first["dtypes"] == ["torch.bfloat16", "torch.float32"]
    assert first["worst"] == 0.0
    assert first["moved"] > 0
