"""`RunContext`, the parts of a run as `build_run` creates them, and `RunProgress`, the counters that its steps update."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import median_high
from typing import Any

from torch import nn

from zeromesh.errors import counted
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.telemetry.status_board import Activity
from zeromesh.telemetry.step_recorder import Figures, added
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher
from zeromesh.trainer.checkpoints.trainer_state import Best, TrainerState, settings_of
from zeromesh.trainer.config.sections.schedule import LRSchedule
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import Collate, MapDataset
from zeromesh.trainer.data.feed import RunData
from zeromesh.trainer.data.loader import BatchLoader, Feed, Workers
from zeromesh.trainer.data.sampler import BatchPlan
from zeromesh.trainer.data.streaming import StreamedDataset
from zeromesh.trainer.formatting import Detail
from zeromesh.trainer.loop.prediction import PreprocessLogits
from zeromesh.trainer.loop.trained_model import TrainedModel
from zeromesh.trainer.losses.losses import ComputeLoss
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.monitoring.plan_check import PlanCheck
from zeromesh.trainer.monitoring.step_metrics import StartTimes, unstrict
from zeromesh.trainer.monitoring.step_stats import StepResult, StepStats, traffic_table
from zeromesh.trainer.torch_lr_scheduler import MakeScheduler, TorchSchedule

Values = dict[str, float]  # Values of an evaluation or of a run by name, such as `eval_loss`.
Line = dict[str, Any]
COUNTERS = ("step", "passed_over", "tokens", "skipped", "skipped_in_a_row", "rewinds", "best", "ended", "origin")
"""The names of what a `TrainerState` has of a `RunProgress`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserInputs:
    """The arguments that the user has passed to the trainer beside its configuration."""

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
    """The inputs that come from the configuration, not from arguments."""

    @property
    def reads_text(self) -> bool:
        """True if the configuration names the text data and the tokenizer."""
        return self.train_dataset is None and self.eval_dataset is None and self.processing_class is None

    def names(self) -> dict[str, str]:
        """Return for each input a text that says if it was passed, for ranks to compare."""
        given = {each.name: "given" if getattr(self, each.name) is not None else "not given" for each in fields(self)}
        return {**given, **dict.fromkeys((*self.named, "named"), "named in the configuration")}


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """The result of a run. Losses are means over targets; `losses` has one per step. A global batch without targets is no step."""

    final_step: int
    final_loss: float
    losses: tuple[float, ...] = field(repr=False)
    """The losses of this process's steps; a resumed run has the earlier ones in `metrics.jsonl`."""
    eval_loss: float | None
    """The loss of the evaluation after the last step; None without evaluation data."""
    tokens: int
    tokens_per_second: float
    """Tokens per second over all ranks, without the first step, which records and allocates."""
    peak_memory_bytes: int
    """The peak memory of the rank with the most, in bytes."""
    skipped_steps: int
    """Steps without an update, because their gradients were not finite."""
    passed_over: int = 0
    """Global batches of this process without targets, or passed over by `recovery.on_spike`, which are no steps."""
    metrics: dict[str, float] = field(default_factory=dict, repr=False)
    """The summary of the run under transformers' names: `train_loss`, `train_runtime` in seconds, `total_flos`, `epoch`, ..."""


def comes_after(step: int, every: int | str) -> bool:
    """Return True if what is due every so many steps is due after `step`, counted from 1. For `every` 0 or `epoch` none is."""
    return isinstance(every, int) and every > 0 and step % every == 0


