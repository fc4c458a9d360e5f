"""Predicted memory: by hand on a small plan, and against the ledger and the tensors of engines that train."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import pytest
import torch

from tests.conformance.recipe import Layout, Problem
from tests.support.devices import DEVICE
from tests.support.workers import Workers
from zeromesh.flat.layout import ParameterSpec
from zeromesh.offload import Purpose
from zeromesh.options import Precision, ZeroOptions
from zeromesh.settings.keys import AverageSettings
from zeromesh.units.build import plan_layouts
from zeromesh.units.plan import UnitPlan
from zeromesh.zero.memory_model import MemoryModel

_P = 4096  # elements of each of three units: no rank count used here makes padding
Transport = Literal["local", "shared", "gloo"]


def plan(dtype: torch.dtype = torch.bfloat16, trained: tuple[bool, ...] = (True, True, True)) -> list[UnitPlan]:
    return [
        UnitPlan(
            module=name, specs=(ParameterSpec(fqn=f"{name}.w", shape=(64, _P // 64), dtype=dtype, requires_grad=grad),)
        )
        for name, grad in zip(("", "a", "b"), trained, strict=True)
    ]


def options(stage: int, **changes: Any) -> ZeroOptions:
    return ZeroOptions(stage=stage, precision=Precision(compute=torch.bfloat16), **changes)


INSIDE = {"optimizer_in_backward": True, "on_nonfinite": "stop"}
BY_HAND: dict[str, tuple[Transport, int, ZeroOptions, dict[str, int], int | None]] = {
    "one rank keeps everything": (
        "local", 1, options(2), {"parameters": 6 * _P, "master": 12 * _P, "moments": 24 * _P, "gradients": 12 * _P}, 0
    ),
    # Gathered: the root, the unit that computes and the one that is fetched.
    "stage 3 over gloo keeps shards alone": (
        "gloo", 4, options(3),
        {"parameters": 0, "master": 3 * _P, "moments": 6 * _P, "gradients": 3 * _P, "gradient_buckets": 8 * _P}, 6 * _P,
    ),
    "without prefetch": ("gloo", 4, options(3, prefetch=0), {}, 4 * _P),
    "shared pages count once over the ranks": (
        "shared", 4, options(3, gathered_budget=1 << 40), {"parameters": 6 * _P // 4, "gradient_buckets": 4 * _P}, 0,
    ),
    "of which the root's stay": ("shared", 4, options(3), {"parameters": 2 * _P // 4}, _P),
    "a budget keeps the last units first": (
        "gloo", 2, options(3, gathered_budget=2 * _P), {"parameters": 2 * _P}, 4 * _P
    ),
    "sums before one reduction": (
        "shared", 2, options(1, accumulation=4), {"partial_gradients": 12 * _P, "gradient_buckets": 8 * _P}, None
    ),
    "none where each microbatch is reduced": ("shared", 2, options(2, accumulation=4), {"partial_gradients": 0}, None),
    "averages are as large as one moment": (
        "shared", 2, options(3, average=AverageSettings(decay=0.9)), {"averages": 6 * _P, "moments": 12 * _P}, None
    ),
    "the optimizer inside backward needs few gradients": (
        "shared", 2, options(3, **INSIDE), {"gradients": 4 * _P}, None
    ),
}  # fmt: skip
"""Of three units of `_P` elements in bf16, masters and sums in fp32, AdamW: transport, ranks, options, bytes by purpose, and
those that are gathered for a while."""


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    transport, parts, how, terms, gathered = BY_HAND[name]
    found = MemoryModel(plan_layouts(plan(), parts), how, parts, transport)
    assert {purpose: found.terms.get(Purpose[purpose.upper()], 0) for purpose in terms} == terms
    assert gathered in (None, found.gathered)
    if len(terms) > 3:
        assert len(found.terms) == sum(map(bool, terms.values()))


def test_masters_of_the_compute_dtype_are_the_parameters() -> None:
    for stage, wanted in (
        (2, 0),
        (3, 3 * 4 * _P // 2),
    ):  # At stage 3 nothing stays gathered that they could be part of.
        found = MemoryModel(plan_layouts(plan(torch.float32), 2), ZeroOptions(stage=stage), 2, "gloo")
        assert found.terms.get(Purpose.MASTER, 0) == wanted


def test_frozen_parameters_have_no_states() -> None:
    assert MemoryModel(plan_layouts(plan(trained=(False, True, False)), 2), options(1), 2, "gloo").terms == {
        Purpose.PARAMETERS: 3 * 2 * _P,
        Purpose.MASTER: 4 * _P // 2,
        Purpose.MOMENTS: 8 * _P // 2,
        Purpose.GRADIENTS: 4 * _P // 2,
        Purpose.GRADIENT_BUCKETS: 2 * 2 * 2 * _P,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A run whose bytes are counted."""

    ranks: int = 2
    problem: Problem
    layout: Layout


