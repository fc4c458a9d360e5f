"""The end of a run: no run ends well without its last checkpoint, which is there before the evaluation of the last step."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import StorageError
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.step_metrics import read_metrics
from zeromesh.trainer.tools.checkpoint.export import export_checkpoint
from zeromesh.trainer.tools.checkpoint.reading import summary_of


def trainer_in(folder: Path, *, callbacks: tuple[Callback, ...] = (), **sections: Any) -> Trainer:
    config = settings(str(folder), **{"run": {"max_steps": 2}, "checkpoint": {"every_steps": 2}, **sections})
    return Trainer(seeded(llama), config, sentences(), sentences(5, seed=4), callbacks=list(callbacks))


def store_of(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder / "run" / "checkpoints")


def evaluations(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "evaluations.jsonl"
    return read_metrics(path) if path.exists() else []


def failing_once(folder: Path, attribute: str, *, times: float = 1) -> Callable[..., Any]:
    """A method of the store that fails so many times, and then does what it did."""
    real = getattr(CheckpointStore, attribute)
    left = times

    def fails(store: CheckpointStore, *arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise StorageError(f"{str(store.root)!r} cannot be written: {os.strerror(errno.EPERM)}")
        return real(store, *arguments, **options)

    return fails


@pytest.mark.parametrize(("attribute", "asynchronous"), [("create", False), ("commit", True)])
def test_the_last_checkpoint_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: str, asynchronous: bool, capfd: Any
) -> None:
    monkeypatch.setattr(CheckpointStore, attribute, failing_once(tmp_path, attribute, times=1))
    with trainer_in(tmp_path, checkpoint={"every_steps": 3, "asynchronous": asynchronous}) as trainer:
        trainer.fit()
    assert store_of(tmp_path).steps() == [2]
    CheckpointReader(store_of(tmp_path).path(2)).verify()
    said = capfd.readouterr().out
    assert "Operation not permitted; there is none yet. It is tried once more" in said.replace("\n", " ")


def test_a_run_without_its_last_checkpoint_is_an_error_and_the_next_start_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        real = CheckpointStore.commit
        patch.setattr(
            CheckpointStore,
            "commit",
            lambda store, step, manifest: (real if step == 1 else failing_once(tmp_path, "commit"))(
                store, step, manifest
            ),
        )
        refused = pytest.raises(StorageError, match=r"not permitted; the newest is of step 1\..*start the run again")
        sections = {"run": {"max_steps": 2}, "checkpoint": {"every_steps": 1, "max_failures": 9}}
        with trainer_in(tmp_path, **sections) as trainer, refused:
            trainer.fit()
    assert store_of(tmp_path).steps() == [1]
    with trainer_in(tmp_path, **sections) as trainer:
        report = trainer.fit()
    assert len(report.losses) == 1
    assert store_of(tmp_path).steps() == [2, 1]


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


def test_callbacks_hear_of_the_last_checkpoint_after_its_evaluation(tmp_path: Path) -> None:
    watching = Strikes(lambda: None)
    with trainer_in(tmp_path, callbacks=(watching,), checkpoint={"every_steps": 1}) as trainer:
        trainer.fit()
    assert watching.events == ["saved 1", "evaluated 2", "saved 2"]


def test_the_best_checkpoint_is_chosen_with_the_last_evaluation(tmp_path: Path) -> None:
    """The last checkpoint is written before it is judged: the one that it beats goes then."""
    sections = {
        "run": {"max_steps": 3, "eval_every": 1},
        "checkpoint": {"every_steps": 1, "keep_last": 1, "keep_best": 1},
    }
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
        reader.verify()
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
        CheckpointReader(store.path(2)).verify()
    store.amend(2, name, (store.path(2) / "trainer_state.json").read_bytes())
    export_checkpoint(store.path(2), tmp_path / "out", "keep", Console(shown=False))
    assert not list((tmp_path / "out").glob("trainer_state*"))
