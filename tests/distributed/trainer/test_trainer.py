"""The trainer, on one rank and on several: it does what a plain loop does, and says what it did."""

import json
from pathlib import Path

import pytest

from tests.support.tables import tried
from tests.support.workers import Workers

FULL = pytest.mark.full
UNEVEN = {("sum", 1), ("mean", 2), ("text", 3)}
SPOILED = [
    {"calls": [2]},
    {"calls": [2, 4, 5], "message": "gradients were not finite in 2 steps in a row, up to step 5", "max_nonfinite": 2},
    {"calls": [1, 3, 5], "message": "3 of 5 steps made no update"},
    {"calls": [3], "message": "no parameter was changed (run.on_nonfinite: stop)", "steps": 2, "on_nonfinite": "stop"},
]
test_a_run_is_that_of_a_plain_loop = pytest.mark.sampled(8)(
    tried(
        "trainer_cases",
        [
            *((size, "story", {"stage": stage}) for size, stage in ((1, 3), (2, 3), (2, 0))),
            *(pytest.param(size, "story", {"stage": stage}, marks=FULL) for size, stage in ((2, 1), (3, 2))),
            # Microbatches and ranks do not divide the global batch.
            *(
                pytest.param(size, "uneven", {"kind": kind, "micro": micro}, marks=() if (kind, size) in UNEVEN else FULL)
                for size, micro in ((1, 3), (2, 4), (3, 2))
                for kind in ("text", "mean", "sum")
            ),
            (2, "recompute", {}),
            pytest.param(1, "recompute", {"compiled": True}, marks=FULL),
            (2, "half", {}),
            *((2, "spoiled", arguments) for arguments in SPOILED),
            *((1, "interrupted", {"where": where}) for where in ("begin", "update", "end", "forward", "backward")),
            (2, "broken", {}),
        ],
        timeout=240.0,
    )
)


def test_initial_weights_depend_on_seed_and_name_alone(workers: Workers, tmp_path: Path) -> None:
    found = [
        workers.run(size, "trainer_cases:initial", folder=str(tmp_path), stage=stage)[0] for size, stage in ((1, 0), (2, 2), (3, 3))
    ]
    assert all(each == found[0] for each in found), found
    assert found[0]["config"] == found[0]["callable"] == found[0]["meta"] != found[0]["tied"]


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
def test_what_is_said_of_a_model(workers: Workers, tmp_path: Path, name: str, wanted: str, absent: tuple[str, ...]) -> None:
    """Rank 0 says it once, and the others nothing."""
    lines, others = workers.run(2, "profiling_cases:said", folder=str(tmp_path), name=name, every_steps=0)
    assert others == []
    assert any(line.startswith("done: 4 steps") for line in lines), lines
    assert len([line for line in lines if wanted in line]) == 1 or not wanted
    assert not any(word in "".join(lines) for word in absent)
    assert sum(NORMED in line for line in lines) == (name == "normed")


def test_rows_of_the_start_and_the_next_command_at_the_end(workers: Workers, tmp_path: Path) -> None:
    lines = workers.run(2, "profiling_cases:said", folder=str(tmp_path), name="built", every_steps=4)[0]
    assert "model    Redrawn, 49 parameters" in lines
    assert [line for line in lines if line.startswith("data ")] == ["data     16 samples"]
    assert [line.split()[0] for line in lines[-2:]] == ["model", "next"]
    assert lines[-2].endswith("step-00000004")
    assert lines[-1].startswith("next     zeromesh report ")
    assert json.loads(next(tmp_path.glob("*/starts.jsonl")).read_text().splitlines()[0])["parameters"] == 49