@dataclass(kw_only=True, slots=True)
class RunProgress:
    """The counters of a run. Losses and seconds are those of this process's steps."""

    max_nonfinite: int  # The limit of consecutive skipped steps, after which the run ends; 0: none.
    resumed: TrainerState = field(default_factory=lambda: TrainerState(step=0, samples=0, tokens=0, updates=0, skipped=0))
    """The state from which this process goes on: that of the resumed checkpoint, or of step 0."""
    log: list[Line] = field(default_factory=list)
    """The logged lines in transformers' form, which callbacks know as `state.log_history`."""
    unlogged: list[float] = field(default_factory=list)  # The losses since the last line of the log.
    step: int = 0
    passed_over: int = 0
    """The number of data steps skipped: a callback ended an epoch early, or a global batch had no targets or was a spike."""
    without_targets: int = 0  # The number of global batches without targets or with a spike, in this process.
    accepted: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=0))  # see `Judge`
    acts: list[Mapping[str, Any]] = field(default_factory=list)  # on suspicious steps, until a metrics line has them
    reached: int = 0  # The data position after the last step made, counting skipped data steps.
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0  # Tokens since the start of training.
    skipped: int = 0  # Steps without an update since the start of training.
    skipped_in_a_row: int = 0
    cause: str = ""  # The reason why the latest skipped step was skipped.
    rewinds: int = 0  # as in `TrainerState`
    origin: str = ""
    unit: str = "tokens"
    communication: Figures = field(default_factory=dict)
    bubbles: list[Mapping[str, float]] = field(default_factory=list)
    best: Best = field(default_factory=Best)
    ended: str = ""  # The reason for an end before the last step; empty if there is none.
    evaluated_targets: int | None = None  # Number of targets of the latest evaluation; None for one of several sets.
    owes: set[str] = field(default_factory=set)  # as in `TrainerState`: a run that is stopped puts these off
    began: tuple[float, int] = field(default_factory=lambda: (time.perf_counter(), 0))
    """The start of training in this process, by `time.perf_counter`, and the number of samples before."""
    summary: Values = field(default_factory=dict)
    report: FitReport | None = None
    unfinished: StepResult | None = None
    """The result of the latest step, until it is logged, callbacks have heard of it, and what it asked for is done."""
    begun: dict[str, Any] = field(default_factory=dict)  # what that changes, as it was before, and after which `step`
    concluded: tuple[int, dict[str, Any]] = (0, {})  # the latest step of which all is done, and the callbacks' states then

    @property
    def position(self) -> int:
        """The index of the next data step: steps made and data steps skipped."""
        return self.step + self.passed_over

    @property
    def too_many_skipped(self) -> bool:
        return 0 < self.max_nonfinite <= self.skipped_in_a_row

    @property
    def last_loss(self) -> float | None:
        return self.losses[-1] if self.losses else self.resumed.loss

    def resume(self, state: TrainerState) -> None:
        self.resumed, self.unlogged, self.owes = state, [*state.unlogged], set(state.owes)
        for name in COUNTERS:
            setattr(self, name, getattr(state, name))
        self.reached = self.position
        self.log[:] = [unstrict(line) for line in state.log_history]
        self.accepted.clear()
        self.accepted.extend((loss, norm) for loss, norm in state.accepted)

    def rewind(self, state: TrainerState) -> None:
        """Go back to `state`, an earlier one, and pass over the data of the steps since then."""
        position, undone, rewinds = self.position, self.step - state.step, self.rewinds
        first = self.resumed if self.resumed.step <= state.step else state
        log = [line for line in self.log if line["step"] <= state.step]
        self.resume(replace(state, passed_over=position - state.step, ended="", log_history=log))
        self.resumed, self.rewinds, self.skipped_in_a_row, self.begun = first, rewinds + 1, 0, {}
        self.without_targets += undone
        del self.losses[-undone:], self.seconds[-undone:]

    def add(self, result: StepResult) -> None:
        self.reached = self.position + 1
        self.step += 1
        self.losses.append(result.loss)
        self.unlogged.append(result.loss)
        self.seconds.append(result.seconds)
        self.tokens += result.tokens
        self.unit = result.unit
        self.skipped += result.outcome.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.outcome.skipped else 0
        self.cause = result.outcome.cause or self.cause
        if not result.outcome.skipped and math.isfinite(result.loss):
            self.accepted.append((result.loss, result.outcome.grad_norm))
        if result.bubble:
            self.bubbles.append(result.bubble)
        if result.communication:
            self.communication = added(self.communication, result.communication)

    def notes(self) -> list[str]:
        """Return notes about the average step: skipped updates, communication, and the pipeline bubble."""
        found = []
        if self.skipped:
            found.append(f"{counted(self.skipped, 'step')} made no update: their gradients were not finite")
        if self.without_targets:
            found.append(f"{counted(self.without_targets, 'global batch')} passed over, without an update")
        if self.communication:
            table = "\n  ".join(traffic_table(self.communication, steps=len(self.seconds)))
            found.append(Detail(f"communication of this rank in a step:\n  {table}"))
        if self.bubbles:
            measured, predicted = (median_high(one[name] for one in self.bubbles) for name in ("measured", "predicted"))
            found.append(f"pipeline: ranks were idle for {measured:.0%} of a step (median; {predicted:.0%} predicted)")
        return found


