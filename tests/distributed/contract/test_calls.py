"""Methods for all ranks: called on one, with wrong arguments, or in another order than by the others."""

import math
from pathlib import Path

import pytest

from tests.support.workers import PoolOptions, Workers

METHODS = {
    "evaluate": "trainer.evaluate()",
    "predict": "trainer.predict()",
    "save": "trainer.save()",
    "save_pretrained": "trainer.save()",
    "generate": "trainer.generate()",
    "state_dict": "trainer.state_dict()",
    "gathered": "trainer.gathered(['model.embed_tokens.weight'])",
    "gradient": "trainer.gradient('model.embed_tokens.weight')",
    "fit": "trainer.fit()",
    "run": "the first method of the trainer that needs a run",
}


@pytest.mark.parametrize(
    ("transport", "hosts", "calls"),
    [
        ("shared", 0, ["evaluate", "state_dict", "fit", "run", "step gradient"]),
        pytest.param(
            "shared", 0, ["save", "predict", "save_pretrained", "generate", "gathered"], marks=pytest.mark.full
        ),
        ("gloo", 0, ["state_dict", "step evaluate"]),
        pytest.param("gloo", 0, ["evaluate"], marks=pytest.mark.full),
        ("gloo", -2, ["evaluate", "step gradient"]),
    ],
)
def test_a_method_for_all_ranks_that_one_calls_names_itself_and_the_rank_that_did_not_come(
    workers: Workers, tmp_path: Path, transport: str, hosts: int, calls: list[str]
) -> None:
    arguments = {"folder": str(tmp_path), "transport": transport, "calls": calls, "seconds": 1.0}
    with workers.fresh(PoolOptions(size=2, hosts=hosts)) as pool:
        first, second = pool.run("call_cases:alone", **arguments)
    assert list(first) == calls
    for name in calls:
        method = METHODS[name.rpartition(" ")[2]]
        for found in (first[name], second.get(name, first[name])):
            assert found["error"] == "CollectiveError"
            assert f"{method} must be called on all ranks: rank 0 called it, and rank 1 did not" in found["text"]
            assert found["seconds"] < 8


def test_ranks_that_make_different_calls_are_told_both(workers: Workers, tmp_path: Path) -> None:
    with workers.fresh(PoolOptions(size=2)) as pool:
        first, second = pool.run("call_cases:differing", folder=str(tmp_path))
    for found in (first["differing"], second["differing"]):
        assert "rank 0 called trainer.evaluate() and rank 1 called trainer.save()" in found["text"]
    assert second["left"]["error"] == "DataError"
    assert "rank 1 has left trainer.evaluate() with DataError" in first["left"]["text"]
    assert first["left"]["seconds"] < 10


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_a_call_that_is_refused_leaves_nothing_behind(workers: Workers, tmp_path: Path, transport: str) -> None:
    found = workers.run(2, "call_cases:refused", folder=str(tmp_path), transport=transport)
    for each in found:
        assert each["dataset"]["error"] == "DataError"
        assert math.isfinite(each["loss"])
        assert math.isfinite(each["evaluated"])
    assert found[1]["gradient"]["error"] == "PhaseError"
    assert found[1]["unknown"]["error"] == "LayoutError"
