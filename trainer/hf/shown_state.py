"""Where a run is, as transformers' `TrainerState`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerState, TrainingArguments

from zeromesh.trainer.hf.checkpoint_links import link_of

if TYPE_CHECKING:
    from zeromesh.trainer.trainer import Trainer


def bring_up_to_date(state: TrainerState, trainer: Trainer, arguments: TrainingArguments | None) -> None:
    """Have `state` say where the run is now. It has the run's own list of what was logged."""
    now = trainer.state
    state.global_step, state.max_steps, state.epoch = now.step, now.max_steps, now.epoch
    state.num_train_epochs = max(1, math.ceil(now.epochs))
    state.num_input_tokens_seen, state.total_flos = now.tokens, now.total_flos
    state.is_world_process_zero = state.is_local_process_zero = now.is_world_process_zero
    state.train_batch_size = trainer.run_config.batch.micro_size
    history: Any = now.log_history
    state.log_history = history
    if arguments is None:
        return
    state.compute_steps(arguments, now.max_steps)
    if arguments.metric_for_best_model is not None and now.best_metric is not None:
        state.best_metric, state.best_global_step = now.best_metric, now.best_step
        state.best_model_checkpoint = None if now.best_checkpoint is None else str(link_of(Path(now.best_checkpoint)))
