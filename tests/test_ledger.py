"""Every byte that an engine holds, against a formula over the layout of its buckets.

For a bucket of P elements (padded) over W ranks, c bytes each in the compute dtype, m in master weights, r in sums:

    parameters   P c where they are kept, divided by W on shared memory; else only while gathered
    master       nothing where the kept parameters are the master weights (equal dtypes); else m (P / W), or m P at stage 0
    gradients    r (P / W), or r P at stage 0; inside backward one scratch of the longest shard, unless microbatches add up
    partial      r P at stages 0 and 1 with several microbatches and ranks
    in flight    slots x the largest bucket, as it travels; twice over gloo, which receives into buffers of its own
    moments      m (P / W) for each moment, or m P at stage 0
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import pytest
from conformance.recipe import DTYPES, Layout, Problem
from conformance.reference import build
from workers import Workers

from zeromesh.flat.layout import BucketLayout, build_layout
from zeromesh.zero.plan import plan_model


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A run whose bytes are counted."""

    size: int = 2
    problem: Problem
    layout: Layout


MOMENTS = {"adamw": 2, "sgd": 1, "adagrad": 1}


def buckets_of(setting: Setting) -> list[list[BucketLayout]]:
    """Layouts by unit, from the plan alone."""
    plan = plan_model(build(setting.problem), DTYPES[setting.problem.precision][0])
    return [[build_layout(unit.name, specs, setting.size) for specs in unit.buckets()] for unit in plan.units]


def kept_units(setting: Setting, sizes: list[int]) -> list[bool]:
    """Which units' parameters stay: all but at stage 3, where a budget is given to the last units first, to the root last."""
    layout = setting.layout
    if layout.stage < 3 or setting.size == 1 or (layout.transport == "shared" and layout.budget is None):
        return [True] * len(sizes)
    left, kept = layout.budget or 0, [False] * len(sizes)
    for unit in [*range(len(sizes) - 1, 0, -1), 0]:
        if sizes[unit] <= left:
            left -= sizes[unit]
            kept[unit] = True
    return kept


def expected(setting: Setting) -> dict[str, int]:
    """Bytes by purpose between steps."""
    layout, problem, ranks = setting.layout, setting.problem, setting.size
    master, sums = (DTYPES[problem.precision][1].itemsize,) * 2
    units = buckets_of(setting)
    compute = [[bucket.slots[0].spec.dtype.itemsize for bucket in unit] for unit in units]
    sizes = [
        sum(b.padded * c for b, c in zip(unit, row, strict=True)) for unit, row in zip(units, compute, strict=True)
    ]
    kept = kept_units(setting, sizes)
    owners = 1 if layout.stage == 0 else ranks
    share = ranks if layout.transport == "shared" and layout.stage > 0 else 1
    partial = layout.stage < 2 and layout.accumulation > 1 and ranks > 1
    total = dict.fromkeys(("PARAMETERS", "MASTER", "GRADIENTS", "PARTIAL_GRADIENTS", "GRADIENT_BUCKETS", "MOMENTS"), 0)
    largest = longest = 0
    for unit, row, keeps in zip(units, compute, kept, strict=True):
        for bucket, c in zip(unit, row, strict=True):
            trainable = bucket.slots[0].spec.requires_grad
            own = bucket.padded // owners
            m = master if trainable else c
            total["PARAMETERS"] += bucket.padded * c // share if keeps else 0
            total["MASTER"] += 0 if keeps and m == c else own * m
            if trainable:
                total["GRADIENTS"] += own * sums
                total["PARTIAL_GRADIENTS"] += bucket.padded * sums if partial else 0
                total["MOMENTS"] += own * master * MOMENTS[problem.optimizer]
                largest = max(largest, bucket.padded * (sums if partial else c))
                longest = max(longest, own * sums)
    if layout.in_backward and layout.accumulation == 1:
        total["GRADIENTS"] = longest
    if ranks > 1:
        total["GRADIENT_BUCKETS"] = largest * layout.slots * (2 if layout.transport == "gloo" else 1)
    return {purpose: nbytes for purpose, nbytes in total.items() if nbytes}


def transient(setting: Setting) -> int:
    """The most that gathered parameters can take beyond `expected`: the root, one unit and the prefetched."""
    sizes = [
        sum(bucket.padded * bucket.slots[0].spec.dtype.itemsize for bucket in unit) for unit in buckets_of(setting)
    ]
    loose = [size for size, keeps in zip(sizes, kept_units(setting, sizes), strict=True) if not keeps]
    share = 1 if setting.layout.transport == "gloo" else setting.size
    return sum(sorted(loose, reverse=True)[: 2 + setting.layout.prefetch]) // share


