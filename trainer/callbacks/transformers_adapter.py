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


class TransformersCallbacks:
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

    # Events

    def call(self, event: str, trainer: ObservedTrainer, *arguments: Any) -> None:
        """Run an event of all callbacks, and take over the flags that they change."""
        if event == "on_init_end":
            self._begin(trainer)
            return
        progress = trainer.run.progress
        named: dict[str, Any] = {}
        if event == "on_train_begin":
            # By now it is known how many steps an epoch has.
            self._arguments = trainer.training_arguments or arguments_of(trainer.run_config)
        if event in ("on_train_begin", "on_epoch_begin"):
            self._train = trainer.get_train_dataloader()
        elif event == "on_prediction_step":
            self._evaluation = trainer.batches_of(progress.evaluation_feed)
        elif event == "on_save":
            self._state.stateful_callbacks = self.state_dict()
        elif event == "on_log":
            named["logs"] = progress.history.latest()
        elif event == "on_evaluate":
            named["metrics"] = progress.history.latest()
        elif event == "on_predict":
            named["metrics"] = dict(arguments[0])
        known = frozenset(named.get("logs", ()))
        if event != "on_optimizer_step":  # The step counts only when it has ended.
            bring_up_to_date(self._state, trainer, self._arguments)
        control = trainer.control
        for flag, name in _FLAGS.items():
            setattr(self._control, flag, getattr(control, name))
        self._notify(event, {**self._views(trainer), **named})
        for flag, name in _FLAGS.items():
            setattr(control, name, bool(getattr(self._control, flag)))
        added = {name: value for name, value in named.get("logs", {}).items() if name not in known}
        trainer.run.model.stepper.scalars.add(added)

    def _begin(self, trainer: ObservedTrainer) -> None:
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

    # What is kept in checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The states that callbacks export, by their class; of two of one class, the first."""
        found: dict[str, Any] = {}
        for callback in self._callbacks:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, callback.state())
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make callbacks anew from the states that `state_dict` returned."""
        for number, callback in enumerate(self._callbacks):
            kept = state.get(type(callback).__name__)
            if kept is not None and isinstance(callback, ExportableState):
                self._callbacks[number] = type(callback).from_state(kept)
