"""What may be done when: the life of a unit, parameters at rest, the model between steps."""

import math
from collections.abc import Callable

import pytest
from torch import nn

from tests.support.workers import Pool, Workers
from zeromesh.errors import PhaseError
from zeromesh.offload import Ledger
from zeromesh.units.unit import Phase, Unit

LEGAL = {
    (Phase.RESTING, Phase.GATHERING),
    (Phase.GATHERING, Phase.LIVE),
    (Phase.LIVE, Phase.RESTING),
}


@pytest.mark.parametrize("old", Phase)
@pytest.mark.parametrize("new", Phase)
def test_the_table_of_transitions(old: Phase, new: Phase) -> None:
    unit = Unit(3, "layers.3", nn.Module(), (), Ledger(), 1.0)
    unit.phase = old
    if (old, new) in LEGAL:
        unit.enter(new)
        assert unit.phase is new
        return
    with pytest.raises(PhaseError, match=r"unit layers\.3 is .* and cannot become"):
        unit.enter(new)


@pytest.mark.parametrize(("transport", "budget"), [("shared", None), ("shared", 0), ("gloo", 0), ("gloo", 100_000)])
def test_parameters_at_rest_name_themselves(workers: Workers, transport: str, budget: int | None) -> None:
    case = "tests.conformance.scenes:resting_parameters"
    for found in workers.run(2, case, transport=transport, budget=budget):
        for state in found["states"]:
            assert state == {"shapes": True, "silent": [], "model": True, "saved": True, "gradients": []}


@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_not_allowed_says_so(fresh_pool: Callable[..., Pool], stage: int, transport: str) -> None:
    """And training goes on after it."""
    for found in fresh_pool(2).run("tests.conformance.scenes:phases", stage=stage, transport=transport):
        assert f"unit {found['unit']} is" in found["transition"]
        assert "outside a training step" in found["outside"]
        assert "outside a training step" in found["outside later"]
        assert "during evaluation" in found["nested"]
        assert "no.such" in found["unknown"]
        assert math.isfinite(found["norm"])


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_model_can_be_used_between_steps(workers: Workers, stage: int, transport: str, budget: int | None) -> None:
    case = "tests.conformance.scenes:looking"
    for found in workers.run(2, case, stage=stage, transport=transport, budget=budget):
        assert math.isfinite(found.pop("norm"))
        assert found == {"loss": True, "tokens": True, "hidden": True, "gathered": [True, True]}


def test_backward_belongs_to_the_engine(fresh_pool: Callable[..., Pool]) -> None:
    (found,) = fresh_pool(1).run("tests.conformance.scenes:misuse_of_backward")
    assert "let the trainer call backward" in found["own"]
    assert "use_reentrant=False" in found["reentrant"]


def test_a_users_call_that_fails_does_not_end_training(workers: Workers) -> None:
    for found in workers.run(2, "tests.conformance.scenes:interrupted_call"):
        assert found["error"]
        assert found["again"]
        assert math.isfinite(found["norm"])


def test_a_model_made_whole_is_ordinary(workers: Workers) -> None:
    for found in workers.run(2, "tests.conformance.scenes:made_whole"):
        assert found == {"equal": True, "gradients": True}
