"""One `fit`: resume from a checkpoint, train, log, evaluate, save, stop gracefully, and end with a report and a whole model."""

import math
import shlex
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from zeromesh.checkpoint.loader import candidates
from zeromesh.environment import is_earlier_start, starts_of_run
from zeromesh.errors import CollectiveError, ConfigError, DataError, NonFiniteError, StorageError, counted, some
from zeromesh.launch.signals import StopRequest, stop_requests
from zeromesh.optim.fused_optimizer import hyperparameters
from zeromesh.trainer.checkpoints.manager import RunCheckpoints, load_weights
from zeromesh.trainer.checkpoints.trainer_state import TrainerState, description_of, goal_of, value_of
from zeromesh.trainer.config.sections.schedule import STEADY
from zeromesh.trainer.data.collate import IGNORED_LABEL
from zeromesh.trainer.data.loader import BatchLoader, Feed
from zeromesh.trainer.formatting import Detail, human_bytes, human_count
from zeromesh.trainer.loop.context import COUNTERS, FitReport, Line, RunContext, comes_after
from zeromesh.trainer.loop.evaluation import evaluate, evaluation_line, generation_of, require_metric
from zeromesh.trainer.loop.recovery import Recovery, look_for_files, note_act, require_updates, rewind
from zeromesh.trainer.loop.train_step import REGROUP
from zeromesh.trainer.models.adapters import is_adapted, pretrained_of
from zeromesh.trainer.monitoring.plan_check import comparison_lines
from zeromesh.trainer.monitoring.profiler import Profile
from zeromesh.trainer.monitoring.run_directory import RunDirectory
from zeromesh.trainer.monitoring.step_metrics import EVALUATIONS, RECOVERIES, SAMPLES, MetricsWriter, sentence, strict
from zeromesh.trainer.monitoring.step_stats import Balance, Patience, StepResult, Stragglers, rank_figures
from zeromesh.trainer.monitoring.tracking import Tracking, evaluation_row, samples_row, step_row

Samples = Callable[[RunContext], list[dict[str, Any]]]
"""Generates the completions of a run's prompts, on all ranks; returns `step`, `prompt` and `completion` of each."""
_SOURCES = {"memory": "the memory of the ranks", "snapshot": "a snapshot in memory"}


