"""Where states rest changes no bit of what is computed, for every choice of tiers."""

import math
from dataclasses import asdict, replace

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
def resident() -> dict[object, Result]:
    return {}


def base_of(
    laboratory: Laboratory, resident: dict[object, Result], size: int, problem: Problem, layout: Layout
) -> Result:
    key = (size, problem, layout)
    if key not in resident:
        resident[key] = laboratory.train(size, problem, layout, QUIET)
        check_ranks_agree(resident[key])
    return resident[key]


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


@pytest.mark.parametrize(("choice", "layout", "problem"), cases())
def test_tiers_change_no_bit(
    laboratory: Laboratory, resident: dict[object, Result], choice: str, layout: str, problem: str
) -> None:
    size, how = LAYOUTS[layout]
    base = base_of(laboratory, resident, size, PROBLEMS[problem], how)
    found = laboratory.train(size, PROBLEMS[problem], replace(how, offload=choice), QUIET)
    check_same_bits(found, base, *EVERYTHING)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adagrad"])
def test_every_optimizer_streams(laboratory: Laboratory, optimizer: str) -> None:
    if optimizer == "adagrad" and DEVICE.type != "cpu":
        pytest.skip("torch has a fused kernel of Adagrad for the host alone, which rounds otherwise than the device's")
    problem = Problem(model="odd", optimizer=optimizer, steps=4, samples=12, precision="bfloat16")
    layout = Layout(transport="auto")
    base = laboratory.train(2, problem, layout, QUIET)
    found = laboratory.train(2, problem, replace(layout, offload=ALL), QUIET)
    check_same_bits(found, base, *EVERYTHING)


@pytest.mark.parametrize(("size", "accumulation"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("choice", [ALL, "optimizer=file:0.5"])
def test_the_optimizer_inside_backward_streams(
    laboratory: Laboratory, choice: str, size: int, accumulation: int
) -> None:
    problem = Problem(model="llama", steps=4, samples=12, precision="bfloat16")
    layout = Layout(accumulation=accumulation, in_backward=True)
    base = laboratory.train(size, problem, layout, QUIET)
    found = laboratory.train(size, problem, replace(layout, offload=choice), QUIET)
    check_same_bits(found, base, *EVERYTHING)


def test_models_with_frozen_and_tied_parameters_and_skipped_steps(laboratory: Laboratory) -> None:
    for model in ("frozen", "lora", "moe"):
        problem = Problem(model=model, clip=0.3, steps=3, samples=24)
        layout = Layout(accumulation=2)
        base = laboratory.train(2, problem, layout, QUIET)
        found = laboratory.train(2, problem, replace(layout, offload=ALL), QUIET)
        check_same_bits(found, base, *EVERYTHING)


def test_replicas_of_offloaded_shards(laboratory: Laboratory) -> None:
    """Sums over replicas come between a shard's reduction and its way to the file."""
    problem = Problem(model="llama", clip=0.3, steps=3, samples=24, precision="bfloat16")
    base = laboratory.train(4, problem, Layout(), QUIET, replicate=2)
    found = laboratory.train(4, problem, Layout(offload=ALL), QUIET, replicate=2)
    check_same_bits(found, base, *EVERYTHING)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_device_with_room_for_a_part_of_the_states_trains_when_they_rest_elsewhere(
    workers: Workers, accumulation: int
) -> None:
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


def test_an_infinite_gradient_skips_the_step(laboratory: Laboratory) -> None:
    problem = Problem(model="llama", clip=0.3, steps=3, samples=12)
    extra = Extra(gradient_step=-1, infinite={"rank": 1, "step": 1})
    base = laboratory.train(2, problem, Layout(), extra)
    found = laboratory.train(2, problem, Layout(offload=ALL), extra)
    check_same_bits(found, base, "digests", "parameters", "final_loss")
