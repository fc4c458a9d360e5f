"""Numbers at their boundaries, which whole runs pass without touching: budgets, clipping, the loss scale, the trial of a loss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from zeromesh.optim.optimizer_step import LossScaler, clip_factor
from zeromesh.options import ScalerSettings, ZeroOptions
from zeromesh.trainer.losses.trial import examine
from zeromesh.units.build import kept_buckets

CPU = torch.device("cpu")


def _layout(nbytes: int) -> Any:
    return SimpleNamespace(nbytes=nbytes, first=SimpleNamespace(requires_grad=True, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        (49, [False, False, False]),
        (50, [True, False, False]),
        (100, [False, False, True]),
        (299, [True, False, True]),
        (300, [False, True, True]),
        (349, [False, True, True]),
        (350, [True, True, True]),
    ],
)
def test_a_budget_keeps_what_fits_it_exactly_the_last_unit_first(budget: int, kept: list[bool]) -> None:
    units: Any = [[_layout(50)], [_layout(120), _layout(80)], [_layout(100)]]
    found = kept_buckets(units, ZeroOptions(stage=3, gathered_budget=budget), CPU, "shared")
    assert found == [[stays] * len(unit) for stays, unit in zip(kept, units, strict=True)]


@pytest.mark.parametrize(("kind", "kept"), [("local", True), ("shared", True), ("gloo", False)])
def test_no_budget_is_an_automatic_one(kind: str, kept: bool) -> None:
    budgets: Any = ("auto", None)
    for budget in budgets:
        assert kept_buckets([[_layout(50)]], ZeroOptions(gathered_budget=budget), CPU, kind) == [[kept]]


@pytest.mark.parametrize("norm", [0.0, 1e-7, 0.999, 1.0, 1.0000005, 1.000002, 37.0])
def test_clipping_multiplies_as_torch_does(norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    parameter.grad = torch.full((1,), norm, dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert norm * clip_factor(norm, 1.0) == pytest.approx(float(parameter.grad), rel=1e-15)


def test_the_loss_scale_moves_in_the_step_that_fills_the_interval() -> None:
    scaler = LossScaler(ScalerSettings(initial_scale=8.0, growth_interval=2, smallest=2.0))
    found = []
    for overflow in (False, False, False, True, False, True, True, True):
        scaler.update(overflow=overflow)
        found.append(scaler.scale)
    assert found == [8.0, 16.0, 16.0, 8.0, 8.0, 4.0, 2.0, 2.0]


class _NearlyItsOwnLoss(LlamaForCausalLM):
    factor = 1.0

    @property
    def loss_function(self) -> Any:
        return lambda *arguments, **named: ForCausalLMLoss(*arguments, **named) * self.factor


@pytest.mark.parametrize(("factor", "taken"), [(1.0, True), (1 + 1e-8, False)])
def test_the_chunked_head_stands_for_no_loss_that_differs_by_more_than_rounding(factor: float, taken: bool) -> None:
    kind = type("Nearly", (_NearlyItsOwnLoss,), {"factor": factor})
    model = kind(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1))
    assert (examine(model).route is not None) is taken