@dataclass(kw_only=True, slots=True)
class RunContext:
    """The parts of one run. `config` has values derived from the data, such as the number of steps of an epoch. `model` and `stats`
    are made of the other parts, and set when these are there."""

    config: TrainerConfig
    mesh: Mesh
    inputs: UserInputs
    events: CallbackDispatcher
    console: Console
    start_times: StartTimes
    plan: BatchPlan
    data: RunData
    data_description: Mapping[str, Any]
    """The description of the data that a resumed run must match; see `RunData.description`."""
    schedule: LRSchedule | TorchSchedule
    model: TrainedModel = field(init=False)
    stats: StepStats = field(init=False)
    progress: RunProgress
    workers: Workers
    planned: PlanCheck | None = None
    """The plan's prediction and the measurements to compare it with, where a plan has chosen the layout."""

    @property
    def finished(self) -> bool:
        return bool(self.progress.ended) or self.progress.position >= self.config.run.max_steps

    @property
    def epoch(self) -> float:
        """The epochs of training data consumed so far, as a fraction."""
        return self.plan.epoch_after(self.progress.reached)

    @property
    def samples(self) -> int:
        return self.plan.samples_of(self.progress.position).start

    def begin_end(self) -> None:
        """Note what the end of a step may change, or put it back where an error or a lost rank has cut that end short."""
        progress, begun = self.progress, self.progress.begun
        if begun.get("step") == progress.step:  # Callbacks have got their states back before they heard of this start.
            progress.best, progress.unlogged, progress.owes = begun["best"], [*begun["unlogged"]], {*begun["owes"]}
            progress.ended, progress.log[:] = "", progress.log[: begun["log_history"]]
            self.events.forget_requests(stop_epoch=self.events.control.should_epoch_stop)
            return
        noted = {"best": progress.best, "unlogged": [*progress.unlogged], "owes": sorted(progress.owes), "step": progress.step}
        progress.begun = {**noted, "log_history": len(progress.log), "callbacks": self.states_of_callbacks()}

    def states_of_callbacks(self) -> dict[str, Any]:
        """Return them where the run goes on from memory after a lost rank."""
        return self.events.states() if self.model.require_engine().optimizer_step.journal is not None else {}

    def due_after(self, number: int, position: int) -> dict[str, bool]:
        """Return which actions are due after step `number`, from 1, on data of step `position`; `sync`: replicas are alike then."""
        config, every, last = self.config, self.config.run, position + 1 == self.config.run.max_steps

        def due(steps: int | str) -> bool:
            return comes_after(0 if last else number, steps)

        # Otherwise the checkpoint waits for the evaluation at the end of the epoch.
        judged = every.eval_every != "epoch" or not (last or self.plan.ends_epoch(position))
        found = {
            "log": due(every.log_every) or (every.log_first_step and number == 1),
            "evaluate": comes_after(number, every.eval_every) or (last and judged and every.eval_at_end),
            "save": due(config.checkpoint.every_steps) and judged,
            "stop": last,
            "sample": comes_after(number, every.prompts_every or 0),
        }
        together = any(found[name] for name in found if name != "log") or self.plan.ends_epoch(position)
        return {**found, "sync": together or number % config.parallel.sync_every == 0}

    @property
    def ranks(self) -> Mesh:
        """The ranks that are at one place after the step, as a mesh: between syncs of local steps those of this replica alone."""
        engine = self.model.engine
        return engine.ranks if engine is not None and engine.optimizer_step.diverged else self.mesh

    @property
    def total_flos(self) -> float:
        return 6.0 * self.progress.tokens * self.model.flop_parameters

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that must match in a process that resumes this run."""
        return settings_of(self.config, model=self.model.description, data=self.data_description)

    def loader(self, feed: Feed, *, last: int, state: Mapping[str, Any] | None = None) -> BatchLoader:
        def waiting() -> None:
            self.mesh.post(Activity.DATA)
            if isinstance(feed.dataset, StreamedDataset):
                feed.dataset.show(self.console.note, self.console.status)

        return BatchLoader(feed, self.mesh.data_index, self.workers, last=last, state=state, waiting=waiting)

    def learning_rate_of(self, step: int) -> float:
        """Return the learning rate of step `step`, counted from 0."""
        return self.config.optimizer.lr * self.schedule.factor(step)

    def summary_values(self) -> Values:
        """Return the summary of the run so far, under transformers' names; times and speeds are those of this process."""
        began, samples = self.progress.began
        seconds, losses = max(time.perf_counter() - began, 1e-9), self.progress.losses
        return {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round((self.samples - samples) / seconds, 3),
            "train_steps_per_second": round(len(losses) / seconds, 3),
            "total_flos": self.total_flos,
            "train_loss": sum(losses) / max(1, len(losses)),
            "epoch": self.epoch,
        }

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Append values that belong to no step to the log, and call `on_log`."""
        self.progress.log.append({**values, "epoch": self.epoch, "step": self.progress.step})
        self.events.call("on_log", self.progress.step, values)

    def log_evaluation(self, values: Values) -> None:
        self.log_values(values)
        self.events.control.should_evaluate = False
        self.events.call("on_evaluate", self.progress.step, values)
