"""Which checkpoints a run keeps and goes on from, what it says of them, and what of a checkpoint is loaded."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.checkpoint.io.format import TensorSpec
from zeromesh.checkpoint.saver import Saved
from zeromesh.errors import CheckpointError, ConfigError, StorageError
from zeromesh.trainer.checkpoints import manager
from zeromesh.trainer.checkpoints.manager import RunCheckpoints, link_of, load_weights, require_settings
from zeromesh.trainer.checkpoints.trainer_state import EVALUATED, NAME, TrainerState, settings_of
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.trainer_config import with_length
from zeromesh.zero.full_state import AVERAGE, MASTER, MODEL


def state(step: int, metric: float | None = None, **fields: Any) -> TrainerState:
    return TrainerState(step=step, samples=0, tokens=0, updates=step, skipped=0, metric=metric, **fields)


class World:
    """The collectives of one rank, or of a rank that hears of the error `first` of rank 0."""

    def __init__(self, first: str = "") -> None:
        self.first = first

    def barrier(self, what: str) -> None: ...

    def all_or_raise(self, what: str, work: Callable[[], Any], kind: Any, **given: Any) -> list[Any]:
        if self.first and given.get("first"):
            raise kind(self.first)
        return [work()]


def one_mesh(rank: int = 0, size: int = 1, first: str = "") -> Any:
    return SimpleNamespace(rank=rank, world_size=size, world=World(first), device=torch.device("cpu"))


class Saver:
    """Notes what it is asked for; `results` are those of the saves that it has begun."""

    def __init__(self, store: Any, mesh: Any, ledger: Any) -> None:
        self.storage = SimpleNamespace(leads=True)
        self.calls: list[tuple[Any, ...]] = []
        self.results: list[Saved] = []
        self.refused, self.old, self.in_flight = "", "", None

    def begin(self, step: int, content: Any) -> None:
        self.calls.append(("begin", step))
        if self.refused:
            raise StorageError(self.refused)

    def poll(self) -> Saved | None:
        return None

    def finish(self) -> Saved | None:
        self.calls.append(("finish",))
        return self.results.pop(0) if self.results else None

    def give_up(self) -> None:
        self.calls.append(("give up",))

    def amend(self, step: int, name: str, data: bytes, keep: Callable[[], set[int]]) -> Saved:
        self.calls.append(("amend", step, name, keep()))
        return Saved(step=step, nbytes=0, failure=self.refused, warning=self.old)

    def remove_old(self, seconds: float) -> str:
        self.calls.append(("remove", seconds))
        return self.old

    def require_room(self, tensors: Sequence[Any]) -> None:
        self.calls.append(("room", [each.name for each in tensors]))


class Run:
    """A run's checkpoints over a saver that only notes, with its lines."""

    def __init__(
        self, folder: Path, *, linked: bool = False, goes_on: bool = False, mesh: Any = None, **sections: Mapping[str, Any]
    ) -> None:
        self.lines: list[str] = []
        tensors = [TensorSpec(kind=MODEL, name=name, dtype=torch.float32, shape=()) for name in "ab"]
        holdings = SimpleNamespace(frozen=set, tensors=lambda: tensors, bucket_number=hash)
        engine: Any = SimpleNamespace(
            mesh=mesh or one_mesh(), ledger=None, model=nn.Linear(1, 1), checkpoint_state=holdings,
            optimizer_step=SimpleNamespace(before_change=None, journal=None), durable=None,
        )  # fmt: skip
        self.engine = engine
        resume = sections.get("checkpoint", {}).get("resume", "auto")
        if resume not in ("auto", "never"):
            Path(resume).mkdir(parents=True, exist_ok=True)
        config = load_config({**sections, "checkpoint": {"every_steps": 1, **sections.get("checkpoint", {})}})
        self.kept = RunCheckpoints(config, folder, engine, None, self.lines.append, linked=linked, goes_on=goes_on)
        self.saver: Any = self.kept.saver

    def make(self, *steps: int) -> None:
        for step in steps:
            self.kept.store.path(step).mkdir(parents=True, exist_ok=True)


