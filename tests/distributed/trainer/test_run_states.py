"""What a run keeps: settings before the first forward, states that JSON alone cannot say, and its last checkpoint in any case."""

import errno
import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.stored_cases import verify
from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import ConfigError, StorageError
from zeromesh.trainer.checkpoints.trainer_state import TrainerState, differences
from zeromesh.trainer.loop.training_loop import TrainingLoop
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.step_metrics import read_metrics
from zeromesh.trainer.tools.checkpoint.export import export_checkpoint
from zeromesh.trainer.tools.checkpoint.reading import summary_of


class WritesIntoItsConfig(nn.Module):
    """A model whose forward changes fields of its configuration, as transformers' classifiers do with `problem_type`."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.inner = llama(**changes)
        self.config = self.inner.config

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.config.problem_type = "single_label_classification"
        self.config.seen = getattr(self.config, "seen", 0) + 1
        return self.inner(input_ids=input_ids, labels=labels)


class Keeps(Callback):
    """A callback with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def trainer_in(folder: Path, model: nn.Module | None = None, *, callbacks: Sequence[Callback] = (), **sections: Any) -> Trainer:
    """A trainer of 2 steps with a checkpoint after the second."""
    config = settings(str(folder), **{"run": {"max_steps": 2}, "checkpoint": {"every_steps": 2}, **sections})
    return Trainer(model or seeded(llama), config, sentences(), sentences(5, seed=4), callbacks=list(callbacks))


def saving(folder: Path, model: nn.Module, steps: int, *callbacks: Callback) -> Trainer:
    """A trainer that saves after each of some steps, and does not evaluate."""
    sections = {"run": {"max_steps": steps, "eval_at_end": False}, "checkpoint": {"every_steps": 1}}
    return trainer_in(folder, model, callbacks=callbacks, **sections)


def test_what_a_model_writes_into_its_config_is_no_setting(tmp_path: Path) -> None:
    used = seeded(WritesIntoItsConfig)
    for steps, model in ((1, used), (2, seeded(WritesIntoItsConfig)), (3, used), (4, seeded(WritesIntoItsConfig))):
        with saving(tmp_path, model, steps) as trainer:
            assert len(trainer.fit().losses) == 1
    with (
        saving(tmp_path, seeded(lambda: WritesIntoItsConfig(attention_dropout=0.5)), 5) as trainer,
        pytest.raises(ConfigError, match=r"attention_dropout: 0.0 then, 0.5 now"),
    ):
        trainer.fit()


def test_states_that_are_not_finite_come_back(tmp_path: Path) -> None:
    value = {"best": math.inf, "list": [-math.inf, 1], "tensor": torch.ones(2)}
    model = seeded(llama)
    model.config.time_step_limit = (0.0, math.inf)
    with saving(tmp_path, model, 1, Keeps(value)) as trainer:
        trainer.fit()
    restored = Keeps(None)
    again = seeded(llama)
    again.config.time_step_limit = (0.0, math.inf)
    with saving(tmp_path, again, 2, restored) as trainer:
        trainer.fit()
    assert restored.value == {"best": math.inf, "list": [-math.inf, 1], "tensor": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("name", "said"), [("callback", "callbacks.Keeps.value: a set, which"), ("config", "trial of a checkpoint: .*object")]
)
def test_what_cannot_be_written_is_found_before_the_first_step(tmp_path: Path, name: str, said: str) -> None:
    model = seeded(llama)
    if name == "config":
        model.config.odd = object()
    callbacks = [Keeps({1, 2})] if name == "callback" else []
    with saving(tmp_path, model, 2, *callbacks) as trainer, pytest.raises(StorageError, match=said):
        trainer.fit()
    assert trainer.config.run.max_steps == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_state_is_read_as_it_was_written() -> None:
    kept = {"a": math.nan, "b": {"__float__": "no number"}}
    state = TrainerState(step=1, samples=0, tokens=0, updates=1, skipped=0, settings=kept, stream={"x": [math.inf]})
    read = TrainerState.from_json(json.loads(state.to_json()), "here")
    assert math.isnan(read.settings["a"])
    assert read.settings["b"] == kept["b"]
    assert read.stream == state.stream
    assert not differences(state.settings, read.settings)


def store_of(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "run" / "checkpoints")


