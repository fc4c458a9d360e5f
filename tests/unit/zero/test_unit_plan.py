"""From models to units and buckets."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.models import SUBJECTS, Stack, bert, frozen, gpt2, llama, moe, odd, stack
from zeromesh.errors import LayoutError
from zeromesh.flat.layout import ParameterSpec, StageCopies
from zeromesh.units.plan import ModelCuts, UnitPlan, plan_model


def wide_pair() -> list[nn.Module]:
    return [nn.Linear(64, 64), nn.Linear(64, 64)]


def units_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[str]:
    return [unit.name for unit in plan_model(model, dtype)]


def specs_of(plan: Sequence[UnitPlan]) -> list[ParameterSpec]:
    return [spec for unit in plan for spec in unit.specs]


def dtypes_of(plan: Sequence[UnitPlan]) -> dict[str, torch.dtype]:
    return {spec.fqn: spec.dtype for spec in specs_of(plan)}


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_parameter_is_in_one_unit(name: str) -> None:
    model = SUBJECTS[name].build()
    plan = plan_model(model, torch.float32)
    found = [spec.fqn for spec in specs_of(plan)]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    for unit in plan[1:]:
        assert all(spec.fqn.startswith(f"{unit.module}.") for spec in unit.specs)
        assert sum(spec.numel for spec in unit.specs) >= 4096
    assert plan[0].module == ""


@pytest.mark.parametrize(
    ("build", "units"),
    [
        (llama, ["root", "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]),
        (moe, ["root", "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]),
        (gpt2, ["root", "transformer.h.0", "transformer.h.1"]),
        (bert, ["root", "bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1"]),
        (stack, ["root", "blocks.0", "blocks.1", "blocks.2"]),
        (lambda: nn.Linear(100, 100), ["root"]),
        (lambda: nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 100)), ["root", "0", "2"]),
        (lambda: nn.Sequential(nn.Linear(100, 100), nn.Conv1d(100, 100, 1)), ["root"]),
        # Blocks inside blocks are one unit, and small units join the root.
        (
            lambda: nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(*wide_pair()) for _ in range(2))}),
            ["root", "layers.0", "layers.1"],
        ),
        (lambda: Stack([nn.Linear(10, 10) for _ in range(4)], [0, 1, 2, 3], 32), ["root"]),
    ],
)
def test_units_are_blocks_embedding_head_and_the_rest(build: Any, units: list[str]) -> None:
    assert units_of(build()) == units


def test_a_container_without_a_forward_is_no_unit_but_what_it_holds_may_be() -> None:
    def layer() -> nn.Module:
        inner = nn.ModuleDict({"a": nn.Sequential(nn.Linear(64, 64))})
        return nn.ModuleList([nn.Linear(64, 64), inner, nn.LayerNorm(64)])

    model = nn.ModuleDict({"layers": nn.ModuleList([layer(), layer()])})
    model["layers"][1].weight = nn.Parameter(torch.zeros(5000))
    names = [f"layers.{number}.{part}" for number in range(2) for part in ("0", "1.a")]
    assert units_of(model) == ["root", *names]
    assert "layers.1.weight" in [spec.fqn for spec in plan_model(model, torch.float32)[0].specs]


def test_tied_parameters_are_one_with_several_names_in_the_unit_around_their_uses() -> None:
    plan = plan_model(gpt2(), torch.float32)
    (tied,) = [spec for spec in specs_of(plan) if spec.aliases]
    assert (tied.fqn, tied.aliases) == ("transformer.wte.weight", ("lm_head.weight",))
    assert tied in plan[0].specs

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(70, 70), nn.Linear(70, 70)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    plan = plan_model(nn.ModuleList([Tied(), Tied()]), torch.float32)
    assert [unit.name for unit in plan] == ["root", "0", "1"]
    assert [spec.aliases for spec in plan[1].specs] == [("0.second.weight",), (), ()]


def test_the_main_dtype_becomes_the_compute_dtype_and_wider_ones_stay() -> None:
    model = stack()
    for block in model.blocks:
        block.norm.double()
    model.embedding.half()
    found = dtypes_of(plan_model(model, torch.bfloat16))
    assert {found["blocks.0.norm.weight"], found["blocks.0.norm.bias"]} == {torch.float64}
    assert found["blocks.0.up.weight"] == found["embedding.weight"] == torch.bfloat16
    assert set(dtypes_of(plan_model(stack().double(), torch.float32)).values()) == {torch.float32}
    assert dtypes_of(plan_model(model, torch.float64))["blocks.0.norm.weight"] == torch.float64


def test_batch_norms_stay_in_fp32() -> None:
    """As their statistics do; a 16-bit input beside them is what PyTorch takes."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    dtypes = {spec.fqn: spec.dtype for spec in specs_of(plan_model(model, torch.bfloat16))}
    assert {fqn for fqn, dtype in dtypes.items() if dtype == torch.float32} == {"1.weight", "1.bias"}
    assert all(spec.dtype == torch.float64 for spec in specs_of(plan_model(model, torch.float64)))


def test_what_a_model_keeps_in_fp32_stays_there() -> None:
    model = stack()
    model._keep_in_fp32_modules = ["norm"]
    found = dtypes_of(plan_model(model, torch.bfloat16))
    assert {name for name, dtype in found.items() if dtype == torch.float32} == {
        name for name, _ in model.named_parameters() if "norm" in name
    }
    assert set(dtypes_of(plan_model(model, torch.float64)).values()) == {torch.float64}


