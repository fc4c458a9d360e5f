"""The loop over steps: train, log, evaluate, save, and stop gracefully.

The first signal ends the run after the current step, the second one at once. SIGHUP, of a lost terminal, and SIGUSR1, which
schedulers send on request, are treated as SIGTERM.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch

from zeromesh.errors import NonFiniteError, counted, some
from zeromesh.launch.rank_processes import STOP_SIGNALS, handled_signals
from zeromesh.trainer.checkpoints.manager import RunCheckpoints
from zeromesh.trainer.checkpoints.trainer_state import TrainerState, description_of, goal_of, value_of
from zeromesh.trainer.data.collate import IGNORED_LABEL
from zeromesh.trainer.data.loader import BatchLoader
from zeromesh.trainer.formatting import Detail
from zeromesh.trainer.loop.context import Line, RunContext
from zeromesh.trainer.loop.evaluation import evaluate, evaluation_line, generation_of
from zeromesh.trainer.monitoring.profiler import Profile
from zeromesh.trainer.monitoring.rank_waits import Stragglers
from zeromesh.trainer.monitoring.step_metrics import EVALUATIONS, SAMPLES, MetricsWriter, sentence, strict
from zeromesh.trainer.monitoring.step_stats import StepResult, rank_figures
from zeromesh.trainer.monitoring.tracking import Tracking

Samples = Callable[[RunContext], list[dict[str, Any]]]
"""Generates the completions of a run's prompts, on all ranks; returns `step`, `prompt` and `completion` of each."""
_REPEAT_SECONDS = 1.0
"""Seconds in which repeated signals count as one: a terminal and a launcher both forward the same Ctrl-C."""


class StopRequest:
    """A request to stop this process after the current step, and its signal: SIGINT, SIGTERM, or 0 without a request."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.signal = 0
        self._show = show
        self._at = 0.0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: record the first one, and let a second one end the process by its default action."""
        now = time.monotonic()
        if not self.signal:
            self.signal, self._at = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, now
            self._show(f"{signal.Signals(number).name}: stopping after this step; a second one stops at once")
        elif now - self._at > _REPEAT_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@contextmanager
def stop_requests(show: Callable[[str], None]) -> Iterator[StopRequest]:
    """Inside the block signals become requests, unless a handler is installed already; `show` receives a line for the console."""
    request, ends = StopRequest(show), (signal.SIG_DFL, signal.default_int_handler)
    with handled_signals([each for each in STOP_SIGNALS if signal.getsignal(each) in ends], request.receive):
        yield request