LLAMA = Problem(samples=12)
BF16 = replace(LLAMA, precision="bfloat16")
SETTINGS = {
    **{
        f"{dtype}, stage {stage}, {transport}, {accumulation} microbatches": Setting(
            problem=replace(LLAMA, precision=dtype),
            layout=Layout(stage=stage, transport=transport, accumulation=accumulation),
        )
        for dtype in ("float32", "bfloat16")
        for stage in range(4)
        for transport in ("shared", "gloo")
        for accumulation in (1, 2)
    },
    **{
        f"{dtype}, stage {stage}, one rank": Setting(
            ranks=1, problem=replace(LLAMA, precision=dtype), layout=Layout(stage=stage)
        )
        for dtype in ("float32", "bfloat16")
        for stage in range(4)
    },
    **{
        f"{model}, stage {layout.stage}": Setting(problem=replace(LLAMA, model=model), layout=layout)
        for model in ("gpt2", "frozen", "moe", "conv", "odd")
        for layout in (Layout(stage=3, transport="gloo", budget=20_000), Layout(stage=1, accumulation=2))
    },
    "budget 0": Setting(problem=LLAMA, layout=Layout(transport="shared", budget=0)),
    "a budget for some": Setting(problem=BF16, layout=Layout(transport="gloo", budget=40_000, prefetch=2)),
    "three ranks, odd sizes": Setting(
        ranks=3, problem=replace(LLAMA, model="odd"), layout=Layout(transport="gloo", budget=0)
    ),
    "frozen beside trained, three slots": Setting(
        ranks=3, problem=replace(BF16, model="lora"), layout=Layout(transport="gloo", slots=3)
    ),
    "momentum": Setting(problem=replace(LLAMA, optimizer="sgd"), layout=Layout(transport="shared")),
    "adagrad": Setting(problem=replace(LLAMA, optimizer="adagrad"), layout=Layout(transport="gloo", stage=1)),
    "inside backward, accumulating": Setting(
        problem=LLAMA, layout=Layout(transport="shared", in_backward=True, accumulation=2)
    ),
}


def account(workers: Workers, setting: Setting, **more: Any) -> None:
    arguments = {"problem": asdict(setting.problem), "layout": asdict(setting.layout)}
    workers.run(setting.ranks, "footprint_cases:account", **arguments, **more)


def in_short_run() -> list[Any]:
    """Settings, of whose products a diagonal is in the short run."""
    products = [name for name in SETTINGS if "microbatches" in name or "one rank" in name]
    left = {name for number, name in enumerate(products) if number % 3}
    return [pytest.param(name, marks=pytest.mark.full) if name in left else name for name in SETTINGS]


@pytest.mark.parametrize("name", in_short_run())
def test_the_ledger_is_as_predicted(workers: Workers, name: str) -> None:
    account(workers, SETTINGS[name])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_inside_backward_stay_below_what_is_predicted(workers: Workers, ranks: int, stage: int) -> None:
    account(workers, Setting(ranks=ranks, problem=Problem(), layout=Layout(stage=stage, in_backward=True)), paced=True)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="transports between CPUs")
def test_a_rank_that_runs_ahead_of_its_peer_waits_instead_of_keeping_gradients(workers: Workers) -> None:
    workers.run(2, "footprint_cases:lead")
