"""The loop over steps: train, log, evaluate, save, stop in order."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch

from zeromesh.optim.fused_optimizer import Rates
from zeromesh.trainer.callbacks.control import TrainerControl
from zeromesh.trainer.checkpoints.best_metric import goal_of, value_of
from zeromesh.trainer.checkpoints.manager import RunCheckpoints
from zeromesh.trainer.checkpoints.trainer_state import TrainerState
from zeromesh.trainer.data.feed import Feed
from zeromesh.trainer.data.streaming import StreamedDataset
from zeromesh.trainer.loop.context import RunContext
from zeromesh.trainer.loop.evaluation import evaluate, evaluation_line
from zeromesh.trainer.loop.stop_signals import StopRequest
from zeromesh.trainer.monitoring.memory import STEP_MEMORY, MemoryTimeline
from zeromesh.trainer.monitoring.profiler import Profile
from zeromesh.trainer.monitoring.step_metrics import EVALUATIONS, MetricsWriter, StepMetrics
from zeromesh.trainer.monitoring.step_stats import RankStats, Stragglers
from zeromesh.trainer.tracking.tracking import Tracking


class TrainingLoop:
    """Trains a run from the step where it is to its last one, or to one after which it is asked to stop."""

    def __init__(
        self,
        run: RunContext,
        feed: Feed,
        *,
        writer: MetricsWriter | None,
        tracking: Tracking,
        profile: Profile,
        checkpoints: RunCheckpoints,
        request: StopRequest,
    ) -> None:
        self._run = run
        self._progress = run.progress
        self._feed = feed
        self._writer = writer
        self._tracking = tracking
        self._profile = profile
        self._checkpoints = checkpoints
        self._request = request
        self._last = run.config.run.max_steps
        self._stragglers = Stragglers()
        wanted = run.config.profile.step_figures
        timeline = writer.path.with_name(STEP_MEMORY) if writer is not None and wanted else None
        self._memory = MemoryTimeline(timeline, self._progress.step + 1)
        self._stopped = 0
        """The signal by which some rank was asked to stop."""
        self._ended = ""
        """Why the run ends before its last step, as if that were it."""
        self._written = 0
        """The latest step whose line is in the files."""
        self._metrics: StepMetrics | None = None
        """The line of the present step, until it is logged."""
        self._unannounced = False
        """Whether the present step is saved, and `on_save` was not called yet."""
        self._evaluated: tuple[int, float] | None = None
        """The latest evaluation: after which step, and its loss."""

    @property
    def eval_loss(self) -> float | None:
        """The loss of the evaluation after the present step; None where there was none."""
        return self._evaluated[1] if self._evaluated and self._evaluated[0] == self._progress.step else None

    @property
    def _over(self) -> bool:
        return self._run.finished or bool(self._stopped or self._ended)

    def go(self) -> int:
        """Train; returns 0 after the last step, or the number of the signal that some rank was stopped by."""
        run = self._run
        self._progress.began = (time.perf_counter(), run.samples)
        run.events.call("on_train_begin")
        run.console.start(total_steps=self._last, first_step=self._progress.step, after=self._last_evaluation())
        if run.config.run.eval_at_start and self._progress.step == 0 and run.data.eval is not None:
            self._evaluate()
            run.start_times.end("evaluation")
        self._begin_epoch(resumed=self._progress.step > 0)
        while not self._over:
            self._train_one()
        wanted = (run.config.run.eval_at_end or self._progress.owes_evaluation) and self.eval_loss is None
        if wanted and run.data.eval is not None and not self._stopped:
            self._save_last()
            self._evaluate()
        if self._ended:
            run.note(f"ended after step {self._progress.step}: {self._ended}")
        self._save_last()
        self._announce_save()
        self._checkpoints.close()
        if not self._stopped:
            self._progress.summary = run.summary_values()
            run.log_values(self._progress.summary)
            run.events.call("on_train_end")
        return self._stopped

    def _train_one(self) -> None:
        run = self._run
        number = self._progress.step + 1
        position = self._progress.position
        run.reset_control()
        run.events.call("on_step_begin", number)
        rates = Rates(lr_factor=run.schedule.factor(number - 1), momentum=run.schedule.momentum(number - 1))
        self._progress.learning_rate = run.config.optimizer.lr * rates.lr_factor

        def before_update() -> None:
            with run.model.gradients_to_read():
                run.events.call("on_pre_optimizer_step", number)

        feed = replace(self._feed, passed_over=self._progress.passed_over)
        with self._profile.step(number), self._memory.recorded(number, run.model.require_engine().ledger):
            result = run.model.stepper.train_step(
                feed,
                number - 1,
                rates,
                substep_end=partial(run.events.call, "on_substep_end", number),
                before_update=before_update,
                stop_signal=self._request.signal,
            )
        self._progress.step, self._progress.reached = number, position + 1
        start = run.start_times.finish()
        self._stopped = self._stopped or result.stop_signal
        run.events.call("on_optimizer_step", number)
        self._stragglers.took(result.seconds, result.idle)
        due = self._due_after_step(position)
        figures = RankStats.of(run.mesh, self._stragglers.busy) if due.log else None
        peak = figures.peak_bytes if figures else 0
        metrics = self._progress.totals.add(result, number, self._progress.learning_rate, peak, run.stats.of(result))
        self._progress.history.count(metrics.loss)
        if result.skipped and result.loss_scale == 1.0:
            run.note(f"step {number}: no update on any rank: {result.cause}")
        self._metrics = metrics
        if due.log:
            metrics = self._metrics = self._with_scalars(metrics)
            self._write(metrics)
        run.note(start)
        run.events.control |= due
        self._announce("on_step_end", metrics)
        run.events.agree(run.mesh)
        if not self._log():
            run.console.advance(number)
        if figures is not None:
            run.note(self._stragglers.look(number, figures.busy))
        self._progress.totals.check(number)
        self._act_on_requests()
        if run.plan.ends_epoch(position) or run.events.control.stop_epoch or (self._over and not self._stopped):
            self._end_epoch(position)

    def _due_after_step(self, position: int) -> TrainerControl:
        """What the configuration asks for after the step that was just made, whose data was that of step `position`."""
        number, config = self._progress.step, self._run.config
        every, last = config.run, position + 1 == self._last

        def due(steps: int | str) -> bool:
            return not isinstance(steps, str) and bool(steps) and (last or number % steps == 0)

        judged = every.eval_every != "epoch"  # Else the last checkpoint waits for the evaluation.
        return TrainerControl(
            log=due(every.log_every) or (every.log_first_step and number == 1),
            evaluate=due(every.eval_every) or (last and judged and every.eval_at_end),
            save=due(config.checkpoint.every_steps) and (judged or not last),
            stop=last,
        )

    def _due_after_epoch(self) -> TrainerControl:
        """What the configuration asks for at the end of an epoch."""
        config = self._run.config
        return TrainerControl(
            log=config.run.log_every == "epoch",
            evaluate=config.run.eval_every == "epoch",
            save=config.checkpoint.every_steps == "epoch",
        )

    def _with_scalars(self, metrics: StepMetrics) -> StepMetrics:
        """The line with the values that losses, callbacks and `trainer.log` have added since the last one."""
        found = self._run.model.stepper.scalars.take(self._run.mesh)
        return replace(metrics, extras={**metrics.extras, **found}) if found else metrics

    def _announce(self, event: str, metrics: StepMetrics) -> None:
        """Call callbacks with a step's line; what they add to it is logged with the next one."""
        record = metrics.record()
        before = dict(record)
        self._run.events.call(event, metrics.step, record)
        added = {name: value for name, value in record.items() if value is not before.get(name)}
        self._run.model.stepper.scalars.add(added)

    def _write(self, metrics: StepMetrics) -> None:
        """Write a step's line, before callbacks are called, so that it is there whatever they do."""
        run = self._run
        if self._writer is not None:
            self._writer.write({**metrics.record(), **run.start_times.take()})
        self._tracking.log(metrics)
        run.console.step(metrics)
        self._written = metrics.step

    def _log(self) -> bool:
        """Log the present step, if that is requested and not done yet; returns whether it was logged now."""
        run, metrics = self._run, self._metrics
        if not run.events.control.log or metrics is None:
            return False
        if self._written != metrics.step:
            peak = RankStats.of(run.mesh).peak_bytes
            metrics = self._with_scalars(replace(metrics, peak_memory_bytes=peak))
            self._write(metrics)
        self._metrics = None
        run.events.control.log = False
        self._progress.history.step(metrics, run.epoch)
        self._announce("on_log", metrics)
        return True

    def _act_on_requests(self) -> None:
        """Evaluate, save and stop as is requested now."""
        run = self._run
        if run.events.control.evaluate and run.data.eval is not None and not self._stopped:
            if self._over:
                self._save_last()
            self._evaluate()
            run.events.agree(run.mesh)
        self._checkpoints.poll()
        if run.events.control.save and not self._stopped:
            self._save()
        if run.events.control.stop and not self._over:
            self._ended = "a callback asked to stop"

    def _begin_epoch(self, *, resumed: bool = False) -> None:
        run = self._run
        position = self._progress.position
        if not self._over and (resumed or position == 0 or run.plan.ends_epoch(position - 1)):
            run.reset_control()
            run.events.call("on_epoch_begin", run.plan.epochs_after(position))

    def _end_epoch(self, position: int) -> None:
        """End an epoch, or the last one of the run, after the data of step `position`; pass over what is left of it."""
        run = self._run
        epoch = run.plan.epochs_after(position)
        if not run.plan.ends_epoch(position) and not self._over:
            self._progress.passed_over += run.plan.next_epoch(position + 1) - position - 1
        stop_epoch = run.events.control.stop_epoch
        run.reset_control().stop_epoch = stop_epoch
        run.events.control |= self._due_after_epoch()
        run.events.call("on_epoch_end", epoch)
        run.events.agree(run.mesh)
        self._log()
        self._act_on_requests()
        self._begin_epoch()

    def _stop_requested(self) -> bool:
        """Whether some rank was asked to stop; all ranks call it between two microbatches of an evaluation, which may be long."""
        signals = self._run.mesh.world.max_(torch.tensor([int(self._request.signal)]), "requests to stop")
        self._stopped = self._stopped or int(signals[0])
        return bool(self._stopped)

    def _last_evaluation(self) -> float:
        """About how many steps take as long as the evaluation after the last one: without backward a third of the work."""
        if not self._run.config.run.eval_at_end:
            return 0.0
        samples = sum(len(each) for each in self._run.data.evaluated().values())
        return samples / self._run.config.batch.global_size / 3

    def _evaluate(self) -> None:
        run, section = self._run, self._run.config.run
        values = evaluate(run, None, ignored=self._progress.ignored_outputs, stop=self._stop_requested)
        if values is None:
            return
        run.note(evaluation_line(run, values))
        metric = self._progress.latest_metric = value_of(section.metric, values)
        self._evaluated = (self._progress.step, values["eval_loss"])
        if self._writer is not None:
            with MetricsWriter(self._writer.path.with_name(EVALUATIONS)) as evaluations:
                evaluations.write({"step": self._progress.step, **values})
        # Before the best value changes: as with transformers, a callback compares with what was best until now.
        run.log_evaluation(values)
        self._tracking.evaluated(self._progress.step, values)
        goal = goal_of(section.metric, section.metric_goal)
        best = self._progress.best = self._progress.best.after(
            metric, self._progress.step, goal, section.min_improvement
        )
        if section.load_best and best.step == self._progress.step:
            run.events.control.save = True
        if section.patience and best.waited >= section.patience:
            self._ended = f"{best.waited} evaluations without a better {section.metric} (run.patience)"
        self._checkpoints.record(self._state())

    def _save(self) -> None:
        run, checkpoints = self._run, self._checkpoints
        run.events.control.save = False
        if self._over:
            self._save_last()
        if self._progress.step not in (checkpoints.latest, checkpoints.in_flight):
            wait = run.events.read_checkpoints
            self._unannounced = checkpoints.save(self._state(), run.model.module, run.processing_class, wait=wait)
        self._announce_save()

    def _save_last(self) -> None:
        """Save the state after the last step, before an evaluation that a kill may end."""
        run, checkpoints = self._run, self._checkpoints
        if run.config.checkpoint.every_steps:
            self._unannounced |= self._progress.step not in (checkpoints.latest, checkpoints.in_flight)
            checkpoints.save_last(self._state(), run.model.module, run.processing_class)
        checkpoints.finish()

    def _announce_save(self) -> None:
        """Call `on_save` for a new checkpoint: as with transformers, after the evaluation of its step."""
        if self._unannounced:
            self._unannounced = False
            self._run.events.call("on_save", self._progress.step)

    def _state(self) -> TrainerState:
        run = self._run
        engine_progress = run.model.require_engine().progress()
        samples = run.samples
        stream = run.data.train.state(samples) if isinstance(run.data.train, StreamedDataset) else {}
        return TrainerState(
            step=self._progress.step,
            samples=samples,
            stream=stream,
            passed_over=self._progress.passed_over,
            tokens=self._progress.totals.tokens,
            updates=engine_progress.updates,
            skipped=self._progress.totals.skipped,
            trained=engine_progress.trained,
            averages=engine_progress.averaged_updates,
            loss=self._progress.totals.last_loss,
            eval_loss=self.eval_loss,
            metric=self._progress.latest_metric if self.eval_loss is not None else None,
            best=self._progress.best.to_json(),
            callbacks=run.events.states(),
            loss_scale=engine_progress.loss_scale,
            good_steps=engine_progress.good_steps,
            seed=run.config.run.seed,
            max_steps=self._last,
            learning_rate=run.learning_rate_of(max(0, self._progress.step - 1)),
            tracker=self._tracking.identity(run.config.run.name),
            log_history=self._progress.history.to_json(),
            settings=run.settings,
        )