@dataclass(kw_only=True)
class TrainingLoop:
    """Trains a run from its current step to the last one, or to one after which it is asked to stop."""

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
    """The signal by which some rank was asked to stop; 0: none."""
    _ended: str = ""
    """The reason for an early end of the run; empty if there is none."""
    _start: dict[str, Any] = field(default_factory=dict)
    """Seconds of the phases of startup, until a line of metrics has logged them."""
    _line: Line | None = None
    """The current step's line of metrics, until it is logged."""
    _written: int = 0
    """The latest step whose line is in the file."""
    _on_save_due: bool = False
    """True if the current step is saved and `on_save` is still to be called."""
    _evaluated: tuple[int, float, float] | None = None
    """The step, the loss and the value of `run.metric` of the latest evaluation."""

    @property
    def _current_evaluation(self) -> tuple[float | None, float | None]:
        """The loss and the metric of the evaluation after the current step; None without one."""
        return self._evaluated[1:] if self._evaluated and self._evaluated[0] == self.run.progress.step else (None, None)

    @property
    def _over(self) -> bool:
        return self.run.finished or bool(self._stopped or self._ended)

    def go(self) -> tuple[int, float | None]:
        """Train; returns 0 after the last step, or the signal by which some rank was asked to stop, and the loss of the last step's
        evaluation."""
        run, progress, section = self.run, self.run.progress, self.run.config.run
        progress.began = (time.perf_counter(), run.samples)
        run.events.call("on_train_begin")
        if not self._over:
            self.checkpoints.rehearse(self._state)
        # The last evaluation costs as much as so many steps: forward is a third of a step's work.
        samples = sum(map(len, run.data.evaluated().values())) if section.eval_at_end else 0
        after = samples / run.config.batch.global_size / 3
        run.console.start(total_steps=section.max_steps, first_step=progress.step, after=after)
        if section.eval_at_start and progress.step == 0 and run.data.eval is not None:
            self._evaluate()
            run.start_times.end("evaluation")
        self._begin_epoch(resumed=progress.step > 0)
        while not self._over:
            self._train_one()
        wanted = (section.eval_at_end or progress.owes_evaluation) and self._current_evaluation[0] is None
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
        return self._stopped, self._current_evaluation[0]

    def _train_one(self) -> None:
        run, progress, events = self.run, self.run.progress, self.run.events
        number, position = progress.step + 1, progress.position

        events.forget_requests()
        events.call("on_step_begin", number)
        factor, momentum = run.schedule.factor(number - 1), run.schedule.momentum(number - 1)
        with self.profile.step(number):
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
            progress.passed_over += 1
            progress.without_targets += 1
            run.console.note(
                f"after step {progress.step}: a global batch has no target (all labels are {IGNORED_LABEL}) and is passed over"
            )
        else:
            self._finish_step(result, position)
        if run.plan.ends_epoch(position) or events.control.should_epoch_stop or (self._over and not self._stopped):
            self._end_epoch(position)

    def _before_update(self) -> None:
        model = self.run.model
        model.gradients_ready = True
        try:
            self.run.events.call("on_pre_optimizer_step", self.run.progress.step + 1)
        finally:
            model.gradients_ready = False

    def _finish_step(self, result: StepResult, position: int) -> None:
        """Count and log a step, whose data was that of step `position`, and do what is due after it."""
        run, progress, events, times = self.run, self.run.progress, self.run.events, self.run.start_times
        progress.add(result)
        number, first = progress.step, not times.over
        if first:
            times.end("first step")
            times.over = True
            self._start = {"start": {part: round(seconds, 3) for part, seconds in times.parts.items()}}
        self._stopped = self._stopped or result.stop_signal
        events.call("on_optimizer_step", number)
        self._stragglers.add(result.seconds, result.idle)

        due = self._due_after_step(position)
        peak, busy = rank_figures(run.mesh, self._stragglers.busy) if due["log"] else (0, ())
        lr = run.learning_rate_of(number - 1)
        line = run.stats.line(result, step=number, lr=lr, tokens=progress.tokens, peak=peak)
        if run.planned is not None:
            run.planned.add(result.seconds, result.phases)
            if due["stop"]:
                line["plan"] = run.planned.record(line["memory"], rank_figures(run.mesh)[0])
        if result.skipped and result.loss_scale == 1.0:
            run.console.note(f"step {number}: no update on any rank: {result.cause}")
        self._line = line
        if due["log"]:
            self._write(line)
        if first:
            run.console.note(Detail(f"start: {sentence(times.parts)}"))
            if unreached := run.model.require_engine().without_gradient:
                run.console.note(
                    f"no gradient came to {some(unreached)}: without one, parameters are neither updated nor decayed"
                )
        events.request(**due)
        self._announce("on_step_end", line)
        events.agree(run.mesh)
        if not self._log():
            run.console.advance(number)
        if due["log"]:
            run.console.note(self._stragglers.look(number, busy))
        if progress.max_nonfinite and progress.skipped_in_a_row >= progress.max_nonfinite:
            raise NonFiniteError(
                f"gradients were not finite in {counted(progress.skipped_in_a_row, 'step')} in a row, up to step {number} "
                f"(run.max_nonfinite; in the last, {progress.cause}); no update of these steps was made. Lower optimizer.lr, look "
                "at the data, or use precision.compute: bfloat16"
            )
        self._act_on_requests()
        every = run.config.run.prompts_every
        if every and number % every == 0 and not self._stopped:
            self._sample()

    def _due_after_step(self, position: int) -> dict[str, bool]:
        """Return the actions that the configuration schedules after this step, whose data was that of step `position`."""
        number, config = self.run.progress.step, self.run.config
        every, last = config.run, position + 1 == config.run.max_steps

        def due(steps: int | str) -> bool:
            return not isinstance(steps, str) and bool(steps) and (last or number % steps == 0)

        judged = every.eval_every != "epoch"  # Otherwise the last checkpoint waits for the evaluation.
        return {
            "log": due(every.log_every) or (every.log_first_step and number == 1),
            "evaluate": every.evaluates_after(number) or (last and judged and every.eval_at_end),
            "save": due(config.checkpoint.every_steps) and (judged or not last),
            "stop": last,
        }

    def _announce(self, event: str, line: Mapping[str, Any]) -> None:
        """Call callbacks with the step's line; values that they add are logged with the next step."""
        if not self.run.events.listens(event):
            return
        shown = dict(line)
        self.run.events.call(event, line["step"], shown)
        added = {name: value for name, value in shown.items() if value is not line.get(name)}
        self.run.model.stepper.scalars.add(added)

    def _write(self, line: Line) -> None:
        """Write the step's line, before callbacks run, so that no callback can prevent it. All ranks call it.

        The line gets the values that losses, callbacks and `trainer.log` have added since the last one.
        """
        run = self.run
        line |= run.model.stepper.scalars.take(run.mesh)
        if self.writer is not None:
            self.writer.write({**line, **self._start})
            self._start = {}
        self.tracking.log(line)
        run.console.step(line)
        self._written = line["step"]

    def _log(self) -> bool:
        """Log the current step, unless it is not due or done; returns True if it was logged now."""
        run, line = self.run, self._line
        if not run.events.control.should_log or line is None:
            return False
        if self._written != line["step"]:
            line["peak_memory_bytes"] = rank_figures(run.mesh)[0]
            self._write(line)
        self._line = None
        run.events.control.should_log = False
        run.progress.log_step(line, run.epoch)
        self._announce("on_log", line)
        return True

    def _act_on_requests(self) -> None:
        run = self.run
        if run.events.control.should_evaluate and run.data.eval is not None and not self._stopped:
            if self._over:
                self._save_last()
            self._evaluate()
            run.events.agree(run.mesh)
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
        """End an epoch, or the last one of the run, after the data of step `position`, and skip the rest of the epoch."""
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

    def _evaluate(self) -> None:
        run, progress, section = self.run, self.run.progress, self.run.config.run

        def stop() -> bool:
            # Evaluations may be long, so ranks ask each other between microbatches.
            asked = torch.tensor([int(self.request.signal)])
            self._stopped = self._stopped or int(run.mesh.world.all_reduce_max(asked, "requests to stop")[0])
            return bool(self._stopped)

        values = evaluate(run, None, stop=stop, generation=generation_of(run, None, {}, metrics=True))
        if values is None:
            return
        run.console.note(evaluation_line(run, values))
        metric = value_of(section.metric, values)
        self._evaluated = (progress.step, values["eval_loss"], metric)
        line = {"step": progress.step, **values}
        self._append(EVALUATIONS, line)
        # Callbacks compare with the previous best value, as with transformers.
        run.log_evaluation(values)
        self.tracking.evaluated(line)
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
        if self.samples is None:
            return
        with self.run.model.averaged() if self.run.config.ema.evaluate else nullcontext():
            lines = self.samples(self.run)
        self._append(SAMPLES, *lines)
        self.tracking.sampled(self.run.progress.step, lines)

    def _append(self, name: str, *lines: Mapping[str, Any]) -> None:
        """Append lines to another file beside that of the metrics."""
        if self.writer is not None:
            with MetricsWriter(self.writer.path.with_name(name)) as file:
                for line in lines:
                    file.write(line)

    def _save(self) -> None:
        run, checkpoints = self.run, self.checkpoints
        run.events.control.should_save = False
        if self._over:
            self._save_last()
        if run.progress.step not in (checkpoints.latest, checkpoints.in_flight):
            adapted = run.events.of_transformers
            wait = adapted is not None and adapted.read_checkpoints
            self._on_save_due = checkpoints.save(self._state(), wait=wait)
        self._announce_save()

    def _save_last(self) -> None:
        """Save the state after the last step, before an evaluation during which the process may be killed."""
        run, checkpoints = self.run, self.checkpoints
        if run.config.checkpoint.every_steps:
            self._on_save_due |= run.progress.step not in (checkpoints.latest, checkpoints.in_flight)
            checkpoints.save_last(self._state())
        checkpoints.finish()

    def _announce_save(self) -> None:
        """Call `on_save` for a new checkpoint, after the evaluation of its step, as transformers does."""
        if self._on_save_due:
            self._on_save_due = False
            self.run.events.call("on_save", self.run.progress.step)

    def _state(self) -> TrainerState:
        run, progress = self.run, self.run.progress
        engine = run.model.require_engine().progress()
        eval_loss, metric = self._current_evaluation
        now, before = description_of(run.model.module), run.model.described
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
            written={f"model.{name}": now[name] for name in now if name not in before or before[name] != now[name]},
        )
