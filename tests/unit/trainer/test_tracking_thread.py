"""The threads of trackers: what ends them and how, and what their last calls are."""

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from tests.support.step_lines import metrics
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.loop import training_loop
from zeromesh.trainer.monitoring import tracking as tracking_module
from zeromesh.trainer.monitoring.tracking import Tracking, _tracking_id, samples_row, step_row
from zeromesh.trainer.trackers.backends import UNKNOWN, RowPosition, TrackedRow, TrackedRun, Tracker


class Noted(Tracker):
    """A tracker that notes its calls, and runs `on_log` at each row."""

    def __init__(self, on_log: Callable[[TrackedRow], Any] = lambda row: None) -> None:
        run = TrackedRun(ident="x", name="x", project="x", tags=(), online=False, directory=Path(), step=0, config={})
        super().__init__("noted", run)
        self.sent, self.calls, self.rows = UNKNOWN, list[str](), list[TrackedRow]()
        self._on_log = on_log

    def start(self) -> None:
        self.calls.append("start")

    def log(self, row: TrackedRow) -> None:
        self.rows.append(row)
        self._on_log(row)

    def finish(self) -> None:
        self.calls.append("finish")

    def give_up(self, error: BaseException) -> None:
        self.calls.append(f"give up after {error}")
        raise OSError("a tracker that fails at that, too")

    def abandon(self) -> None:
        self.calls.append("abandon")
        raise OSError("a tracker that fails at that, too")


def test_the_end_of_trackers_that_work() -> None:
    left: list[str] = []
    trackers = [Noted(), Noted()]
    with Tracking(trackers, ident="x", leave=lambda: left.append("left")) as tracking:
        assert tracking.identity("run") == {"id": "x", "run": "run"}
        tracking.send(samples_row(4, [{"prompt": "a", "completion": "b", "more": 1}]))
        assert not left
    assert [each.calls for each in trackers] == [["start", "finish"]] * 2
    assert trackers[0].rows == [TrackedRow(RowPosition(4, evaluation=True), {}, (("a", "b"),))]
    assert left == ["left"]
    tracking.__exit__(None)
    tracking.send(step_row(metrics(5)))
    assert (len(trackers[0].rows), left) == (1, ["left"])


def test_a_tracker_that_fails_gives_up() -> None:
    def fail(row: TrackedRow) -> None:
        raise ValueError("no")

    said: list[str] = []
    with Tracking([failing := Noted(fail)], said.append, ident="x") as tracking:
        tracking.send(step_row(metrics(5)))
    assert failing.calls == ["start", "give up after no"]
    assert said == ["WARNING: tracking by noted ended after step 0: ValueError: no. Training goes on; metrics.jsonl has every step"]


@pytest.mark.parametrize(
    ("error", "patience", "seconds"), [(None, 9.0, "0.2"), (KeyError, 9.0, "0.1"), (None, 0.05, "0.05"), (KeyError, 0.05, "0.05")]
)
def test_a_tracker_that_hangs_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None, patience: float, seconds: str
) -> None:
    """After an error, which the other ranks have to hear of, sooner than at the end of a run."""
    monkeypatch.setattr(tracking_module, "_FINISH_SECONDS", 0.2)
    monkeypatch.setattr(tracking_module, "_ERROR_SECONDS", 0.1)
    monkeypatch.setattr(tracking_module, "_ABANDON_SECONDS", 0.0)
    gate, said, left = threading.Event(), list[str](), list[str]()
    stuck = Noted(lambda row: gate.wait(30))
    tracking = Tracking([stuck], said.append, ident="x", patience=patience, leave=lambda: left.append("left"))
    with tracking:
        tracking.send(step_row(metrics(1)))
        tracking.__exit__(error)
    assert said == [f"WARNING: tracking by noted did not end within {seconds} seconds; metrics.jsonl has every step"]
    assert stuck.calls == ["start", "abandon"]
    assert not left, "accelerate's state is in use still"
    gate.set()


@pytest.mark.parametrize(
    ("step", "known", "kept"),
    [
        (3, {}, "stored"),
        (0, {}, None),  # A run from the beginning is another one.
        (0, {"id": "known", "run": "run"}, None),
    ],
)
def test_an_id_is_kept_by_runs_that_go_on(tmp_path: Path, step: int, known: dict[str, str], kept: str | None) -> None:
    path = tmp_path / "tracking.json"
    path.write_text('{"id": "stored", "run": "run"}')
    found = _tracking_id(path, "run", step, known, lambda text: None)
    assert (found if kept else found not in ("stored", "known")) == (kept or True)
    assert json.loads(path.read_text())["id"] == found


