"""Gradients that are not finite, and losses without targets: what one rank has, all ranks take part in."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.devices import DEVICE
from tests.support.workers import Pool
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.process_mesh import Mesh

from .cases import Run, digest
from .checks import Laboratory, check_ranks_agree, check_same_bits, whole_product
from .recipe import Extra, Layout, Problem, as_arguments

BAD = 2


def stop_on_infinity(mesh: Mesh, problem: dict[str, Any], layout: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    more = Extra(**extra)
    run = Run.start(mesh, Problem(**problem), Layout(**layout))
    for step in range(run.problem.steps):
        before = run.digest()
        bad = (mesh.rank, step) == (more.infinite["rank"], more.infinite["step"])
        try:
            run.step(step, factor=float("inf") if bad else 1.0)
        except ZeromeshError as error:
            unchanged = before == run.digest()
            return {"step": step, "error": type(error).__name__, "message": str(error), "unchanged": unchanged}
    return {"step": -1}


def without_targets(mesh: Mesh, stage: int, transport: str, kind: str) -> str:
    """The last rank's loss is 0 in the first and third step: a constant, or computed and multiplied by 0."""
    problem = Problem(model="lora", steps=4, samples=8)
    layout = Layout(stage=stage, transport=transport, budget=0, accumulation=2)
    run = Run.start(mesh, problem, layout)
    computed = run.loss_of

    def loss_of(micro: Any, factor: float) -> torch.Tensor:
        loss = computed(micro, factor)
        return loss if factor else loss.new_zeros(()) if kind == "constant" else loss * 0

    run.loss_of = loss_of  # type: ignore[method-assign]
    for step in range(problem.steps):
        empty = step in (0, 2) and mesh.rank == mesh.world_size - 1
        run.step(step, factor=0.0 if empty else 1.0)
    found = digest(tensor for _, tensor in sorted(run.parameters().items()))
    run.close()
    return found


@pytest.mark.parametrize(("stage", "transport"), whole_product(3, [0, 1, 2, 3], ["shared", "gloo"]))
def test_one_rank_with_infinity_makes_all_skip(laboratory: Laboratory, stage: int, transport: str) -> None:
    """Parameters and moments keep their bits, and the next steps go on as if the bad one had not been."""
    problem = Problem(model="llama", clip=0.3, steps=5, samples=12)
    layout = Layout(stage=stage, transport=transport, accumulation=2)
    found = laboratory.train(2, problem, layout, Extra(gradient_step=-1, infinite={"rank": 1, "step": BAD}))
    check_ranks_agree(found)
    for rank in found.ranks:
        assert rank["skipped"] == [step == BAD for step in range(problem.steps)]
        assert rank["digests"][BAD] == rank["digests"][BAD - 1]
        assert rank["digests"][BAD + 1] != rank["digests"][BAD]
    assert [math.isfinite(norm) for norm in found.norms] == [step != BAD for step in range(problem.steps)]
    assert all(math.isfinite(loss) for step, loss in enumerate(found.losses) if step != BAD)


def test_a_skipped_first_step_leaves_nothing_behind(laboratory: Laboratory) -> None:
    problem = Problem(model="llama", steps=1, samples=12)
    found = laboratory.train(2, problem, Layout(), Extra(gradient_step=-1, infinite={"rank": 0, "step": 0}))
    start = laboratory.train(2, Problem(model="llama", steps=0, samples=12), Layout(), Extra(gradient_step=-1))
    check_same_bits(found, start, "parameters", "final_loss")


@pytest.mark.parametrize("in_backward", [False, True])
def test_stop_raises_on_all_ranks(fresh_pool: Callable[..., Pool], in_backward: bool) -> None:
    problem = Problem(model="llama", steps=4, samples=12)
    layout = Layout(on_nonfinite="stop", in_backward=in_backward)
    arguments = as_arguments(problem, layout, Extra(gradient_step=-1, infinite={"rank": 1, "step": BAD}))
    pool = fresh_pool(2)
    outcomes = pool.outcomes("test_nonfinite:stop_on_infinity", **arguments)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
    for outcome in outcomes:
        assert outcome.result["step"] == BAD
        # Inside backward one rank may find it first; the other then names that rank and its reason.
        assert "NonFiniteError" in outcome.result["error"] + outcome.result["message"]
        assert "gradients of unit " in outcome.result["message"]
        # On a device no update waits for the host to look at its gradients first.
        assert outcome.result["unchanged"] or (in_backward and DEVICE.type != "cpu")


@pytest.mark.parametrize(("stage", "transport"), whole_product(5, [0, 2, 3], ["shared", "gloo"]))
def test_a_microbatch_without_targets_adds_zeros(fresh_pool: Callable[..., Pool], stage: int, transport: str) -> None:
    """Its loss may be a constant, which has no backward; its peers' backward gathers parameters all the same."""
    pool = fresh_pool(2)
    found = {
        kind: pool.run("test_nonfinite:without_targets", stage=stage, transport=transport, kind=kind)
        for kind in ("computed", "constant")
    }
    assert found["constant"] == found["computed"]
