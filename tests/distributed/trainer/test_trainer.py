"""The trainer, on one rank and on several: it does what a plain loop does, and says what it did."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import Workers

FULL = pytest.mark.full
UNEVEN = {("sum", 1), ("mean", 2), ("text", 3)}
SPOILED = [
    {"calls": [2]},
    {"calls": [2, 4, 5], "message": "gradients were not finite in 2 steps in a row, up to step 5", "max_nonfinite": 2},
    {"calls": [1, 3, 5], "message": "3 of 5 steps made no update"},
    {"calls": [3], "message": "no parameter was changed (run.on_nonfinite: stop)", "steps": 2, "on_nonfinite": "stop"},
]
ROWS: list[Any] = [
    *((size, "story", {"stage": stage}) for size, stage in ((1, 3), (2, 3), (2, 0), (3, 2))),
    pytest.param(2, "story", {"stage": 1}, marks=FULL),
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
]


@pytest.mark.parametrize(("size", "case", "arguments"), ROWS)
def test_a_run_is_that_of_a_plain_loop(
    workers: Workers, tmp_path: Path, size: int, case: str, arguments: dict[str, Any]
) -> None:
    timeout = 240.0 if arguments.get("compiled") else 60.0
    workers.run(size, f"trainer_cases:{case}", timeout=timeout, folder=str(tmp_path), **arguments)


def test_initial_weights_depend_on_seed_and_name_alone(workers: Workers, tmp_path: Path) -> None:
    found = [
        workers.run(size, "trainer_cases:initial", folder=str(tmp_path), stage=stage)[0]
        for size, stage in ((1, 0), (2, 2), (3, 3))
    ]
    assert all(each == found[0] for each in found), found
    assert found[0]["config"] == found[0]["callable"] == found[0]["meta"] != found[0]["tied"]