@pytest.fixture(autouse=True)
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "Saver", Saver)
    monkeypatch.setattr(manager, "content_of", lambda *_: None)


METRICS: dict[int, float | None] = {1: 3.0, 2: 1.0, 3: 1.0, 4: 9.0, 5: manager._NO_METRIC, 6: None}


@pytest.mark.parametrize(
    ("checkpoint", "run", "kept"),
    [
        ({"keep_last": 2}, {}, {7, 6}),
        ({"keep_last": 0}, {}, {1, 2, 3, 4, 5, 6, 7}),
        # Of equal values the earlier one; a part of a checkpoint that another host judges stays.
        ({"keep_last": 1, "keep_best": 1}, {}, {7, 6, 2}),
        ({"keep_last": 1, "keep_best": 2}, {}, {7, 6, 2, 3}),
        ({"keep_last": 1, "keep_best": 5}, {}, {7, 6, 1, 2, 3, 4}),
        ({"keep_last": 1, "keep_best": 1}, {"metric": "accuracy"}, {7, 6, 4}),
        ({"keep_last": 1, "keep_best": 1}, {"metric_goal": "highest"}, {7, 6, 4}),
        ({"keep_last": 1}, {"load_best": True, "eval_every": 1}, {7, 6, 2}),
    ],
)
def test_the_latest_and_the_best_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Any, run: Any, kept: set[int]
) -> None:
    asked: list[int] = []

    def metric_of(path: Path) -> float | None:
        asked.append(int(path.name[-8:]))
        return METRICS[asked[-1]]

    monkeypatch.setattr(manager, "_metric_of", metric_of)
    judged = Run(tmp_path, checkpoint=checkpoint, run=run)
    judged.make(*range(1, 8))
    judged.kept.latest = 7
    for _ in range(2):
        judged.kept.record(state(7, metric=4.0))
    assert judged.saver.calls == [("amend", 7, EVALUATED, kept)] * 2
    best = "keep_best" in checkpoint or "load_best" in run
    assert asked == ([6, 5, 4, 3, 2, 1, 6] if best else [])  # What is known is not read again.
    judged.kept.record(state(6, metric=0.0))
    assert len(judged.saver.calls) == 2


def test_a_checkpoint_that_is_on_its_way_gets_the_latest_state_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.make(3)
    run.saver.in_flight, run.saver.results = 3, [Saved(step=3, nbytes=0)]
    run.kept.record(state(4))
    assert run.saver.calls == []
    run.kept.record(state(3))
    assert run.saver.calls == [("finish",), ("amend", 3, EVALUATED, {3})]


def test_what_is_wrong_with_an_amended_checkpoint_and_with_old_ones_is_said(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint={"timeout_seconds": 7})
    run.kept.latest, run.saver.refused, run.saver.old = 3, "no room", "busy"
    run.kept.record(state(3))
    run.kept.close()
    old = "WARNING: old checkpoints were not removed: busy"
    assert run.lines == ["WARNING: the checkpoint of step 3 does not have its latest state: no room", old, old]
    assert run.saver.calls[1:] == [("finish",), ("remove", 7.0)]


@pytest.mark.parametrize(("error", "size", "given_up"), [(True, 1, True), (True, 2, False), (False, 1, False)])
def test_an_unfinished_save_is_given_up_after_an_error_of_one_rank(tmp_path: Path, error: bool, size: int, given_up: bool) -> None:
    run = Run(tmp_path, mesh=one_mesh(size=size))
    try:
        with run.kept:
            if error:
                raise KeyError
    except KeyError:
        assert error
    assert (("give up",) in run.saver.calls) == given_up


@pytest.mark.parametrize(
    ("wait", "asynchronous", "waits"), [(True, True, 2), (False, True, 1), (False, False, 2), (True, False, 2)]
)
def test_a_save_is_waited_for_where_that_is_asked(tmp_path: Path, wait: bool, asynchronous: bool, waits: int) -> None:
    run = Run(tmp_path, checkpoint={"asynchronous": asynchronous})
    run.saver.results = [Saved(step=1, nbytes=2048), Saved(step=2, nbytes=0, failure="gone", warning="unseen")]
    assert run.kept.save(state(2), wait=wait)
    assert run.saver.calls == [("finish",), ("begin", 2), ("finish",)][: 1 + waits]
    assert run.kept.latest == 1
    assert run.lines[0] == f"step 1: checkpoint of 2.0 KiB in {run.kept.store.path(1)}"
    failed = "WARNING: the checkpoint of step 2 was not written: gone; the newest is of step 1. Training goes on"
    assert run.lines[1:] == ([failed] if waits == 2 else [])
    assert run.engine.optimizer_step.before_change is not None


