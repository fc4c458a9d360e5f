"""What a run says about a model that a person may take for something else."""

import json
from pathlib import Path

import pytest

from tests.support.workers import Workers

DRAWN, NORMED = "reset_parameters", "BatchNorm"


@pytest.mark.parametrize(
    ("name", "wanted", "absent"),
    [
        ("built", "", (DRAWN, NORMED)),
        ("callable", "built whole on CPU by every rank, because it initialises second.weight otherwise", (NORMED,)),
        ("meta", "passed on the meta device: weights of first, second are drawn by `reset_parameters`", (NORMED,)),
        ("library on meta", "it has no values: its weights are drawn anew", (DRAWN, NORMED)),
        ("normed", "BatchNorm (layers.1): means and variances are those of each rank's own microbatch", (DRAWN,)),
        ("frozen", "model    Redrawn, trained 9 of 49 parameters (18.37%)", (DRAWN,)),
    ],
)
def test_what_is_said_of_a_model(
    workers: Workers, tmp_path: Path, name: str, wanted: str, absent: tuple[str, ...]
) -> None:
    """Rank 0 says it once, and the others nothing."""
    lines, others = workers.run(2, "note_cases:said", folder=str(tmp_path), name=name, every_steps=0)
    assert others == []
    assert any(line.startswith("done: 4 steps") for line in lines), lines
    assert len([line for line in lines if wanted in line]) == 1 or not wanted
    assert not any(word in "".join(lines) for word in absent)
    assert sum(NORMED in line for line in lines) == (name == "normed")


def test_rows_of_the_start_and_the_next_command_at_the_end(workers: Workers, tmp_path: Path) -> None:
    lines = workers.run(2, "note_cases:said", folder=str(tmp_path), name="built", every_steps=4)[0]
    assert "model    Redrawn, 49 parameters" in lines
    assert [line for line in lines if line.startswith("data ")] == ["data     16 samples"]
    assert [line.split()[0] for line in lines[-2:]] == ["model", "next"]
    assert lines[-2].endswith("step-00000004")
    assert lines[-1].startswith("next     zeromesh report ")
    start = json.loads(next(tmp_path.glob("*/starts.jsonl")).read_text().splitlines()[0])
    assert start["parameters"] == 49
