"""The trainer, on one rank and on several: it does what a plain loop does, and says what it did."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import Workers
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.monitoring.step_metrics import read_metrics

FULL = pytest.mark.full
CASES = "trainer_cases"
UNEVEN = {("sum", 1), ("mean", 2), ("text", 3)}
FIELDS = ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "peak_memory_bytes"]

EVENTS = [
    *("evaluated 0", "begin", "step 1", "update 1", "end 1", "step 2", "update 2", "end 2", "evaluated 2", "step 3"),
    *("update 3", "end 3", "evaluated 3", "step 4", "update 4", "end 4", "evaluated 4", "finish", "evaluated 4"),
]


def run(workers: Workers, size: int, case: str, **arguments: Any) -> dict[str, Any]:
    """Run a case and return rank 0's result; the others say the same where they can."""
    return workers.run(size, f"{CASES}:{case}", **arguments)[0]


@pytest.mark.parametrize(("size", "stage"), [(1, 3), (2, 3), (2, 0), pytest.param(2, 1, marks=FULL), (3, 2)])
def test_a_run_and_all_that_may_be_done_around_it(workers: Workers, tmp_path: Path, size: int, stage: int) -> None:
    found = run(workers, size, "story", folder=str(tmp_path), stage=stage)
    assert found["events"] == EVENTS
    assert all(value <= 1e-9 for value in found["differences"].values()), found["differences"]
    assert len(found["differences"]) == 9
    assert found["report"] == [4, True, 0, 4 * 8 * 12]
    assert found["numbers"] == [True, True]
    assert found["same_report"]
    assert (found["training"], found["hooks"], found["own_forwards"]) == (True, 0, 0)
    check_files(tmp_path / "run", found, size)


def check_files(folder: Path, found: dict[str, Any], size: int) -> None:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    more = [*["communication"] * (size > 1), "mfu", "phases", "memory"]
    first = [[*FIELDS, *more, "start", "time"]]
    assert [list(record) for record in records] == first + [[*FIELDS, *more, "time"]] * 3
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["tokens"] for record in records] == [96, 192, 288, 384]
    assert [record["lr"] for record in records] == pytest.approx([0.0, 0.01, 0.01 * 2 / 3, 0.01 / 3])
    assert [record["grad_norm"] for record in records] == pytest.approx(found["norms"], rel=1e-9)
    assert records == read_metrics(folder / "metrics.jsonl")
    resolved = load_config(folder / "config.resolved.yaml")
    assert resolved == load_config(found["config"])


@pytest.mark.parametrize(
    ("kind", "size", "micro"),
    [
        pytest.param(kind, size, micro, marks=() if (kind, size) in UNEVEN else FULL)
        for size, micro in ((1, 3), (2, 4), (3, 2))
        for kind in ("text", "mean", "sum")
    ],
)
def test_a_global_batch_that_nothing_divides(
    workers: Workers, tmp_path: Path, kind: str, size: int, micro: int
) -> None:
    found = run(workers, size, "uneven", folder=str(tmp_path), kind=kind, micro=micro)
    assert all(value <= 1e-9 for value in found.values()), found


def test_initial_weights_depend_on_seed_and_name_alone(workers: Workers, tmp_path: Path) -> None:
    layouts = [(1, 0), (2, 2), (3, 3)]
    found = [run(workers, size, "initial", folder=str(tmp_path), stage=stage) for size, stage in layouts]
    assert all(each == found[0] for each in found), found
    assert found[0]["config"] == found[0]["callable"] == found[0]["meta"] != found[0]["tied"]


def test_recomputed_activations_change_nothing(workers: Workers, tmp_path: Path) -> None:
    modes = ("none", "block", "selective")
    found = {mode: run(workers, 2, "recompute", folder=str(tmp_path), mode=mode) for mode in modes}
    for mode in ("block", "selective"):
        assert found[mode]["losses"] == pytest.approx(found["none"]["losses"], rel=1e-12)
    assert [each["left"] for each in found.values()] == [0, 0, 0]


