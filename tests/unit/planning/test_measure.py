"""Figures of a machine are what was done, over the seconds that it took."""

import time
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from zeromesh.trainer.planning import measure


def test_a_link_is_known_by_a_small_and_a_large_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(
        [*[0.25] * measure._ROUNDS, *[2.25] * measure._ROUNDS]  # of an exchange, in each round
    )
    ticks, now = count(), [0.0]

    def clock() -> float:
        now[0] += 0.0 if next(ticks) % 2 == 0 else measure._COUNT * next(seconds)
        return now[0]

    exchange = SimpleNamespace(all_reduce_async=lambda tensor: SimpleNamespace(wait=lambda: None))
    group = SimpleNamespace(size=3, barrier=lambda what: None, gather_json=lambda value, what: [value])
    monkeypatch.setattr(measure, "open_exchange", lambda *arguments: exchange)
    monkeypatch.setattr(time, "perf_counter", clock)
    link = measure._link(group, torch.device("cpu"), "shared", (4, 3072))  # type: ignore[arg-type]
    assert link["latency_seconds"] == pytest.approx(0.25 / 4), "a ring of three sends four messages one after another"
    assert link["bandwidth"] == pytest.approx(4 / 3 * 3072 / 2.0)


def test_rates_count_all_that_is_computed_and_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = measure._DeviceMeter(torch.device("cpu"), SimpleNamespace(elements=1 << 16))  # type: ignore[arg-type]
    calls = []
    monkeypatch.setattr(meter, "_seconds", lambda step: calls.append(step()) or 0.5)
    assert meter._product(8, 16, 32, torch.float32) == 3 * 2 * 8 * 16 * 32 / 0.5, "three products of 2 m n k operations"
    assert meter.bandwidth() == measure._TENSORS_MOVED * (1 << 14) * 4 / 0.5
    assert len(calls) == 2
