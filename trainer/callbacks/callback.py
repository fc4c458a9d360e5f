"""`Callback`, the base class of a user's code that runs at fixed points of a run, reads `RunState` and makes requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Trainer = Any  # the calling `zeromesh.Trainer`, whose class imports this module


class Callback:
    """Base class of callbacks; every method runs on all ranks, in one order. An exception ends the run, and names the callback.
    Arguments are read-only. Callbacks may call `trainer.request` to evaluate, save, log or stop after the present step; a
    request of any rank holds for all. Callbacks of transformers are accepted too."""

    def on_init_end(self, trainer: Trainer) -> None:
        """Called at the end of the trainer's construction; the only model is one that was passed in."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """Called before the first step."""

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """Called before the first step of epoch `epoch`, counted from 0, and where a run resumes within it."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        """Called before step `step`, counted from 1."""

    def on_substep_end(self, trainer: Trainer, step: int) -> None:
        """Called after forward and backward of each microbatch but the step's last one."""

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        """Called after the last backward of a step, before clipping and the update; `trainer.gradient(name)` is available."""

    def on_optimizer_step(self, trainer: Trainer, step: int) -> None:
        """Called after the update."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        """Called after step `step`; `metrics` is the line that `run.log_every` logs."""

    def on_log(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        """Called when a step's line, an evaluation's values or, before `on_train_end`, the run's values are logged."""

    def on_evaluate(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation and its `on_log`; `metrics` has `eval_loss` and the values of `compute_metrics`."""

    def on_predict(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Called after a prediction."""

    def on_prediction_step(self, trainer: Trainer, done: int, total: int) -> None:
        """Called after microbatch `done` of `total` of this rank, in an evaluation or prediction."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """Called after a checkpoint save has started, which may still be in progress."""

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """Called after the last step of epoch `epoch`, counted from 0, or of the run."""

    def on_train_end(self, trainer: Trainer) -> None:
        """Called after the last step, while parameters are still partitioned."""

    def on_push_begin(self, trainer: Trainer) -> None:
        """Called before the model is saved and uploaded to the Hub."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state for a checkpoint, in types of JSON; a resumed run passes it to `load_state_dict`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, which may be empty where steps are made again after a lost rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    step: int
    max_steps: int
    epoch: float  # the number of passes over the training data so far
    epochs: float  # and at the end of the run
    tokens: int
    best_metric: float | None
    best_step: int
    best_checkpoint: str | None
    is_world_process_zero: bool
    total_flos: float = 0.0  # so far by transformers' estimate, 6 per token and parameter, embeddings aside
    log_history: Sequence[dict[str, Any]] = ()  # the live list of losses, evaluations and finally the run's totals
