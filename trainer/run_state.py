"""`trainer.state`: where a run is, to be read by callbacks and by whoever holds the trainer."""

from __future__ import annotations

from collections.abc import Mapping
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
    log_history: tuple[Mapping[str, Any], ...] = ()
    """What this process has logged: lines of metrics and values of evaluations."""

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
