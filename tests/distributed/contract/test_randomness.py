"""Random numbers of a step: fresh wherever they are drawn, whatever the layout, and the same when a block is recomputed."""

from pathlib import Path

import pytest

from tests.support.workers import Workers

CASE = "randomness_cases:fresh_numbers"


def test_numbers_are_fresh_and_do_not_depend_on_the_layout(workers: Workers, tmp_path: Path) -> None:
    """Those of the loss, between and inside of units, of each microbatch, step, call and rank."""
    alone = workers.run(1, CASE, folder=str(tmp_path / "1"))[0]
    together = workers.run(2, CASE, folder=str(tmp_path / "2"))
    drawn = alone["stage 0"]["drawn"]
    assert len(set(drawn)) == len(drawn) == 2 * 4 * (2 + 2 * 5)
    for name, each in alone.items():
        if name != "sums":
            both = [rank[name]["drawn"] for rank in together]
            wanted = drawn if name != "resumed" else drawn[len(drawn) // 2 :]
            assert sorted(each["drawn"]) == sorted(both[0] + both[1]) == sorted(wanted), name
            assert each["apart"] <= 1e-9, name
            assert all(rank[name]["apart"] <= 1e-9 for rank in together), name
    for key, value in alone["sums"].items():
        assert together[0]["sums"][key] == pytest.approx(value, abs=1e-9)
    # Every evaluation draws the same numbers, and training draws as if there had been none.
    one = alone["larger rounds"]["evaluated"]
    assert len(one) == 4
    assert one[:2] != one[2:]
    assert sorted(one) == pytest.approx(sorted(x for rank in together for x in rank["larger rounds"]["evaluated"]))
