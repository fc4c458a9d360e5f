"""Shards inside a group, copies of the group: reduce-scatter inside, then a sum over the copies."""

import pytest

from .checks import Laboratory, check_equal, check_same_bits, whole_product
from .recipe import Extra, Layout, Problem


@pytest.mark.parametrize(
    ("stage", "transport", "accumulation"), whole_product(5, [0, 1, 2, 3], ["shared", "gloo"], [1, 4])
)
def test_two_copies_of_two_shards(laboratory: Laboratory, stage: int, transport: str, accumulation: int) -> None:
    problem = Problem(model="odd", clip=0.3)
    layout = Layout(stage=stage, transport=transport, accumulation=accumulation)
    found = laboratory.train(4, problem, layout, replicate=2)
    check_equal(found, laboratory.reference(problem), problem)


@pytest.mark.parametrize(("stage", "model"), whole_product(2, [0, 2, 3], ["llama", "routed", "frozen"]))
def test_copies_alone(laboratory: Laboratory, stage: int, model: str) -> None:
    """No shards: plain data parallelism. In `routed`, ranks use different experts, so gradients arrive in different orders."""
    problem = Problem(model=model, clip=0.3)
    found = laboratory.train(2, problem, Layout(stage=stage, accumulation=4), replicate=2)
    check_equal(found, laboratory.reference(problem), problem)


@pytest.mark.parametrize(("stage", "size", "accumulation"), whole_product(3, [0, 3], [2, 4], [1, 4]))
def test_the_optimizer_inside_backward(laboratory: Laboratory, stage: int, size: int, accumulation: int) -> None:
    problem = Problem(model="llama", steps=4)
    base = laboratory.train(size, problem, Layout(stage=stage, accumulation=accumulation), replicate=2)
    layout = Layout(stage=stage, accumulation=accumulation, in_backward=True)
    found = laboratory.train(size, problem, layout, Extra(gradient_step=-1), replicate=2)
    check_same_bits(found, base, "losses", "parameters", "final_loss")
