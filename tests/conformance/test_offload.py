"""Where states rest changes no bit of what is computed, for every choice of tiers."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.support.devices import DEVICE
from tests.support.workers import Workers

from .checks import Laboratory, Result, check_ranks_agree, check_same_bits
from .recipe import Extra, Layout, Problem

QUIET = Extra(gradient_step=-1)
EVERYTHING = ("losses", "norms", "digests", "parameters", "final_loss")
ALL = "optimizer=file parameters=file"
CHOICES = (
    ALL,
    "optimizer=file",
    "optimizer=host parameters=host",
    "optimizer=file gradients=none",
    "gradients=file",
    "parameters=file",
    "optimizer=file:0.6 gradients=file:0.3 parameters=file:0.5",
    "optimizer=host:0.5 gradients=file parameters=file:0.9",
    f"{ALL} checksums",
    f"{ALL} stripes",
)
LAYOUTS = {
    "one rank": (1, Layout(accumulation=1)),
    "one rank, 2 microbatches": (1, Layout(accumulation=2)),
    "shared": (2, Layout(transport="shared")),
    "shared, 2 microbatches, prefetch 3": (2, Layout(transport="shared", accumulation=2, prefetch=3)),
    "gloo": (2, Layout(transport="gloo")),
    "gloo, prefetch 3, no overlap": (2, Layout(transport="gloo", prefetch=3, overlap=False, accumulation=2)),
    "stage 2": (2, Layout(stage=2, transport="shared", accumulation=2)),
    "stage 1": (2, Layout(stage=1, transport="gloo", accumulation=2)),
    "stage 0": (2, Layout(stage=0, transport="shared")),
}
PROBLEMS = {
    "bf16": Problem(model="gpt2", clip=0.3, samples=24, precision="bfloat16"),
    "float32": Problem(model="llama", clip=0.3, samples=24, precision="float32"),
}


@pytest.fixture(scope="module")
def same_bits(laboratory: Laboratory) -> Callable[..., None]:
    """Trains with states in the device's memory, once for each problem, and with them elsewhere: no bit is another."""
    resident: dict[object, Result] = {}

    def check(
        choice: str,
        size: int,
        problem: Problem,
        layout: Layout,
        *,
        extra: Extra = QUIET,
        what: tuple[str, ...] = EVERYTHING,
        **axes: int,
    ) -> None:
        key = (size, problem, layout, repr(extra), *axes.items())
        if key not in resident:
            resident[key] = laboratory.train(size, problem, layout, extra, **axes)
            check_ranks_agree(resident[key])
        found = laboratory.train(size, problem, replace(layout, offload=choice), extra, **axes)
        check_same_bits(found, resident[key], *what)

    return check


def cases() -> list[object]:
    """Every choice with some layout, every layout with everything on file; all of the product in the whole matrix."""
    found = []
    for number, choice in enumerate(CHOICES):
        for place, layout in enumerate(LAYOUTS):
            if "parameters" in choice and LAYOUTS[layout][1].stage < 3:
                continue
            for kind, problem in enumerate(PROBLEMS):
                quick = (choice == ALL and kind == 0) or (place + number + kind) % 13 == 0
                marks = () if quick else (pytest.mark.full,)
                found.append(pytest.param(choice, layout, problem, marks=marks, id=f"{choice}, {layout}, {problem}"))
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("choice", "layout", "problem"), cases())
def test_tiers_change_no_bit(same_bits: Callable[..., None], choice: str, layout: str, problem: str) -> None:
    size, how = LAYOUTS[layout]
    same_bits(choice, size, PROBLEMS[problem], how)


def small(model: str, steps: int, **more: Any) -> Problem:
    return Problem(model=model, steps=steps, **{"samples": 12, **more})


BF16, CLIPPED = {"precision": "bfloat16"}, {"clip": 0.3, "samples": 24}
ACCUMULATED = Layout(accumulation=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("choice", "size", "problem", "layout", "axes"),
    [
        *((ALL, 2, small("odd", 4, optimizer=name, **BF16), Layout(transport="auto"), {}) for name in ("adam", "sgd", "adagrad")),
        *(  # Optimizers inside backward.
            pytest.param(
                *(choice, size, small("llama", 4, **BF16), Layout(accumulation=accumulation, in_backward=True), {}),
                marks=() if (choice == ALL) == (size == accumulation) else pytest.mark.full,
            )
            for choice in (ALL, "optimizer=file:0.5")
            for size in (1, 2)
            for accumulation in (1, 2)
        ),
        # Frozen and tied parameters, and skipped steps.
        *((ALL, 2, small(model, 3, **CLIPPED), ACCUMULATED, {}) for model in ("frozen", "lora", "moe")),
        # Sums over replicas come between a shard's reduction and its way to the file.
        (ALL, 4, small("llama", 3, **CLIPPED, **BF16), Layout(), {"replicate": 2}),
    ],
)
def test_every_kind_of_update_streams(
    same_bits: Callable[..., None], choice: str, size: int, problem: Problem, layout: Layout, axes: dict[str, int]
) -> None:
    if problem.optimizer == "adagrad" and DEVICE.type != "cpu":
        pytest.skip("torch has a fused kernel of Adagrad for the host alone, which rounds otherwise than the device's")
    same_bits(choice, size, problem, layout, **axes)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_device_with_room_for_a_part_of_the_states_trains_when_they_rest_elsewhere(workers: Workers, accumulation: int) -> None:
    problem = Problem(model="llama", clip=0.3, steps=2, samples=12, precision="bfloat16")
    layouts = [Layout(transport="gloo", accumulation=accumulation, offload=choice, budget=0) for choice in ("", ALL)]
    given = {"problem": asdict(problem), "layouts": [asdict(layout) for layout in layouts]}
    for resident, away in workers.run(2, "tests.conformance.cases:in_arena", **given):
        assert "do not fit into the device tier" in resident["refused"]
        assert math.isfinite(away["loss"])


def test_gradients_can_be_read_before_the_update(laboratory: Laboratory) -> None:
    """And reading them, or evaluating, changes nothing."""
    problem = Problem(model="llama", clip=0.3, steps=3, samples=12)
    base = laboratory.train(2, problem, Layout(), Extra(gradient_step=1))
    found = laboratory.train(2, problem, Layout(offload=ALL), Extra(gradient_step=1, inspect_every=1))
    check_same_bits(found, base, *EVERYTHING)
    assert found.gradients.keys() == base.gradients.keys()
    for name, gradient in found.gradients.items():
        assert gradient.equal(base.gradients[name]), name


def test_an_infinite_gradient_skips_the_step(same_bits: Callable[..., None]) -> None:
    extra = Extra(gradient_step=-1, infinite={"rank": 1, "step": 1})
    what = ("digests", "parameters", "final_loss")
    same_bits(ALL, 2, small("llama", 3, clip=0.3), Layout(), extra=extra, what=what)
