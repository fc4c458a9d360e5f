"""`trainer.state`: where a run is, to be read by callbacks and by whoever holds the trainer.

What is to be done after a step: by the configuration, and by callbacks, which may ask for more or for less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch

from zeromesh.mesh.process_mesh import Mesh


@dataclass(slots=True)
class TrainerControl:
    """One rank's; `agreed` has those of all. They are for the present step, except that `stop` stays."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: bool = False
    """End the run after this step, with a checkpoint, as if it were the last one."""
    stop_epoch: bool = False
    """Leave the rest of the epoch's data out."""

    def __or__(self, other: TrainerControl) -> TrainerControl:
        """What either wishes."""
        return TrainerControl(*(mine or theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def agreed(self, mesh: Mesh) -> TrainerControl:
        """What any rank wishes; all ranks call this together."""
        mine = torch.tensor([int(each) for each in astuple(self)], dtype=torch.int64)
        said: Sequence[int] = mesh.world.max_(mine, "wishes of callbacks").tolist()
        return TrainerControl(**{field.name: bool(value) for field, value in zip(fields(self), said, strict=True)})


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
