"""A slow rank is named, and a file says where every rank is while a run goes on."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.workers import Workers
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.monitoring.rank_waits import Stragglers


def looks(busy: Sequence[float], count: int, steps: int = 1) -> list[str | None]:
    """The lines of so many looks, one after so many steps, on a run whose ranks are at work for `busy` seconds a step."""
    looker = Stragglers()
    looker.add(9.0, 0.0)  # The first step is not looked at.
    lines = []
    for look in range(1, count + 1):
        for _ in range(steps):
            looker.add(0.4, 0.4 - busy[0])
        assert looker.busy == pytest.approx(busy[0])
        lines.append(looker.look(look * steps, busy))
    return lines


def test_a_rank_that_is_slow_for_ten_steps_is_named_once_in_a_hundred() -> None:
    said = looks([0.1, 0.11, 0.35, 0.1], 139)
    assert [step for step, line in enumerate(said, start=1) if line] == [10, 110]
    assert said[9] == (
        "rank 2 is slow: over 10 steps it was at work for 350 ms a step, the others for 100 ms, and waited for it"
    )


def test_seconds_are_those_of_one_step_however_rarely_ranks_are_looked_at() -> None:
    said = looks([0.1, 0.35], 3, steps=6)
    assert said[0] is None
    assert said[1] == (
        "rank 1 is slow: over 12 steps it was at work for 350 ms a step, the others for 100 ms, and waited for it"
    )


@pytest.mark.parametrize(
    ("busy", "named"),
    [([0.1, 0.14], 0), ([0.001, 0.01], 0), ([0.2], 0), ([0.01, 0.059], 0), ([0.01, 0.061], 1)],
)
def test_what_is_nearly_as_fast_or_slow_by_less_than_a_twentieth_of_a_second_is_not(
    busy: list[float], named: int
) -> None:
    """However many times as long it takes."""
    assert sum(line is not None for line in looks(busy, 39)) == named


def test_a_rank_is_never_at_work_for_less_than_no_time() -> None:
    looker = Stragglers()
    for _ in range(3):
        looker.add(0.1, 0.4)
    assert looker.busy == 0.0


def test_a_run_says_who_is_slow_and_where_everyone_is(
    workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = workers.run(3, "checkpoint_cases:slowed", folder=str(tmp_path), rank=1, seconds=0.12)
    assert "rank 1 is slow" in found[0]["said"]
    during = found[0]["during"]
    assert [row["rank"] for row in during] == [0, 1, 2]
    assert all(row["pid"] > 0 and row["step"] >= 1 for row in during)
    assert found[0]["communication"] <= 1.0
    after = json.loads((tmp_path / "run" / "ranks.json").read_text())["ranks"]
    assert [row["step"] for row in after] == [13] * 3
    assert main(["status", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())  # lines are broken where the folder's name is long
    assert "step 13" in said
    assert "seconds without progress" in said
    assert main(["status", str(tmp_path / "nowhere")]) == 1
    assert "holds no run" in capsys.readouterr().err


def test_waits_in_evaluations_are_no_part_of_steps(workers: Workers, tmp_path: Path) -> None:
    """A rank that is slow in evaluations alone is not named, and the table of communication has what belongs to steps."""
    for found in workers.run(2, "checkpoint_cases:slowed", folder=str(tmp_path), rank=1, seconds=0.4, evaluations=True):
        assert "is slow" not in found["said"]
        assert found["communication"] <= 1.0