@pytest.mark.parametrize(("limit", "ends"), [(2, 2), (1, 1), (0, None)])
def test_failures_in_a_row_end_a_run_at_their_limit(tmp_path: Path, limit: int, ends: int | None) -> None:
    run = Run(tmp_path, checkpoint={"max_failures": limit})
    run.saver.refused = "no room"
    for count in range(1, (ends or 5)):
        assert run.kept.save(state(count), wait=False) is False
    assert run.lines == ["WARNING: no room; there is none yet. Training goes on"] * len(run.lines)
    if ends:
        said = rf"no room \({ends} saves in a row failed, checkpoint.max_failures is {limit}\)"
        with pytest.raises(StorageError, match=said):
            run.kept.save(state(9), wait=False)


def test_the_last_save_is_tried_twice_and_only_where_it_is_not_done(tmp_path: Path) -> None:
    run = Run(tmp_path, checkpoint={"max_failures": 0})
    run.kept.latest = 4
    run.kept.save_last(state(4))
    assert run.saver.calls == [("finish",)]
    run.saver.results = [Saved(step=5, nbytes=0)]
    run.kept.save_last(state(5))
    assert ("begin", 5) not in run.saver.calls
    run.saver.refused = "no room"
    with pytest.raises(StorageError, match=r"no room; the newest is of step 5\. It was tried twice"):
        run.kept.save_last(state(6))
    assert run.saver.calls.count(("begin", 6)) == 2
    assert run.lines[-1].endswith("It is tried once more")


@pytest.mark.parametrize(("every", "goes_on"), [(1, ""), (0, ""), (1, "memory"), (1, "files")])
def test_room_and_small_files_are_tried_where_checkpoints_are_written_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, goes_on: str
) -> None:
    """But not by a run that goes on, and would lose by an end what it has in memory. What each rank holds is tried in any case."""
    monkeypatch.setattr(manager, "load_engine", lambda *_: None)
    run = Run(tmp_path, goes_on=goes_on == "memory", checkpoint={"every_steps": every})
    if goes_on == "files":
        record = {"step": 3, "content": state(3).to_json()}
        run.engine.durable = SimpleNamespace(resumed=record)
        assert run.kept.resume({}).step == 3  # type: ignore[union-attr]
        run.saver.calls.clear()
    frozen: Any = SimpleNamespace(referenced=lambda: SimpleNamespace(tensors=[SimpleNamespace(name="a")]))
    run.kept._frozen = frozen
    run.kept.require_room()
    assert run.saver.calls == ([("room", ["b"])] if every and not goes_on else [])
    unwritable = state(1, callbacks={"Own": {"value": {1}}})
    refusal = pytest.raises(StorageError, match=r"^callbacks\.Own\.value: a set")
    with refusal if goes_on == "files" or (every and not goes_on) else nullcontext():
        run.kept.try_small_files(lambda: unwritable)
    with refusal if goes_on != "memory" else nullcontext():
        run.kept.try_small_files(lambda: unwritable, held=True)
    run.engine.optimizer_step.journal = object()
    with refusal if goes_on != "memory" else nullcontext():
        run.kept.try_small_files(lambda: unwritable)


# Resuming


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the checkpoint of a path's name is found to hold: a state, or the reason why it cannot be read."""
    found: dict[str, Any] = {"loaded": []}

    def read(path: Path, engine: Any) -> tuple[Any, TrainerState]:
        content = found.get(path.name, "it is damaged")
        if isinstance(content, str):
            raise CheckpointError(f"{path.name}: {content}")
        return SimpleNamespace(manifest=SimpleNamespace(step=found.get("manifest", content.step))), content

    monkeypatch.setattr(manager, "candidates", lambda mesh, store: store.steps())
    monkeypatch.setattr(manager, "read_state", read)
    monkeypatch.setattr(manager, "load_engine", lambda reader, engine, state: found["loaded"].append(state.step))
    return found


