"""`RunContext`: the parts of a run, which stay as `build_run` has made them; `RunProgress` has what its steps change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.callbacks.control import RunState, TrainerControl
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher
from zeromesh.trainer.checkpoints.manager import FOLDER
from zeromesh.trainer.checkpoints.trainer_state import description_of, settings_of
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import Collate, MapDataset
from zeromesh.trainer.data.feed import RunData
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.loop.prediction import PreprocessLogits
from zeromesh.trainer.loop.progress import RunProgress, Values
from zeromesh.trainer.loop.trained_model import TrainedModel
from zeromesh.trainer.losses.losses import ComputeLoss
from zeromesh.trainer.lr_schedule import LRSchedule
from zeromesh.trainer.monitoring.console import RunConsole
from zeromesh.trainer.monitoring.start_times import StartTimes
from zeromesh.trainer.monitoring.step_stats import StepStats
from zeromesh.trainer.torch_lr_scheduler import MakeScheduler, TorchSchedule


@dataclass(frozen=True, kw_only=True, slots=True)
class UserInputs:
    """What the user has passed to the trainer beside its configuration."""

    model: nn.Module | Callable[[], nn.Module] | None = None
    train_dataset: MapDataset | None = None
    eval_dataset: MapDataset | Mapping[str, MapDataset] | None = None
    collate: Collate | None = None
    compute_loss: ComputeLoss | None = None
    compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None
    preprocess_logits_for_metrics: PreprocessLogits | None = None
    lr_scheduler: MakeScheduler | None = None
    processing_class: Any = None
    of_transformers: bool = False
    """Whether transformers' `TrainingArguments` are among them."""

    def names(self) -> dict[str, str]:
        """Which inputs were passed, and which were not: ranks can compare that much of them."""
        return {each.name: "given" if getattr(self, each.name) is not None else "not given" for each in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The parts of one run. `config` has what the data decides, such as the number of steps of so many epochs."""

    config: TrainerConfig
    mesh: Mesh
    inputs: UserInputs
    events: CallbackDispatcher
    console: RunConsole
    start_times: StartTimes
    plan: BatchPlan
    data: RunData
    data_description: Mapping[str, Any]
    """What a resumed run must have in common with this one's data; see `RunData.description`."""
    schedule: LRSchedule | TorchSchedule
    model: TrainedModel
    stats: StepStats
    progress: RunProgress

    @property
    def finished(self) -> bool:
        """Whether the run is at its last step."""
        return self.progress.position >= self.config.run.max_steps

    @property
    def epoch(self) -> float:
        """How many times the training data was passed over, as far as it was trained on."""
        return self.plan.epoch_after(self.progress.reached)

    @property
    def samples(self) -> int:
        """Samples since the start of training."""
        return self.plan.samples_of(self.progress.position).start

    @property
    def total_flos(self) -> float:
        """Floating-point operations so far, by transformers' estimate; see `RunState.total_flos`."""
        return 6.0 * self.progress.totals.tokens * self.model.parameters

    @property
    def processing_class(self) -> Any:
        """The tokenizer that is saved with the model."""
        return self.model.processing_class

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that another process must have in common to resume this run."""
        return settings_of(self.config, model=description_of(self.model.module), data=self.data_description)

    def learning_rate_of(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        return self.config.optimizer.lr * self.schedule.factor(step)

    def state(self, directory: Path) -> RunState:
        """The state of the run as callbacks see it; `directory` is the run's."""
        run, progress, best = self.config.run, self.progress, self.progress.best
        checkpoint = CheckpointStore(directory / FOLDER).path(best.step) if best.value is not None else None
        return RunState(
            step=progress.step,
            max_steps=run.max_steps,
            epoch=self.epoch,
            epochs=self.plan.epoch_after(run.max_steps) if run.epochs is None else run.epochs,
            tokens=progress.totals.tokens,
            best_metric=best.value,
            best_step=best.step,
            best_checkpoint=str(checkpoint) if checkpoint is not None and checkpoint.exists() else None,
            is_world_process_zero=self.mesh.rank == 0,
            total_flos=self.total_flos,
            log_history=progress.history.lines,
        )

    def summary_values(self) -> Values:
        """Values of the whole run, as far as it is, by transformers' names."""
        began, samples = self.progress.began
        return self.progress.totals.summary(
            seconds=time.perf_counter() - began,
            samples=self.samples - samples,
            flops=self.total_flos,
            epoch=self.epoch,
        )

    def note(self, *lines: str | None) -> None:
        """Show lines to a person, on rank 0; None stands for no line."""
        for line in filter(None, lines):
            self.console.note(line)

    def reset_control(self) -> TrainerControl:
        """Forget what was requested for the latest step; a request to stop the run stays."""
        self.events.control = TrainerControl(stop=self.events.control.stop)
        return self.events.control

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Add values that are no step's to the history, and announce them to callbacks."""
        self.progress.history.values(values, self.progress.step, self.epoch)
        self.events.call("on_log", self.progress.step, values)

    def log_evaluation(self, values: Values) -> None:
        """Log the values of an evaluation, and announce the evaluation to callbacks."""
        self.log_values(values)
        self.events.control.evaluate = False
        self.events.call("on_evaluate", self.progress.step, values)