@dataclass(kw_only=True)
class TrainingLoop:
    """Trains a run in its locked directory; `samples` generates the completions of `run.prompts`."""

    run: RunContext
    directory: RunDirectory
    samples: Samples | None = None
    recovery: Recovery | None = None
    _checkpoints: RunCheckpoints = field(init=False)
    _request: StopRequest = field(init=False)
    _loader: BatchLoader = field(init=False)
    _writer: MetricsWriter | None = field(init=False)
    _tracking: Tracking = field(init=False)
    _profile: Profile = field(init=False)
    _stragglers: Stragglers = field(default_factory=Stragglers)
    _balance: Balance | None = None
    _patience: Patience | None = None
    _signal: int = 0  # The signal by which some rank was asked to stop; 0: none.
    _start: dict[str, Any] = field(default_factory=dict)
    """Seconds of the phases of startup, until a line of metrics has logged them."""
    _line: Line | None = None  # The current step's line of metrics, until it is logged.
    _last_written_step: int = 0  # The latest step whose line is in the file.
    _refused: bool = False  # True if it was said that a line could not be written.
    _on_save_due: bool = False  # True if the current step is saved and `on_save` is still to be called.
    _evaluated: tuple[int, float | None, float | None] | None = None
    """The step, the loss and the value of `run.metric` of the latest evaluation."""

    @property
    def _current_evaluation(self) -> tuple[float | None, float | None]:
        return self._evaluated[1:] if self._evaluated and self._evaluated[0] == self.run.progress.step else (None, None)

    @property
    def _asked(self) -> int:
        """The signal by which this rank is asked to stop after the present step, or `REGROUP`; 0: none."""
        regroups = self.recovery is not None and bool(self.recovery.line.asked)
        return int(self._request.signal or (REGROUP if regroups else 0))

    @property
    def _is_over(self) -> bool:
        return self.run.finished or bool(self._signal)

    def fit(self) -> FitReport:
        """Train up to the last step. An interrupted run is resumed; for a finished one only a note is shown. Raises as
        `Trainer.fit`, and `KeyboardInterrupt` or `SystemExit` after a step and its checkpoint, when some rank was asked to stop."""
        run, progress = self.run, self.run.progress
        if progress.report is not None:
            run.console.note(f"already finished at step {progress.step}; a new Trainer trains this model further")
            return progress.report
        feed = run.model.feeds.train()
        if feed is None:
            raise DataError("there is no train_dataset; give one to Trainer, or name text in data.train")
        run.start_times.begin()
        with run.model.guarded("trainer.fit()"), stop_requests(run.console.note) as self._request:
            if run.data.eval is not None:
                # Invalid metrics are refused before training, not at the first evaluation.
                require_metric(run)
                generation_of(run, None, {}, metrics=True)
            self._checkpoints = RunCheckpoints(
                run.config,
                self.directory.path,
                run.model.require_engine(),
                run.model.processing_class,
                run.console.note,
                linked=bool(run.events.of_transformers),
                goes_on=self.directory.goes_on(run.mesh),
            )
            if progress.step == 0:
                self._resume()
            run.start_times.end("checkpoints")
            if not run.finished:
                self._checkpoints.require_room()
            if not run.finished or progress.owes or (self.recovery is not None and self.recovery.source in _SOURCES):
                self._train(feed)
            if not self._signal:
                progress.report = self._end()
        if self._signal == REGROUP:
            raise CollectiveError("another host has come")
        self._signal = self._signal or self._request.signal  # Which has come after the last step.
        if self._signal or progress.report is None:
            run.console.note(f"stopped after step {progress.step}")
            # The process ends as it does by the signal's default action, but through `finally` blocks.
            raise KeyboardInterrupt if self._signal == signal.SIGINT else SystemExit(128 + self._signal)
        if progress.max_nonfinite and 2 * progress.skipped > progress.step:
            what = f"{progress.skipped} of {counted(progress.step, 'step')} made no update: gradients were not finite"
            last = f"in the last such step, {progress.cause or 'of an earlier process'}"
            state = "The run is complete and what it has is saved, but the model is hardly trained"
            cure = "look at the first line of metrics.jsonl that has `cause`. run.max_nonfinite: 0 lets such a run pass"
            raise NonFiniteError(f"{what} ({last}). {state}; {cure}")
        return progress.report

    def _resume(self) -> None:
        run = self.run
        run.events.note_first()
        if self.recovery is not None and (state := self.recovery.restore(run)) is not None:
            self._checkpoints.require_settings(state, run.settings)  # Every start reads the data anew.
            if self.recovery.source == "snapshot" or run.config.offload.parameters.tier == "file":
                self._checkpoints.load_frozen(state.origin)
            self._take_over(state)
            run.console.note(f"went on after step {run.progress.step}, from {_SOURCES[self.recovery.source]}")
            return
        run.console.status("looking for checkpoints")
        state = self._checkpoints.resume(run.settings)
        files = run.model.require_engine().durable
        if files is None:
            look_for_files(run, state)
        if state is None:
            # The first steps may be on no disk yet, and a run that is over removes its files.
            if files is not None and 2 < (last := self.directory.last_step(run.mesh)) < run.config.run.max_steps:
                why = f"{self.directory.path} has {last} steps, and neither files of states (offload.durable) nor checkpoints"
                raise ConfigError(f"{why} are found: move it back to where it was, or choose another run.name")
            if self.recovery is not None:
                self.recovery.require_values()
                run.events.restore({}, lost=self.recovery.lost_steps(0))
            return
        run.progress.resume(state)
        self._take_over(state)
        if self.recovery is not None and files is not None and files.resumed is not None:
            self.recovery.source = "files"
        section, progress = run.config.run, run.progress
        same = (state.max_steps, state.patience) == (section.max_steps, section.patience)
        if not (is_earlier_start(state.start) or (same and "run.patience" in state.ended)):
            progress.ended = ""  # The user lets the run go on, as after a callback that limits the time of a job.
        if state.max_steps != section.max_steps and run.config.schedule.name not in STEADY:
            change = f"{state.max_steps} then, {section.max_steps} now"
            run.console.note(f"run.max_steps: {change}; the learning rate follows the new one's curve from here on")
        if run.finished:
            due = section.eval_at_end or comes_after(state.step, section.eval_every)
            if run.data.eval is not None and due and state.eval_loss is None:
                progress.owes.add("evaluate")
            owed = ", but not evaluated there, which is done now" if "evaluate" in progress.owes else ""
            by_epochs = section.epochs is not None and run.plan.steps_of(section.epochs) <= section.max_steps
            length = "run.epochs" if by_epochs else "run.max_steps"
            why = f"ended early ({progress.ended})" if progress.ended else "is complete"
            what = f"nothing was trained: run {section.name!r} {why} at step {progress.reached} of {section.max_steps}{owed}"
            run.console.note(f"{what}; raise {length}{', change run.patience' * bool(progress.ended)}, or choose another run.name")
        else:
            run.console.note(f"resumed from step {state.step} ({human_count(state.tokens)} tokens)")

    def _take_over(self, state: TrainerState, *, goes_back: bool = False) -> None:
        """Go on with what an earlier process, or this one in an earlier mesh, has left in `state`."""
        run = self.run
        # Settings that a forward has written into the model's configuration keep the values that the run's first process had.
        kept = {name: value for name, value in run.model.description.items() if f"model.{name}" not in state.written}
        first = {name.removeprefix("model."): state.settings[name] for name in state.written if name in state.settings}
        run.model.description = kept | first
        self._evaluated = (state.step, state.eval_loss, state.metric)
        lost = self.recovery.lost_steps(state.step) if self.recovery is not None else None
        run.events.restore(state.callbacks, lost=0 if goes_back else lost)

    def _train(self, feed: Feed) -> None:
        run, progress, note = self.run, self.run.progress, self.run.console.note
        config, mesh, path, resumed, step = run.config, run.mesh, self.directory.path, progress.resumed, progress.step
        facts = {"parameters": run.model.parameters, "given": [name for name, how in run.inputs.names().items() if how == "given"]}
        with (
            self._checkpoints,
            self.directory.open(config, done := step - bool(progress.unfinished), facts, mesh) as self._writer,
            run.console,
            run.loader(feed, last=config.run.max_steps, state=resumed.stream or None) as self._loader,
            Tracking.open(config, mesh, path, step=done or step, known=resumed.tracker, note=note) as self._tracking,
            Profile(config.profile, path, run.model.require_engine(), step + 1, note) as self._profile,
        ):
            if config.batch.balance == "speed":
                self._balance = Balance(self._loader, mesh, resumed.paces)
            if config.parallel.timeout_seconds == "auto" and mesh.world_size > 1:
                self._patience = Patience(mesh)
            run.start_times.end("files and trackers")
            if self.recovery is not None:
                self.recovery.present = partial(self._state, own=True)
            self._take_steps()

    def _take_steps(self) -> None:
        run, progress, section = self.run, self.run.progress, self.run.config.run
        progress.began = (time.perf_counter(), run.samples)
        if self.recovery is not None and self.recovery.cause:
            progress.acts.append({"act": "went on", "cause": self.recovery.cause["cause"]})
        run.events.call("on_train_begin")
        if not self._is_over:
            self._checkpoints.try_small_files(self._state, held=self.recovery is not None and self.recovery.snapshots is not None)
        # The last evaluation costs as much as so many steps: forward is a third of a step's work.
        samples = sum(map(len, run.data.evaluation_sets().values())) if section.eval_at_end else 0
        run.console.start(total_steps=section.max_steps, first_step=progress.step, after=samples / run.config.batch.global_size / 3)
        if section.eval_at_start and progress.step == 0 and run.data.eval is not None:
            self._evaluate()
            run.start_times.end("evaluation")
        if progress.owes and progress.unfinished is None:
            self._act_on_requests()
        if self.recovery is not None:
            self.recovery.begin_training(run)
        if progress.unfinished is not None:
            self._conclude(progress.unfinished, progress.position - 1)
        else:
            self._begin_epoch(resumed=progress.step > 0)
        files = run.model.require_engine().durable
        while not self._is_over:
            self._train_one()
            if self.recovery is not None and not self._is_over:
                self.recovery.after_step(run)
            if files is not None and not run.finished:
                files.commit(progress.step, self._state(own=True).to_json())
        if section.eval_at_end and run.data.eval is not None and not self._signal and self._current_evaluation[0] is None:
            self._save_last()
            self._evaluate()
        if progress.ended:
            run.console.note(f"ended after step {progress.step}: {progress.ended}")
        self._save_last()
        self._announce_save()
        self._checkpoints.close()
        if files is not None:  # What is whole is in a checkpoint, or with the caller.
            (files.remove if run.finished and not self._signal else files.wait)()
        if not self._signal:
            progress.summary = run.summary_values()
            # Without that of an end in which a rank was lost.
            progress.log[:] = [line for line in progress.log if "train_runtime" not in line]
            run.log_values(progress.summary)
            run.events.call("on_train_end")

    def _train_one(self) -> None:
        run, progress, events = self.run, self.run.progress, self.run.events
        number, position = progress.step + 1, progress.position

        if run.ranks is run.mesh:  # Requests between syncs wait for the next one.
            events.forget_requests()
        events.call("on_step_begin", number)
        factor, momentum = run.schedule.factor(number - 1), run.schedule.momentum(number - 1)
        run.mesh.watch.in_step = True
        profile, pre_update = self._profile, partial(events.call, "on_pre_optimizer_step", number)
        with profile.step(number) if number in profile.steps or number == profile.measured else nullcontext():
            result = run.model.stepper.train_step(
                self._loader,
                position,
                number - 1,
                hyperparameters(run.model.require_engine().options.optimizer, factor, momentum),
                substep_end=partial(events.call, "on_substep_end", number),
                before_update=pre_update if events.listeners("on_pre_optimizer_step") else None,
                stop_signal=self._asked,
                syncs=run.due_after(number, position)["sync"],
            )
        run.mesh.watch.in_step = False
        if isinstance(result, StepResult):
            progress.add(result)
            progress.unfinished = result
            note_act(run, self._loader.feed, result.judged, range(position, position + 1))
        else:
            progress.passed_over += 1
            progress.without_targets += 1
            events.forget_requests()  # A step that does not count has no requests; ranks did not combine them.
            if result is None:
                why = f"has no target (all labels are {IGNORED_LABEL}) and is passed over"
                run.console.note(f"after step {progress.step}: a global batch {why}")
            else:
                progress.skipped_in_a_row += 1
                progress.cause = result["cause"]
                note_act(run, self._loader.feed, result, range(position, position + 1))
                self._go_back()
        self._conclude(progress.unfinished, position)

    def _conclude(self, result: StepResult | None, position: int) -> None:
        """Do what follows a step, and an epoch that ends with its data; `result` is None for data that were no step."""
        run, progress, events = self.run, self.run.progress, self.run.events
        if result is not None:
            run.begin_end()
            self._finish_step(result, position)
        ends = events.control.should_epoch_stop and run.ranks is run.mesh
        if run.plan.ends_epoch(position) or ends or (self._is_over and not self._signal):
            self._end_epoch(position)
        progress.unfinished, progress.concluded = None, (progress.step, run.states_of_callbacks())

    def _finish_step(self, result: StepResult, position: int) -> None:
        """Log a step, and then evaluate, save or stop as requested; `position` is the index of the step's data."""
        run, progress, events, times = self.run, self.run.progress, self.run.events, self.run.start_times
        number, first = progress.step, not times.over
        if first:
            times.end("first step")
            times.over = True
            self._start = {"start": {part: round(seconds, 3) for part, seconds in times.parts.items()}}
        self._signal = self._signal or result.stop_signal
        events.call("on_optimizer_step", number)
        self._stragglers.add(result.seconds, result.idle)

        due = run.due_after(number, position)
        peak, busy = rank_figures(run.ranks, self._stragglers.busy) if due["log"] else (0, ())
        line = run.stats.line(result, step=number, lr=run.learning_rate_of(number - 1), tokens=progress.tokens, peak=peak)
        if shares := self._loader.feed.plan.shares:
            line["shares"] = {str(rank): share for rank, share in enumerate(shares)}
        if run.planned is not None:
            run.planned.steps.append((result.seconds, result.phases))
            if due["stop"]:
                line["plan"] = run.planned.record(line["memory"], rank_figures(run.mesh)[0])
        if result.outcome.cause and result.outcome.loss_scale == 1.0:
            where = "any rank" if run.config.parallel.sync_every == 1 else "this replica"
            run.console.note(f"step {number}: no update on {where}: {result.outcome.cause}")
        self._line = line
        if due["log"]:
            self._write(line)
        if first:
            run.console.note(Detail(f"start: {sentence(times.parts)}"))
            if self.recovery is not None and (cause := self.recovery.cause):
                lost = self.recovery.lost_steps(progress.resumed.step)
                figures = {"seconds": time.time() - cause["time"], "parts": times.parts, "lost_steps": lost}
                self._append(RECOVERIES, {**cause, **figures, "source": self.recovery.source})
            if unreached := run.model.require_engine().without_gradient:
                run.console.note(f"no gradient came to {some(unreached)}; so they are neither updated nor decayed")
        events.request(**{name: due[name] for name in ("log", "evaluate", "save", "stop")})
        self._announce("on_step_end", line)
        events.agree(run.ranks)
        if not self._log():
            run.console.advance(number)
        if due["log"] and due["sync"]:
            run.console.note(self._stragglers.compare(number, busy))
        require_updates(run)
        if self._patience is not None:
            run.console.note(self._patience.after(result, syncs=due["sync"]))
        if self._balance is not None and not self._is_over:
            run.console.note(self._balance.after(result))
        if run.ranks is run.mesh:
            self._act_on_requests(samples=due["sample"])

    def _go_back(self) -> None:
        """Go back to an earlier checkpoint if a spike lasts, and leave out what later steps have written, as a resumed run does."""
        if (found := rewind(self.run, self._checkpoints, self.recovery, self._loader.feed)) is None:
            return
        state, line = found
        self._take_over(state, goes_back=True)
        self._line, self._last_written_step = None, 0
        self._checkpoints.record(self._state())
        if self._writer is not None:
            self._writer.keep_through(state.step, EVALUATIONS, SAMPLES)
        self._append(RECOVERIES, line)

    def _announce(self, event: str, line: Mapping[str, Any]) -> None:
        """Call callbacks with the step's line; values that they add are logged with the next step."""
        if not self.run.events.listeners(event):
            return
        shown = dict(line)
        self.run.events.call(event, line["step"], shown)
        self.run.model.stepper.scalars.add({name: value for name, value in shown.items() if value is not line.get(name)})

    def _write(self, line: Line) -> None:
        """Write the step's line, with values added since the last one, before callbacks, which could fail. All ranks call it."""
        run = self.run
        line |= run.model.stepper.scalars.take(run.ranks)
        self._append("", {**line, **self._start, **({"judged": run.progress.acts} if run.progress.acts else {})})
        self._start, run.progress.acts = {}, []
        if run.config.tracking.backends:
            self._tracking.send(step_row(line))
        run.console.step(line)
        self._last_written_step = line["step"]

    def _log(self) -> bool:
        """Log the current step, unless it is not due or done; returns True if it was logged now."""
        run, line = self.run, self._line
        if not run.events.control.should_log or line is None:
            return False
        if self._last_written_step != line["step"]:
            line["peak_memory_bytes"] = rank_figures(run.ranks)[0]
            self._write(line)
        self._line = None
        run.events.control.should_log = False
        # The loss is the mean over the steps since the last line of the log.
        progress, losses, run.progress.unlogged = run.progress, run.progress.unlogged, []
        norm = {} if line["grad_norm"] is None else {"grad_norm": line["grad_norm"]}
        logged = {"loss": sum(losses) / max(1, len(losses)), **norm, "learning_rate": line["lr"]}
        progress.log.append({**logged, "epoch": run.epoch, "step": line["step"]})
        self._announce("on_log", line)
        return True

    def _act_on_requests(self, *, samples: bool = False) -> None:
        run, owes = self.run, self.run.progress.owes
        owes |= {"evaluate"} if run.events.control.should_evaluate and run.data.eval is not None else set()
        owes |= {"sample"} if samples else set()
        if "evaluate" in owes and run.data.eval is not None and not self._signal:
            if self._is_over:
                self._save_last()
            self._evaluate()
            run.events.agree(run.mesh)
        if "sample" in owes and not self._signal:
            self._sample()
            owes.discard("sample")
            self._checkpoints.record(self._state())
        if self._checkpoints.saver.in_flight is not None:
            self._checkpoints.poll()
        if run.events.control.should_save and not self._signal:
            self._save()
        if run.events.control.should_training_stop and not self._is_over:
            run.progress.ended = "a callback asked to stop"
            self._checkpoints.record(self._state())

    def _begin_epoch(self, *, resumed: bool = False) -> None:
        run, position = self.run, self.run.progress.position
        if not self._is_over and (resumed or position == 0 or run.plan.ends_epoch(position - 1)):
            run.events.forget_requests()
            run.events.call("on_epoch_begin", int(run.plan.epoch_after(position)))

    def _end_epoch(self, position: int) -> None:
        """End an epoch, or the last one of the run, after the data of step `position`, and skip the rest of the epoch."""
        run, config, every = self.run, self.run.config, self.run.config.checkpoint.every_steps
        epoch, whole = int(run.plan.epoch_after(position)), run.plan.ends_epoch(position)
        if not whole and not self._is_over:
            run.progress.passed_over += run.plan.next_epoch(position + 1) - position - 1
        run.events.forget_requests(stop_epoch=run.events.control.should_epoch_stop)
        run.events.request(
            log=config.run.log_every == "epoch",
            evaluate=config.run.eval_every == "epoch" and (config.run.eval_at_end or not self._is_over or whole),
            save=every == "epoch" or (config.run.eval_every == "epoch" and whole and comes_after(run.progress.step, every)),
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
            self._signal = self._signal or int(run.mesh.world.all_reduce_max(torch.tensor([self._asked]), "requests to stop")[0])
            return bool(self._signal)

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
        self._tracking.send(evaluation_row(line))
        if section.prompts_every is None:
            self._sample()
        goal = goal_of(section.metric, section.metric_goal)
        best = progress.best = progress.best.after(metric, progress.step, goal, section.min_improvement)
        if section.load_best and best.step == progress.step:
            run.events.control.should_save = True
        if section.patience and best.waited >= section.patience:
            progress.ended = f"{best.waited} evaluations without a better {section.metric} (run.patience)"
        progress.owes.discard("evaluate")
        self._checkpoints.record(self._state())

    def _sample(self) -> None:
        if self.samples is None:
            return
        with self.run.model.averaged() if self.run.model.evaluates_average else nullcontext():
            lines = self.samples(self.run)
        self._append(SAMPLES, *lines)
        self._tracking.send(samples_row(self.run.progress.step, lines))

    def _append(self, name: str, *lines: Mapping[str, Any]) -> None:
        """Append lines to a file, or that of steps. It is said once that they cannot be: checkpoints decide if the run ends."""
        if (steps := self._writer) is None:
            return
        try:
            with MetricsWriter(steps.path.with_name(name)) if name else nullcontext(steps) as file:
                for line in lines:
                    file.write(line)
        except StorageError as error:
            self.run.console.note(None if self._refused else f"WARNING: {error}. Training goes on")
            self._refused = True

    def _save(self) -> None:
        run, checkpoints = self.run, self._checkpoints
        run.events.control.should_save = False
        if self._is_over:
            self._save_last()
        if run.progress.step not in (checkpoints.latest, checkpoints.saver.in_flight):
            self._on_save_due = checkpoints.save(self._state(), wait=run.events.reads_checkpoints)
        self._announce_save()

    def _save_last(self) -> None:
        """Save the state after the last step, before an evaluation during which the process may be killed."""
        run, checkpoints = self.run, self._checkpoints
        checkpoints.finish()
        # An older checkpoint, which a callback or a change of hosts has asked for, would pass for the model.
        if run.config.checkpoint.every_steps or self._signal == REGROUP or candidates(run.mesh, checkpoints.store):
            self._on_save_due |= run.progress.step != checkpoints.latest
            checkpoints.save_last(self._state())

    def _announce_save(self) -> None:
        if self._on_save_due:
            self._on_save_due = False
            self.run.events.call("on_save", self.run.progress.step)

    def _state(self, *, own: bool = False) -> TrainerState:
        """Return the present state; `own`: without other ranks' parts."""
        run, progress = self.run, self.run.progress
        eval_loss, metric = self._current_evaluation
        now, before = description_of(run.model.module), run.model.description
        return TrainerState(
            **{name: getattr(progress, name) for name in COUNTERS},
            samples=run.samples,
            stream=self._loader.state(progress.position),
            owes=sorted(progress.owes),
            accepted=list(progress.accepted),
            paces=() if self._balance is None else self._balance.paces,
            **run.model.require_engine().progress(own=own),
            loss=progress.last_loss,
            eval_loss=eval_loss,
            metric=metric,
            callbacks=run.events.states(),
            unlogged=[*progress.unlogged],
            **{name: getattr(run.config.run, name) for name in ("seed", "max_steps", "patience")},
            start="".join(starts_of_run()[-1:]),
            learning_rate=run.learning_rate_of(max(0, progress.step - 1)),
            tracker=self._tracking.identity(run.config.run.name),
            log_history=[strict(line) for line in progress.log] if run.events.of_transformers else [],
            settings=run.settings,
            written={f"model.{name}": now[name] for name in now if name not in before or before[name] != now[name]},
        )

    def _end(self) -> FitReport:
        """Make the model whole, with its best weights if configured; returns the report, and shows it."""
        run, checkpoints = self.run, self._checkpoints
        progress, best, config = run.progress, run.progress.best, run.config.run
        if config.load_best and best.value is not None and best.step != progress.step:
            if self.recovery is not None:
                self.recovery.forget_steps()  # They are other weights than those of the last step, which is saved.
            load_weights(checkpoints.store.path(best.step), run.model.require_engine())
            run.console.note(f"weights of step {best.step}: {config.metric} {best.value:.4g} is the best")
        # Replicas that take local steps skip some of their own: what is said, and judged, is their mean.
        progress.skipped = sum(map(sum, run.mesh.world.gather_integers([progress.skipped]))) // run.mesh.world_size
        steady = progress.seconds[1:] or progress.seconds
        per_step = (progress.tokens - progress.resumed.tokens) / max(1, len(progress.seconds))
        report = FitReport(
            final_step=progress.step,
            final_loss=math.nan if progress.last_loss is None else progress.last_loss,
            losses=tuple(progress.losses),
            eval_loss=self._current_evaluation[0],
            tokens=progress.tokens,
            tokens_per_second=per_step * len(steady) / sum(steady) if steady else 0.0,
            peak_memory_bytes=rank_figures(run.mesh)[0],
            skipped_steps=progress.skipped,
            passed_over=progress.without_targets,
            metrics=dict(progress.summary or run.summary_values()),
        )
        if report.losses:
            speed = f"{human_count(report.tokens_per_second)} {progress.unit}/s"
            done = f"done: {counted(report.final_step, 'step')}, loss {report.final_loss:.4f}, {speed}"
            run.console.note(f"{done}, peak memory {human_bytes(report.peak_memory_bytes)} a rank")
        run.console.note(*progress.notes())
        if run.planned is not None and run.planned.result:
            run.console.note("\n  ".join(comparison_lines(run.planned.result)))
        run.model.make_whole()
        if checkpoints.latest is not None:
            run.console.note(f"model    {checkpoints.store.path(checkpoints.latest)!s}")
            shown = shlex.quote(str(self.directory.path))
            module, tokenizer = run.model.module, run.model.processing_class
            pretrained = pretrained_of(module)
            command = f"zeromesh report {shown}"
            if is_adapted(module):
                command = f"zeromesh checkpoint export {shown} OUT --merge"
            elif pretrained is not None and pretrained.can_generate() and getattr(tokenizer, "chat_template", None):
                command = f"zeromesh generate {shown} --chat"
            run.console.note(f"next     {command}")
        return report