@FULL
def test_compiled_blocks_change_nothing(workers: Workers, tmp_path: Path) -> None:
    plain = run(workers, 1, "recompute", folder=str(tmp_path), mode="none")
    found = run(workers, 1, "recompute", folder=str(tmp_path), mode="none", compile_blocks=True, timeout=240)
    assert found["losses"] == pytest.approx(plain["losses"][4:], rel=1e-9)
    assert found["left"] == 0


def test_float16_finds_its_scale(workers: Workers, tmp_path: Path) -> None:
    found = run(workers, 2, "half", folder=str(tmp_path))
    lines = found["lines"]
    first = next(index for index, line in enumerate(lines) if "skipped" not in line)
    assert 1 <= first <= 6
    assert all(line["skipped"] is True and line["grad_norm"] in ("nan", "inf") for line in lines[:first])
    assert not any("skipped" in line for line in lines[first : first + 4])
    assert found["skipped"] == sum("skipped" in line for line in lines)
    scales = [line["loss_scale"] for line in lines]
    assert scales[: first + 4] == [2.0 ** (23 - min(step, first)) for step in range(first + 4)]
    assert scales[first + 4 :][:1] == [2.0 ** (24 - first)] or first == 6
    for line, exact in zip(lines[first : first + 4], found["exact"][first : first + 4], strict=True):
        assert line["loss"] == pytest.approx(exact["loss"], rel=1e-3)
        assert line["grad_norm"] == pytest.approx(exact["grad_norm"], rel=1e-2)


def test_a_step_that_is_not_finite_is_skipped_by_all(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, f"{CASES}:spoiled", folder=str(tmp_path), calls=[2])
    assert found[0]["weights"] == found[1]["weights"] != ""
    assert [found[0]["skipped"], found[1]["skipped"]] == [1, 1]
    line = found[0]["lines"][1]
    assert line["skipped"] is True
    assert line["loss"] == "inf"
    assert line["grad_norm"] in ("nan", "inf")
    assert "gradients of unit" in line["cause"]
    assert line["cause"].endswith("; the loss is not finite on rank 0")
    assert not any("skipped" in found[0]["lines"][index] for index in (0, 2, 3, 4))


@pytest.mark.parametrize(
    ("section", "calls", "message", "steps"),
    [
        ({"max_nonfinite": 2}, [2, 4, 5], "gradients were not finite in 2 steps in a row, up to step 5", 5),
        ({}, [1, 3, 5], "3 of 5 steps made no update", 5),
        ({"on_nonfinite": "stop"}, [3], "no parameter was changed (run.on_nonfinite: stop)", 2),
    ],
)
def test_steps_that_are_not_finite_end_the_run(
    workers: Workers, tmp_path: Path, section: dict[str, Any], calls: list[int], message: str, steps: int
) -> None:
    found = workers.run(2, f"{CASES}:spoiled", folder=str(tmp_path), calls=calls, **section)
    for each in found:
        assert each["error"].startswith("NonFiniteError")
        assert message in each["error"]
        assert "the loss is not finite on rank 0" in each["error"]
    assert len(found[0]["lines"]) == steps


@pytest.mark.parametrize("where", ["begin", "update", "end", "forward", "backward"])
def test_one_rank_goes_on_after_an_interruption(workers: Workers, tmp_path: Path, where: str) -> None:
    found = run(workers, 1, "interrupted", folder=str(tmp_path), where=where)
    assert found == {"same": True, "steps": [1, 2, 3, 4], "losses": 4, "finite": True}


def test_several_ranks_do_not_go_on_after_an_error(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, f"{CASES}:broken", folder=str(tmp_path))
    assert found[1]["said"][0] == "ValueError: no more"
    assert found[0]["said"][0].startswith("CollectiveError: rank 0: ")
    assert "rank 1 failed with ValueError: no more" in found[0]["said"][0]
    for each in found:
        assert len(each["said"]) == 5
        assert all(text.startswith("PhaseError: this run ended after 2 whole steps ") for text in each["said"][1:])
        assert all("make a new Trainer" in text for text in each["said"][1:])
