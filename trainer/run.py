"""One run: the objects that a trainer makes when they are first needed, and the loop over steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PredictionOutput

from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import PhaseError
from zeromesh.kernels.cpu_matmul import take_product_buffers
from zeromesh.mesh.mesh_shape import AXES
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import reuse_freed_memory
from zeromesh.options import ZeroOptions
from zeromesh.trainer.callbacks.control import RunState, TrainerControl
from zeromesh.trainer.callbacks.dispatcher import CallbackDispatcher
from zeromesh.trainer.checkpoints.best_metric import Best, goal_of, value_of
from zeromesh.trainer.checkpoints.manager import FOLDER, RunCheckpoints, load_weights
from zeromesh.trainer.checkpoints.trainer_state import settings_of
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import MapDataset
from zeromesh.trainer.data.feed import require_same_data
from zeromesh.trainer.data.streaming import StreamedDataset
from zeromesh.trainer.formatting import human_bytes, human_count
from zeromesh.trainer.loop.evaluation import Evaluator, Values
from zeromesh.trainer.loop.stop_signals import leave, stop_requests
from zeromesh.trainer.loop.training_loop import TrainingLoop
from zeromesh.trainer.lr_schedule import STEADY
from zeromesh.trainer.models.build import check_model
from zeromesh.trainer.models.hub_download import pin_sources
from zeromesh.trainer.monitoring.console import RunConsole, make_console
from zeromesh.trainer.monitoring.log_history import LogHistory
from zeromesh.trainer.monitoring.oom_report import explained
from zeromesh.trainer.monitoring.profiler import Profile
from zeromesh.trainer.monitoring.progress import FitReport, Progress
from zeromesh.trainer.monitoring.run_directory import RunDirectory, start_facts
from zeromesh.trainer.monitoring.start_times import StartTimes
from zeromesh.trainer.monitoring.step_stats import RankStats, StepStats
from zeromesh.trainer.setup import build
from zeromesh.trainer.setup.engine_options import engine_options
from zeromesh.trainer.setup.first_batch_checks import UserInputs
from zeromesh.trainer.setup.model import TrainedModel
from zeromesh.trainer.setup.rank_agreement import require_same_settings
from zeromesh.trainer.tracking.tracking import Tracking


class Run:
    """A model on a mesh with its data, from before the first step to after the last."""

    def __init__(
        self, config: TrainerConfig, mesh: Mesh, given: UserInputs, events: CallbackDispatcher, start_times: StartTimes
    ) -> None:
        self.mesh, self.given, self.events, self.start_times = mesh, given, events, start_times
        self.call = events.call
        require_same_settings(mesh, config, {**given.names(), "callbacks": "some" if events else "none"})
        config = pin_sources(config, mesh, model_given=given.model is not None)
        self.console: RunConsole = make_console(mesh.rank)
        if mesh.device.type == "cpu":
            reuse_freed_memory()
            take_product_buffers()
        self.step = 0
        self.passed_over = 0
        """Steps whose data was left out, because a callback ended an epoch early."""
        self.reached = 0
        """The number of steps, made or passed over, up to the last one that was made."""
        self.best = Best()
        self.latest_metric = float("nan")
        """Of the latest evaluation, what `run.metric` names."""
        self.goal = goal_of(config.run.metric, config.run.metric_goal)
        self.learning_rate = 0.0
        self.history = LogHistory(kept=given.of_transformers or events.has_theirs)
        self._summary: dict[str, float] = {}
        self._began = (time.perf_counter(), 0)
        """When this process began to train, and after how many samples."""
        self.progress = Progress(config.run.max_nonfinite)
        self.tracker: Mapping[str, str] = {}
        """What the checkpoint that the run goes on from knows of its trackers."""
        self.report: FitReport | None = None
        self.owes_evaluation = False
        """Whether the run was stopped in the evaluation after its last step."""
        self._broken = ""
        build.set_determinism(config.run.deterministic)
        self.config, self.plan = config, build.batch_plan(config, mesh)
        options = engine_options(config, self.plan.accumulation)
        self.tell(*config.notes)
        self._say_what_comes(options.precision.table(config.optimizer.name))
        if given.model is None:
            check_model(config.model)
        self.console.status("reading the data")
        self.data = build.prepare_data(
            config, given.train_dataset, given.eval_dataset, given.processing_class, mesh, self.console
        )
        self.tell(*self.data.notes)
        self.config, self.plan = build.over_data(config, self.plan, self.data.train)
        self.schedule = build.learning_rate_schedule(self.config, given.lr_scheduler)
        self._described = self.data.description(shuffle=self.config.data.shuffle)
        mesh.meet("comparison of data")
        require_same_data(mesh, self.data.sets(), self._decided_by_the_data())
        self.evaluator = Evaluator(self)
        start_times.end("data")
        self.console.status("building the model")
        self.trained = TrainedModel(self, options)
        start_times.end("engine")
        try:
            self.figures = self._make_figures(options)
            start_times.end("figures")
        except BaseException:
            self.trained.close()
            raise

    @property
    def finished(self) -> bool:
        """Whether the run is at its last step."""
        return self.step + self.passed_over >= self.config.run.max_steps

    def state(self, directory: Path) -> RunState:
        """See `Trainer.state`."""
        run, best = self.config.run, self.best
        checkpoint = CheckpointStore(directory / FOLDER).path(best.step) if best.value is not None else None
        return RunState(
            step=self.step,
            max_steps=run.max_steps,
            epoch=self.epoch,
            epochs=self.plan.epoch_after(run.max_steps) if run.epochs is None else run.epochs,
            tokens=self.progress.tokens,
            best_metric=best.value,
            best_step=best.step,
            best_checkpoint=str(checkpoint) if checkpoint is not None and checkpoint.exists() else None,
            is_world_process_zero=self.mesh.rank == 0,
            total_flos=self.total_flos,
            log_history=self.history.lines,
        )

    @property
    def epoch(self) -> float:
        """How many times the training data was passed over, as far as it was trained on."""
        return self.plan.epoch_after(self.reached)

    @property
    def total_flos(self) -> float:
        """See `RunState.total_flos`."""
        return 6.0 * self.progress.tokens * self.trained.parameters

    def rate_of(self, step: int) -> float:
        """The learning rate of step `step`, counted from 0."""
        return self.config.optimizer.lr * self.schedule.factor(step)

    def fresh_wishes(self) -> TrainerControl:
        """What is wished for when nothing is, but that a run which is to stop still is."""
        return TrainerControl(stop=self.events.wishes.stop)

    def agree(self) -> None:
        """Make what any rank's callbacks ask for the wish of all."""
        self.events.agree(self.mesh)

    # Before training

    def _decided_by_the_data(self) -> dict[str, object]:
        """What all ranks must have alike, now that the data is read."""
        run = self.config.run
        steps = {"run.max_steps": run.max_steps, "schedule.warmup_steps": self.config.schedule.warmup_steps}
        return {
            **{f"data.{name}": each for name, each in self._described.items()},
            **steps,
            "schedule": self.schedule.factor(0),
        }

    def _make_figures(self, options: ZeroOptions) -> StepStats:
        ledger, samples = self.trained.require_engine().ledger, self.config.batch.global_size
        figures = StepStats(self.trained.flops, self.mesh, options.precision.compute, samples, ledger)
        self.tell(*figures.notes)
        return figures

    def _say_what_comes(self, precision: str) -> None:
        """What is known before anything is read."""
        shape, device = self.mesh.shape, self.mesh.device.type.upper()
        axes = [f"{axis} {size}" for axis, size in zip(AXES, shape.sizes, strict=True) if size > 1]
        ranks = f"{shape.world_size} {device} ranks: {' x '.join(axes)}" if axes else f"1 {device} rank"
        self.console.note(f"{self.config.run.name}: ZeRO stage {self.config.zero.stage} on {ranks}")
        if shape.tensor > 1 or shape.pipeline > 1:
            self.console.note(self.mesh.picture())
        self.console.note(f"batch: {self.plan.equation()}")
        self.console.note(precision)

    def tell(self, *notes: str | None) -> None:
        """Tell a person whatever there is to tell."""
        for note in filter(None, notes):
            self.console.note(note)

    # Training

    def fit(self, directory: RunDirectory) -> FitReport:
        """Train up to the last step, in a directory that is locked.

        A run that was interrupted goes on where it was; one that has ended says so.

        Raises:
            KeyboardInterrupt, SystemExit: after a step and its checkpoint, when some rank was told to stop.
            NonFiniteError: at the end, where more than half of all steps made no update.
        """
        if self.report is not None:
            self.console.note(f"already finished at step {self.step}; a new Trainer trains this model further")
            return self.report
        feed = self.trained.feeds.train()
        if feed is None:
            raise build.no_training_data()
        build.require_trained_parameters(self.trained.model)
        self.start_times.begin()
        with self.guarded("trainer.fit()"), stop_requests(self.console.note) as request:
            checkpoints = RunCheckpoints(
                self.config.checkpoint,
                directory.path,
                self.mesh,
                self.trained.require_engine(),
                self.console.note,
                goal=self.goal,
                keep_best=int(self.config.run.load_best),
                linked=self.history.kept,
            )
            eval_loss = self._resume(checkpoints) if self.step == 0 else None
            self.start_times.end("checkpoints")
            stopped = 0
            if not self.finished or self.owes_evaluation:
                if not self.finished:
                    checkpoints.require_room()
                with (
                    self._ending(checkpoints),
                    directory.open(self.config, self.step, start_facts(self.mesh, self.trained.parameters)) as writer,
                    directory.monitored(self.mesh),
                    self.console,
                    self._tracking(directory) as tracking,
                    Profile(self.config.profile, directory.path, self.mesh, self.console.note) as profile,
                ):
                    self.start_times.end("files and trackers")
                    loop = TrainingLoop(
                        self,
                        feed,
                        writer=writer,
                        tracking=tracking,
                        profile=profile,
                        checkpoints=checkpoints,
                        request=request,
                    )
                    stopped = loop.go()
                    eval_loss = loop.eval_loss
            if not stopped and self.config.run.load_best:
                self._load_best(checkpoints)
            report = None if stopped else self._end(eval_loss)
        if report is None:
            self.console.note(f"stopped after step {self.step}")
            leave(stopped)
        self.progress.require_trained(report.final_step)
        return report

    def _tracking(self, directory: RunDirectory) -> Tracking:
        return Tracking.open(
            self.config, self.mesh, directory.path, step=self.step, known=self.tracker, note=self.console.note
        )

    @contextmanager
    def _ending(self, checkpoints: RunCheckpoints) -> Iterator[None]:
        """An error of a single rank leaves nothing that is still written when it goes on."""
        try:
            yield
        except BaseException:
            if self.mesh.world_size == 1:
                checkpoints.give_up()
            raise

    def _resume(self, checkpoints: RunCheckpoints) -> float | None:
        """Go to where an earlier process was, if there was one; the evaluation loss there."""
        self.console.status("looking for checkpoints")
        state = checkpoints.resume(self.settings)
        if state is None:
            return None
        self.step, self.passed_over, self.tracker = state.step, state.passed_over, state.tracker
        self.reached = state.step + state.passed_over
        self.best = Best.from_json(state.best, "the checkpoint")
        self.events.restore(state.callbacks)
        self.history.restore(state.log_history, "the checkpoint")
        if isinstance(self.data.train, StreamedDataset):
            self.data.train.restore(state.stream, "the checkpoint")
        self.progress.resume(tokens=state.tokens, skipped=state.skipped, loss=state.loss)
        if state.max_steps != self.config.run.max_steps and self.config.schedule.name not in STEADY:
            now = f"{state.max_steps} then, {self.config.run.max_steps} now"
            self.console.note(f"run.max_steps: {now}; the learning rate follows the curve of the new one from here on")
        evaluates = self.data.eval is not None and bool(self.config.run.eval_at_end or self.config.run.eval_every)
        self.owes_evaluation = self.finished and evaluates and state.eval_loss is None
        owed = ", but not evaluated there, which is done now" if self.owes_evaluation else ""
        if self.finished:
            run = self.config.run
            length = "run.max_steps" if run.epochs is None else "run.epochs"
            self.console.note(
                f"nothing was trained: run {run.name!r} is complete at step {self.reached} of {run.max_steps}{owed}; "
                f"raise {length}, or choose another run.name"
            )
        else:
            self.console.note(f"resumed from step {state.step} ({human_count(state.tokens)} tokens)")
        return state.eval_loss

    def _load_best(self, checkpoints: RunCheckpoints) -> None:
        """Go back to the weights of the best evaluation."""
        if self.best.value is None or self.best.step == self.step:
            return
        checkpoints.load_weights(self.best.step)
        self.console.note(
            f"weights of step {self.best.step}: {self.config.run.metric} {self.best.value:.4g} is the best"
        )

    def _end(self, eval_loss: float | None) -> FitReport:
        metrics = self._summary or self._values_of_the_run()
        report = self.progress.report(self.step, eval_loss, RankStats.of(self.mesh).peak_bytes, metrics)
        if report.losses:
            self.console.note(
                f"done: {report.final_step} steps, loss {report.final_loss:.4f}, "
                f"{human_count(report.tokens_per_second)} {self.progress.unit}/s, "
                f"peak memory {human_bytes(report.peak_memory_bytes)} a rank"
            )
        self.tell(*self.progress.notes())
        self.trained.make_whole()
        self.report = report
        return report

    def begin_summary(self) -> None:
        """This process begins to train now."""
        self._began = (time.perf_counter(), self._samples)

    def summarize(self) -> None:
        """Log values of the whole run, which has been trained."""
        self._summary = self._values_of_the_run()
        self.log_values(self._summary)

    def _values_of_the_run(self) -> dict[str, float]:
        at, samples = self._began
        return self.progress.summary(
            seconds=time.perf_counter() - at,
            samples=self._samples - samples,
            flops=self.total_flos,
            epoch=self.epoch,
        )

    @property
    def _samples(self) -> int:
        """Since the start of training."""
        return self.plan.samples_of(self.step + self.passed_over).start

    def log_values(self, values: Mapping[str, Any]) -> None:
        """Note values beside those of steps, and tell callbacks of them."""
        self.history.values(values, self.step, self.epoch)
        self.call("on_log", self.step, values)

    def log_evaluation(self, values: Values) -> None:
        """The same of an evaluation, whose callbacks come after."""
        self.log_values(values)
        self.events.wishes.evaluate = False
        self.call("on_evaluate", self.step, values)

    @property
    def settings(self) -> dict[str, Any]:
        """What another process that goes on with this run must have the same."""
        return settings_of(self.config, model=build.description_of(self.trained.model), data=self._described)

    @property
    def processing_class(self) -> Any:
        """The tokenizer that is saved with the model."""
        given = self.given.processing_class
        return given if given is not None else self.data.processing_class

    def before_update(self, number: int) -> None:
        """Between the last backward of a step and its update."""
        with self.trained.gradients_to_read():
            self.call("on_pre_optimizer_step", number)

    # When something goes wrong

    def require_sound(self) -> None:
        """Raise `PhaseError` after an error that left the ranks apart, or weights half updated."""
        if self._broken:
            raise PhaseError(
                f"this run ended after {self.step} whole steps with {self._broken}. It cannot go on; make a new Trainer"
            )

    @contextmanager
    def guarded(self, call: str) -> Iterator[None]:
        """A call that all ranks make, such as `trainer.fit()`; "" where a rank may make it alone.

        After an error that leaves something half done that ranks do together the run cannot go on, and the others are told. A call
        that is refused before that has changed nothing. A single rank has lost nothing but the step that it was in.
        """
        self.require_sound()
        begun = self.mesh.begun
        try:
            with self.mesh.call(call) if call else nullcontext():
                yield
        except BaseException as error:
            where = Path(self.config.run.output_dir).expanduser() / self.config.run.name
            told = explained(error, self.trained.engine, self.mesh, where, self.step)
            half_done = self.mesh.begun != begun or self.mesh.in_doubt
            if half_done:
                self.mesh.fail(told)
            if half_done or (self.trained.engine is not None and not self.trained.engine.abandon_pass()):
                self._broken = f"{type(told).__name__}: {told}".removesuffix(": ")
            if told is error:
                raise
            raise told from error

    # Beside and after training

    def load_weights(self, checkpoint: Path) -> None:
        """Take the weights of a checkpoint, to evaluate them; all ranks call it. Raises as `checkpoints.load_weights`."""
        with self.guarded("trainer.run.load_weights()"):
            self.step = load_weights(checkpoint, self.trained.require_engine(), self.mesh)

    def evaluations(self, stop: Callable[[], bool]) -> Values | None:
        """Evaluate in the loop; None once `stop` is true, which is so on all ranks or on none."""
        values = self.evaluator.evaluate(None, ignored=self.evaluator.ignored_in_training, stop=stop)
        if values is not None:
            self.console.note(self.evaluator.note(values))
            self.latest_metric = value_of(self.config.run.metric, values)
        return values

    def evaluate(
        self, dataset: MapDataset | Mapping[str, MapDataset] | None, prefix: str, ignored: Sequence[str] | None
    ) -> Values:
        """See `Trainer.evaluate`."""
        with self.guarded("trainer.evaluate()"):
            values = self.evaluator.evaluate(dataset, prefix, ignored)
        if values is None:
            raise PhaseError("an evaluation has ended early that nothing was to end")
        self.log_evaluation(values)
        return {**values, "epoch": self.epoch}

    def predict(self, dataset: MapDataset, prefix: str, ignored: Sequence[str] | None) -> PredictionOutput:
        """See `Trainer.predict`."""
        with self.guarded("trainer.predict()"):
            output = self.evaluator.predict(dataset, prefix, ignored)
        self.call("on_predict", output.metrics or {})
        return output

    def close(self) -> None:
        """See `Trainer.close`."""
        self.trained.close()