def test_integers_stay_integers() -> None:
    model = stack()
    model.blocks[0].table = nn.Parameter(torch.arange(5), requires_grad=False)
    plan = plan_model(model, torch.bfloat16)
    assert dtypes_of(plan)["blocks.0.table"] == torch.int64
    assert len(plan[1].buckets()) == 2


def test_buckets_have_one_dtype_and_one_need_for_gradients() -> None:
    model = frozen()
    plan = plan_model(model, torch.float32)
    for unit in plan:
        for bucket in unit.buckets():
            assert len({(spec.dtype, spec.requires_grad) for spec in bucket}) == 1
    by_name = {unit.name: unit for unit in plan}
    assert [specs[0].requires_grad for specs in by_name["model.layers.0"].buckets()] == [False]
    assert {specs[0].requires_grad for specs in by_name["model.layers.2"].buckets()} == {False, True}


def test_what_stages_share_lies_in_a_bucket_of_its_own() -> None:
    name = "transformer.wte.weight"
    copies = StageCopies(name=name, aliases=("lm_head.weight",), ranks=(0, 1))
    root, *_ = plan_model(gpt2(), torch.float32, cuts=ModelCuts(copies={name: copies}))
    buckets = [{spec.fqn for spec in bucket} for bucket in root.buckets()]
    assert {name} in buckets
    assert len(buckets) == 2


def test_optimizer_groups_are_asked_for_by_name() -> None:
    plan = plan_model(frozen(), torch.float32, lambda fqn: int("norm" in fqn))
    for spec in specs_of(plan):
        assert spec.group == int("norm" in spec.fqn)  # Of frozen parameters too, which may be trained later.


def test_parameters_without_elements_have_a_place() -> None:
    plan = plan_model(odd(), torch.float32)
    empty = [spec for spec in specs_of(plan) if spec.numel == 0]
    assert {spec.fqn for spec in empty} == {f"blocks.{n}.nothing" for n in range(3)} | {"blocks.1.empty"}


class Experts(nn.Module):
    """Three experts, whose weights multiply their results, or what goes in, or the results of a few tokens. A forward counts in
    a buffer and in a list, and draws random numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.num_experts, self.kind = 3, kind
        self.up = nn.Parameter(torch.randn(3, 16, 8), requires_grad=False)
        self.down = nn.Parameter(torch.randn(3, 8, 16), requires_grad=False)
        self.inside, self.calls = nn.BatchNorm1d(16, affine=False), list[float]()

    def forward(self, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        self.inside.num_batches_tracked += 1
        self.calls.append(random.random() + float(torch.rand(())))
        most = chosen.numel() // self.num_experts if self.kind == "capacity" else None
        for expert in range(self.num_experts):
            rows, at = (each[:most] for each in torch.where(chosen == expert))
            given, by = hidden_states[rows], weights[rows, at, None]
            given, by = (given * by, torch.ones_like(by)) if self.kind == "input" else (given, by)
            out = out.index_add(0, rows, torch.tanh(given @ self.up[expert]) @ self.down[expert] * by)
        return out


class Swapped(Experts):
    def forward(self, hidden_states: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states, chosen, weights)


@pytest.mark.parametrize(
    ("build", "apart"),
    [
        (lambda: Experts("result"), True),
        (lambda: Experts("input"), False),
        (lambda: Experts("capacity"), False),
        (lambda: Swapped("result"), False),
        (lambda: Experts("result").requires_grad_(True), False),
        (lambda: Experts("result").to("meta"), True),
    ],
)
def test_frozen_experts_are_apart_if_a_trial_finds_that_weights_multiply_their_results(build: Any, apart: bool) -> None:
    model = nn.ModuleDict({"gate": nn.Linear(16, 3), "experts": build(), "more": build()})
    generator = torch.get_rng_state()
    found = {spec.experts for spec in specs_of(plan_model(model, torch.float32)) if "gate" not in spec.fqn}
    assert found == ({"experts", "more"} if apart else {""})
    assert torch.equal(torch.get_rng_state(), generator)
    for each in (model["experts"], model["more"]):
        assert each.calls == []
        assert each.inside.num_batches_tracked.is_meta or not each.inside.num_batches_tracked


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(LayoutError, match="ReLU has no parameters to train"):
        plan_model(nn.ReLU(), torch.float32)


def in_one_memory(*places: torch.Tensor, trained: bool = True) -> nn.Module:
    return nn.ParameterList(nn.Parameter(each, requires_grad=trained and not n) for n, each in enumerate(places))


MATRIX = torch.randn(4, 6)


@pytest.mark.parametrize("places", [(MATRIX, MATRIX), (MATRIX, MATRIX.t()), (MATRIX[1:], MATRIX[:3])])
def test_parameters_in_one_memory_are_refused_if_one_is_trained(places: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(LayoutError, match=r"[01] and [01] share memory"):
        plan_model(in_one_memory(*places), torch.float32)
    assert plan_model(in_one_memory(*places, trained=False), torch.float32)


@pytest.mark.parametrize("places", [(MATRIX[:2], MATRIX[2:]), (MATRIX[:, :3], MATRIX[:, 3:]), (MATRIX[:0], MATRIX)])
def test_parameters_that_divide_a_memory_are_allowed(places: tuple[torch.Tensor, ...]) -> None:
    assert plan_model(in_one_memory(*places), torch.float32)
