"""Exchanges of activations: the same bits on all ranks and over every kind, in any order of waiting; errors that name a rank."""

import pytest
import torch

from tests.support.workers import Outcome, PoolOptions, Workers
from zeromesh.comm.activation_collectives import Exchange
from zeromesh.comm.shm_transport import IN_FLIGHT
from zeromesh.offload.memory.allocation import PAGE

KINDS = ["shared", "gloo"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_gives_what_one_process_computes(workers: Workers, kind: str, size: int) -> None:
    for found in workers.run(size, "exchange_cases:collectives", kind=kind):
        assert len(found) >= 130
        assert [name for name, equal in found.items() if not equal] == []


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_waited_for_in_any_order(workers: Workers, kind: str) -> None:
    """More of them than an exchange in shared memory keeps under way."""
    for equal in workers.run(2, "exchange_cases:in_any_order", kind=kind, flying=2 * IN_FLIGHT + 9):
        assert len(equal) > IN_FLIGHT
        assert all(equal)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(workers: Workers, kind: str) -> None:
    for found in workers.run(2, "exchange_cases:refusals", kind=kind):
        assert "LayoutError: scattered sum of [3, 5] along dim 0: 3 is no multiple of 2 ranks" in found["scatter"]
        assert "sizes are [1, 1]; allowed are 2 of them" in found["gather sizes"]
        assert "a tensor of shape [3, 5] has no dim 2" in found["dim"]
        assert "asked for twice" in found["twice"]


def test_alone_everything_is_a_copy() -> None:
    exchange, tensor = Exchange(), torch.arange(6.0).view(2, 3)
    results = [
        exchange.all_reduce_async(tensor),
        exchange.all_gather_async(tensor, 1),
        exchange.reduce_scatter_async(tensor, 0),
    ]
    for pending in results:
        result = pending.wait()
        assert torch.equal(result, tensor)
        assert result.data_ptr() != tensor.data_ptr()


def test_slots_are_used_again(workers: Workers) -> None:
    for found in workers.run(2, "exchange_cases:memory_of_slots"):
        assert 1 <= len(found["slots"]) <= 2
        assert max(found["slots"]) == -(-20_000 * 7 * 4 // PAGE) * PAGE
        assert (
            found["descriptors"] <= 2 * len(found["slots"]) + 2
        )  # a mapping has one of its own; two slots of the peer
        assert found["left"] < 0  # the counters' own goes as well


def spoiled(workers: Workers, kind: str, fault: str) -> list[Outcome]:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=1.5)) as pool:
        return pool.outcomes("exchange_cases:goes_wrong", timeout=30, kind=kind, fault=fault)


@pytest.mark.parametrize(
    ("kind", "fault"), [*((kind, "killed") for kind in KINDS), ("shared", "gone before it was read")]
)
def test_a_rank_that_is_gone_is_named(workers: Workers, kind: str, fault: str) -> None:
    survivor, victim = spoiled(workers, kind, fault)
    assert victim.error == "died"
    assert survivor.error == "CollectiveError"
    assert "sum of activations over axis world cannot end: rank 1 is gone (killed or exited)" in survivor.message


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_late_is_named(workers: Workers, kind: str) -> None:
    waiting, _ = spoiled(workers, kind, "late")
    assert waiting.error == "CollectiveError"
    assert "sum of activations over axis world did not end within 1.5 seconds" in waiting.message
    assert "rank 1 (pid " in waiting.message


@pytest.mark.parametrize(
    ("fault", "first", "second"),
    [
        ("other collective", "sum of float32 [4, 6]", "gather along dim 1 of float32 [4, 6]"),
        ("other shape", "sum of float32 [4, 6]", "sum of float32 [3, 6]"),
        ("other shares", "gather along dim 0 of float32 [4, 6]", "gather along dim 0 of float32 [4, 6]"),
    ],
)
def test_ranks_that_exchange_something_else_are_named(workers: Workers, fault: str, first: str, second: str) -> None:
    """In shared memory; gloo itself cannot tell."""
    for rank, outcome in enumerate(spoiled(workers, "shared", fault)):
        own, other = (first, second) if rank == 0 else (second, first)
        assert outcome.error == "CollectiveError"
        assert f"rank {1 - rank} asked for a {other}, rank {rank} for a {own}" in outcome.message


def test_an_exchange_is_forgotten_by_each_rank_when_it_likes(workers: Workers) -> None:
    assert all(all(equal) for equal in workers.run(2, "exchange_cases:forgotten"))
