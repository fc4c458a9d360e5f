"""Dropout does not know the layout; recomputed activations are those of forward; compiled blocks are blocks."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeromesh.mesh.process_mesh import Mesh

from .cases import Run, digest
from .checks import Laboratory, check_equal, check_same_bits, whole_product
from .models import stack
from .recipe import Extra, Layout, Problem

QUIET = Extra(gradient_step=-1)
DROPOUT = Problem(model="gpt2", dropout=0.1, steps=5, samples=8)
LAYOUTS = [
    (2, Layout(stage=3, accumulation=2)),
    (2, Layout(stage=0, accumulation=2, transport="gloo")),
    (4, Layout(stage=2, accumulation=1)),
    (4, Layout(stage=3, accumulation=1, transport="gloo")),
    (1, Layout(stage=3, accumulation=4, checkpointing="hf")),
    (2, Layout(stage=3, accumulation=2, checkpointing="hf", budget=0)),
]


def dropout_masks(mesh: Mesh) -> dict[str, Any]:
    """Hashes of what every dropout layer of GPT-2 sets to zero, over two steps of two microbatches."""
    problem = Problem(model="gpt2", dropout=0.5, steps=2, samples=4)
    run = Run.start(mesh, problem, Layout(accumulation=2))
    masks: list[str] = []
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _module, _args, output: masks.append(digest([(output == 0).cpu()])))
    for step in range(problem.steps):
        run.step(step)
    run.close()
    return {"masks": masks}


def recomputed_dropout(mesh: Mesh, budget: int | None, kind: str) -> dict[str, str]:
    found = {}
    for name in ("plain", "recomputed"):
        torch.manual_seed(3)
        model = stack()
        for block in model.blocks:
            block.dropout.p = 0.3
        if name == "recomputed" and kind == "call":
            model.recompute = True
        elif name == "recomputed":
            for block in model.blocks:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        found[name] = _train_stack(mesh, model, Layout(budget=budget))
    return found


def _train_stack(mesh: Mesh, model: nn.Module, layout: Layout) -> str:
    problem = Problem(model="stack", decay=False, steps=3, samples=12)
    run = Run.of(mesh, problem, layout, model)
    for step in range(problem.steps):
        run.step(step)
    found = digest(run.parameters().values())
    run.close()
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=str)
def test_dropout_is_the_same_in_every_layout(laboratory: Laboratory, size: int, layout: Layout) -> None:
    """Microbatches of two samples: one rank runs four a step, four ranks run one each."""
    alone = laboratory.train(1, DROPOUT, Layout(accumulation=4))
    check_equal(laboratory.train(size, DROPOUT, layout), alone, DROPOUT)


def test_dropout_does_something_and_changes_from_step_to_step(laboratory: Laboratory) -> None:
    alone = laboratory.train(1, DROPOUT, Layout(accumulation=4), QUIET)
    without = laboratory.reference(Problem(model="gpt2", steps=5, samples=8))
    assert all(abs(a - b) > 1e-4 for a, b in zip(alone.losses, without.losses, strict=True))
    (seeds,) = laboratory.workers.run(1, "tests.conformance.test_randomness:dropout_masks")
    assert len(set(seeds["masks"])) == len(seeds["masks"])


@pytest.mark.parametrize("kind", ["call", "wrapped"])
@pytest.mark.parametrize(("size", "budget"), [(1, None), (2, None), (2, 0)])
def test_recomputation_draws_the_same_dropout(laboratory: Laboratory, size: int, budget: int | None, kind: str) -> None:
    """`checkpoint(block, x)` runs the block's hooks again in backward, a checkpointed `forward` does not."""
    for result in laboratory.workers.run(size, "tests.conformance.test_randomness:recomputed_dropout", budget=budget, kind=kind):
        assert result["plain"] == result["recomputed"]


@pytest.mark.parametrize(
    ("model", "stage", "transport"), whole_product(5, ["llama", "gpt2", "bert", "moe", "lora"], [1, 2, 3], ["shared", "gloo"])
)
def test_checkpointing_of_a_library_changes_no_bit(laboratory: Laboratory, model: str, stage: int, transport: str) -> None:
    problem = Problem(model=model, steps=3, samples=12)
    base = laboratory.train(2, problem, Layout(stage=stage, transport=transport), QUIET)
    found = laboratory.train(2, problem, Layout(stage=stage, transport=transport, checkpointing="hf"), QUIET)
    check_same_bits(found, base, "losses", "norms", "digests", "parameters")


@pytest.mark.parametrize(
    ("subject", "budget"), whole_product(3, [("stack", 2), ("reused", 2), ("odd", 3), ("stack", 1)], [None, 0])
)
def test_checkpointed_calls_change_no_bit(laboratory: Laboratory, subject: tuple[str, int], budget: int | None) -> None:
    """Hooks run again when backward recomputes a call."""
    model, size = subject
    problem = Problem(model=model, steps=3, samples=12)
    base = laboratory.train(size, problem, Layout(accumulation=2, budget=budget), QUIET)
    found = laboratory.train(size, problem, Layout(accumulation=2, budget=budget, checkpointing="call"), QUIET)
    check_same_bits(found, base, "losses", "norms", "digests", "parameters")


@pytest.mark.parametrize(("stage", "budget"), [(3, 0), *(pytest.param(stage, None, marks=pytest.mark.full) for stage in (2, 3))])
def test_compiled_blocks(laboratory: Laboratory, stage: int, budget: int | None) -> None:
    problem = Problem(model="stack", clip=0.3, steps=3, samples=12)
    layout = Layout(stage=stage, budget=budget, compile=True)
    laboratory.check(2, problem, layout)
