"""Where sums are taken in the same order, results are the same bit by bit."""

from dataclasses import replace

import pytest

from tests.support.devices import DEVICE

from .checks import Laboratory, Result, check_ranks_agree, check_same_bits, whole_product
from .recipe import Extra, Layout, Problem

QUIET = Extra(gradient_step=-1)
EVERYTHING = ("losses", "norms", "digests", "parameters", "final_loss")

BASE = Layout(stage=3, transport="shared")
VARIANTS: dict[str, Layout] = {
    "stage 2": replace(BASE, stage=2),
    "stage 2, gloo": replace(BASE, stage=2, transport="gloo"),
    "no overlap": replace(BASE, overlap=False),
    "prefetch 0": replace(BASE, prefetch=0),
    "prefetch 3": replace(BASE, prefetch=3),
    "budget 0": replace(BASE, budget=0),
    "budget for some units": replace(BASE, budget=100_000),
    "budget 0, prefetch 3": replace(BASE, budget=0, prefetch=3),
    "one slot": replace(BASE, slots=1),
    "four slots": replace(BASE, slots=4),
    "gloo": replace(BASE, transport="gloo"),
    "gloo, everything kept": replace(BASE, transport="gloo", budget=1 << 30),
    "gloo, prefetch 0, no overlap": replace(BASE, transport="gloo", prefetch=0, overlap=False),
    "gloo, prefetch 3, one slot": replace(BASE, transport="gloo", prefetch=3, slots=1),
}
SUBJECTS: dict[str, tuple[Problem, int, int]] = {
    "llama": (Problem(model="llama", clip=0.3, steps=4, samples=24), 2, 2),
    "frozen": (Problem(model="frozen", steps=4, samples=24), 3, 1),
    "gpt2 in bf16": (Problem(model="gpt2", clip=0.3, steps=4, samples=24, precision="bfloat16"), 2, 2),
}


@pytest.fixture(scope="module")
def kept() -> dict[object, Result]:
    return {}


def run_once(laboratory: Laboratory, kept: dict[object, Result], size: int, problem: Problem, layout: Layout) -> Result:
    key = (size, problem, layout)
    if key not in kept:
        kept[key] = laboratory.train(size, problem, layout, QUIET)
    return kept[key]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("subject", "variant"), whole_product(3, SUBJECTS, VARIANTS))
def test_what_only_moves_memory_changes_no_bit(
    laboratory: Laboratory, kept: dict[object, Result], subject: str, variant: str
) -> None:
    problem, size, accumulation = SUBJECTS[subject]
    base = run_once(laboratory, kept, size, problem, replace(BASE, accumulation=accumulation))
    check_ranks_agree(base)
    found = laboratory.train(size, problem, replace(VARIANTS[variant], accumulation=accumulation), QUIET)
    check_same_bits(found, base, *EVERYTHING)


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_0_and_1_equal_stage_2_without_accumulation(laboratory: Laboratory, stage: int) -> None:
    problem = Problem(model="llama", steps=4, samples=24)
    base = laboratory.train(2, problem, Layout(stage=2, transport="shared"), QUIET)
    found = laboratory.train(2, problem, Layout(stage=stage, transport="shared"), QUIET)
    check_same_bits(found, base, "losses", "parameters", "final_loss")


@pytest.mark.parametrize("stage", [2, 3])
def test_reducing_once_a_step_is_what_stage_1_does(laboratory: Laboratory, kept: dict[object, Result], stage: int) -> None:
    problem = Problem(model="llama", steps=4, samples=24)
    base = run_once(laboratory, kept, 2, problem, Layout(stage=1, accumulation=3))
    found = laboratory.train(2, problem, Layout(stage=stage, accumulation=3, reduce_once=True), QUIET)
    check_same_bits(found, base, "losses", "norms", "parameters", "final_loss")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_rank_has_no_stages(laboratory: Laboratory, kept: dict[object, Result], stage: int) -> None:
    problem = Problem(model="lora", clip=0.3, steps=4, samples=24)
    base = run_once(laboratory, kept, 1, problem, Layout(stage=3, accumulation=4))
    check_same_bits(laboratory.train(1, problem, Layout(stage=stage, accumulation=4), QUIET), base, *EVERYTHING)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a device sums over ranks in an order of its own")
@pytest.mark.parametrize(
    ("precision", "subject"), whole_product(3, ["float64", "float32", "bfloat16"], [(2, 2, 2), (2, 2, 3), (4, 1, 3), (4, 1, 1)])
)
def test_ranks_are_microbatches(
    laboratory: Laboratory, kept: dict[object, Result], precision: str, subject: tuple[int, int, int]
) -> None:
    """One process that accumulates the same four microbatches adds the same numbers in the same order."""
    size, accumulation, stage = subject
    problem = Problem(model="gpt2", steps=4, samples=24, precision=precision)
    base = run_once(laboratory, kept, 1, problem, Layout(accumulation=4))
    found = laboratory.train(size, problem, Layout(stage=stage, accumulation=accumulation), QUIET)
    assert found.ranks[0]["parameters"] == base.ranks[0]["parameters"]
    assert found.final_loss == base.final_loss


@pytest.mark.parametrize(("stage", "ranks"), whole_product(3, [0, 1, 2, 3], [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]))
def test_the_optimizer_inside_backward_changes_no_bit(laboratory: Laboratory, stage: int, ranks: tuple[int, int]) -> None:
    """The norm alone is summed in another order."""
    size, accumulation = ranks
    problem = Problem(model="odd", steps=3, samples=12)
    layout = Layout(stage=stage, accumulation=accumulation, transport="auto")
    base = laboratory.train(size, problem, layout, QUIET)
    found = laboratory.train(size, problem, replace(layout, in_backward=True), QUIET)
    check_same_bits(found, base, "losses", "digests", "parameters", "final_loss")
    assert found.norms == pytest.approx(base.norms, rel=1e-12)


@pytest.mark.parametrize("budget", [None, 0])
def test_the_optimizer_inside_backward_over_gloo(laboratory: Laboratory, budget: int | None) -> None:
    problem = Problem(model="llama", steps=3, samples=12)
    layout = Layout(transport="gloo", budget=budget)
    base = laboratory.train(2, problem, layout, QUIET)
    found = laboratory.train(2, problem, replace(layout, in_backward=True), QUIET)
    check_same_bits(found, base, "losses", "digests", "parameters", "final_loss")


@pytest.mark.parametrize("layout", [BASE, replace(BASE, transport="gloo"), replace(BASE, stage=2)], ids=str)
def test_what_happens_between_steps_changes_no_bit(laboratory: Laboratory, layout: Layout) -> None:
    """Evaluation, reading of parameters, `gathered` and `generate` after every step."""
    problem = Problem(model="llama", steps=3, samples=12)
    base = laboratory.train(2, problem, layout, QUIET)
    found = laboratory.train(2, problem, layout, Extra(gradient_step=1, inspect_every=1))
    check_same_bits(found, base, "losses", "norms", "digests", "parameters", "final_loss")