def evaluations(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "evaluations.jsonl"
    return read_metrics(path) if path.exists() else []


def failing_once(attribute: str) -> Callable[..., Any]:
    """A method of the store that fails the first time, and then does what it did."""
    real, failures = getattr(CheckpointStore, attribute), iter([errno.EPERM])

    def fails(store: CheckpointStore, *arguments: Any, **options: Any) -> Any:
        for number in failures:
            raise StorageError(f"{str(store.root)!r} cannot be written: {os.strerror(number)}")
        return real(store, *arguments, **options)

    return fails


@pytest.mark.parametrize(("attribute", "asynchronous"), [("create", False), ("commit", True)])
def test_the_last_checkpoint_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, asynchronous: bool, capfd: Any
) -> None:
    monkeypatch.setattr(CheckpointStore, attribute, failing_once(attribute))
    with trainer_in(tmp_path, checkpoint={"every_steps": 3, "asynchronous": asynchronous}) as trainer:
        trainer.fit()
    assert store_of(tmp_path).steps() == [2]
    verify(CheckpointReader(store_of(tmp_path).path(2)))
    said = capfd.readouterr().out
    assert "Operation not permitted; there is none yet. It is tried once more" in said.replace("\n", " ")


def test_a_run_without_its_last_checkpoint_is_an_error_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        real = CheckpointStore.commit

        def commit(store: CheckpointStore, step: int, manifest: Any) -> Any:
            return (failing_once("commit") if step > 1 else real)(store, step, manifest)

        patch.setattr(CheckpointStore, "commit", commit)
        refused = pytest.raises(StorageError, match=r"not permitted; the newest is of step 1\..*start the run again")
        sections = {"run": {"max_steps": 2}, "checkpoint": {"every_steps": 1, "max_failures": 9}}
        with trainer_in(tmp_path, **sections) as trainer, refused:
            trainer.fit()
    assert store_of(tmp_path).steps() == [1]
    with trainer_in(tmp_path, **sections) as trainer:
        report = trainer.fit()
    assert len(report.losses) == 1
    assert store_of(tmp_path).steps() == [2, 1]


def test_failures_count_in_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = CheckpointStore.commit

    def commit(store: CheckpointStore, step: int, manifest: Any) -> Any:
        return (failing_once("commit") if step in (1, 3) else real)(store, step, manifest)

    monkeypatch.setattr(CheckpointStore, "commit", commit)
    sections = {"run": {"max_steps": 4}, "checkpoint": {"every_steps": 1, "max_failures": 2, "asynchronous": False}}
    with trainer_in(tmp_path, **sections) as trainer:
        assert trainer.fit().final_step == 4
    assert store_of(tmp_path).steps() == [4, 2]


class Strikes(Callback):
    """Something that happens in the middle of the last evaluation."""

    def __init__(self, what: Callable[[], None]) -> None:
        self.what, self.events = what, list[str]()

    def on_prediction_step(self, trainer: Trainer, done: int, total: int) -> None:
        if trainer.state.step == 2 and done == 1:
            self.what()

    def on_evaluate(self, trainer: Trainer, step: int, metrics: Any) -> None:
        self.events.append(f"evaluated {step}")

    def on_save(self, trainer: Trainer, step: int) -> None:
        self.events.append(f"saved {step}")


def dies() -> None:
    raise SystemExit("as if killed")


def interrupts() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("what", "run"),
    [
        (dies, {"eval_at_end": True}),
        (interrupts, {"eval_at_end": False, "eval_every": 2}),
        pytest.param(dies, {"eval_every": "epoch"}, marks=pytest.mark.full),
    ],
)
def test_the_last_checkpoint_is_there_before_the_last_evaluation(
    tmp_path: Path, what: Callable[[], None], run: dict[str, Any]
) -> None:
    """What ends the evaluation costs the evaluation alone, and the next start makes it."""
    run = {"max_steps": 2, **run}
    with trainer_in(tmp_path / "whole", run=run) as trainer:
        wanted = trainer.fit().eval_loss
    ended = pytest.raises((SystemExit, KeyboardInterrupt))
    with trainer_in(tmp_path, run=run, callbacks=(Strikes(what),)) as trainer, ended:
        trainer.fit()
    assert store_of(tmp_path).steps() == [2]
    assert evaluations(tmp_path) == []
    assert summary_of(store_of(tmp_path), 2)["eval_loss"] is None

    watching = Strikes(lambda: None)
    with trainer_in(tmp_path, run=run, callbacks=(watching,)) as trainer:
        report = trainer.fit()
    assert report.losses == ()
    assert report.eval_loss == wanted
    assert watching.events == ["evaluated 2"]
    assert [(line["step"], line["eval_loss"]) for line in evaluations(tmp_path)] == [(2, wanted)]
    assert summary_of(store_of(tmp_path), 2) | {"path": "", "date": ""} == (
        summary_of(store_of(tmp_path / "whole"), 2) | {"path": "", "date": ""}
    )

    with trainer_in(tmp_path, run=run, callbacks=(Strikes(dies),)) as trainer:
        assert trainer.fit().eval_loss == wanted  # Nothing is evaluated any more.
    assert len(evaluations(tmp_path)) == 1


class Stops(Keeps):
    """Asks the run to stop in its second step, or in the middle of the evaluation after it."""

    def __init__(self, event: str) -> None:
        super().__init__(value=0)
        self.event = event

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        if step == 2 and self.event == "step":
            interrupts()

    def on_prediction_step(self, trainer: Trainer, done: int, total: int) -> None:
        if trainer.state.step == 2 and self.event == "evaluation":
            interrupts()


