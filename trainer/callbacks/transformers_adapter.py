"""Callbacks of transformers on runs of zeromesh: their events, arguments and control flags.

They get their own kinds of objects: `TrainingArguments` that say what the configuration says, a `TrainerState` that follows the
run, a `TrainerControl` whose flags are what the run is about to do, and which they may change. Nothing else that they change
changes anything in the run. Events come in the order of transformers' Trainer, and see what they see there.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from zeromesh.environment import read_environment
from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.callbacks.transformers_views import (
    Batches,
    ObservedTrainer,
    OptimizerView,
    SchedulerView,
    arguments_of,
    bring_up_to_date,
)

_FLAGS = {
    "should_log": "log",
    "should_evaluate": "evaluate",
    "should_save": "save",
    "should_training_stop": "stop",
    "should_epoch_stop": "stop_epoch",
}


class TransformersCallbacks(Callback):
    """All callbacks of transformers that a trainer has; they share arguments, state and control."""

    def __init__(self) -> None:
        self._callbacks: list[TrainerCallback] = []
        self._control = TrainerControl()
        self._state = TrainerState()
        self._arguments: TrainingArguments | None = None
        self._optimizer: OptimizerView | None = None
        self._train: Batches | None = None
        self._evaluation: Batches | None = None
        """The batches of the latest evaluation or prediction."""

    @staticmethod
    def accepts(callback: Any) -> bool:
        """Whether `callback` is one of transformers', or a class of them."""
        return isinstance(callback, TrainerCallback) or (
            isinstance(callback, type) and issubclass(callback, TrainerCallback)
        )

    @property
    def read_checkpoints(self) -> bool:
        """Whether some callback does something when a checkpoint was saved."""
        return any(type(each).on_save is not TrainerCallback.on_save for each in self._callbacks)

    def add(self, callback: Any) -> None:
        """Add a callback; a class is called without arguments."""
        self._callbacks.append(callback() if isinstance(callback, type) else callback)

    def remove(self, callback: Any) -> TrainerCallback | None:
        """Remove a callback, which is named by itself or by its class; None where there is none."""
        for each in self._callbacks:
            if each is callback or (isinstance(callback, type) and isinstance(each, callback)):
                self._callbacks.remove(each)
                return each
        return None

    # Events, in the order of a run

    def on_init_end(self, trainer: ObservedTrainer) -> None:
        self._arguments = trainer.training_arguments or arguments_of(trainer.config)
        first = read_environment().rank == 0
        self._state.is_world_process_zero = self._state.is_local_process_zero = first
        if first and self._callbacks:
            # As transformers' Trainer has by now; `fit` says what is wrong with it.
            with suppress(OSError):
                Path(self._arguments.output_dir).mkdir(parents=True, exist_ok=True)
        later = dict.fromkeys(("optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"))
        inputs = trainer.inputs
        self._notify("on_init_end", {"model": inputs.model, "processing_class": inputs.processing_class, **later})

    def on_train_begin(self, trainer: ObservedTrainer) -> None:
        # What epochs are in steps is known by now.
        self._arguments = trainer.training_arguments or arguments_of(trainer.run_config)
        self._train = trainer.get_train_dataloader()
        self._call(trainer, "on_train_begin")

    def on_epoch_begin(self, trainer: ObservedTrainer, epoch: int) -> None:
        self._train = trainer.get_train_dataloader()
        self._call(trainer, "on_epoch_begin")

    def on_step_begin(self, trainer: ObservedTrainer, step: int) -> None:
        self._call(trainer, "on_step_begin")

    def on_substep_end(self, trainer: ObservedTrainer, step: int) -> None:
        self._call(trainer, "on_substep_end")

    def on_pre_optimizer_step(self, trainer: ObservedTrainer, step: int) -> None:
        self._call(trainer, "on_pre_optimizer_step")

    def on_optimizer_step(self, trainer: ObservedTrainer, step: int) -> None:
        self._call(trainer, "on_optimizer_step", follow=False)  # The step counts only when it has ended.

    def on_step_end(self, trainer: ObservedTrainer, step: int, metrics: Mapping[str, Any]) -> None:
        self._call(trainer, "on_step_end")

    def on_log(self, trainer: ObservedTrainer, step: int, metrics: Mapping[str, Any]) -> None:
        logs = trainer.run.progress.history.latest()
        known = frozenset(logs)
        self._call(trainer, "on_log", logs=logs)
        trainer.run.model.stepper.scalars.add({name: value for name, value in logs.items() if name not in known})

    def on_evaluate(self, trainer: ObservedTrainer, step: int, metrics: Mapping[str, float]) -> None:
        self._call(trainer, "on_evaluate", metrics=trainer.run.progress.history.latest())

    def on_predict(self, trainer: ObservedTrainer, metrics: Mapping[str, float]) -> None:
        self._call(trainer, "on_predict", metrics=dict(metrics))

    def on_prediction_step(self, trainer: ObservedTrainer, done: int, total: int) -> None:
        self._evaluation = trainer.batches_of(trainer.run.progress.evaluation_feed)
        self._call(trainer, "on_prediction_step")

    def on_save(self, trainer: ObservedTrainer, step: int) -> None:
        self._state.stateful_callbacks = self.state_dict()
        self._call(trainer, "on_save")

    def on_epoch_end(self, trainer: ObservedTrainer, epoch: int) -> None:
        self._call(trainer, "on_epoch_end")

    def on_train_end(self, trainer: ObservedTrainer) -> None:
        self._call(trainer, "on_train_end")

    def on_push_begin(self, trainer: ObservedTrainer) -> None:
        self._call(trainer, "on_push_begin")

    # What is kept in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The states that callbacks export, by their class; of two of one class, the first."""
        found: dict[str, Any] = {}
        for callback in self._callbacks:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, callback.state())
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, callback in enumerate(self._callbacks):
            kept = state.get(type(callback).__name__)
            if kept is not None and isinstance(callback, ExportableState):
                self._callbacks[number] = type(callback).from_state(kept)

    # How they are called

    def _call(self, trainer: ObservedTrainer, event: str, *, follow: bool = True, **more: Any) -> None:
        """Run an event; `follow` the run first, or show the state as it was in the event before."""
        if follow:
            bring_up_to_date(self._state, trainer, self._arguments)
        control = trainer.control
        for flag, name in _FLAGS.items():
            setattr(self._control, flag, getattr(control, name))
        self._notify(event, {**self._views(trainer), **more})
        for flag, name in _FLAGS.items():
            setattr(control, name, bool(getattr(self._control, flag)))

    def _notify(self, event: str, named: Mapping[str, Any]) -> None:
        for callback in self._callbacks:
            try:
                answer = getattr(callback, event)(self._arguments, self._state, self._control, **named)
            except Exception as error:
                error.add_note(f"raised by callback {type(callback).__name__}.{event}")
                raise
            if answer is not None:
                self._control = answer

    def _views(self, trainer: ObservedTrainer) -> dict[str, Any]:
        if self._optimizer is None:
            self._optimizer = OptimizerView(trainer.run.model.optimizer, trainer.model)
        steps = self._state.global_step
        rate = trainer.run.learning_rate_of(steps)
        optimizer = self._optimizer.at(rate)
        return {
            "model": trainer.model,
            "processing_class": trainer.processing_class,
            "optimizer": optimizer,
            "lr_scheduler": SchedulerView([rate] * len(optimizer.param_groups), steps),
            "train_dataloader": self._train,
            "eval_dataloader": self._evaluation,
        }
