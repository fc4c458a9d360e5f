"""Tracking: every step once with its figures, also after a kill and a resume; what fails is one warning."""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.distributed.integrations import tracker_rows
from tests.support import wandb_log
from tests.support.step_lines import check_phases, metrics
from tests.support.tracking_cases import SECRETS
from tests.support.waiting import logged_steps
from tests.support.workers import PoolOptions, Workers
from zeromesh.errors import ConfigError, StorageError
from zeromesh.trainer.config import load as loading
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.redact import REDACTED, Redaction
from zeromesh.trainer.monitoring import tracking as tracking_module
from zeromesh.trainer.monitoring.step_metrics import MetricsWriter, read_metrics
from zeromesh.trainer.monitoring.tracking import Tracking, evaluation_row, missed_rows, step_row
from zeromesh.trainer.trackers import backends as kinds
from zeromesh.trainer.trackers.backends import UNKNOWN, RowPosition, TrackedRow, TrackedRun, Tracker

CASE = "tracking_cases:tracked"
FIGURES = {
    *("train/loss", "train/learning_rate", "train/grad_norm", "train/tokens"),
    *("perf/tokens_per_second", "perf/step_seconds", "perf/mfu", "memory/peak_bytes"),
    *("memory/device/parameters", "memory/device/moments", "memory/device/gradients", "memory/device/gradient_buckets"),
    *("time/data", "time/forward", "time/backward", "time/communication", "time/optimizer"),
    *("communication/shard/all-gather/bytes", "communication/shard/reduce-scatter/seconds"),
}
ALL = ("wandb", "noted", "tensorboard")


def wandb_rows(run: Path) -> list[dict[str, Any]]:
    return [row for path in wandb_log.files(run) for row in wandb_log.rows(path)]


def noted_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "noted" / "zeromesh.jsonl").read_text().splitlines()]


def events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run / "tensorboard")).Reload()


def tracked_values(run: Path, tracker: str, name: str) -> list[tuple[int, float]]:
    """The steps of a figure with its values, in the order in which a tracker has them."""
    if tracker == "wandb":
        return [(row["train/global_step"], row[name]) for row in wandb_rows(run) if name in row]
    if tracker == "noted":
        return [(line["step"], line[name]) for line in noted_lines(run) if name in line]
    return [(event.step, event.value) for event in events(run).Scalars(name)]


def require_once(run: Path, trackers: Sequence[str], trained: Sequence[int], evaluated: Sequence[int]) -> None:
    """Each tracker has these steps and evaluations once, in order, with the losses of `metrics.jsonl`."""
    losses = {line["step"]: line["loss"] for line in read_metrics(run / "metrics.jsonl")}
    for tracker in trackers:
        found = tracked_values(run, tracker, "train/loss")
        assert [step for step, _ in found] == list(trained), tracker
        assert [loss for _, loss in found] == pytest.approx([losses[step] for step in trained], rel=1e-6)
        assert [step for step, _ in tracked_values(run, tracker, "eval/loss")] == list(evaluated), tracker
    if "wandb" in trackers:
        rows = wandb_rows(run)
        assert [row["_step"] for row in rows] == list(range(len(rows)))


# A run and what trackers hold of it


