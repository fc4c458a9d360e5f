"""Predicted memory: by hand on a small plan, and against the ledger of engines that train."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import pytest
import torch
from conformance.recipe import Layout, Problem
from workers import Workers

from zeromesh.flat.layout import ParameterSpec
from zeromesh.offload import Purpose
from zeromesh.zero.footprint import predict_memory
from zeromesh.zero.options import Precision, ZeroOptions
from zeromesh.zero.plan import ModelPlan, UnitPlan

_P = 4096  # elements of each of three units: no rank count used here makes padding
Transport = Literal["local", "shared", "gloo"]


def plan(dtype: torch.dtype = torch.bfloat16, trained: tuple[bool, ...] = (True, True, True)) -> ModelPlan:
    units = [
        UnitPlan(
            module=name, specs=(ParameterSpec(fqn=f"{name}.w", shape=(64, _P // 64), dtype=dtype, requires_grad=grad),)
        )
        for name, grad in zip(("", "a", "b"), trained, strict=True)
    ]
    return ModelPlan(units=tuple(units))


def options(stage: int, **changes: Any) -> ZeroOptions:
    return ZeroOptions(stage=stage, precision=Precision(compute=torch.bfloat16), **changes)


class TestByHand:
    """Three units of `_P` elements in bf16, masters and sums in fp32, AdamW."""

    def test_one_rank_keeps_everything(self) -> None:
        found = predict_memory(plan(), options(2), parts=1, transport="local")
        assert found.terms == {
            Purpose.PARAMETERS: 3 * 2 * _P,
            Purpose.MASTER: 3 * 4 * _P,
            Purpose.MOMENTS: 3 * 8 * _P,
            Purpose.GRADIENTS: 3 * 4 * _P,
        }
        assert found.gathered == 0

    def test_stage_3_over_gloo_keeps_shards_alone(self) -> None:
        found = predict_memory(plan(), options(3), parts=4, transport="gloo")
        assert found.terms == {
            Purpose.MASTER: 3 * 4 * _P // 4,
            Purpose.MOMENTS: 3 * 8 * _P // 4,
            Purpose.GRADIENTS: 3 * 4 * _P // 4,
            Purpose.GRADIENT_BUCKETS: 2 * 2 * 2 * _P,
        }
        assert found.gathered == 3 * 2 * _P  # the root, the unit that computes and the one that is fetched
        assert predict_memory(plan(), options(3, prefetch=0), parts=4, transport="gloo").gathered == 2 * 2 * _P

    def test_shared_pages_count_once_over_the_ranks(self) -> None:
        found = predict_memory(plan(), options(3), parts=4, transport="shared")
        assert found.terms[Purpose.PARAMETERS] == 3 * 2 * _P // 4
        assert found.terms[Purpose.GRADIENT_BUCKETS] == 2 * 2 * _P
        assert found.gathered == 0

    def test_a_budget_keeps_the_last_units_first(self) -> None:
        found = predict_memory(plan(), options(3), parts=2, transport="gloo", budget=2 * _P)
        assert found.terms[Purpose.PARAMETERS] == 2 * _P
        assert found.gathered == 2 * 2 * _P

    def test_masters_of_the_compute_dtype_are_the_parameters(self) -> None:
        def masters(stage: int) -> int:
            terms = predict_memory(plan(torch.float32), ZeroOptions(stage=stage), parts=2, transport="gloo").terms
            return terms.get(Purpose.MASTER, 0)

        assert masters(2) == 0
        assert masters(3) == 3 * 4 * _P // 2  # nothing stays gathered that they could be part of

    def test_frozen_parameters_have_no_states(self) -> None:
        found = predict_memory(plan(trained=(False, True, False)), options(1), parts=2, transport="gloo")
        assert found.terms == {
            Purpose.PARAMETERS: 3 * 2 * _P,
            Purpose.MASTER: 4 * _P // 2,
            Purpose.MOMENTS: 8 * _P // 2,
            Purpose.GRADIENTS: 4 * _P // 2,
            Purpose.GRADIENT_BUCKETS: 2 * 2 * 2 * _P,
        }

    def test_sums_before_one_reduction(self) -> None:
        found = predict_memory(plan(), options(1, accumulation=4), parts=2, transport="shared")
        assert found.terms[Purpose.PARTIAL_GRADIENTS] == 3 * 4 * _P
        assert found.terms[Purpose.GRADIENT_BUCKETS] == 2 * 4 * _P
        assert (
            Purpose.PARTIAL_GRADIENTS
            not in predict_memory(plan(), options(2, accumulation=4), parts=2, transport="shared").terms
        )

    def test_the_optimizer_inside_backward_needs_few_gradients(self) -> None:
        inside = options(3, optimizer_in_backward=True, on_nonfinite="stop")
        assert predict_memory(plan(), inside, parts=2, transport="shared").terms[Purpose.GRADIENTS] == 2 * 4 * _P // 2


CELLS = [
    *[
        (2, transport, dtype, stage)
        for transport in ("shared", "gloo")
        for dtype in ("float32", "bfloat16")
        for stage in range(4)
    ],
    *[(1, "auto", dtype, stage) for dtype in ("float32", "bfloat16") for stage in range(4)],
]


def check(found: dict[str, Any]) -> None:
    assert found["ledger"] == found["predicted"]
    assert found["ledger_peak"] == found["predicted_peak"]
    assert found["tensors"] == {name: nbytes for name, nbytes in found["ledger"].items() if name in found["tensors"]}


def account(workers: Workers, size: int, problem: Problem, layout: Layout) -> list[dict[str, Any]]:
    return workers.run(size, "footprint_cases:account", problem=asdict(problem), layout=asdict(layout))


@pytest.mark.parametrize(("size", "transport", "dtype", "stage"), CELLS)
def test_the_ledger_is_as_predicted(workers: Workers, size: int, transport: str, dtype: str, stage: int) -> None:
    layout = Layout(stage=stage, transport=transport)
    for found in account(workers, size, Problem(precision=dtype), layout):
        check(found)


@pytest.mark.parametrize("model", ["gpt2", "frozen", "moe", "conv", "odd"])
def test_of_other_models_too(workers: Workers, model: str) -> None:
    for layout in (Layout(stage=3, transport="gloo", budget=20_000), Layout(stage=1, accumulation=2)):
        for found in account(workers, 2, Problem(model=model), layout):
            check(found)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_with_other_optimizers_too(workers: Workers, optimizer: str) -> None:
    for found in account(workers, 2, Problem(optimizer=optimizer), Layout(stage=2)):
        check(found)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_inside_backward_stay_below_what_is_predicted(workers: Workers, size: int, stage: int) -> None:
    """How many are there at once depends on how ranks keep pace with each other."""
    for found in account(workers, size, Problem(), Layout(stage=stage, in_backward=True)):
        name = Purpose.GRADIENTS.name
        assert 0 < found["ledger"].pop(name) <= found["predicted"].pop(name)
        assert found["ledger"] == found["predicted"]