NOW = {"run.seed": 1}


def test_a_run_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path, stored: dict[str, Any]) -> None:
    run = Run(tmp_path)
    assert run.kept.resume(NOW) is None
    run.make(2, 4, 6)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*The newest: step-00000006: it is damaged$"):
        run.kept.resume(NOW)
    run.lines.clear()
    stored |= {"step-00000004": state(4, metric=2.5, settings=NOW), "step-00000002": state(2, settings=NOW)}
    found = run.kept.resume(NOW)
    assert found is stored["step-00000004"]
    assert (run.kept.latest, stored["loaded"], run.kept._metrics) == (4, [4], {4: 2.5})
    assert run.lines == ["checkpoint of step 6 skipped: step-00000006: it is damaged"]


@pytest.mark.parametrize(("name", "step", "manifest"), [("step-00000004", 5, 5), ("step-00000004", 4, 5), ("copy", 4, 5)])
def test_a_checkpoint_of_another_step_than_its_name_says_is_refused(
    tmp_path: Path, stored: dict[str, Any], name: str, step: int, manifest: int
) -> None:
    stored |= {name: state(step, settings=NOW), "manifest": manifest}
    run = Run(tmp_path, checkpoint={"resume": str(tmp_path / name)})
    with pytest.raises(CheckpointError, match=rf"is of step {manifest} by its manifest, and of step {step} by its {NAME}"):
        run.kept.resume(NOW)
    assert stored["loaded"] == []


def test_other_settings_are_refused_of_a_runs_own_checkpoint_and_said_of_one_that_is_named(
    tmp_path: Path, stored: dict[str, Any]
) -> None:
    stored |= {name: state(4, settings={"run.seed": 2, "a": 1}, written={"a": 2}) for name in ("step-00000004", "copy")}
    run = Run(tmp_path)
    run.make(4)
    with pytest.raises(ConfigError, match=r"(?s)settings:\n  - run\.seed: 2 then, 1 now\nundo") as error:
        run.kept.resume({**NOW, "a": 2})
    assert f"checkpoint.resume: {run.kept.store.path(4)}" in str(error.value)
    named = Run(tmp_path / "new", checkpoint={"resume": str(tmp_path / "copy")})
    assert named.kept.resume({**NOW, "a": 2}) == replace(stored["copy"], origin=str(tmp_path / "copy"))
    assert named.lines == ["resumed with another setting: run.seed: 2 then, 1 now"]


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_the_name_of_a_run_or_of_its_folder_means_its_newest_checkpoint(tmp_path: Path, stored: dict[str, Any], below: str) -> None:
    stored["step-00000007"] = state(7, settings=NOW)
    Run(tmp_path / "old").make(3, 7)
    run = Run(tmp_path / "new", checkpoint={"resume": str(tmp_path / "old" / below)})
    found = run.kept.resume(NOW)
    assert found is not None
    assert (found.step, run.kept.latest) == (7, None)
    assert found.origin == str(tmp_path / "old/checkpoints/step-00000007")


@pytest.mark.parametrize("own", [True, False])
def test_frozen_weights_are_those_of_the_checkpoint_with_which_the_run_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Though the other run has gone on since; they are not taken from the model's source where that is gone."""
    asked: list[str] = []

    def opened(path: Path, engine: Any) -> Any:
        asked.append(path.name)
        raise CheckpointError("it is gone")

    monkeypatch.setattr(manager, "_open_checkpoint", opened)
    old = Run(tmp_path / "old")
    old.make(4, 8)
    run = Run(tmp_path / "new", checkpoint={"resume": str(tmp_path / "old")})
    run.engine.checkpoint_state.frozen = lambda: {"a"}
    run.make(*[6] * own)
    with pytest.raises(CheckpointError, match=r"frozen weights of this run are those of .*step-00000004, which cannot be read"):
        run.kept.load_frozen(str(old.kept.store.path(4)))
    assert asked == ["step-00000006"] * own + ["step-00000004"]
    run.kept.load_frozen("")


