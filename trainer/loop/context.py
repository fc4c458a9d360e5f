"""`RunContext`: the parts of a run, which stay as `build_run` has made them, and `RunProgress`, what its steps change."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import NonFiniteError, counted
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.telemetry.event_ring import Activity
from zeromesh.telemetry.step_recorder import Figures, added
from zeromesh.trainer.callbacks.callback import RunState
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher
from zeromesh.trainer.checkpoints.manager import FOLDER
from zeromesh.trainer.checkpoints.trainer_state import Best, description_of, settings_of
from zeromesh.trainer.config.sections.schedule import LRSchedule
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import Collate, MapDataset
from zeromesh.trainer.data.feed import Feed, RunData
from zeromesh.trainer.data.loader import BatchLoader, Workers
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.data.streaming import StreamedDataset
from zeromesh.trainer.formatting import Detail
from zeromesh.trainer.loop.prediction import PreprocessLogits
from zeromesh.trainer.loop.trained_model import TrainedModel
from zeromesh.trainer.losses.losses import ComputeLoss
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.plan_check import PlanCheck
from zeromesh.trainer.monitoring.step_metrics import StartTimes, StepMetrics
from zeromesh.trainer.monitoring.step_stats import StepResult, StepStats, traffic_table
from zeromesh.trainer.torch_lr_scheduler import MakeScheduler, TorchSchedule

Values = dict[str, float]
"""Values of an evaluation or of a run by name, such as `eval_loss`."""
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class UserInputs:
    """The inputs that the user has passed to the trainer beside its configuration."""

    model: nn.Module | Callable[[], nn.Module] | None = None
    train_dataset: MapDataset | None = None
    eval_dataset: MapDataset | Mapping[str, MapDataset] | None = None
    collate: Collate | None = None
    compute_loss: ComputeLoss | None = None
    compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None
    preprocess_logits_for_metrics: PreprocessLogits | None = None
    lr_scheduler: MakeScheduler | None = None
    processing_class: Any = None
    named: frozenset[str] = frozenset()
    """Those that the configuration names, and no script has passed."""

    @property
    def reads_text(self) -> bool:
        """True if the configuration names text, and its tokenizer."""
        return self.train_dataset is None and self.eval_dataset is None and self.processing_class is None

    def names(self) -> dict[str, str]:
        """Which inputs were passed, and which were not: ranks can compare that much of them."""
        given = {each.name: "given" if getattr(self, each.name) is not None else "not given" for each in fields(self)}
        return {**given, **dict.fromkeys((*self.named, "named"), "named in the configuration")}


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """The result of a run. Losses are means over targets; `losses` has one per step. A global batch without a target is no step."""

    final_step: int
    final_loss: float
    losses: tuple[float, ...] = field(repr=False)
    """Those of this process; a run that was resumed has the earlier ones in `metrics.jsonl`."""
    eval_loss: float | None
    """The loss of the evaluation after the last step; None without evaluation data."""
    tokens: int
    tokens_per_second: float
    """Over all ranks, without the first step, which records and allocates."""
    peak_memory_bytes: int
    """The largest of any rank."""
    skipped_steps: int
    """Steps without an update, because their gradients were not finite."""
    passed_over: int = 0
    """Global batches of this process without a target, which made no update and are no steps."""
    metrics: dict[str, float] = field(default_factory=dict, repr=False)
    """The run in a few numbers, by transformers' names: `train_loss`, `train_runtime` in seconds, `total_flos`, `epoch`, ..."""


def _mean(losses: Sequence[float]) -> float:
    """The mean; 0 of none."""
    return sum(losses) / max(1, len(losses))


