"""`TrainerControl`: what is to be done after a step, which callbacks may change; `RunState`: where a run is, which they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from zeromesh.mesh.process_mesh import Mesh


@dataclass(slots=True)
class TrainerControl:
    """What one rank is to do after the present step; `stop` stays for later steps. `agreed` is what all ranks do."""

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: bool = False
    """End the run after this step, with a checkpoint, as if it were the last one."""
    stop_epoch: bool = False
    """Leave the rest of the epoch's data out."""

    def __or__(self, other: TrainerControl) -> TrainerControl:
        """Everything that is set in one of the two."""
        return TrainerControl(*(a or b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def agreed(self, mesh: Mesh) -> TrainerControl:
        """Everything that is set on any rank; all ranks call this together."""
        own = torch.tensor([int(each) for each in astuple(self)], dtype=torch.int64)
        return TrainerControl(*map(bool, mesh.world.max_(own, "requests of callbacks").tolist()))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Where a run is. The properties are transformers' names of the same."""

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
