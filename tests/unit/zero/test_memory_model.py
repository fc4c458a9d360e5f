"""A run whose states cannot fit is refused, and the message says what would need less."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conformance.models import stack

from zeromesh.errors import StorageError
from zeromesh.options import Precision, ZeroOptions
from zeromesh.trainer.setup import memory_check
from zeromesh.units.plan import plan_model
from zeromesh.zero.memory_model import predict_memory

TRANSPORTS = {1: "local", 2: "gloo", 4: "shared"}


def on_meta() -> Any:
    """A model that nothing has to be given back of."""
    with torch.device("meta"):
        return stack(size=64)


def refusal(monkeypatch: pytest.MonkeyPatch, ranks: int, free: int, **changes: Any) -> str:
    """What is said where so many bytes are free; empty where that is enough."""
    monkeypatch.setattr(memory_check, "available_bytes", lambda: free)
    monkeypatch.setattr(memory_check, "swap_bytes", lambda: 0)
    mesh: Any = SimpleNamespace(
        device=torch.device("cpu"),
        shard=SimpleNamespace(size=ranks),
        environment=SimpleNamespace(local_world_size=ranks),
    )
    try:
        memory_check.require_memory(on_meta(), options(**changes), mesh, transport=TRANSPORTS[ranks])
    except StorageError as error:
        return str(error)
    return ""


def options(**changes: Any) -> ZeroOptions:
    return ZeroOptions(precision=Precision(compute=torch.bfloat16), **changes)


@pytest.mark.parametrize(
    ("ranks", "stage", "advice"),
    [
        (1, 0, "make the model smaller, or use more hosts with a zero.stage above 0"),
        (1, 1, "make the model smaller, or use more hosts"),
        (1, 3, "make the model smaller, or use more hosts"),
        (2, 0, "set zero.stage to 3, which needs *, make the model smaller, or use more hosts with a zero.stage"),
        (2, 2, "set zero.stage to 3, which needs *, make the model smaller, or use more hosts"),
        (2, 3, "make the model smaller, or use more hosts"),
        (4, 0, "set zero.stage to 3, which needs *, make the model smaller, or use more hosts with a zero.stage"),
        (4, 3, "make the model smaller, or use more hosts"),
    ],
)
def test_the_advice_fits_the_stage(monkeypatch: pytest.MonkeyPatch, ranks: int, stage: int, advice: str) -> None:
    said = refusal(monkeypatch, ranks, free=1, stage=stage)
    before, _, after = advice.partition("*")
    said = said.partition("are free; ")[2]
    assert said.startswith(before)
    assert after in said
    assert ("zero.stage" in said) == ("zero.stage" in advice)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_needed_is_what_is_predicted(monkeypatch: pytest.MonkeyPatch, ranks: int, stage: int) -> None:
    plan = plan_model(on_meta(), torch.bfloat16)
    found = predict_memory(
        plan, options(stage=stage, gathered_budget=0), parts=ranks, transport=TRANSPORTS[ranks], budget=0
    )
    needed = ranks * found.total
    assert refusal(monkeypatch, ranks, free=needed, stage=stage, gathered_budget=0) == ""
    assert "need at least" in refusal(monkeypatch, ranks, free=needed - 1, stage=stage, gathered_budget=0)


def test_of_what_may_be_kept_as_much_is_counted_as_takes_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that the configuration names is taken as it is."""
    plan = plan_model(on_meta(), torch.bfloat16)
    budgets = (0, 10**9)
    totals = [
        2 * predict_memory(plan, options(stage=3), parts=2, transport="gloo", budget=budget).total for budget in budgets
    ]
    assert totals[0] < totals[1]
    assert refusal(monkeypatch, 2, free=totals[0], stage=3) == ""
    assert refusal(monkeypatch, 2, free=totals[0], stage=3, gathered_budget=10**9)
    assert refusal(monkeypatch, 2, free=totals[1], stage=3, gathered_budget=10**9) == ""
