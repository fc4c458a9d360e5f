"""Trackers: what each is told of a run, and the last row of an earlier process, after which this one goes on."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zeromesh.trainer.trackers.backends import (
    TRACKERS,
    UNKNOWN,
    RowPosition,
    TensorBoardTracker,
    TrackedRow,
    TrackedRun,
    Tracker,
    TrackerKind,
    WandbTracker,
    kind_of,
)

IDENT = "a1b2c3d4"


def run_of(directory: Path, **changes: Any) -> TrackedRun:
    given: dict[str, Any] = {"ident": IDENT, "name": "run", "project": "runs", "tags": ("one", "two"), "online": True}
    return TrackedRun(**{**given, "directory": directory, "step": 0, "config": {"a": {"b": 1}}, **changes})


class Sink:
    """Stands for accelerate's tracker, and for the library's object in it: notes all calls."""

    step, resumed = 5, False

    def __init__(self, **more: Any) -> None:
        self.calls: list[Any] = []
        self.tracker = self
        vars(self).update(more)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: self.calls.append((name, *given, *([named] if named else [])))


def made(kind: type[Tracker], name: str, run: TrackedRun, sink: Sink) -> Any:
    """A tracker of a kind whose library is the sink."""

    class Noting(kind):  # type: ignore[misc, valid-type]
        def _make(self, project: str, **keywords: Any) -> None:
            sink.calls.append(("make", project, keywords))
            self.tracker = sink

    return Noting(name, run)


# Rows of an earlier process


@pytest.mark.parametrize(
    ("content", "step", "sent"),
    [
        (None, 0, RowPosition(0)),
        (None, 7, UNKNOWN),
        ([IDENT, 6, False], 7, RowPosition(6)),
        ([IDENT, 6, True, 12], 9, RowPosition(6, evaluation=True)),
        ([IDENT, 0, False], 3, RowPosition(0)),
        ([IDENT, -1, False], 7, UNKNOWN),
        (["another", 6, False], 7, UNKNOWN),
        (["another", 6, False], 0, RowPosition(0)),
        ([IDENT], 7, UNKNOWN),
        ([IDENT, None, False], 7, UNKNOWN),
    ],
)
def test_the_last_row_of_an_earlier_process_is_that_of_the_same_run(
    tmp_path: Path, content: Any, step: int, sent: RowPosition
) -> None:
    path, sink = tmp_path / "tracking-noted.json", Sink()
    if content is not None:
        path.write_text(json.dumps(content))
    tracker = made(Tracker, "noted", run_of(tmp_path, step=step, settings={"a.b": 1}), sink)
    tracker.start()
    assert tracker.sent == sent
    assert sink.calls == [("make", "runs", {}), ("store_init_configuration", {"a.b": 1})]
    if sent == RowPosition(0) and step == 0:
        assert json.loads(path.read_text()) == [IDENT, 0, False]
    tracker.log(TrackedRow(RowPosition(8, evaluation=True), {"eval/loss": 0.5}))
    assert json.loads(path.read_text()) == [IDENT, 8, True]
    tracker.log(TrackedRow(RowPosition(9), {}))
    assert json.loads(path.read_text()) == [IDENT, 9, False]
    tracker.finish()
    assert sink.calls[2:] == [("log", {"eval/loss": 0.5}, {"step": 8}), ("finish",)]


def test_a_row_is_recorded_before_it_is_sent(tmp_path: Path) -> None:
    tracker = made(Tracker, "noted", run_of(tmp_path), Sink())

    def log(values: Any, step: int) -> None:
        seen.append((json.loads((tmp_path / "tracking-noted.json").read_text()), step))

    seen: list[Any] = []
    tracker.tracker = SimpleNamespace(log=log)
    tracker.log(TrackedRow(RowPosition(3), {"train/loss": 1.0}))
    assert seen == [([IDENT, 3, False], 3)]


@pytest.mark.parametrize(
    ("noted", "step", "purged", "sent"),
    [
        (None, 0, 0, RowPosition(0)),
        (None, 6, 7, RowPosition(6, evaluation=True)),
        ([IDENT, 4, False], 6, 4, RowPosition(3, evaluation=True)),
        ([IDENT, 9, True], 6, 7, RowPosition(6, evaluation=True)),
        ([IDENT, 7, False], 6, 7, RowPosition(6, evaluation=True)),
    ],
)
def test_tensorboard_drops_rows_that_come_again(tmp_path: Path, noted: Any, step: int, purged: int, sent: RowPosition) -> None:
    sink = Sink()
    if noted is not None:
        (tmp_path / "tracking-tensorboard.json").write_text(json.dumps(noted))
    tracker = made(TensorBoardTracker, "tensorboard", run_of(tmp_path, step=step), sink)
    tracker.start()
    assert tracker.sent == sent
    assert sink.calls[0] == ("make", "", {"purge_step": purged, "flush_secs": 1.0})
    assert sink.calls[1:] == [("add_text", "config", "```yaml\na:\n  b: 1\n```", {"global_step": step})]
    tracker.log(TrackedRow(RowPosition(8), {"x": 1.0}, (("Hi", " there"), ("a", "b"))))
    assert sink.calls[2:] == [
        ("log", {"x": 1.0}, {"step": 8}),
        ("add_text", "samples/0", "**Hi**\n\n there", {"global_step": 8}),
        ("add_text", "samples/1", "**a**\n\nb", {"global_step": 8}),
    ]


@pytest.mark.parametrize(
    ("summary", "sent"),
    [
        ({"train/global_step": 6}, RowPosition(6)),
        ({"train/global_step": 6, "eval/global_step": 6}, RowPosition(6, evaluation=True)),
        ({"train/global_step": 7, "eval/global_step": 6}, RowPosition(7)),
        ({"train/global_step": "x"}, UNKNOWN),
    ],
)
def test_a_run_of_wandb_that_is_online_goes_on_after_the_server_s_last_row(
    tmp_path: Path, summary: dict[str, Any], sent: RowPosition
) -> None:
    (tmp_path / "tracking-wandb.json").write_text(json.dumps([IDENT, 4, False]))
    for resumed in (True, False):
        sink = Sink(resumed=resumed, summary=summary)
        tracker = made(WandbTracker, "wandb", run_of(tmp_path, step=3), sink)
        tracker.start()
        assert tracker.sent == (sent if resumed else UNKNOWN)
        ((_, project, keywords), *defined) = sink.calls
        settings = keywords.pop("settings")
        assert project == "runs"
        assert keywords == {
            "id": IDENT,
            "name": "run",
            "tags": ["one", "two"],
            "config": {"a": {"b": 1}},
            "dir": str(tmp_path),
            "mode": "online",
            "resume": "allow",
        }
        assert (settings.console, settings.save_code, settings.x_save_requirements) == ("off", False, False)
        hidden = ("x_disable_meta", "x_disable_stats", "x_disable_machine_info", "disable_git", "disable_code", "silent")
        assert all(getattr(settings, name) is True for name in hidden)
        step = "train/global_step"
        assert defined == [("define_metric", step), ("define_metric", "*", {"step_metric": step})]
        tracker.log(TrackedRow(RowPosition(8, evaluation=True), {"eval/loss": 0.5}))
        row = {"train/global_step": 8, "eval/global_step": 8, "eval/loss": 0.5}
        assert sink.calls[3:] == [("log", row, {"step": None, "commit": True})]
        assert json.loads((tmp_path / "tracking-wandb.json").read_text()) == [IDENT, 8, True, 5]
        (tmp_path / "tracking-wandb.json").write_text(json.dumps([IDENT, 4, False]))


# What each is told


def told(name: str, run: TrackedRun) -> dict[str, Any]:
    return kind_of(name).arguments(run)


def test_trackers_are_told_of_a_run_and_nothing_of_the_machine(tmp_path: Path) -> None:
    run, resumed = run_of(tmp_path), run_of(tmp_path, step=3, tags=())
    assert told("aim", run) == {"experiment": "run", "system_tracking_interval": None, "capture_terminal_logs": False}
    dvc = {"dir": str(tmp_path / "dvclive"), "dvcyaml": str(tmp_path / "dvc.yaml"), "save_dvc_exp": False}
    assert (told("dvclive", run), told("dvclive", resumed)) == ({**dvc, "resume": False}, {**dvc, "resume": True})
    assert told("mlflow", run) == {"run_name": "run", "tags": {"tags": "one, two"}}
    assert told("mlflow", resumed) == {"run_name": "run", "tags": None}
    off = {"auto_log_gpu": False, "auto_log_cpu": False}
    assert told("trackio", run) == {"name": f"run-{IDENT}", "resume": "allow", **off}
    assert (told("tensorboard", run), told("somebody's own", run)) == ({}, {})
    assert kind_of("somebody's own") == TrackerKind(kind_of("somebody's own").arguments, Tracker, ())
    assert {name: kind.make for name, kind in TRACKERS.items() if kind.make is not Tracker} == {
        "tensorboard": TensorBoardTracker, "wandb": WandbTracker
    }  # fmt: skip


@pytest.mark.parametrize("online", [True, False])
def test_trackers_with_settings_of_their_own_are_told_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, online: bool
) -> None:
    offline: list[bool] = []
    task = SimpleNamespace(set_offline=offline.append)
    monkeypatch.setitem(sys.modules, "clearml", SimpleNamespace(Task=task))
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(ExperimentConfig=dict))
    monkeypatch.setitem(sys.modules, "swanlab", SimpleNamespace(Settings=dict))
    run = run_of(tmp_path, online=online)
    clearml = told("clearml", run)
    assert set(clearml.pop("auto_connect_frameworks").values()) == {False}
    off = dict.fromkeys(("auto_connect_arg_parser", "auto_resource_monitoring", "auto_connect_streams"), False)
    assert clearml == {"task_name": "run", "tags": ["one", "two"], "reuse_last_task_id": False, **off}
    assert offline == ([] if online else [True])
    comet = told("comet_ml", run)
    settings = comet.pop("experiment_config")
    key = comet.pop("experiment_key")
    assert (len(key), key.isalnum(), key == told("comet_ml", run)["experiment_key"]) == (32, True, True)
    assert key != told("comet_ml", run_of(tmp_path, ident="another"))["experiment_key"]
    assert comet == {"mode": "get_or_create", **({} if online else {"online": False})}
    watches = {name: settings.pop(name) for name in [*settings] if name.startswith(("log_", "auto_", "parse_"))}
    assert (len(watches), set(watches.values())) == (10, {False})
    folder = {"offline_directory": str(tmp_path / "comet_ml"), "display_summary_level": 0}
    assert settings == {"name": "run", "tags": ["one", "two"], **folder}
    swan = told("swanlab", run)
    assert set(swan["settings"]["probe"].values()) == {False}
    assert swan.pop("settings")["terminal"] == {"proxy_type": "none"}
    known = {"name": "run", "tags": ["one", "two"], "id": IDENT, "resume": "allow", "log_dir": str(tmp_path / "swanlab")}
    assert swan == {**known, **({} if online else {"mode": "offline"})}
