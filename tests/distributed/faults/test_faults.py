"""Ranks that die, stop, err or diverge: the others say who and where, soon, and nobody waits for ever."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.checks import whole_product
from tests.conformance.recipe import Layout
from tests.distributed.faults.faults import Fault
from tests.support.workers import Outcome, PoolOptions, Workers

TIMEOUT = 2.0
SOON = 2.0
"""Seconds after which survivors know that a rank is gone."""
GONE, ERRED = "is gone (killed or exited)", "rank 1 failed with ValueError: sample 17 is bad"
TRANSPORTS, PLACES = ("shared", "gloo"), ("forward", "backward")
APART = {"transport": "gloo", "hosts": 1}
"""Ranks that take themselves to be on different hosts: no shared memory, and a board in the rendezvous store."""
VICTIMS = {"kill": ("died", ""), "exit": ("died", ""), "raise": ("ValueError", "sample 17 is bad")}
Row = tuple[Fault, dict[str, Any], tuple[str, ...]]
Scene = Callable[..., tuple[list[Outcome], float]]


@pytest.fixture
def scene(workers: Workers, tmp_path: Path) -> Iterator[Scene]:
    """Runs a fault in processes of its own; returns what the ranks said and when it happened."""
    with ExitStack() as pools:

        def play(
            fault: Fault, *, size: int = 2, stage: int = 3, transport: str = "shared", **options: Any
        ) -> tuple[list[Outcome], float]:
            given = PoolOptions(**{"size": size, "timeout_seconds": TIMEOUT, **options})
            layout = asdict(Layout(stage=stage, transport=transport, budget=0 if transport == "gloo" else None))
            stuck, marker = [fault.rank] if fault.kind == "stop" else [], tmp_path / "marker"
            arguments = {"layout": layout, "fault": asdict(fault), "marker": str(marker)}
            pool = pools.enter_context(workers.fresh(given))
            outcomes = pool.outcomes("faults:train", timeout=30, stuck=stuck, **arguments)
            return outcomes, float(marker.read_text()) if marker.exists() else 0.0

        yield play


def rows(short: int, row: Callable[..., Row], *choices: Any) -> list[Any]:
    """A row for every combination of choices, one of `short` of them in the short run."""
    found = []
    for each in whole_product(short, *choices):
        fault, options, words = row(*each.values)
        found.append(pytest.param(fault, options, words, marks=each.marks, id=f"{fault.kind}, {options}, {each.id}"))
    return found


def killed(transport: str, stage: int, where: str) -> Row:
    words = (GONE, f"in {where} of unit blocks.1", "at step 2")
    return Fault(kind="kill", where=where), {"transport": transport, "stage": stage}, words


def stopped(transport: str, stage: int) -> Row:
    words = ("parallel.timeout_seconds", "in forward of unit blocks.1", "at step 2")
    return Fault(kind="stop"), {"transport": transport, "stage": stage}, words


def swapped(transport: str, stage: int, **more: int) -> Row:
    """It runs the second and third block in the other order: their buckets are of one size, so sums would just be wrong."""
    return Fault(kind="swap"), {"transport": transport, "stage": stage, **more}, ()


def erred(transport: str, where: str, **more: int) -> Row:
    return Fault(kind="raise", where=where), {"transport": transport, **more}, (ERRED,)


def slow(transport: str, stage: int, **more: int) -> Row:
    """A part of a second in each of six places: longer than the timeout in sum, but its progress moves."""
    return Fault(kind="slow", seconds=0.35), {"transport": transport, "stage": stage, **more}, ()


FAULTS = (
    *rows(5, killed, TRANSPORTS, [0, 2, 3], PLACES),
    # One survivor may fail first, and the other names it with its reason.
    *rows(1, lambda transport: (Fault(kind="kill", rank=0), {"size": 3, "transport": transport}, (GONE,)), TRANSPORTS),
    # Rank 0 keeps the store.
    *rows(4, lambda where, rank: (Fault(kind="kill", rank=rank, where=where), APART, ()), PLACES, [0, 1]),
    *rows(1, lambda where: (Fault(kind="exit", where=where), {}, (GONE,)), ["backward"]),
    *rows(4, stopped, TRANSPORTS, [2, 3]),
    *rows(1, lambda options: (Fault(kind="stop"), options, ()), [APART]),
    *rows(5, swapped, TRANSPORTS, [0, 2, 3]),
    *rows(2, partial(swapped, hosts=1), ["gloo"], [2, 0, 3]),
    # Replicas gather nothing from each other, but sum their gradients.
    *rows(1, partial(swapped, replicate=2), ["auto"], [0, 3]),
    *rows(1, partial(swapped, replicate=2, hosts=1), ["auto"], [0, 3]),
    *rows(1, erred, TRANSPORTS, PLACES),
    *rows(1, partial(erred, hosts=1), ["gloo"], ["forward"]),
)
PAUSES = (
    *rows(4, slow, TRANSPORTS, [2, 3]),
    *rows(1, partial(slow, hosts=1), ["gloo"], [3]),
    *rows(1, lambda where: (Fault(kind="sleep", seconds=1.0, where=where), {}, ()), ["backward"]),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("fault", "options", "words"), FAULTS)
def test_a_fault_is_named_by_all_others(scene: Scene, fault: Fault, options: dict[str, Any], words: tuple[str, ...]) -> None:
    """The error names the rank, what happened to it, and the unit where it was. What another branch does, both name."""
    outcomes, happened = scene(fault, **options)
    apart, parted, stuck = bool(options.get("hosts")), fault.kind == "swap", fault.kind == "stop"
    for outcome in outcomes:
        if outcome.rank == fault.rank and not parted:
            assert (outcome.error, outcome.message) == VICTIMS[fault.kind]
            continue
        assert outcome.error == "CollectiveError", outcome
        for word in (f"rank {1 - outcome.rank if parted else fault.rank}", *words):
            assert word in outcome.message, outcome.message
        assert fault.kind == "raise" or re.search(r"unit (blocks\.\d|root|head)", outcome.message), outcome.message
        assert outcome.at - happened < SOON + TIMEOUT * (stuck or parted or (apart and fault.kind != "raise"))
        assert not stuck or apart or outcome.at - happened > TIMEOUT - 0.1
    assert not parted or any("disagree on the order of units" in outcome.message for outcome in outcomes)


@pytest.mark.parametrize(("fault", "options", "words"), PAUSES)
def test_a_slow_rank_is_waited_for(scene: Scene, fault: Fault, options: dict[str, Any], words: tuple[str, ...]) -> None:
    outcomes, _ = scene(fault, **options)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes


@pytest.mark.parametrize("stage", [2, 3])
def test_training_on_several_hosts_is_the_same(scene: Scene, stage: int) -> None:
    fault = Fault(kind="none", step=-1)
    apart, _ = scene(fault, stage=stage, transport="auto", hosts=1)
    together, _ = scene(fault, stage=stage, transport="gloo")
    assert [outcome.result for outcome in apart] == [outcome.result for outcome in together]


@pytest.mark.parametrize(("transport", "kind"), whole_product(3, TRANSPORTS, ["width", "layers", "frozen", "slots", "stage"]))
def test_ranks_that_build_different_things_say_so(workers: Workers, transport: str, kind: str) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=TIMEOUT)) as pool:
        outcomes = pool.outcomes("faults:mismatch", timeout=30, kind=kind, transport=transport, stage=3)
    for outcome in outcomes:
        assert outcome.error in ("CollectiveError", "LayoutError"), outcome
        assert f"rank {1 - outcome.rank}" in outcome.message, outcome.message
    assert any("LayoutError" in outcome.error + outcome.message for outcome in outcomes)
