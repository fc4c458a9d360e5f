"""Ranks that die, stop, err or diverge: the others say who and where, soon, and nobody waits for ever."""

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.checks import whole_product
from tests.conformance.recipe import Layout
from tests.distributed.faults.faults import Fault
from tests.support.workers import Outcome, Pool, PoolOptions, Workers

TIMEOUT = 3.0
SOON = 2.0
"""Seconds after which survivors know that a rank is gone."""

Scene = Callable[..., tuple[list[Outcome], float]]


@pytest.fixture
def scene(workers: Workers, tmp_path: Path) -> Iterator[Scene]:
    """Runs a fault in processes of its own; returns what the ranks said and when it happened."""
    pools: list[Pool] = []

    def play(
        fault: Fault,
        *,
        size: int = 2,
        stage: int = 3,
        transport: str = "shared",
        timeout: float = TIMEOUT,
        **options: Any,
    ) -> tuple[list[Outcome], float]:
        pools.append(workers.fresh(PoolOptions(size=size, timeout_seconds=timeout, **options)))
        marker = tmp_path / "marker"
        layout = asdict(Layout(stage=stage, transport=transport, budget=0 if transport == "gloo" else None))
        stuck = [fault.rank] if fault.kind == "stop" else []
        arguments = {"layout": layout, "fault": asdict(fault), "marker": str(marker)}
        outcomes = pools[-1].outcomes("faults:train", timeout=30, stuck=stuck, **arguments)
        return outcomes, float(marker.read_text()) if marker.exists() else 0.0

    yield play
    for pool in pools:
        pool.close()


def check_named(outcome: Outcome, victim: int, *words: str) -> None:
    """The error names the rank, what happened to it, and the unit where it was."""
    assert outcome.error == "CollectiveError", outcome
    for word in (f"rank {victim}", *words):
        assert word in outcome.message, outcome.message
    assert re.search(r"unit (blocks\.\d|root|head)", outcome.message), outcome.message


@pytest.mark.parametrize(
    ("transport", "stage", "where"), whole_product(5, ["shared", "gloo"], [0, 2, 3], ["forward", "backward"])
)
def test_a_killed_rank_is_named_at_once(scene: Scene, transport: str, stage: int, where: str) -> None:
    fault = Fault(kind="kill", where=where)
    (survivor, victim), happened = scene(fault, stage=stage, transport=transport)
    assert victim.error == "died"
    check_named(survivor, 1, "is gone (killed or exited)", f"in {where} of unit blocks.1", "at step 2")
    assert survivor.at - happened < SOON


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_every_survivor_names_the_killed_rank(scene: Scene, transport: str) -> None:
    outcomes, happened = scene(Fault(kind="kill", rank=0), size=3, transport=transport)
    assert outcomes[0].error == "died"
    for survivor in outcomes[1:]:
        # One survivor may fail first, and the other names it with its reason.
        check_named(survivor, 0, "is gone (killed or exited)")
        assert survivor.at - happened < SOON


def test_a_rank_that_just_ends_is_gone_too(scene: Scene) -> None:
    (survivor, _), _ = scene(Fault(kind="exit", where="backward"))
    check_named(survivor, 1, "is gone (killed or exited)")


@pytest.mark.parametrize(("transport", "stage"), whole_product(3, ["shared", "gloo"], [2, 3]))
def test_a_stopped_rank_is_named_at_the_timeout(scene: Scene, transport: str, stage: int) -> None:
    (survivor,), happened = scene(Fault(kind="stop"), stage=stage, transport=transport)
    check_named(survivor, 1, "parallel.timeout_seconds", "in forward of unit blocks.1", "at step 2")
    assert TIMEOUT - 0.1 < survivor.at - happened < TIMEOUT + SOON


@pytest.mark.parametrize(("transport", "stage"), whole_product(5, ["shared", "gloo"], [0, 2, 3]))
def test_a_rank_that_takes_another_branch_is_named_by_all(scene: Scene, transport: str, stage: int) -> None:
    """It runs the second and third block in the other order: their buckets are of one size, so sums would just be wrong."""
    outcomes, happened = scene(Fault(kind="swap"), stage=stage, transport=transport)
    for outcome in outcomes:
        check_named(outcome, 1 - outcome.rank)
        assert outcome.at - happened < TIMEOUT + SOON
    assert any("disagree on the order of units" in outcome.message for outcome in outcomes)


