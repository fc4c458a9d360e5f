"""The loop over steps: train, log, evaluate, save, stop in order."""

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from zeromesh.errors import some
from zeromesh.trainer.checkpoints.manager import RunCheckpoints
from zeromesh.trainer.checkpoints.trainer_state import TrainerState, goal_of, value_of
from zeromesh.trainer.data.collate import IGNORED_LABEL
from zeromesh.trainer.data.loader import BatchLoader
from zeromesh.trainer.formatting import Detail
from zeromesh.trainer.loop.context import RunContext
from zeromesh.trainer.loop.evaluation import evaluate, evaluation_line, generation_of
from zeromesh.trainer.loop.stop_signals import StopRequest
from zeromesh.trainer.monitoring.profiler import STEP_MEMORY, Profile, recorded_memory
from zeromesh.trainer.monitoring.step_metrics import EVALUATIONS, SAMPLES, MetricsWriter, StepMetrics, sentence, strict
from zeromesh.trainer.monitoring.step_stats import Stragglers, rank_figures
from zeromesh.trainer.tracking.tracking import Tracking

Samples = Callable[[RunContext], list[dict[str, Any]]]
"""Continues the prompts of a run, on all ranks; returns `step`, `prompt` and `completion` of each."""


@dataclass(kw_only=True)
class TrainingLoop:
    """Trains a run from the step where it is to its last one, or to one after which it is asked to stop."""

    run: RunContext
    loader: BatchLoader
    writer: MetricsWriter | None
    tracking: Tracking
    profile: Profile
    checkpoints: RunCheckpoints
    request: StopRequest
    samples: Samples | None = None
    _stragglers: Stragglers = field(default_factory=Stragglers)
    _stopped: int = 0
    """The signal by which some rank was asked to stop."""
    _ended: str = ""
    """Why the run ends before its last step, as if that were it."""
    _memory_step: int = 0
    """The step whose memory is recorded: the second of this process, as the first allocates what stays; 0: none."""
    _start: dict[str, Any] = field(default_factory=dict)
    """How long the start has taken, until a line of metrics has it."""
    _metrics: StepMetrics | None = None
    """The line of the present step, until it is logged."""
    _sampled: int = 0
    """The latest step after which prompts were continued by `run.prompts_every`."""
    _written: int = 0
    """The latest step whose line is in the files."""
    _unannounced: bool = False
    """True if the present step is saved, and `on_save` was not called yet."""
    _evaluated: tuple[int, float, float] | None = None
    """The latest evaluation: after which step, its loss, and the value of `run.metric`."""

    @property
    def _judged(self) -> tuple[float | None, float | None]:
        """The loss and the metric of the evaluation after the present step; None where there was none."""
        return self._evaluated[1:] if self._evaluated and self._evaluated[0] == self.run.progress.step else (None, None)

    @property
    def eval_loss(self) -> float | None:
        """The loss of the evaluation after the present step; None where there was none."""
        return self._judged[0]

    @property
    def _over(self) -> bool:
        return self.run.finished or bool(self._stopped or self._ended)

    def go(self) -> int:
        """Train; returns 0 after the last step, or the number of the signal that some rank was stopped by."""
        run, progress, section = self.run, self.run.progress, self.run.config.run
        if self.writer is not None and run.config.profile.step_figures:
            self._memory_step = progress.step + 2
        progress.began = (time.perf_counter(), run.samples)
        run.events.call("on_train_begin")
        if not self._over:
            self.checkpoints.rehearse(self._state)
        run.console.start(total_steps=section.max_steps, first_step=progress.step, after=self._last_evaluation())
        if section.eval_at_start and progress.step == 0 and run.data.eval is not None:
            self._evaluate()
            run.start_times.end("evaluation")
        self._begin_epoch(resumed=progress.step > 0)
        while not self._over:
            self._train_one()
        wanted = (section.eval_at_end or progress.owes_evaluation) and self.eval_loss is None
        if wanted and run.data.eval is not None and not self._stopped:
            self._save_last()
            self._evaluate()
        if self._ended:
            run.console.note(f"ended after step {progress.step}: {self._ended}")
        self._save_last()
        self._announce_save()
        self.checkpoints.close()
        if not self._stopped:
            progress.summary = run.summary_values()
            run.log_values(progress.summary)
            run.events.call("on_train_end")
        return self._stopped

    def _train_one(self) -> None:
        run, progress, events = self.run, self.run.progress, self.run.events
        number, position = progress.step + 1, progress.position

        # Train on the next global batch.
        events.forget_requests()
        events.call("on_step_begin", number)
        factor, momentum = run.schedule.factor(number - 1), run.schedule.momentum(number - 1)
        progress.learning_rate = run.config.optimizer.lr * factor
        with self._recorders(number):
            result = run.model.stepper.train_step(
                self.loader,
                position,
                number - 1,
                run.model.optimizer.groups(factor, momentum),
                substep_end=partial(events.call, "on_substep_end", number),
                before_update=self._before_update if events.listens("on_pre_optimizer_step") else None,
                stop_signal=self.request.signal,
            )
        if result is None:
            self._pass_over(position)
            return
        progress.add(result)
        if run.planned is not None:
            run.planned.add(result.seconds, result.phases)
        start = None if run.start_times.over else self._end_start()
        self._stopped = self._stopped or result.stop_signal
        events.call("on_optimizer_step", number)
        self._stragglers.add(result.seconds, result.idle)

        # Log it, where the configuration or a callback asks for that.
        due = self._due_after_step(position)
        peak, busy = rank_figures(run.mesh, self._stragglers.busy) if due["log"] else (0, ())
        metrics = run.stats.line(result, step=number, lr=progress.learning_rate, tokens=progress.tokens, peak=peak)
        if run.planned is not None and due["stop"]:
            compared = run.planned.record(metrics.extras["memory"], rank_figures(run.mesh)[0])
            metrics = replace(metrics, extras={**metrics.extras, "plan": compared})
        if result.skipped and result.loss_scale == 1.0:
            run.console.note(f"step {number}: no update on any rank: {result.cause}")
        self._metrics = self._write(metrics) if due["log"] else metrics
        run.console.note(start)
        if start is not None and (unreached := run.model.require_engine().without_gradient):
            run.console.note(
                f"no gradient came to {some(unreached)}: without one, parameters are neither updated nor decayed"
            )
        events.request(**due)
        self._announce("on_step_end", self._metrics)
        events.agree(run.mesh)
        if not self._log():
            run.console.advance(number)
        if due["log"]:
            run.console.note(self._stragglers.look(number, busy))
        progress.check()

        # Evaluate, save and stop.
        self._act_on_requests()
        if run.plan.ends_epoch(position) or events.control.should_epoch_stop or (self._over and not self._stopped):
            self._end_epoch(position)

    def _pass_over(self, position: int) -> None:
        """Go on after a global batch without a target, the data of step `position`, which is no step of the run."""
        run = self.run
        run.progress.passed_over += 1
        run.progress.without_targets += 1
        run.console.note(
            f"after step {run.progress.step}: a global batch has no target (all labels are {IGNORED_LABEL}) and is passed over"
        )
        if run.plan.ends_epoch(position) or self._over:
            self._end_epoch(position)

    def _recorders(self, number: int) -> ExitStack:
        """Return a context that records a step: torch's profiler and the timeline of memory, where they are asked for."""
        stack = ExitStack()
        if number in self.profile.steps:
            stack.enter_context(self.profile.step(number))
        if number == self._memory_step and self.writer is not None:
            path, ledger = self.writer.path.with_name(STEP_MEMORY), self.run.model.require_engine().ledger
            stack.enter_context(recorded_memory(path, number, ledger))
        return stack

    def _before_update(self) -> None:
        """Let callbacks read the gradients of the present step."""
        with self.run.model.gradients_to_read():
            self.run.events.call("on_pre_optimizer_step", self.run.progress.step + 1)

    def _end_start(self) -> str:
        """The first step of the process has been made: the sentence about the time until then."""
        times = self.run.start_times
        times.end("first step")
        times.over = True
        self._start = {"start": {part: round(seconds, 3) for part, seconds in times.parts.items()}}
        return Detail(f"start: {sentence(times.parts)}")

    def _due_after_step(self, position: int) -> dict[str, bool]:
        """Return what the configuration asks for after the step that was just made, whose data was that of step `position`."""
        number, config = self.run.progress.step, self.run.config
        every, last = config.run, position + 1 == config.run.max_steps

        def due(steps: int | str) -> bool:
            return not isinstance(steps, str) and bool(steps) and (last or number % steps == 0)

        judged = every.eval_every != "epoch"  # Else the last checkpoint waits for the evaluation.
        return {
            "log": due(every.log_every) or (every.log_first_step and number == 1),
            "evaluate": every.evaluates_after(number) or (last and judged and every.eval_at_end),
            "save": due(config.checkpoint.every_steps) and (judged or not last),
            "stop": last,
        }

    def _announce(self, event: str, metrics: StepMetrics) -> None:
        """Call callbacks with a step's line; what they add to it is logged with the next one."""
        if not self.run.events.listens(event):
            return
        record = metrics.record()
        before = dict(record)
        self.run.events.call(event, metrics.step, record)
        added = {name: value for name, value in record.items() if value is not before.get(name)}
        self.run.model.stepper.scalars.add(added)

    def _write(self, metrics: StepMetrics) -> StepMetrics:
        """Write a step's line, before callbacks are called, so that it is there whatever they do. All ranks call it.

        Returns the line with the values that losses, callbacks and `trainer.log` have added since the last one.
        """
        run = self.run
        scalars = run.model.stepper.scalars.take(run.mesh)
        metrics = replace(metrics, extras={**metrics.extras, **scalars}) if scalars else metrics
        if self.writer is not None:
            self.writer.write({**metrics.record(), **self._start})
            self._start = {}
        if self.tracking.ident:
            self.tracking.log(metrics)
        run.console.step(metrics)
        self._written = metrics.step
        return metrics

    def _log(self) -> bool:
        """Log the present step, if that is requested and not done yet; returns whether it was logged now."""
        run, metrics = self.run, self._metrics
        if not run.events.control.should_log or metrics is None:
            return False
        if self._written != metrics.step:
            metrics = self._write(replace(metrics, peak_memory_bytes=rank_figures(run.mesh)[0]))
        self._metrics = None
        run.events.control.should_log = False
        run.progress.log_step(metrics, run.epoch)
        self._announce("on_log", metrics)
        return True

    def _act_on_requests(self) -> None:
        """Evaluate, save and stop as is requested now."""
        run, every = self.run, self.run.config.run.prompts_every
        if run.events.control.should_evaluate and run.data.eval is not None and not self._stopped:
            if self._over:
                self._save_last()
            self._evaluate()
            run.events.agree(run.mesh)
        if every and run.progress.step % every == 0 and not self._stopped and self._sampled != run.progress.step:
            self._sampled = run.progress.step
            self._sample()
        if self.checkpoints.in_flight is not None:
            self.checkpoints.poll()
        if run.events.control.should_save and not self._stopped:
            self._save()
        if run.events.control.should_training_stop and not self._over:
            self._ended = "a callback asked to stop"

    def _begin_epoch(self, *, resumed: bool = False) -> None:
        run, position = self.run, self.run.progress.position
        if not self._over and (resumed or position == 0 or run.plan.ends_epoch(position - 1)):
            run.events.forget_requests()
            run.events.call("on_epoch_begin", run.plan.epochs_after(position))

    def _end_epoch(self, position: int) -> None:
        """End an epoch, or the last one of the run, after the data of step `position`; pass over what is left of it."""
        run, config = self.run, self.run.config
        epoch, whole = run.plan.epochs_after(position), run.plan.ends_epoch(position)
        if not whole and not self._over:
            run.progress.passed_over += run.plan.next_epoch(position + 1) - position - 1
        run.events.forget_requests(stop_epoch=run.events.control.should_epoch_stop)
        run.events.request(
            log=config.run.log_every == "epoch",
            evaluate=config.run.eval_every == "epoch" and (config.run.eval_at_end or not self._over or whole),
            save=config.checkpoint.every_steps == "epoch",
        )
        run.events.call("on_epoch_end", epoch)
        run.events.agree(run.mesh)
        self._log()
        self._act_on_requests()
        self._begin_epoch()

    def _stop_requested(self) -> bool:
        """Return True if some rank was asked to stop; all ranks call it between microbatches of evaluations, which may be long."""
        signals = self.run.mesh.world.max_(torch.tensor([int(self.request.signal)]), "requests to stop")
        self._stopped = self._stopped or int(signals[0])
        return bool(self._stopped)

    def _last_evaluation(self) -> float:
        """About how many steps take as long as the evaluation after the last one: without backward a third of the work."""
        if not self.run.config.run.eval_at_end:
            return 0.0
        samples = sum(len(each) for each in self.run.data.evaluated().values())
        return samples / self.run.config.batch.global_size / 3

    def _evaluate(self) -> None:
        run, progress, section = self.run, self.run.progress, self.run.config.run
        generation = generation_of(run, None, {}, metrics=True)
        values = evaluate(run, None, stop=self._stop_requested, generation=generation)
        if values is None:
            return
        run.console.note(evaluation_line(run, values))
        metric = value_of(section.metric, values)
        self._evaluated = (progress.step, values["eval_loss"], metric)
        if self.writer is not None:
            with MetricsWriter(self.writer.path.with_name(EVALUATIONS)) as evaluations:
                evaluations.write({"step": progress.step, **values})
        # Before the best value changes: as with transformers, a callback compares with what was best until now.
        run.log_evaluation(values)
        self.tracking.evaluated(progress.step, values)
        if section.prompts_every is None:
            self._sample()
        goal = goal_of(section.metric, section.metric_goal)
        best = progress.best = progress.best.after(metric, progress.step, goal, section.min_improvement)
        if section.load_best and best.step == progress.step:
            run.events.control.should_save = True
        if section.patience and best.waited >= section.patience:
            self._ended = f"{best.waited} evaluations without a better {section.metric} (run.patience)"
        self.checkpoints.record(self._state())

    def _sample(self) -> None:
        """Have the model continue the prompts of the run, if it has some."""
        if self.samples is None:
            return
        with self.run.model.averaged() if self.run.config.ema.evaluate else nullcontext():
            lines = self.samples(self.run)
        if self.writer is not None:
            with MetricsWriter(self.writer.path.with_name(SAMPLES)) as file:
                for line in lines:
                    file.write(line)
        self.tracking.sampled(self.run.progress.step, lines)

    def _save(self) -> None:
        run, checkpoints = self.run, self.checkpoints
        run.events.control.should_save = False
        if self._over:
            self._save_last()
        if run.progress.step not in (checkpoints.latest, checkpoints.in_flight):
            adapted = run.events.of_transformers
            wait = adapted is not None and adapted.read_checkpoints
            self._unannounced = checkpoints.save(self._state(), wait=wait)
        self._announce_save()

    def _save_last(self) -> None:
        """Save the state after the last step, before an evaluation that a kill may end."""
        run, checkpoints = self.run, self.checkpoints
        if run.config.checkpoint.every_steps:
            self._unannounced |= run.progress.step not in (checkpoints.latest, checkpoints.in_flight)
            checkpoints.save_last(self._state())
        checkpoints.finish()

    def _announce_save(self) -> None:
        """Call `on_save` for a new checkpoint: as with transformers, after the evaluation of its step."""
        if self._unannounced:
            self._unannounced = False
            self.run.events.call("on_save", self.run.progress.step)

    def _state(self) -> TrainerState:
        run, progress = self.run, self.run.progress
        engine = run.model.require_engine().progress()
        eval_loss, metric = self._judged
        return TrainerState(
            step=progress.step,
            samples=run.samples,
            stream=self.loader.state(progress.position),
            passed_over=progress.passed_over,
            tokens=progress.tokens,
            updates=engine.updates,
            skipped=progress.skipped,
            trained=engine.trained,
            averages=engine.averaged_updates,
            loss=progress.last_loss,
            eval_loss=eval_loss,
            metric=metric,
            best=progress.best.to_json(),
            callbacks=run.events.states(),
            loss_scale=engine.loss_scale,
            good_steps=engine.good_steps,
            seed=run.config.run.seed,
            max_steps=run.config.run.max_steps,
            learning_rate=run.learning_rate_of(max(0, progress.step - 1)),
            tracker=self.tracking.identity(run.config.run.name),
            log_history=[strict(line) for line in progress.log] if run.events.of_transformers is not None else [],
            settings=run.settings,
            written=run.written,
        )
