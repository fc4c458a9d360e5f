"""`Callback`: code of a user that runs at fixed points of a run. It reads `RunState`, and may ask for more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Trainer = Any
"""The `zeromesh.Trainer` that calls. Its class imports this module, and a callback may annotate it as it likes."""


class Callback:
    """Override what you need; every method runs on all ranks, in the same order. An exception ends the run, on all ranks, and names
    the callback.

    Arguments are to be read: `trainer.state` says where the run is. Callbacks may ask for more with `trainer.request`: to
    evaluate, save, log or stop after the present step; what any rank asks for, all do. Callbacks of transformers are taken too.
    """

    def on_init_end(self, trainer: Trainer) -> None:
        """At the end of the trainer's construction: there is no model yet but the one that was passed to it."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step."""

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """Before the first step of epoch `epoch`, counted from 0; also where a run goes on inside one."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        """Before step `step`, counted from 1."""

    def on_substep_end(self, trainer: Trainer, step: int) -> None:
        """After forward and backward of a microbatch that is not the step's last one."""

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        """After the last backward of a step, before clipping and the update: `trainer.gradient(name)` can be read."""

    def on_optimizer_step(self, trainer: Trainer, step: int) -> None:
        """After the update."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        """After step `step`; `metrics` is the line that is logged where `run.log_every` says so."""

    def on_log(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        """When the line of a step is logged, the values of an evaluation or, before `on_train_end`, those of the whole run."""

    def on_evaluate(self, trainer: Trainer, step: int, metrics: Mapping[str, float]) -> None:
        """After an evaluation, and its `on_log`; `metrics` has `eval_loss`, and what `compute_metrics` made."""

    def on_predict(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """After a prediction."""

    def on_prediction_step(self, trainer: Trainer, done: int, total: int) -> None:
        """After microbatch `done` of `total` of this rank, in an evaluation or prediction."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """After a checkpoint was begun, which may still be written while training goes on."""

    def on_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        """After the last step of epoch `epoch`, counted from 0, or of the run."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step, while parameters are still partitioned."""

    def on_push_begin(self, trainer: Trainer) -> None:
        """Before the model is saved and uploaded to the Hub."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps of the callback, in types of JSON; `load_state_dict` gets it in a resumed run."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """The present state of a run."""

    step: int
    max_steps: int
    epoch: float
    """How many times the training data was passed over."""
    epochs: float
    """How many times it will have been at the end."""
    tokens: int
    best_metric: float | None
    best_step: int
    best_checkpoint: str | None
    is_world_process_zero: bool
    total_flos: float = 0.0
    """Floating-point operations so far by transformers' estimate: 6 for each token and each parameter that is no embedding."""
    log_history: Sequence[dict[str, Any]] = ()
    """The live list of what the run has logged: losses, values of evaluations, and in the end those of the whole run."""
