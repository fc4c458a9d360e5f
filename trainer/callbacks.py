"""Callbacks: what a user's code can do at fixed points of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromesh.trainer.trainer import Trainer


class Callback:
    """Override what you need; every method runs on all ranks, in the same order. An exception ends the run, on all ranks."""

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step."""

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        """Before step `step`, counted from 1."""

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        """After the last backward of a step, before clipping and the update: `trainer.gradient(name)` can be read."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        """After step `step`; `metrics` is the line that is logged."""

    def on_evaluate(self, trainer: Trainer, step: int, loss: float) -> None:
        """After an evaluation."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step, while parameters are still partitioned."""
