"""Predicted memory against the ledger and the tensors of engines that train."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest

from tests.conformance.recipe import Layout, Problem
from tests.support.devices import DEVICE
from tests.support.workers import Workers


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A run whose bytes are counted."""

    ranks: int = 2
    replicate: int = 1
    problem: Problem
    layout: Layout


LLAMA = Problem(samples=12)
BF16 = replace(LLAMA, precision="bfloat16")
SETTINGS = {
    **{
        f"{dtype}, stage {stage}, {transport}, {accumulation} microbatches": Setting(
            problem=replace(LLAMA, precision=dtype), layout=Layout(stage=stage, transport=transport, accumulation=accumulation)
        )
        for dtype in ("float32", "bfloat16")
        for stage in range(4)
        for transport in ("shared", "gloo")
        for accumulation in (1, 2)
    },
    **{
        f"{dtype}, stage {stage}, one rank": Setting(ranks=1, problem=replace(LLAMA, precision=dtype), layout=Layout(stage=stage))
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
    "three ranks, odd sizes": Setting(ranks=3, problem=replace(LLAMA, model="odd"), layout=Layout(transport="gloo", budget=0)),
    "frozen beside trained, three slots": Setting(
        ranks=3, problem=replace(BF16, model="lora"), layout=Layout(transport="gloo", slots=3)
    ),
    "momentum": Setting(problem=replace(LLAMA, optimizer="sgd"), layout=Layout(transport="shared")),
    "adagrad": Setting(problem=replace(LLAMA, optimizer="adagrad"), layout=Layout(transport="gloo", stage=1)),
    "moments in bfloat16": Setting(problem=LLAMA, layout=Layout(states="bfloat16", stage=2)),
    "moments in blocks": Setting(problem=BF16, layout=Layout(states="int8")),
    "bfloat16 alone": Setting(problem=BF16, layout=Layout(states="bfloat16", master="none")),
    "compensated": Setting(problem=BF16, layout=Layout(states="int8", master="kahan", stage=1)),
    **{
        f"{dtype}, divided replicas, stage {stage}, {shard} shards, {accumulation} microbatches": Setting(
            ranks=2 * shard,
            replicate=2,
            problem=replace(LLAMA, precision=dtype, samples=16),
            layout=Layout(stage=stage, transport=transport, accumulation=accumulation, replicas="divided", budget=0),
        )
        for dtype, stage, shard, transport, accumulation in (
            ("bfloat16", 3, 2, "gloo", 1),
            ("float32", 3, 2, "shared", 2),
            ("bfloat16", 1, 1, "auto", 2),
        )
    },
    "inside backward, accumulating": Setting(problem=LLAMA, layout=Layout(transport="shared", in_backward=True, accumulation=2)),
}


def account(workers: Workers, setting: Setting, **more: Any) -> None:
    arguments = {"problem": asdict(setting.problem), "layout": asdict(setting.layout)}
    workers.run(setting.ranks, "footprint_cases:account", **arguments, replicate=setting.replicate, **more)


def in_short_run() -> list[Any]:
    """Settings, of whose products a diagonal is in the short run."""
    products = [name for name in SETTINGS if "microbatches" in name or "one rank" in name]
    left = {name for number, name in enumerate(products) if number % 5}
    return [pytest.param(name, marks=pytest.mark.full) if name in left else name for name in SETTINGS]


@pytest.mark.sampled(2)
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
