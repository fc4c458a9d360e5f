"""Every layout equals one plain process: models x world sizes x stages x accumulation x transports x optimizers, in float64.

The default is every fifth row of a pairwise cover; `make test-all` (the marker `full`) runs every model, world size, stage,
accumulation and transport together, with the other factors drawn.
"""

import json
import random
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import pytest

from .checks import Laboratory, Row, check_same_bits, pairs_of, pairwise, whole_product
from .models import MATRIX
from .recipe import Extra, Layout, Problem

CORE: dict[str, list[Any]] = {
    "model": list(MATRIX),
    "size": [1, 2, 3, 4],
    "stage": [0, 1, 2, 3],
    "accumulation": [1, 4],
    "transport": ["shared", "gloo"],
}
REST: dict[str, list[Any]] = {
    "clip": [0.0, 0.3],
    "decay": [True, False],
    "optimizer": ["adamw", "sgd", "adagrad"],
    "budget": [None, 0],
    "overlap": [True, False],
}
FACTORS = CORE | REST


def idle(row: Row) -> set[str]:
    """One rank moves nothing; only stage 3 gathers around use."""
    idle = set()
    if row.get("size") == 1:
        idle |= {"transport", "budget", "overlap"}
    if row.get("stage") in (0, 1, 2):
        idle.add("budget")
    return idle


def whole_matrix() -> list[Row]:
    """All of `CORE`, with values of `REST` drawn for each row, the same in every session."""
    dice = random.Random(0)
    rows = []
    for values in product(*CORE.values()):
        row = dict(zip(CORE, values, strict=True))
        if row["size"] == 1 and row["transport"] == "gloo":
            continue
        rows.append(row | {name: dice.choice(choices) for name, choices in REST.items()})
    return rows


def name_of(row: Row) -> str:
    clip = "clip" if row["clip"] else "noclip"
    groups = "groups" if row["decay"] else "one"
    place = f"w{row['size']}-s{row['stage']}-a{row['accumulation']}"
    return f"{row['model']}-{place}-{row['transport']}-{clip}-{groups}-{row['optimizer']}"


def run_row(laboratory: Laboratory, row: Row) -> float:
    problem = Problem(**{name: row[name] for name in ("model", "optimizer", "clip", "decay")})
    names = ("stage", "accumulation", "budget", "overlap")
    transport = "auto" if row["size"] == 1 else row["transport"]
    layout = Layout(transport=transport, **{name: row[name] for name in names})
    return laboratory.check(row["size"], problem, layout)


COVER = pairwise(FACTORS, idle)


def test_the_cover_holds_every_pair() -> None:
    covered = set().union(*(pairs_of(row, idle) for row in COVER))
    for (first, values), (second, others) in combinations(FACTORS.items(), 2):
        for value, other in product(values, others):
            row = {first: value, second: other}
            assert idle(row) & {first, second} or ((first, value), (second, other)) in covered


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.full if number % 5 else (), id=name_of(row)) for number, row in enumerate(COVER)]
)
def test_pairwise(laboratory: Laboratory, row: Row) -> None:
    run_row(laboratory, row)


@pytest.mark.full
@pytest.mark.parametrize("row", whole_matrix(), ids=name_of)
def test_whole_matrix(laboratory: Laboratory, row: Row, record_property: Callable[[str, object], None]) -> None:
    """What is recorded goes into the table of docs/conformance.md."""
    record_property("row", json.dumps({"model": row["model"], "column": f"stage {row['stage']}"}))
    record_property("difference", run_row(laboratory, row))


# Shards inside a group, copies of the group: reduce-scatter inside, then a sum over the copies.


@pytest.mark.parametrize(("stage", "transport", "accumulation"), whole_product(5, [0, 1, 2, 3], ["shared", "gloo"], [1, 4]))
def test_two_copies_of_two_shards(laboratory: Laboratory, stage: int, transport: str, accumulation: int) -> None:
    problem = Problem(model="odd", clip=0.3)
    layout = Layout(stage=stage, transport=transport, accumulation=accumulation)
    laboratory.check(4, problem, layout, replicate=2)


@pytest.mark.parametrize(("stage", "model"), whole_product(2, [0, 2, 3], ["llama", "routed", "frozen"]))
def test_copies_alone(laboratory: Laboratory, stage: int, model: str) -> None:
    """No shards: plain data parallelism. In `routed`, ranks use different experts, so gradients arrive in different orders."""
    laboratory.check(2, Problem(model=model, clip=0.3), Layout(stage=stage, accumulation=4), replicate=2)


@pytest.mark.parametrize(("stage", "size", "accumulation"), whole_product(3, [0, 3], [2, 4], [1, 4]))
def test_the_optimizer_inside_backward(laboratory: Laboratory, stage: int, size: int, accumulation: int) -> None:
    problem = Problem(model="llama", steps=4)
    base = laboratory.train(size, problem, Layout(stage=stage, accumulation=accumulation), replicate=2)
    layout = Layout(stage=stage, accumulation=accumulation, in_backward=True)
    found = laboratory.train(size, problem, layout, Extra(gradient_step=-1), replicate=2)
    check_same_bits(found, base, "losses", "parameters", "final_loss")