@pytest.mark.parametrize(
    ("name", "told"), [("old/checkpoints/step-00000002", 1), ("old", 0), ("other/checkpoints/step-00000002", 0)]
)
def test_a_run_that_has_gone_on_since_its_named_checkpoint_says_so(
    tmp_path: Path, stored: dict[str, Any], name: str, told: int
) -> None:
    stored |= {"step-00000004": state(4, settings=NOW)}
    run = Run(tmp_path / "old", checkpoint={"resume": str(tmp_path / name)})
    run.make(2, 4)
    found = run.kept.resume(NOW)
    assert found is not None
    assert found.step == 4
    said = "checkpoint.resume names step-00000002, and this run has gone on since: it goes on from step 4"
    assert [line.startswith(said) for line in run.lines] == [True] * told


def test_never_refuses_what_an_earlier_run_has_left(tmp_path: Path, stored: dict[str, Any]) -> None:
    run = Run(tmp_path, checkpoint={"resume": "never"})
    assert run.kept.resume(NOW) is None
    run.make(2, 11)
    with pytest.raises(ConfigError, match=r"of an earlier run, up to step 11, and checkpoint\.resume is never"):
        run.kept.resume(NOW)
    stored["step-00000011"] = state(11, settings=NOW)
    own = Run(tmp_path, goes_on=True, checkpoint={"resume": "never"}).kept.resume(NOW)
    assert own is not None
    assert own.step == 11


def test_checkpoints_are_linked_by_transformers_names(tmp_path: Path, stored: dict[str, Any]) -> None:
    stored["step-00000030"] = state(30, settings=NOW)
    for linked, mesh, there in ((False, one_mesh(), False), (True, one_mesh(rank=1), False), (True, one_mesh(), True)):
        run = Run(tmp_path / f"{linked}{mesh.rank}", linked=linked, mesh=mesh)
        run.make(2, 30)
        folder = run.kept.store.root.parent
        for name in ("checkpoint-7", "checkpoint-x", "checkpoint-12-old"):
            (folder / name).symlink_to("nowhere")
        (folder / "checkpoint-2").mkdir()
        (folder / "checkpoint-9").mkdir()
        run.kept.resume(NOW)
        link = link_of(run.kept.store.path(30))
        assert link == folder / "checkpoint-30"
        assert link.is_symlink() == there
        assert (folder / "checkpoint-7").is_symlink() != there
        assert not there or str(link.readlink()) == "checkpoints/step-00000030"
        assert (folder / "checkpoint-x").is_symlink()
        assert (folder / "checkpoint-12-old").is_symlink()
        assert (folder / "checkpoint-9").is_dir()
        assert not (folder / "checkpoint-2").is_symlink()


# What a checkpoint's settings are compared with, and what is loaded of it


@pytest.mark.parametrize(
    ("changes", "run", "checkpoint", "said"),
    [
        ({}, {}, {}, ""),
        ({"run.seed": 8}, {}, {}, r"run\.seed: 8 then"),
        ({"run.seed": 8}, {}, {"resume": "never"}, ""),
        ({"run.seed": 8}, {}, {"resume": "."}, r"run\.seed: 8 then"),
        ({"model.class": "A", "data.path": "x"}, {}, {}, ""),
        ({"schedule.name": "other"}, {}, {}, r"schedule\.name: other then"),
        ({"schedule.name": "other"}, {"epochs": 2, "max_steps": None}, {}, ""),
        ({"optimizer.name": "other"}, {"epochs": 2, "max_steps": None}, {}, r"optimizer\.name: other then"),
    ],
)
def test_settings_are_compared_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, run: Any, checkpoint: Any, said: str
) -> None:
    config = load_config({"run": {"max_steps": 20, **run}, "checkpoint": checkpoint})
    known = with_length(config, 20)
    then = state(3, settings={**settings_of(known, model={}, data={}), **changes})
    read: list[str] = []
    monkeypatch.setattr(manager, "CheckpointReader", lambda path, parts: read.append(path.name))
    monkeypatch.setattr(manager, "state_of", lambda reader: then)
    require_settings(config, tmp_path, one_mesh())
    for step in (1, 3):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    if not said:
        require_settings(config, tmp_path, one_mesh())
        assert read == ([] if checkpoint.get("resume") == "never" else ["step-00000003"])
        monkeypatch.setattr(manager, "state_of", lambda reader: None)
        require_settings(config, tmp_path, one_mesh())
        return
    with pytest.raises(ConfigError, match=said):
        require_settings(config, tmp_path, one_mesh())
    with pytest.raises(ConfigError, match="as rank 0 found"):
        require_settings(config, tmp_path, one_mesh(rank=1, first="as rank 0 found"))
    assert read == ["step-00000003"]


