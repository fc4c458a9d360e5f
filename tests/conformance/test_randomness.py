"""Dropout does not know the layout; recomputed activations are those of forward; compiled blocks are blocks."""

import pytest

from .checks import Laboratory, check_equal, check_same_bits, whole_product
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


@pytest.mark.parametrize(("size", "layout"), LAYOUTS, ids=str)
def test_dropout_is_the_same_in_every_layout(laboratory: Laboratory, size: int, layout: Layout) -> None:
    """Microbatches of two samples: one rank runs four a step, four ranks run one each."""
    alone = laboratory.train(1, DROPOUT, Layout(accumulation=4))
    check_equal(laboratory.train(size, DROPOUT, layout), alone, DROPOUT)


def test_dropout_does_something_and_changes_from_step_to_step(laboratory: Laboratory) -> None:
    alone = laboratory.train(1, DROPOUT, Layout(accumulation=4), QUIET)
    without = laboratory.reference(Problem(model="gpt2", steps=5, samples=8))
    assert all(abs(a - b) > 1e-4 for a, b in zip(alone.losses, without.losses, strict=True))
    (seeds,) = laboratory.workers.run(1, "tests.conformance.scenes:dropout_masks")
    assert len(set(seeds["masks"])) == len(seeds["masks"])


@pytest.mark.parametrize("kind", ["call", "wrapped"])
@pytest.mark.parametrize(("size", "budget"), [(1, None), (2, None), (2, 0)])
def test_recomputation_draws_the_same_dropout(laboratory: Laboratory, size: int, budget: int | None, kind: str) -> None:
    """`checkpoint(block, x)` runs the block's hooks again in backward, a checkpointed `forward` does not."""
    for result in laboratory.workers.run(size, "tests.conformance.scenes:recomputed_dropout", budget=budget, kind=kind):
        assert result["plain"] == result["recomputed"]


@pytest.mark.parametrize(
    ("model", "stage", "transport"),
    whole_product(5, ["llama", "gpt2", "bert", "moe", "lora"], [1, 2, 3], ["shared", "gloo"]),
)
def test_checkpointing_of_a_library_changes_no_bit(
    laboratory: Laboratory, model: str, stage: int, transport: str
) -> None:
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


@pytest.mark.parametrize(
    ("stage", "budget"), [(3, 0), *(pytest.param(stage, None, marks=pytest.mark.full) for stage in (2, 3))]
)
def test_compiled_blocks(laboratory: Laboratory, stage: int, budget: int | None) -> None:
    """`block.forward` is compiled and hooks stay outside of it."""
    problem = Problem(model="stack", clip=0.3, steps=3, samples=12)
    layout = Layout(stage=stage, budget=budget, compile=True)
    check_equal(laboratory.train(2, problem, layout), laboratory.reference(problem), problem)
