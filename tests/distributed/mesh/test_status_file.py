"""A slow rank is named, and a file says where every rank is while a run goes on."""

import json
from pathlib import Path

import pytest

from tests.support.workers import Workers
from zeromesh.trainer.cli.main import main


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
