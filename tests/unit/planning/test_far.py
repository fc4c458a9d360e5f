"""Plans of thousands of ranks do the same few things as those of a host: traces, simulations and sums are counted, not timed."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.planning import estimate
from zeromesh.trainer.planning.auto import subject_of
from zeromesh.trainer.planning.estimate import Estimator
from zeromesh.trainer.planning.machine import find_machine
from zeromesh.trainer.planning.planner import Plan, Planner
from zeromesh.trainer.planning.subject import Subject
from zeromesh.trainer.planning.tracing.trace import Tracer

_LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def _subject(**changes: Any) -> Subject:
    keys = ["data.sequence_length=4096", "batch.global_size=2048", "precision.compute=bfloat16"]
    return subject_of(load_config(None, [f"model.config={ {**_LLAMA_70B, **changes} }", *keys]), device="cuda")


def _counting(found: Counter[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        found[name] += 1
        return call(*args, **kwargs)

    return counted


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the dear parts of a plan are called."""
    found: Counter[str] = Counter()
    parts = ((Tracer, "trace"), (Estimator, "_chunk"), (estimate, "MemoryModel"), (estimate, "simulate"))
    for owner, name in parts:
        monkeypatch.setattr(owner, name, _counting(found, name, getattr(owner, name)))
    return found


def test_more_ranks_take_no_more_traces(calls: Counter[str]) -> None:
    planner = Planner(_subject(num_hidden_layers=8), find_machine("h100"), fixed={"recompute": "none"})
    some = planner.plan(8)
    # For 1, 2, 4 and 8 tensor ranks 1 and 2 samples, and once whether blocks can be recomputed.
    assert calls["trace"] == 4 * 2 + 1
    calls.clear()
    many = planner.plan(4096)
    assert calls["trace"] == 0
    _assert_shared(calls, many)
    assert many.best is not None
    assert many.best.estimate.layout.ranks == 4096
    assert len(many.rows) < 512 * len(some.rows)


@pytest.mark.full
def test_a_large_model_on_4096_ranks(calls: Counter[str]) -> None:
    planner = Planner(_subject(), find_machine("h100"))
    some = planner.plan(512)
    # For 1, 2, 4 and 8 tensor ranks: nothing, some or all recomputed; 1 and 2 samples.
    assert calls["trace"] == 4 * 3 * 2
    many = planner.plan(4096)
    assert calls["trace"] == 4 * 3 * 2
    for plan in (some, many):
        assert plan.best is not None
        assert len(plan.rows) > 5000
    assert len(many.rows) < 8 * len(some.rows)
    calls["simulate"] //= 2
    _assert_shared(calls, some)


def _assert_shared(calls: Counter[str], plan: Plan) -> None:
    """Few schedules are simulated, and what ranks and stages of many layouts have in common is worked out once."""
    layouts = [row.estimate.layout for row in plan.rows]
    assert 0 < calls["simulate"] <= 48
    assert calls["MemoryModel"] < sum(min(each.pipeline, 5) for each in layouts) / 4
    assert calls["_chunk"] < sum(each.pipeline * each.chunks for each in layouts) / 50
