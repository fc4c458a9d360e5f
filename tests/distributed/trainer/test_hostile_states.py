"""Counters that no run has, and two exports at once: refused by name, with nothing lost."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.damage_cases import STATE, replace, resign
from zeromesh.checkpoint.store import write_directory
from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.trainer.checkpoints.trainer_state import TrainerState
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.formatting import human_count

GOOD: dict[str, Any] = {
    "schema": 1,
    "step": 7,
    "samples": 56,
    "tokens": 700,
    "updates": 7,
    "skipped": 0,
    "loss": 1.5,
    "loss_scale": 1.0,
    "seed": 3,
    "best": {"value": 1.5, "step": 7, "waited": 0},
}
HUGE = 10**400
DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        *((name, HUGE, "integer of more than 1000 bits") for name in ("step", "tokens", "loss", "loss_scale", "settings")),
        *((name, 1 << 60, "fields of other types") for name in ("step", "samples", "tokens", "max_steps", "passed_over")),
        *((name, DEEP, "nested deeper than 64 levels") for name in ("settings", "callbacks", "log_history", "step")),
        ("loss_scale", 0, "fields of other types"),
        ("loss", True, "fields of other types"),
        ("learning_rate", float("inf"), "a number that is not finite"),
        ("callbacks", {"": float("inf")}, "a number that is not finite"),
        ("schema", HUGE, "has schema 1000"),
    ],
)
def test_a_state_that_no_run_has_is_refused(name: str, value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        TrainerState.from_json({**GOOD, name: value}, "step-00000007")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("best", "words"),
    [
        ({"value": HUGE}, "integer of more than 1000 bits"),
        ({"step": 1 << 70}, r"fields of other types.*\(best\.step: "),
        ({"value": DEEP}, "nested deeper than 64 levels"),
        ({"value": {"__float__": "nan"}}, r"\(best\.value: "),
        ({"more": 1}, r"\(best\.more: "),
    ],
)
def test_a_best_evaluation_that_no_run_has_is_refused(best: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        TrainerState.from_json({**GOOD, "best": {**GOOD["best"], **best}}, "step-00000007")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([HUGE, -HUGE, 1 << 53, 1e308]),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=5), each, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*GOOD, "metric", "callbacks", "stream", "log_history", "max_steps", "passed_over", "x"])


@given(st.dictionaries(NAMES, VALUES, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_state_is_one_that_can_be_used_or_an_error(changes: dict[str, Any]) -> None:
    try:
        state = TrainerState.from_json({**GOOD, **changes}, "x")
    except CheckpointError:
        return
    human_count(state.tokens)
    plan = BatchPlan(global_size=8, micro_size=2, data_ranks=1, epoch_size=23)
    plan.epoch_after(state.step + state.passed_over)
    plan.samples_of(state.step + state.passed_over)
    assert json.loads(state.to_json())["step"] == state.step


@pytest.mark.parametrize("value", [{"tokens": HUGE}, {"settings": {"a": DEEP}}, {"log_history": [DEEP]}])
def test_commands_name_a_hostile_state(copy: Path, capsys: pytest.CaptureFixture[str], value: dict[str, Any]) -> None:
    replace(copy, STATE, json.dumps({**GOOD, **value}).encode())
    assert main(["checkpoint", "list", str(copy.parent)]) == 0
    assert "NOT WHOLE" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", str(copy)]) == 1
    assert STATE in capsys.readouterr().err


def test_a_layout_that_is_nested_deeply_is_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resign(copy, lambda content: content["layout"].update({"mesh": DEEP}))
    assert main(["checkpoint", "inspect", str(copy)]) == 1
    assert "layout is nested deeper than 64 levels" in capsys.readouterr().err


def test_of_two_that_write_one_directory_at_once_the_first_wins_and_loses_nothing(tmp_path: Path) -> None:
    begun, written = threading.Event(), threading.Event()
    found: list[str] = []

    def second() -> None:
        try:
            with write_directory(tmp_path / "out", 0) as directory:
                (directory / "second").write_text("2")
                begun.set()
                written.wait(10)
        except ConfigError as error:
            found.append(str(error))

    other = threading.Thread(target=second)
    other.start()
    begun.wait(10)
    with write_directory(tmp_path / "out", 0) as directory:
        (directory / "first").write_text("1")
    written.set()
    other.join()
    assert (tmp_path / "out" / "first").read_text() == "1"
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "first"]
    assert len(found) == 1
    assert "something else has been written there meanwhile" in found[0]


def test_a_directory_may_have_the_longest_name(tmp_path: Path, copy: Path) -> None:
    out = tmp_path / ("n" * 255)
    with write_directory(out, 0) as directory:
        (directory / "file").touch()
    assert (out / "file").exists()
