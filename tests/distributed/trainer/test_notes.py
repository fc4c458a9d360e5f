"""What a run says about a model that a person may take for something else."""

import json
from pathlib import Path

import pytest

from tests.support.workers import Workers


def said(workers: Workers, folder: Path, name: str, every_steps: int = 0) -> str:
    """All lines of rank 0; the others print nothing."""
    first, *others = workers.run(2, "note_cases:said", folder=str(folder), name=name, every_steps=every_steps)
    assert others == [[]]
    assert any(line.startswith("done: 4 steps") for line in first), first
    return "\n".join(first)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("built", ""),
        ("callable", "built whole on CPU by every rank, because it initialises second.weight otherwise"),
        ("meta", "passed on the meta device: weights of first, second are drawn by `reset_parameters`"),
        ("library on meta", "it has no values: its weights are drawn anew"),
    ],
)
def test_what_becomes_of_weights_that_init_has_drawn(workers: Workers, tmp_path: Path, name: str, wanted: str) -> None:
    text = said(workers, tmp_path, name)
    assert wanted in text
    assert ("reset_parameters" in text) == (name in ("callable", "meta"))


def test_statistics_of_microbatches(workers: Workers, tmp_path: Path) -> None:
    lines = [line for line in said(workers, tmp_path, "normed").splitlines() if "BatchNorm" in line]
    assert len(lines) == 1
    assert lines[0].startswith("BatchNorm (layers.1): means and variances are those of each rank's own microbatch")
    assert "BatchNorm" not in said(workers, tmp_path, "built")


def test_rows_of_the_start_and_the_next_command_at_the_end(workers: Workers, tmp_path: Path) -> None:
    lines = said(workers, tmp_path, "built", every_steps=4).splitlines()
    assert "model    Redrawn, 49 parameters" in lines
    assert [line for line in lines if line.startswith("data ")] == ["data     16 samples"]
    assert [line.split()[0] for line in lines[-2:]] == ["model", "next"]
    assert lines[-2].endswith("step-00000004")
    assert lines[-1].startswith("next     zeromesh report ")
    start = json.loads(next(tmp_path.glob("*/starts.jsonl")).read_text().splitlines()[0])
    assert start["parameters"] == 49


def test_of_a_model_that_is_partly_frozen_the_trained_parameters_are_counted(workers: Workers, tmp_path: Path) -> None:
    assert "model    Redrawn, trained 9 of 49 parameters (18.37%)" in said(workers, tmp_path, "frozen")