LLAMA = Problem(model="llama", steps=2, samples=12)
BF16 = replace(LLAMA, precision="bfloat16")
SETTINGS = {
    "one rank": Setting(size=1, problem=LLAMA, layout=Layout(stage=3, transport="auto")),
    "one rank, bf16": Setting(size=1, problem=BF16, layout=Layout(stage=0, transport="auto")),
    **{
        f"{problem.precision}, stage {stage}, {transport}, {accumulation} microbatches": Setting(
            problem=problem, layout=Layout(stage=stage, transport=transport, accumulation=accumulation)
        )
        for problem in (LLAMA, BF16)
        for stage in (0, 1, 2, 3)
        for transport in ("shared", "gloo")
        for accumulation in (1, 2)
    },
    "budget 0": Setting(problem=LLAMA, layout=Layout(transport="shared", budget=0)),
    "budget for some": Setting(problem=BF16, layout=Layout(transport="gloo", budget=40_000, prefetch=2)),
    "three ranks, odd sizes": Setting(
        size=3, problem=Problem(model="odd", steps=2, samples=12), layout=Layout(transport="gloo", budget=0)
    ),
    "frozen and unused": Setting(
        problem=Problem(model="frozen", steps=2, samples=12), layout=Layout(transport="shared", stage=2)
    ),
    "mixed units, bf16": Setting(size=3, problem=replace(BF16, model="lora"), layout=Layout(transport="gloo", slots=3)),
    "momentum": Setting(problem=replace(LLAMA, optimizer="sgd"), layout=Layout(transport="shared")),
    "adagrad": Setting(problem=replace(LLAMA, optimizer="adagrad"), layout=Layout(transport="gloo", stage=1)),
    "inside backward": Setting(problem=LLAMA, layout=Layout(transport="shared", in_backward=True)),
    "inside backward, accumulating": Setting(
        problem=LLAMA, layout=Layout(transport="shared", in_backward=True, accumulation=2)
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_ledger_is_the_formula(workers: Workers, name: str) -> None:
    setting = SETTINGS[name]
    wanted, more = expected(setting), transient(setting)
    arguments = {"problem": asdict(setting.problem), "layout": asdict(setting.layout)}
    for found in workers.run(setting.size, "conformance.scenes:ledger", **arguments):
        # Gradients that only pass through have no memory before the first step.
        early = wanted if not setting.layout.in_backward else {**wanted, "GRADIENTS": found["built"].get("GRADIENTS")}
        lazy = setting.problem.optimizer == "adagrad"
        moments = {} if not lazy else {"MOMENTS": wanted["MOMENTS"]}
        built = {name: nbytes for name, nbytes in early.items() if name != "MOMENTS" and nbytes}
        assert {**found["built"], **moments} == {**built, **moments}
        if setting.layout.transport != "shared":
            private = ("PARAMETERS", "MASTER", "GRADIENTS", "PARTIAL_GRADIENTS")
            assert found["held"] == sum(found["trained"].get(purpose, 0) for purpose in private)
        assert found["peak"] <= sum(found["trained"].values()) + more
        _check_after_training(found, wanted, setting)


def _check_after_training(found: dict[str, dict[str, int]], wanted: dict[str, int], setting: Setting) -> None:
    if setting.layout.in_backward and setting.layout.accumulation == 1:
        # As many scratch tensors as reductions were in flight at once.
        scratch = found["trained"].pop("GRADIENTS")
        assert scratch % wanted["GRADIENTS"] == 0
        assert scratch <= wanted["GRADIENTS"] * (setting.layout.slots + 1)
        wanted = {name: nbytes for name, nbytes in wanted.items() if name != "GRADIENTS"}
    assert found["trained"] == wanted


@pytest.mark.parametrize(("stage", "transport"), [(3, "shared"), (2, "gloo"), (0, "shared")])
def test_engines_leave_nothing_behind(workers: Workers, stage: int, transport: str) -> None:
    """Neither files nor mappings nor memory, after several engines on one mesh."""
    for found in workers.run(2, "conformance.scenes:leaks", stage=stage, transport=transport, runs=12):
        assert len(set(found["files"][1:])) == 1, found["files"]
        assert len(set(found["mappings"][1:])) == 1, found["mappings"]
        assert found["resident"][-1] - found["resident"][3] < 4 << 20, found["resident"]
