"""Callbacks of transformers on runs of zeromesh: their events, arguments and control flags.

They get their own kinds of objects: `TrainingArguments` that say what the configuration says, a `TrainerState` that follows the
run, a `TrainerControl` whose flags are what the run is about to do, and which they may change. Nothing else that they change
changes anything in the run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import transformers
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from zeromesh.trainer.best import goal_of
from zeromesh.trainer.callbacks import Callback

if TYPE_CHECKING:
    from zeromesh.trainer.config import TrainerConfig
    from zeromesh.trainer.trainer import Trainer

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
        self._loss, self._steps = 0.0, 0
        """Sum of the losses since the last line that was logged, and of how many steps."""

    @staticmethod
    def takes(callback: Any) -> bool:
        """Whether it is a callback of transformers, or a class of them."""
        return isinstance(callback, TrainerCallback) or (
            isinstance(callback, type) and issubclass(callback, TrainerCallback)
        )

    def add(self, callback: Any) -> None:
        """One more; a class is called without arguments."""
        self._callbacks.append(callback() if isinstance(callback, type) else callback)

    def take_out(self, callback: Any) -> TrainerCallback | None:
        """Remove one, given itself or its class; None where there is none."""
        for each in self._callbacks:
            if each is callback or (isinstance(callback, type) and isinstance(each, callback)):
                self._callbacks.remove(each)
                return each
        return None

    # Events, in the order of a run

    def on_train_begin(self, trainer: Trainer) -> None:
        self._follow(trainer)
        self._control._new_training()
        self._call(trainer, "on_train_begin")

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        self._control._new_epoch()
        self._call(trainer, "on_epoch_begin")

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        self._call(trainer, "on_step_begin")

    def on_substep_end(self, trainer: Trainer, step: int) -> None:
        self._call(trainer, "on_substep_end")

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        self._call(trainer, "on_pre_optimizer_step")

    def on_optimizer_step(self, trainer: Trainer, step: int) -> None:
        self._call(trainer, "on_optimizer_step")

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        self._loss += float(metrics["loss"])
        self._steps += 1
        self._call(trainer, "on_step_end")

    def on_log(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        logs = self._logs(metrics)
        self._state.log_history.append({**logs, "step": step})
        self._call(trainer, "on_log", logs=logs)

    def on_evaluate(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        self._call(trainer, "on_evaluate", metrics={**metrics, "epoch": trainer.state.epoch})

    def on_predict(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        self._call(trainer, "on_predict", metrics=dict(metrics))

    def on_prediction_step(self, trainer: Trainer, done: int, total: int) -> None:
        self._call(trainer, "on_prediction_step", eval_dataloader=_Batches(total))

    def on_save(self, trainer: Trainer, step: int) -> None:
        self._call(trainer, "on_save")

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self._call(trainer, "on_epoch_end")

    def on_train_end(self, trainer: Trainer) -> None:
        self._call(trainer, "on_train_end")

    # What is kept in checkpoints

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"log_history": copy.deepcopy(self._state.log_history)}
        for callback in self._callbacks:
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, callback.state())
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state.log_history = [dict(line) for line in state.get("log_history", ())]
        for number, callback in enumerate(self._callbacks):
            kept = state.get(type(callback).__name__)
            if kept is not None and isinstance(callback, ExportableState):
                self._callbacks[number] = type(callback).from_state(kept)

    # How they are called

    def _call(self, trainer: Trainer, event: str, **more: Any) -> None:
        self._follow(trainer)
        wishes = trainer.wishes
        for flag, wish in _FLAGS.items():
            setattr(self._control, flag, getattr(wishes, wish))
        given = {**self._surroundings(trainer), **more}
        for callback in self._callbacks:
            try:
                answer = getattr(callback, event)(self._arguments, self._state, self._control, **given)
            except Exception as error:
                error.add_note(f"raised by callback {type(callback).__name__}.{event}")
                raise
            if answer is not None:
                self._control = answer
        for flag, wish in _FLAGS.items():
            setattr(wishes, wish, bool(getattr(self._control, flag)))

    def _surroundings(self, trainer: Trainer) -> dict[str, Any]:
        rates = [trainer.learning_rate]
        return {
            "model": trainer.model,
            "processing_class": trainer.processing_class,
            "optimizer": _Optimizer([{"lr": rates[0], "weight_decay": trainer.config.optimizer.weight_decay}]),
            "lr_scheduler": _Rates(rates),
            "train_dataloader": _Batches(trainer.microbatches_per_epoch),
            "eval_dataloader": None,
        }

    def _follow(self, trainer: Trainer) -> None:
        """Bring the state up to date."""
        if self._arguments is None:
            self._arguments = trainer.training_arguments or arguments_of(trainer.run_config)
        now, state, run = trainer.state, self._state, trainer.run_config.run
        state.global_step, state.max_steps, state.epoch = now.step, now.max_steps, now.epoch
        state.num_train_epochs = max(1, round(now.epochs))
        state.num_input_tokens_seen = now.tokens
        state.best_metric, state.best_global_step = now.best_metric, now.best_step or None
        state.best_model_checkpoint = now.best_checkpoint
        state.is_world_process_zero = state.is_local_process_zero = now.is_world_process_zero
        state.train_batch_size = trainer.run_config.batch.micro_size
        every = {"logging_steps": run.log_every, "eval_steps": run.eval_every}
        every["save_steps"] = trainer.run_config.checkpoint.every_steps
        for name, value in every.items():
            setattr(state, name, value if isinstance(value, int) and value else now.max_steps + 1)

    def _logs(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """A line as transformers logs it: the mean loss since the last one, or the values of an evaluation."""
        if "step_seconds" not in metrics:
            return {**metrics, "epoch": self._state.epoch}
        logs = {"loss": self._loss / max(1, self._steps), "learning_rate": metrics["lr"], "epoch": self._state.epoch}
        if metrics.get("grad_norm") is not None:
            logs["grad_norm"] = metrics["grad_norm"]
        self._loss, self._steps = 0.0, 0
        return logs


@dataclass(frozen=True, slots=True)
class _Batches:
    """Stands for a data loader: how many batches a rank has."""

    count: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """Stands for the optimizer, whose state is partitioned: what there is to read."""

    param_groups: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Rates:
    """Stands for the scheduler."""

    rates: Sequence[float]

    def get_last_lr(self) -> list[float]:
        return list(self.rates)


def arguments_of(config: TrainerConfig) -> TrainingArguments:
    """Arguments that say what a configuration says, as far as they have words for it."""

    def strategy(every: int | str) -> dict[str, Any]:
        return (
            {"strategy": "epoch"}
            if isinstance(every, str)
            else {"strategy": "steps" if every else "no", "steps": every or 1}
        )

    log, evaluate, save = map(strategy, (config.run.log_every, config.run.eval_every, config.checkpoint.every_steps))
    schedule = (
        "cosine" if config.schedule.name not in transformers.SchedulerType._value2member_map_ else config.schedule.name
    )
    arguments = TrainingArguments(
        output_dir=f"{config.run.output_dir}/{config.run.name}",
        run_name=config.run.name,
        per_device_train_batch_size=config.batch.micro_size,
        per_device_eval_batch_size=config.batch.eval_micro_size or config.batch.micro_size,
        max_steps=config.run.max_steps,
        num_train_epochs=config.run.epochs or 1,
        learning_rate=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        adam_beta1=config.optimizer.betas[0],
        adam_beta2=config.optimizer.betas[1],
        adam_epsilon=config.optimizer.eps,
        max_grad_norm=config.run.clip_norm,
        lr_scheduler_type=schedule,
        warmup_steps=config.schedule.warmup_steps,
        logging_strategy=log["strategy"],
        logging_steps=log.get("steps", 1),
        eval_strategy=evaluate["strategy"],
        eval_steps=evaluate.get("steps", 1),
        save_strategy=save["strategy"],
        save_steps=save.get("steps", 1),
        save_total_limit=config.checkpoint.keep_last,
        metric_for_best_model=config.run.metric,
        greater_is_better=goal_of(config.run.metric, config.run.metric_goal) == "highest",
        seed=config.run.seed % 2**32,
        label_smoothing_factor=config.run.label_smoothing,
        report_to=[],
        use_cpu=True,
        disable_tqdm=False,
    )
    # Not checked against the strategies: the run judges by every evaluation, and saves when one is best.
    arguments.load_best_model_at_end = config.run.load_best
    return arguments
