"""Exchanges of activations: the same bits on all ranks and over every kind, in any order of waiting; errors that name a rank."""

from __future__ import annotations

import pytest
import torch
from workers import Workers

from zeromesh.errors import LayoutError
from zeromesh.mesh.exchange import LocalExchange

KINDS = ["gloo"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_gives_what_one_process_computes(workers: Workers, kind: str, size: int) -> None:
    for found in workers.run(size, "exchange_cases:collectives", kind=kind):
        assert len(found) > 150
        assert [name for name, equal in found.items() if not equal] == []


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_waited_for_in_any_order(workers: Workers, kind: str) -> None:
    for equal in workers.run(2, "exchange_cases:in_any_order", kind=kind, flying=24):
        assert len(equal) > 12
        assert all(equal)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(workers: Workers, kind: str) -> None:
    for found in workers.run(2, "exchange_cases:refusals", kind=kind):
        assert "LayoutError: scattered sum of [3, 5]: 3 along dim 0 is no multiple of 2 ranks" in found["scatter"]
        assert "allowed are 2 that add up to 3" in found["scatter sizes"]
        assert "sizes are [1, 1]; allowed are 2 of them" in found["gather sizes"]
        assert "a tensor of shape [3, 5] has no dim 2" in found["dim"]
        assert "asked for twice" in found["twice"]


def test_alone_everything_is_a_copy() -> None:
    exchange, tensor = LocalExchange(), torch.arange(6.0).view(2, 3)
    results = [
        exchange.sum(tensor),
        exchange.maximum(tensor),
        exchange.gather(tensor, 1),
        exchange.scatter_sum(tensor, 0),
    ]
    for pending in results:
        result = pending.wait()
        assert torch.equal(result, tensor)
        assert result.data_ptr() != tensor.data_ptr()
    with pytest.raises(LayoutError, match="allowed are 1 that add up to 2"):
        exchange.scatter_sum(tensor, 0, sizes=[1])