@pytest.fixture(scope="module")
def run(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps on two ranks, tracked by wandb, TensorBoard and a tracker of the user's own."""
    folder = tmp_path_factory.mktemp("tracked")
    found = workers.run(2, CASE, timeout=120, folder=str(folder), steps=6, backends=ALL, looks=True)
    assert "WARNING" not in found[0]["said"], found[0]["said"]
    assert found[0]["lag"] < 6  # a second, where the machine has time
    assert [each["threads"] for each in found] == [1, 1]
    return folder / "run"


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run", symlinks=True))


def test_a_run_has_every_step_once_with_its_figures(run: Path) -> None:
    (path,) = wandb_log.files(run)  # of one rank alone
    require_once(run, ALL, [1, 2, 3, 4, 5, 6], [3, 6])
    written = read_metrics(run / "metrics.jsonl")
    check_phases(written)
    for row, line in zip((row for row in wandb_rows(run) if "train/loss" in row), written, strict=True):
        # The evaluation after step 3 has gathered the parameters that the next step reads.
        gathered_before = {"communication/shard/all-gather/bytes"} if line["step"] == 4 else set()
        assert row.keys() >= FIGURES - gathered_before
        for name, field in (("loss", "loss"), ("learning_rate", "lr"), ("grad_norm", "grad_norm")):
            assert row[f"train/{name}"] == line[field]
        assert row["perf/mfu"] == line["mfu"] > 0
        assert row["memory/device/moments"] == line["memory"]["device"]["moments"] > 0
    resolved = yaml.safe_load((run / "config.resolved.yaml").read_text())
    assert resolved["optimizer"]["lr"] == 0.01
    name, settings = wandb_log.started(path)
    assert {key: value for key, value in settings.items() if key in resolved} == resolved
    assert name == "a small run"
    assert json.loads((run / "tracking.json").read_text())["id"] in path.name
    assert "config/text_summary" in events(run).Tags()["tensors"]
    lines = noted_lines(run)
    assert lines[0]["config"]["optimizer.lr"] == 0.01
    assert lines[-1] == {"finished": True}
    assert lines[1].keys() >= FIGURES


# Kills, resumes and breakdowns


def test_after_a_kill_and_a_resume_every_step_is_there_once(workers: Workers, tmp_path: Path) -> None:
    run, marker = tmp_path / "run", tmp_path / "started"
    arguments = {"folder": str(tmp_path), "backends": ["wandb", "noted"], "timeout": 120}
    with workers.fresh(PoolOptions(size=2, timeout_seconds=3.0)) as pool:

        def kill() -> None:
            path = run / "tracking-wandb.json"
            while not path.exists() or json.loads(path.read_text())[1] < 34:
                time.sleep(0.001)  # The row that is recorded now may not be sent any more.
            for pid in pool.pids:
                os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        outcomes = pool.outcomes(CASE, steps=500, marker=str(marker), rest=0.1, **arguments)
        killer.join()
    assert {outcome.error for outcome in outcomes} == {"died"}
    made = logged_steps(tmp_path)
    lasted = [step for step, _ in tracked_values(run, "wandb", "train/loss")]
    assert lasted == list(range(1, len(lasted) + 1))
    assert made - len(lasted) <= 2 / 0.1 + 1  # at most two seconds are lost
    assert len(lasted) > 10
    (file,) = wandb_log.files(run)
    require_last_row(file, tmp_path / "cut")
    assert "resumed from step" in workers.run(2, CASE, steps=made + 9, **arguments)[0]["said"]
    first, second = wandb_log.files(run)
    assert first.name == second.name
    evaluated = sorted({*range(3, made + 10, 3), made + 9})
    require_once(run, ["wandb"], range(1, made + 10), evaluated)
    sent = [step for step, _ in tracked_values(run, "noted", "train/loss")]
    # Of such a tracker nobody knows what it has kept: the one row that a kill meets may be lost, and none is there twice.
    assert sent == sorted(set(sent))
    assert len(set(range(1, made + 10)) - set(sent)) <= 1


def require_last_row(file: Path, cut: Path) -> None:
    """What a resumed run takes for wandb's last row is that, wherever a kill has cut the file off."""
    content = file.read_bytes()
    assert len(content) > 2 << 15  # several blocks, over whose borders there are records
    for size in {*range(0, len(content), 499), len(content)}:
        cut.write_bytes(content[:size])
        rows = wandb_log.rows(cut)
        last = RowPosition(rows[-1]["train/global_step"], "eval/loss" in rows[-1]) if rows else RowPosition(0)
        assert kinds._last_row(cut) == (last, len(rows) - 1)


def test_the_id_comes_from_the_checkpoint_where_its_file_is_gone(workers: Workers, copied: Path) -> None:
    arguments = {"folder": str(copied.parent), "backends": ["noted"]}
    path = copied / "tracking.json"
    ident = json.loads(path.read_text())["id"]
    path.unlink()
    workers.run(1, CASE, steps=7, **arguments)
    assert json.loads(path.read_text())["id"] == ident
    shutil.rmtree(copied / "checkpoints")
    workers.run(1, CASE, steps=3, **arguments)  # From the beginning: another run.
    assert json.loads(path.read_text())["id"] != ident


@pytest.mark.full
def test_steps_that_are_computed_again_are_not_sent_again(workers: Workers, tmp_path: Path) -> None:
    sections, trackers = {"checkpoint": {"asynchronous": False}}, ["noted", "tensorboard"]
    arguments = {"folder": str(tmp_path), "backends": trackers, "steps": 12, "sections": sections}
    with workers.fresh(PoolOptions(size=1)) as pool:
        (outcome,) = pool.outcomes(CASE, breaks=9, **arguments)
    assert outcome.error == "KeyError"
    said = workers.run(1, CASE, **arguments)[0]["said"]
    assert "resumed from step 5" in said
    assert "WARNING" not in said
    require_once(tmp_path / "run", trackers, range(1, 13), [3, 6, 9, 12])


def test_an_evaluation_that_is_computed_again_is_not_sent_again(workers: Workers, copied: Path) -> None:
    """Whatever the last row was that an earlier process has sent: here that of an evaluation."""
    shutil.rmtree(copied / "checkpoints" / "step-00000006")
    trackers = ["wandb", "noted"]
    found = workers.run(1, CASE, timeout=120, folder=str(copied.parent), steps=9, backends=trackers)[0]
    assert "resumed from step 5" in found["said"]
    require_once(copied, trackers, range(1, 10), [3, 6, 9])


def cut(run: Path, step: int) -> None:
    """Leave of trackers what a kill has left that met them just after `step`, far behind training; 0: before their first row.

    Rows after it are recorded as wandb's, whose service has not written them.
    """
    ident = json.loads((run / "tracking.json").read_text())["id"]
    (path,) = wandb_log.files(run)
    if not step:
        os.truncate(path, 200)
    while step and tracked_values(run, "wandb", "train/loss")[-1][0] > step:
        os.truncate(path, path.stat().st_size - 20)
    for name in ("noted", "tensorboard"):
        (run / f"tracking-{name}.json").write_text(json.dumps([ident, step, False]))
    lines = [line for line in noted_lines(run) if step and line.get("step", 0) <= step]
    (run / "noted" / "zeromesh.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("left", [4, 0])
def test_what_a_kill_has_kept_from_trackers_is_sent_when_the_run_goes_on(workers: Workers, copied: Path, left: int) -> None:
    """Of steps that are not computed again, as their checkpoint is there; of all of them, where the first rows were met."""
    cut(copied, left)
    found = workers.run(2, CASE, timeout=120, folder=str(copied.parent), steps=9, backends=ALL)[0]
    assert "resumed from step 6" in found["said"]
    assert "WARNING" not in found["said"]
    require_once(copied, ALL, range(1, 10), [3, 6, 9])
    rows = {row["train/global_step"]: row for row in wandb_rows(copied) if "train/loss" in row}
    assert rows[5].keys() == rows[8].keys()  # sent later and at once


@pytest.mark.parametrize("gone", ["wandb", "tracking-wandb.json"])
def test_either_of_two_tells_the_last_row_of_wandb(workers: Workers, copied: Path, gone: str) -> None:
    """Its files may have been removed after `wandb sync`; a row is then recorded still."""
    (copied / gone).rename(copied.parent / gone)
    found = workers.run(1, CASE, timeout=120, folder=str(copied.parent), steps=9, backends=["wandb"])[0]
    assert "WARNING" not in found["said"]
    rows = [(row["_step"], row["train/global_step"]) for row in wandb_rows(copied)]
    assert rows[-4:] == [(8, 7), (9, 8), (10, 9), (11, 9)]
    assert len(rows) == (4 if gone == "wandb" else 12)


@pytest.fixture
def wandb_here() -> Iterator[None]:
    """wandb's service is a child of this process, and ends with the test."""
    import wandb

    leave = tracking_module._join_accelerate(torch.device("cpu"))
    yield
    leave()
    wandb.teardown()


@pytest.mark.parametrize(
    ("processes", "gone", "left"),
    [
        # It was removed after `wandb sync`, and that of an earlier process was not, which knows of no later row.
        pytest.param([(1, 3), (4, 3), (7, 3)], 1, [0, 1, 2, 6, 7, 8], id="the latest", marks=pytest.mark.full),
        # It was removed, and the process after it was killed before its first row.
        pytest.param([(1, 3), (4, 0), (4, 1)], 0, [3], id="one before a file without rows"),
    ],
)
@pytest.mark.usefixtures("wandb_here")
def test_rows_of_a_file_of_wandb_that_is_gone_are_sent(
    tmp_path: Path, processes: list[tuple[int, int]], gone: int, left: list[int]
) -> None:
    given: dict[str, Any] = {"ident": "a1b2c3d4", "name": "run", "project": "runs", "tags": (), "config": {}}
    for process, (first, rows) in enumerate(processes):
        run = TrackedRun(**given, online=False, directory=tmp_path, step=first - 1)
        tracker = kinds.WandbTracker("wandb", run)
        tracker.start()
        assert tracker.sent == RowPosition(first - 1)
        for step in range(first, first + rows):
            tracker.log(TrackedRow(RowPosition(step), {"train/loss": 1.0}))
        tracker.finish()
        if process == gone:
            shutil.rmtree((tmp_path / "wandb" / "latest-run").resolve())
        time.sleep(1.01 - time.time() % 1)  # The names of folders have seconds, and the next one is another.
    assert [row["_step"] for row in wandb_rows(tmp_path)] == left


def test_what_is_missing_is_told_by_the_files_of_the_run(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as steps, MetricsWriter(tmp_path / "evaluations.jsonl") as evaluations:
        for step in range(1, 7):
            steps.write(metrics(step, phases={"data": math.inf if step == 4 else 0.5}))
        for step in (0, 3, 5, 6):
            evaluations.write({"step": step, "eval_loss": math.nan, "eval_words": "none"})
    found = list(missed_rows(tmp_path, RowPosition(3), 5))
    assert [row.position for row in found] == [(3, True), (4, False), (5, False), (5, True)]
    assert found[1].values["time/data"] == math.inf
    assert math.isnan(found[0].values["eval/loss"])
    assert found[0].values.keys() == {"eval/loss"}
    assert [row.position.step for row in missed_rows(tmp_path, RowPosition(5, evaluation=True), 9)] == [6, 6]
    assert not list(missed_rows(tmp_path, UNKNOWN, 5))  # nobody knows how much that would be
    assert not list(missed_rows(tmp_path / "nowhere", RowPosition(0), 5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"of": "none"}\n{"step": 7, "loss": "nan"}\n{"step": 8, "lo')
    (lost,) = missed_rows(tmp_path, RowPosition(6, evaluation=True), 9)
    assert math.isnan(lost.values["train/loss"])
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        missed_rows(tmp_path, RowPosition(0), 9)


@pytest.mark.parametrize("stops", [False, pytest.param(True, marks=pytest.mark.full)])
def test_training_goes_on_when_the_service_of_wandb_is_killed_or_stuck(workers: Workers, tmp_path: Path, stops: bool) -> None:
    size, trackers = (1, ["wandb"]) if stops else (2, ["wandb", "noted"])
    arguments = {"folder": str(tmp_path), "steps": 12, "backends": trackers, "kills": 4, "stops": stops}
    found = workers.run(size, CASE, timeout=120, **arguments)[0]
    assert (found["killed"], found["left"]) == (1, 0)
    assert len(found["losses"]) == 12
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 13))
    said = " ".join(found["said"].split())
    assert said.count("WARNING") == 1
    if stops:
        assert "WARNING: tracking by wandb did not end within 1 seconds; metrics.jsonl has every step" in said
    else:
        assert "WARNING: tracking by wandb ended after step" in said
        assert "Training goes on; metrics.jsonl has every step" in said
        assert [step for step, _ in tracked_values(tmp_path / "run", "noted", "train/loss")] == list(range(1, 13))


def test_a_service_of_wandb_that_is_about_to_end_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed closes its sockets before it has ended, and what notices that comes before its end."""
    left: list[bool] = []
    monkeypatch.setattr("wandb.teardown", lambda: left.append(True))
    shutil.copy(shutil.which("sleep") or "", tmp_path / "wandb-core")
    with subprocess.Popen([tmp_path / "wandb-core", "60"]) as service:
        while not kinds._services():
            time.sleep(0.01)
        threading.Timer(0.2, service.kill).start()
        kinds.WandbTracker.__new__(kinds.WandbTracker).give_up(ConnectionResetError())
    assert left == [True]


@pytest.mark.parametrize("ahead", [2, 3600])
def test_files_of_tensorboard_are_in_the_order_in_which_they_began(tmp_path: Path, ahead: int) -> None:
    """Also two of one second, of which the process with the lower number is the later; and where the clock was set back."""
    pytest.importorskip("tensorboard")
    folder = tmp_path / "tensorboard"
    folder.mkdir()
    (folder / "events.out.tfevents.word").touch()
    earlier = folder / f"events.out.tfevents.{int(time.time()) + ahead}.{socket.gethostname()}.999999999.0"
    earlier.touch()
    run = TrackedRun(ident="x", name="x", project="x", tags=(), online=False, directory=tmp_path, step=0, config={})
    leave = tracking_module._join_accelerate(torch.device("cpu"))
    tracker = kinds.TensorBoardTracker("tensorboard", run)
    try:
        if ahead > 60:
            with pytest.raises(RuntimeError, match=r"seconds ahead of this machine's clock.*move them away"):
                tracker.start()
        else:
            tracker.start()
            tracker.finish()
            assert sorted(path.name for path in folder.glob("*.[0-9]*"))[0] == earlier.name
            assert len(list(folder.iterdir())) == 3
    finally:
        leave()


# Trackers whose packages may be missing here


@pytest.mark.parametrize("name", tracker_rows.NAMES)
def test_a_tracker_holds_every_step_once_and_no_secret(workers: Workers, tmp_path: Path, name: str) -> None:
    """Offline, of two processes, of which the second goes on; they end in time, and leave nothing beside the run."""
    pytest.importorskip(name)
    arguments = {"folder": str(tmp_path), "backends": [name], "places": tracker_rows.places(tmp_path), "timeout": 120}
    for steps in (6, 9):
        with workers.fresh(PoolOptions(size=2)) as pool:
            found = pool.run("tracking_cases:planted", steps=steps, **arguments)
        assert "WARNING: tracking" not in found[0]["said"]
    rows, settings = tracker_rows.kept(name, tmp_path, "train/loss")
    losses = {line["step"]: line["loss"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    assert [step for step, _ in rows] == list(range(1, 10))
    assert [value for _, value in rows] == pytest.approx([losses[step] for step in range(1, 10)])
    assert set(settings) == {0.01}
    assert [step for step, _ in tracker_rows.kept(name, tmp_path, "eval/loss")[0]] == [3, 6, 9]
    assert not ({path.name for path in tmp_path.iterdir()} - {"run", "mlflow.db", *("clearml", "trackio")})
    for path, content in tracker_rows.contents(tmp_path):
        assert [secret for secret in SECRETS if secret.encode() in content] == [], path


# Names of trackers


def test_unknown_trackers_and_missing_packages_are_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        load_config({"tracking": {"backends": ["wandbb", "comet_ml", "nonsense"]}, "run": {"max_steps": 0}})
    found = "\n".join(caught.value.problems)
    assert "tracking.backends: got 'wandbb'; allowed are aim, clearml, comet_ml" in found
    assert "did you mean wandb?" in found
    assert "comet_ml needs a package that is not installed; run: pip install comet-ml" in found
    assert "got 'nonsense'" in found
    assert "run.max_steps: got 0" in found  # all at once


def test_a_folder_of_the_same_name_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "aim").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [problem for problem in loading.tracker_problems(["aim"]) if "pip install aim" in problem]


# The thread


class Fake(Tracker):
    """A tracker that keeps rows, or does as it is told."""

    def __init__(self, name: str = "fake", sent: RowPosition = UNKNOWN, **calls: Callable[..., Any]) -> None:
        run = TrackedRun(ident="x", name="x", project="x", tags=(), online=False, directory=Path(), step=0, config={})
        super().__init__(name, run)
        self.sent, self.rows = sent, list[TrackedRow]()
        vars(self).update({"start": lambda: None, "log": self.rows.append, "finish": lambda: None, **calls})


def raises(error: Exception) -> Callable[..., None]:
    def call(*_: Any) -> None:
        raise error

    return call


def test_a_tracker_that_fails_is_one_warning_and_the_others_go_on() -> None:
    said: list[str] = []
    good = Fake("good")
    bad = [
        Fake("first", start=raises(ImportError("no such module"))),
        Fake("second", log=raises(ConnectionError("cannot send known-secret\nmore"))),
        Fake("third", finish=raises(OSError("disk full"))),
        Fake("fourth", log=raises(SystemExit(3))),
    ]
    with Tracking([*bad, good], said.append, ident="x", redaction=Redaction(["known-secret"])) as tracking:
        for step in range(1, 6):
            tracking.send(step_row(metrics(step)))
            values = {"loss": 0.5, "eval_accuracy": 0.25, "eval_text": "words", "eval_parts": [0.5]}
            tracking.send(evaluation_row({"step": step, **values}))
    assert [row.position.step for row in good.rows if not row.position.evaluation] == [1, 2, 3, 4, 5]
    assert good.rows[1].values == {"eval/loss": 0.5, "eval/accuracy": 0.25}
    assert len(said) == 4
    said.sort(key=lambda line: "first second third fourth".index(line.split()[3]))
    assert "first did not begin: ImportError: no such module. Training goes on" in said[0]
    assert f"second ended after step 0: ConnectionError: cannot send {REDACTED}. Training" in said[1]
    assert "third did not end well: OSError: disk full" in said[2]
    assert "fourth ended after step 0: SystemExit: 3. Training goes on" in said[3]


@pytest.mark.parametrize("kept", [3, tracking_module._CAPACITY])
def test_the_training_thread_never_waits_and_what_does_not_fit_is_counted(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(tracking_module, "_CAPACITY", kept)
    said: list[str] = []
    gate = threading.Event()
    slow = Fake(log=lambda row: gate.wait(10) and slow.rows.append(row))
    with Tracking([slow], said.append, ident="x") as tracking:
        tracking.send(step_row(metrics(1)))
        while tracking._senders[0].rows.qsize():
            time.sleep(0.001)
        began = time.monotonic()
        for step in range(2, kept + 8):
            tracking.send(step_row(metrics(step)))
        assert time.monotonic() - began < 5
        gate.set()
    assert [row.position.step for row in slow.rows] == [*range(1, kept + 2)]
    assert said == ["WARNING: tracking by fake was too slow for 6 rows, which it misses; metrics.jsonl has every step"]


@pytest.mark.parametrize("where", [pytest.param("start", marks=pytest.mark.full), "log", "finish"])
def test_a_tracker_that_hangs_holds_no_other_up_and_the_end_for_a_bounded_time(where: str) -> None:
    said: list[str] = []
    gate = threading.Event()

    def hang(*_: Any) -> None:
        gate.wait(30)

    good, stuck = Fake("good"), Fake("stuck", **{where: hang})
    with Tracking([stuck, good], said.append, ident="x", patience=0.3) as tracking:
        for step in range(1, 4):
            tracking.send(step_row(metrics(step)))
        began = time.monotonic()
    assert 0.2 < time.monotonic() - began < 5
    assert [row.position.step for row in good.rows] == [1, 2, 3]
    assert said == ["WARNING: tracking by stuck did not end within 0.3 seconds; metrics.jsonl has every step"]
    gate.set()


@pytest.mark.parametrize(
    ("content", "known", "kept"),
    [
        (b'{"id": "abc123"}', {}, "abc123"),
        (b'{"id": "abc', {"id": "def456", "run": "run"}, "def456"),
        (b"[" * 100_000, {"id": "def456", "run": "run"}, "def456"),
        (b'{"id": 7}', {}, None),
        (b'{"id": "../abc"}', {}, None),
        (b"[]", {"id": 7, "run": "run"}, None),
        (b"", {"id": "def456", "run": "another"}, None),
    ],
)
def test_an_id_that_cannot_be_read_is_a_new_one(tmp_path: Path, content: bytes, known: dict[str, Any], kept: str | None) -> None:
    path, said = tmp_path / "tracking.json", []
    path.write_bytes(content)
    found = tracking_module._tracking_id(path, "run", 3, known, said.append)
    assert found == kept or (kept is None and re.fullmatch("[0-9a-f]{8}", found))
    assert json.loads(path.read_text()) == {"id": found, "run": "run"}
    assert [each.name for each in tmp_path.iterdir()] == ["tracking.json"]
    assert not said


def test_rows_that_a_tracker_has_are_left_out() -> None:
    trained, evaluated = Fake(sent=RowPosition(3)), Fake(sent=RowPosition(3, evaluation=True))
    with Tracking([trained, evaluated], ident="x") as tracking:
        for step in range(1, 5):
            tracking.send(step_row(metrics(step)))
            tracking.send(evaluation_row({"step": step, "loss": 1.0}))
    assert [row.position for row in trained.rows] == [(3, True), (4, False), (4, True)]
    assert [row.position for row in evaluated.rows] == [(4, False), (4, True)]


def test_names_of_figures() -> None:
    fake = Fake()
    extras = {
        "mfu": 0.4,
        "skipped": True,
        "cause": "words",
        "phases": {"forward": 0.1},
        "memory": {"device": {"master": 5}},
        "communication": {"shard": {"point to point": {"bytes": 3}}},
    }
    with Tracking([fake], ident="x") as tracking:
        tracking.send(step_row(metrics(2, grad_norm=None, **extras)))
    assert fake.rows[0].values == {
        "train/loss": 3.25,
        "train/learning_rate": 3e-4,
        "train/tokens": 4096,
        "perf/tokens_per_second": 12_345.0,
        "perf/step_seconds": 0.25,
        "memory/peak_bytes": 3 << 29,
        "perf/mfu": 0.4,
        "train/skipped": True,
        "time/forward": 0.1,
        "memory/device/master": 5,
        "communication/shard/point-to-point/bytes": 3,
    }


def test_without_trackers_nothing_is_started() -> None:
    with Tracking() as tracking:
        tracking.send(step_row(metrics(1)))
        tracking.send(evaluation_row({"step": 1, "loss": 1.0}))
    assert tracking.identity("run") == {}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tracking")]