@pytest.mark.parametrize("hosts", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_replica_that_takes_another_branch_is_named(scene: Scene, stage: int, hosts: bool) -> None:
    """Replicas gather nothing from each other, but sum their gradients."""
    outcomes, _ = scene(Fault(kind="swap"), stage=stage, transport="auto", replicate=2, hosts=hosts)
    for outcome in outcomes:
        check_named(outcome, 1 - outcome.rank)
    assert any("disagree on the order of units" in outcome.message for outcome in outcomes)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_rank_that_errs_is_named_with_its_message(scene: Scene, transport: str, where: str) -> None:
    (survivor, victim), happened = scene(Fault(kind="raise", where=where), transport=transport)
    assert (victim.error, victim.message) == ("ValueError", "sample 17 is bad")
    assert survivor.error == "CollectiveError"
    assert "rank 1 failed with ValueError: sample 17 is bad" in survivor.message
    assert survivor.at - happened < SOON


@pytest.mark.parametrize(("transport", "stage"), whole_product(3, ["shared", "gloo"], [2, 3]))
def test_a_slow_rank_is_waited_for(scene: Scene, transport: str, stage: int) -> None:
    """A part of a second in each of six places: longer than the timeout in sum, but its progress moves."""
    outcomes, _ = scene(Fault(kind="slow", seconds=0.4), stage=stage, transport=transport, timeout=2.0)
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes


def test_a_pause_shorter_than_the_timeout_is_no_error(scene: Scene) -> None:
    outcomes, _ = scene(Fault(kind="sleep", seconds=1.0, where="backward"))
    assert [outcome.error for outcome in outcomes] == ["", ""], outcomes


@pytest.mark.parametrize(
    ("transport", "kind"), whole_product(3, ["shared", "gloo"], ["width", "layers", "frozen", "slots", "stage"])
)
def test_ranks_that_build_different_things_say_so(workers: Workers, transport: str, kind: str) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=TIMEOUT)) as pool:
        outcomes = pool.outcomes("faults:mismatch", timeout=30, kind=kind, transport=transport, stage=3)
    for outcome in outcomes:
        assert outcome.error in ("CollectiveError", "LayoutError"), outcome
        assert f"rank {1 - outcome.rank}" in outcome.message, outcome.message
    assert any("LayoutError" in outcome.error + outcome.message for outcome in outcomes)


class TestSeveralHosts:
    """Ranks that take themselves to be on different hosts: no shared memory, and a board in the rendezvous store."""

    @pytest.mark.parametrize("stage", [2, 3])
    def test_training_is_the_same(self, scene: Scene, stage: int) -> None:
        apart, _ = scene(Fault(kind="none", step=-1), stage=stage, transport="auto", hosts=1)
        together, _ = scene(Fault(kind="none", step=-1), stage=stage, transport="gloo")
        assert [outcome.result for outcome in apart] == [outcome.result for outcome in together]

    @pytest.mark.parametrize(("where", "rank"), whole_product(3, ["forward", "backward"], [0, 1]))
    def test_a_killed_rank_is_named(self, scene: Scene, where: str, rank: int) -> None:
        """Rank 0 keeps the store."""
        outcomes, happened = scene(Fault(kind="kill", rank=rank, where=where), transport="gloo", hosts=1)
        survivor = outcomes[1 - rank]
        check_named(survivor, rank)
        assert survivor.at - happened < TIMEOUT + SOON

    def test_a_stopped_rank_is_named(self, scene: Scene) -> None:
        (survivor,), happened = scene(Fault(kind="stop"), transport="gloo", hosts=1)
        check_named(survivor, 1)
        assert survivor.at - happened < TIMEOUT + SOON

    @pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 2, 3])
    def test_a_rank_that_takes_another_branch_is_named_by_all(self, scene: Scene, stage: int) -> None:
        outcomes, happened = scene(Fault(kind="swap"), stage=stage, transport="gloo", hosts=1)
        for outcome in outcomes:
            check_named(outcome, 1 - outcome.rank)
            assert outcome.at - happened < TIMEOUT + SOON
        assert any("disagree on the order of units" in outcome.message for outcome in outcomes)

    def test_a_rank_that_errs_is_named_with_its_message(self, scene: Scene) -> None:
        (survivor, _), happened = scene(Fault(kind="raise"), transport="gloo", hosts=1)
        assert "rank 1 failed with ValueError: sample 17 is bad" in survivor.message
        assert survivor.at - happened < SOON

    def test_a_slow_rank_is_waited_for(self, scene: Scene) -> None:
        outcomes, _ = scene(Fault(kind="slow", seconds=0.4), transport="gloo", hosts=1, timeout=2.0)
        assert [outcome.error for outcome in outcomes] == ["", ""], outcomes