@pytest.mark.parametrize(
    ("event", "run"),
    [
        ("step", {"eval_every": 2, "prompts_every": 2}),
        pytest.param("step", {"eval_every": "epoch"}, marks=pytest.mark.full),
        pytest.param("evaluation", {"eval_every": 2}, marks=pytest.mark.full),
        ("evaluation", {"eval_every": "epoch"}),
    ],
)
def test_what_a_stop_puts_off_is_done_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, run: dict[str, Any]
) -> None:
    """The run evaluates and samples after the same steps as one that nobody stops, and ends with the same best weights."""
    sampled: list[int] = []
    monkeypatch.setattr(TrainingLoop, "_sample", lambda loop: sampled.append(loop.run.progress.step))
    sections = {"run": {"max_steps": 4, "load_best": True, "patience": 2, **run}, "batch": {"global_size": 12}}
    sections["checkpoint"] = {"every_steps": 2}
    found = []
    for folder, stops in (("whole", 0), ("stopped", 1)):
        sampled.clear()
        for each in range(stops + 1):
            callbacks = [Stops(event if each < stops else "")]
            with trainer_in(tmp_path / folder, callbacks=callbacks, **sections) as trainer:
                with pytest.raises(KeyboardInterrupt) if each < stops else nullcontext():
                    trainer.fit()
                best = trainer.state.best_metric
        found.append((evaluations(tmp_path / folder), list(sampled), best))
        assert [line["step"] for line in found[-1][0]] == [2, 4]
    assert found[0][1:] == found[1][1:]
    assert [line["eval_loss"] for line in found[0][0]] == [line["eval_loss"] for line in found[1][0]]


def test_callbacks_hear_of_the_last_checkpoint_after_its_evaluation(tmp_path: Path) -> None:
    watching = Strikes(lambda: None)
    with trainer_in(tmp_path, callbacks=(watching,), checkpoint={"every_steps": 1}) as trainer:
        trainer.fit()
    assert watching.events == ["saved 1", "evaluated 2", "saved 2"]


def test_the_best_checkpoint_is_chosen_with_the_last_evaluation(tmp_path: Path) -> None:
    """The last checkpoint is written before it is judged: the one that it beats goes then."""
    sections = {"run": {"max_steps": 3, "eval_every": 1}, "checkpoint": {"every_steps": 1, "keep_last": 1, "keep_best": 1}}
    with trainer_in(tmp_path, **sections) as trainer:
        trainer.fit()
    losses = {line["step"]: line["eval_loss"] for line in evaluations(tmp_path)}
    best = min(losses, key=lambda step: losses[step])
    assert store_of(tmp_path).steps() == sorted({3, best}, reverse=True)
    state = json.loads((store_of(tmp_path).path(3) / "trainer_state_evaluated.json").read_text())
    assert (state["metric"], state["best"]["step"]) == (losses[3], best)


def test_a_checkpoint_is_amended_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer_in(tmp_path) as trainer:
        trainer.fit()
    store, name = store_of(tmp_path), "trainer_state_evaluated.json"
    before = CheckpointReader(store.path(2)).manifest
    for data in (b'{"new": 1}', b'{"newer": 22}'):
        store.amend(2, name, data)
        reader = CheckpointReader(store.path(2))
        verify(reader)
        assert reader.content(name) == data
    assert set(reader.manifest.files) == {*before.files}
    assert reader.manifest.layout == before.layout

    real = os.replace
    for stop in (1, 2, 3):  # A kill at each change of a name.
        store.amend(2, name, b"{}")
        calls = iter(range(1, 9))

        def killed(source: Any, target: Any, stop: int = stop, calls: Any = calls) -> None:
            if next(calls) == stop:
                raise KeyboardInterrupt
            real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed)
            with pytest.raises(KeyboardInterrupt):
                store.amend(2, name, b'{"newest": 333}')
        verify(CheckpointReader(store.path(2)))
    store.amend(2, name, (store.path(2) / "trainer_state.json").read_bytes())
    export_checkpoint(store.path(2), tmp_path / "out", "keep", Console(shown=False))
    assert not list((tmp_path / "out").glob("trainer_state*"))


class Saves(Callback):
    """Asks for a checkpoint of the first step."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        trainer.request(save=step == 1)


def test_no_older_checkpoint_passes_for_the_model(tmp_path: Path) -> None:
    """Where the configuration asks for none, but a callback has."""
    run, checkpoint = {"max_steps": 3, "eval_at_end": False}, {"every_steps": 0}
    with trainer_in(tmp_path, callbacks=[Saves()], run=run, checkpoint=checkpoint) as trainer:
        trainer.fit()
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [3, 1]