@dataclass(kw_only=True, slots=True)
class RunProgress:
    """How far a run is, and what its steps add up to. Losses and seconds are those of this process's steps."""

    max_nonfinite: int
    """The run ends after so many skipped steps in a row; 0: never."""
    log: list[Line] = field(default_factory=list)
    """The logged lines in transformers' words: what callbacks know as `state.log_history`."""
    logged: int = 0
    """How many of `losses` the lines of steps are means of."""
    step: int = 0
    """Steps that were made."""
    passed_over: int = 0
    """Steps whose data was left out, because a callback ended an epoch early or because it had no target."""
    without_targets: int = 0
    """The latter, of this process."""
    reached: int = 0
    """The number of steps, made or passed over, up to the last one that was made."""
    learning_rate: float = 0.0
    """The learning rate of the latest step."""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    """Since the start of training."""
    skipped: int = 0
    """Steps without an update since the start of training."""
    skipped_in_a_row: int = 0
    cause: str = ""
    """Why the latest skipped step was."""
    unit: str = "tokens"
    """The unit that the latest step's throughput counts."""
    communication: Figures = field(default_factory=dict)
    bubbles: list[Mapping[str, float]] = field(default_factory=list)
    tokens_before: int = 0
    """Tokens of earlier processes."""
    loss_before: float | None = None
    """The last loss of an earlier process."""
    best: Best = field(default_factory=Best)
    evaluated_targets: int | None = None
    """Targets of the latest evaluation; None where it was of several sets."""
    owes_evaluation: bool = False
    """True if the run was stopped in the evaluation after its last step."""
    stream: Mapping[str, Any] = field(default_factory=dict)
    """The place of the training stream in the checkpoint from which the run was resumed; empty for a dataset with a length."""
    tracker: Mapping[str, str] = field(default_factory=dict)
    """The facts about the run's trackers in the checkpoint from which it was resumed."""
    began: tuple[float, int] = field(default_factory=lambda: (time.perf_counter(), 0))
    """When this process began to train, by `time.perf_counter`, and after how many samples."""
    summary: Values = field(default_factory=dict)
    """Values of the whole run, once it was trained."""
    report: FitReport | None = None

    @property
    def position(self) -> int:
        """The step whose data comes next: steps made and steps passed over."""
        return self.step + self.passed_over

    @property
    def last_loss(self) -> float | None:
        """The latest step's loss; None before the first."""
        return self.losses[-1] if self.losses else self.loss_before

    def add(self, result: StepResult) -> None:
        """Count a step that was just made."""
        self.reached = self.position + 1
        self.step += 1
        self.losses.append(result.loss)
        self.seconds.append(result.seconds)
        self.tokens += result.tokens
        self.unit = result.unit
        self.skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        self.cause = result.cause or self.cause
        if result.bubble:
            self.bubbles.append(result.bubble)
        if result.communication:
            self.communication = added(self.communication, result.communication)

    def log_step(self, metrics: StepMetrics, epoch: float) -> None:
        """Add the line of a step to the log: `loss` is the mean of the steps since the last such line."""
        line: Line = {"loss": _mean(self.losses[self.logged :])}
        self.logged = len(self.losses)
        if metrics.grad_norm is not None:
            line["grad_norm"] = metrics.grad_norm
        self.log.append({**line, "learning_rate": metrics.lr, "epoch": epoch, "step": metrics.step})

    def latest_line(self) -> Line:
        """The last line as transformers gives it to callbacks, which know the step from elsewhere."""
        return {name: value for name, value in self.log[-1].items() if name != "step"}

    def check(self) -> None:
        """Raise `NonFiniteError` after too many skipped steps in a row."""
        if self.max_nonfinite and self.skipped_in_a_row >= self.max_nonfinite:
            raise NonFiniteError(
                f"gradients were not finite in {counted(self.skipped_in_a_row, 'step')} in a row, up to step {self.step} "
                f"(run.max_nonfinite; in the last, {self.cause}); no update of these steps was made. Lower optimizer.lr, look at "
                "the data, or use precision.compute: bfloat16"
            )

    def require_trained(self) -> None:
        """Raise `NonFiniteError` where more than half of all steps made no update: such a run is no success."""
        if self.max_nonfinite and 2 * self.skipped > self.step:
            raise NonFiniteError(
                f"{self.skipped} of {counted(self.step, 'step')} made no update, because their gradients were "
                f"not finite (in the last such "
                f"step, {self.cause or 'of an earlier process'}). The run is complete and what it has is saved, but the model "
                "is hardly trained; look at the first line of metrics.jsonl that has `cause`. run.max_nonfinite: 0 lets such a run "
                "pass"
            )

    def notes(self) -> list[str]:
        """Lines about the average step: skipped updates, communication, and how long a pipeline has stood still."""
        found = []
        if self.skipped:
            found.append(f"{counted(self.skipped, 'step')} made no update: their gradients were not finite")
        if self.without_targets:
            found.append(f"{self.without_targets} global batches had no target and were passed over, without an update")
        if self.communication:
            table = "\n  ".join(traffic_table(self.communication, steps=len(self.seconds)))
            found.append(Detail(f"communication of this rank in a step:\n  {table}"))
        if self.bubbles:
            measured, predicted = (
                sorted(each[name] for each in self.bubbles)[len(self.bubbles) // 2]
                for name in ("measured", "predicted")
            )
            found.append(
                f"pipeline: ranks stood still for {measured:.0%} of a step (median; {predicted:.0%} predicted)"
            )
        return found

    def report_of(self, eval_loss: float | None, peak: int, values: Values) -> FitReport:
        """The report of the run; `peak`: bytes that the rank with the most has needed, `values`: those of the whole run."""
        steady = self.seconds[1:] or self.seconds
        per_step = (self.tokens - self.tokens_before) / max(1, len(self.seconds))
        return FitReport(
            final_step=self.step,
            final_loss=float("nan") if self.last_loss is None else self.last_loss,
            losses=tuple(self.losses),
            eval_loss=eval_loss,
            tokens=self.tokens,
            tokens_per_second=per_step * len(steady) / sum(steady) if steady else 0.0,
            peak_memory_bytes=peak,
            skipped_steps=self.skipped,
            passed_over=self.without_targets,
            metrics=dict(values),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The parts of one run. `config` has what the data decides, such as the number of steps of so many epochs."""

    config: TrainerConfig
    mesh: Mesh
    inputs: UserInputs
    events: CallbackDispatcher
    console: Console
    start_times: StartTimes
    plan: BatchPlan
    data: RunData
    data_description: Mapping[str, Any]
    """The description of the data that a resumed run must have in common with this one; see `RunData.description`."""
    schedule: LRSchedule | TorchSchedule
    model: TrainedModel
    stats: StepStats
    progress: RunProgress
    workers: Workers
    planned: PlanCheck | None = None
    """The prediction of a plan and what is measured meanwhile, where a plan has chosen the layout."""

    @property
    def finished(self) -> bool:
        """True if the run has reached its last step."""
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
        return 6.0 * self.progress.tokens * self.model.counted

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that another process must have in common to resume this run."""
        return settings_of(self.config, model=self.model.described, data=self.data_description)

    @property
    def written(self) -> dict[str, Any]:
        """Settings of the model that it has changed since the run began, with their present values."""
        now, before = description_of(self.model.module), self.model.described
        return {f"model.{name}": now[name] for name in now if name not in before or before[name] != now[name]}

    def loader(self, feed: Feed, *, last: int, state: Mapping[str, Any] | None = None) -> BatchLoader:
        """This rank's batches of a feed; see `BatchLoader`."""

        def waiting() -> None:
            self.mesh.post(Activity.DATA)
            if isinstance(feed.dataset, StreamedDataset):
                feed.dataset.show(self.console.note, self.console.status)

        return BatchLoader(feed, self.mesh.data_index, self.workers, last=last, state=state, waiting=waiting)

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
            tokens=progress.tokens,
            best_metric=best.value,
            best_step=best.step,
            best_checkpoint=str(checkpoint) if checkpoint is not None and checkpoint.exists() else None,
            is_world_process_zero=self.mesh.rank == 0,
            total_flos=self.total_flos,
            log_history=progress.log,
        )

    def summary_values(self) -> Values:
        """Values of the whole run, as far as it is, by transformers' names; times and speeds are those of this process."""
        began, samples = self.progress.began
        seconds, losses = max(time.perf_counter() - began, 1e-9), self.progress.losses
        return {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round((self.samples - samples) / seconds, 3),
            "train_steps_per_second": round(len(losses) / seconds, 3),
            "total_flos": self.total_flos,
            "train_loss": _mean(losses),
            "epoch": self.epoch,
        }

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Add values that are no step's to the history, and announce them to callbacks."""
        self.progress.log.append({**values, "epoch": self.epoch, "step": self.progress.step})
        self.events.call("on_log", self.progress.step, values)

    def log_evaluation(self, values: Values) -> None:
        """Log the values of an evaluation, and announce the evaluation to callbacks."""
        self.log_values(values)
        self.events.control.should_evaluate = False
        self.events.call("on_evaluate", self.progress.step, values)
