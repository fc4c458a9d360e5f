"""A slow rank is named, and a file says where every rank is while a run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workers import Workers

from zeromesh.trainer.cli import main
from zeromesh.trainer.stragglers import Stragglers


def test_a_rank_that_is_slow_for_ten_steps_is_named_once_in_a_hundred() -> None:
    looker = Stragglers()
    said = [looker.add(step, [0.1, 0.11, 0.35, 0.1]) for step in range(1, 140)]
    told = [step for step, line in enumerate(said, start=1) if line]
    assert told == [10, 110]
    assert said[9] == (
        "rank 2 is slow: over 10 steps it was at work for 350 ms a step, the others for 100 ms, and waited for it"
    )


@pytest.mark.parametrize("busy", [[0.1, 0.14], [0.001, 0.01], [0.2]])
def test_what_is_nearly_as_fast_or_not_worth_it_is_not(busy: list[float]) -> None:
    looker = Stragglers()
    assert [looker.add(step, busy) for step in range(1, 40)] == [None] * 39


def test_time_at_work_is_the_step_without_its_waits() -> None:
    looker = Stragglers()
    lines = [looker.look(step, 0.5, [0.4 * step, 0.0]) for step in range(12)]
    assert [line is not None for line in lines] == [False] * 10 + [True, False]
    assert "rank 1 is slow" in str(lines[10])


def test_a_run_says_who_is_slow_and_where_everyone_is(
    workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = workers.run(3, "checkpoint_cases:slowed", folder=str(tmp_path), rank=1, seconds=0.12)
    assert "rank 1 is slow" in found[0]["said"]
    during = found[0]["during"]
    assert [row["rank"] for row in during] == [0, 1, 2]
    assert all(row["pid"] > 0 and row["step"] >= 1 for row in during)
    after = json.loads((tmp_path / "run" / "ranks.json").read_text())["ranks"]
    assert [row["step"] for row in after] == [13] * 3
    assert main(["status", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())  # lines are broken where the folder's name is long
    assert "step 13" in said
    assert "seconds without progress" in said
    assert main(["status", str(tmp_path / "nowhere")]) == 1
    assert "holds no run" in capsys.readouterr().err