@pytest.mark.parametrize("averaged", [True, False])
def test_weights_alone_are_loaded_without_what_a_loop_has_left_out(monkeypatch: pytest.MonkeyPatch, averaged: bool) -> None:
    specs = {
        f"{kind} {name}": TensorSpec(kind=kind, name=name, dtype=torch.float32, shape=(1,))
        for kind in (MODEL, MASTER, AVERAGE, "exp_avg")
        for name in ("a", "left")
    }
    tensors = [s for s in specs.values() if averaged or s.kind != AVERAGE]
    manifest = SimpleNamespace(step=6, files={NAME: 0}, tensors=tensors, is_elsewhere=lambda path: False)
    document = {"averages": 5, "passed_over": 3, "callbacks": {"loop": {"without": ["left"]}}}
    reader: Any = SimpleNamespace(manifest=manifest, directory=Path("here"), document=lambda name: document)
    filled: list[str] = []
    updates: list[int] = []

    @contextmanager
    def loading(*, averaged_updates: int) -> Any:
        updates.append(averaged_updates)
        yield

    def fill(mesh: Any, reader: Any, tensors: Any, shards: Any) -> None:
        filled.extend(f"{each.kind} {each.name}" for each in tensors)
        assert [each.spec for each in shards] == tensors

    holdings = SimpleNamespace(
        tensors=lambda *, reading: list(specs.values()),
        shards_to_read=lambda: [SimpleNamespace(spec=each) for each in specs.values()],
        encoded=set,
    )
    engine: Any = SimpleNamespace(mesh=one_mesh(), model=nn.Linear(1, 1), checkpoint_state=holdings, loading=loading)
    engine.load_progress = lambda **given: updates.append(given["updates"])
    monkeypatch.setattr(manager, "open_checkpoint", lambda mesh, path, source: reader)
    monkeypatch.setattr(manager, "fill_shards", fill)
    assert load_weights(Path("here"), engine) == (6, 3)
    weights = [f"{kind} a" for kind in (MODEL, MASTER, AVERAGE) if averaged or kind != AVERAGE]
    assert (filled, updates) == (weights, [5 if averaged else 0])
    filled.clear()
    manager.load_engine(reader, engine, state(6, averages=2, callbacks=document["callbacks"]))
    assert filled == [*weights, "exp_avg a", "exp_avg left"]
    assert updates[1:] == [6, 2 if averaged else 0]


@pytest.mark.parametrize(
    ("found", "part", "metric"),
    [
        (state(1, metric=2.0), (0, 1), 2.0),
        (state(1), (0, 1), manager._NO_METRIC),
        (None, (0, 1), manager._NO_METRIC),
        (None, (1, 2), None),
        (state(1, metric=2.0), (1, 2), 2.0),
        (CheckpointError("damaged"), (1, 2), manager._NO_METRIC),
    ],
)
def test_the_metric_of_an_earlier_checkpoint(monkeypatch: pytest.MonkeyPatch, found: Any, part: Any, metric: Any) -> None:
    def state_of(reader: Any) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    reader = SimpleNamespace(manifest=SimpleNamespace(part=part))
    monkeypatch.setattr(manager, "CheckpointReader", lambda path, parts: reader)
    monkeypatch.setattr(manager, "state_of", state_of)
    assert manager._metric_of(Path("x")) == metric