def test_an_id_that_cannot_be_stored_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    found = _tracking_id(tmp_path / "no" / "tracking.json", "run", 3, {"id": "abc", "run": "run"}, said.append)
    assert found == "abc"
    assert said == [
        f"WARNING: {tmp_path / 'no' / 'tracking.json'} cannot be written (No such file or directory); trackers know the run as abc"
    ]


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, size: int = 2, **section: Any) -> Any:
    """The trackers of a run, whose group waits 100 seconds, and the lines about them."""
    made: list[tuple[str, TrackedRun]] = []
    kind = SimpleNamespace(make=lambda name, run: made.append((name, run)) or Noted())
    monkeypatch.setattr(tracking_module, "kind_of", lambda name: kind)
    config = load_config({"parallel": {"timeout_seconds": 100}, "run": {"name": "here"}})
    tracking = config.tracking.model_copy(update=section)
    config = config.model_copy(update={"tracking": tracking})
    group = SimpleNamespace(gather_bytes=lambda own, what: [own or b"theirs"])
    mesh: Any = SimpleNamespace(rank=rank, world_size=size, world=group, device=torch.device("cpu"))
    said: list[str] = []
    found = Tracking.open(config, mesh, folder, step=3, known={"id": "abc", "run": "here"}, note=said.append)
    return found, made, said


def test_trackers_are_opened_on_one_rank_and_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_module, "_join_accelerate", lambda device: lambda: None)
    names = ["wandb", "noted", "wandb"]
    found, made, _ = opened(tmp_path, monkeypatch, backends=names, tags=["a"], mode="offline")
    assert [name for name, _ in made] == ["wandb", "noted"]
    run = made[0][1]
    assert (run.ident, run.name, run.tags, run.online, run.step) == ("abc", "here", ("a",), False, 3)
    assert run.settings["parallel.timeout_seconds"] == 100
    assert run.settings["optimizer.betas"] == json.dumps(run.config["optimizer"]["betas"])
    assert (found.ident, found.patience) == ("abc", 70.0), "less than the other ranks wait"
    alone, made, _ = opened(tmp_path, monkeypatch, backends=names, size=1, name="named", mode="online")
    assert (made[0][1].name, made[0][1].online, alone.patience) == ("named", True, float("inf"))
    other, made, _ = opened(tmp_path, monkeypatch, backends=names, rank=1)
    assert (other.ident, other.identity("x"), made) == ("theirs", {"id": "theirs", "run": "x"}, [])
    none, made, _ = opened(tmp_path, monkeypatch, backends=[])
    assert (none.ident, made) == ("", [])


def test_a_library_that_fails_leaves_a_run_without_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise OSError("no.")

    monkeypatch.setattr(tracking_module, "_join_accelerate", fail)
    found, made, said = opened(tmp_path, monkeypatch, backends=["wandb"])
    assert (found.ident, made) == ("abc", [])
    assert said == ["WARNING: there is no tracking: OSError: no. Training goes on; metrics.jsonl has every step"]


def test_a_step_that_is_concluded_again_is_no_row_of_an_earlier_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line of metrics is written anew, and its row is sent with it; a run that has a step keeps its id."""
    steps: list[int] = []

    def opened(*given: Any, **named: Any) -> Any:
        steps.append(named["step"] if "step" in named else given[1])
        return nullcontext()

    monkeypatch.setattr(training_loop.Tracking, "open", opened)
    monkeypatch.setattr(training_loop, "Profile", lambda *given: nullcontext())
    monkeypatch.setattr(training_loop.TrainingLoop, "_take_steps", lambda loop: None)
    run: Any = MagicMock(progress=SimpleNamespace(step=7, unfinished=object(), resumed=MagicMock()))
    run.inputs.names.return_value = {}
    loop = training_loop.TrainingLoop(run=run, directory=MagicMock(open=opened))
    loop._checkpoints = MagicMock()
    loop._train(MagicMock())
    run.progress.step = 1
    loop._train(MagicMock())
    assert steps == [6, 6, 0, 1]
