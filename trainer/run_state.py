"""`trainer.state`: where a run is, to be read by callbacks and by whoever holds the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """A moment of a run. The properties are transformers' names of the same."""

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
    """What the run has logged, now and later: losses, values of evaluations, and in the end those of the whole run."""

    @property
    def global_step(self) -> int:
        return self.step

    @property
    def num_train_epochs(self) -> float:
        return self.epochs

    @property
    def num_input_tokens_seen(self) -> int:
        return self.tokens

    @property
    def best_global_step(self) -> int:
        return self.best_step

    @property
    def best_model_checkpoint(self) -> str | None:
        return self.best_checkpoint

    @property
    def is_local_process_zero(self) -> bool:
        return self.is_world_process_zero
