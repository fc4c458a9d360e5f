"""One `fit`: resume from a checkpoint, train in the run's directory, and end with a report and a whole model."""

import math
import shlex
import signal

from zeromesh.errors import ConfigError, DataError, NonFiniteError, counted
from zeromesh.trainer.checkpoints.manager import RunCheckpoints, load_weights
from zeromesh.trainer.config.sections.schedule import STEADY
from zeromesh.trainer.data.feed import Feed
from zeromesh.trainer.formatting import human_bytes, human_count
from zeromesh.trainer.loop.context import FitReport, RunContext
from zeromesh.trainer.loop.evaluation import generation_of, require_metric
from zeromesh.trainer.loop.training_loop import Samples, StopRequest, TrainingLoop, stop_requests
from zeromesh.trainer.models.adapters import is_adapted, pretrained_of
from zeromesh.trainer.monitoring.plan_check import comparison_lines
from zeromesh.trainer.monitoring.profiler import Profile
from zeromesh.trainer.monitoring.run_directory import RunDirectory, start_facts
from zeromesh.trainer.monitoring.step_stats import rank_figures
from zeromesh.trainer.monitoring.tracking import Tracking


def fit(run: RunContext, directory: RunDirectory, samples: Samples | None = None) -> FitReport:
    """Train up to the last step, in a locked directory; `samples` generates the completions of `run.prompts`.

    An interrupted run is resumed; for a finished one only a note is shown.

    Raises:
        DataError: where there is no training data.
        ConfigError: for a model without trainable parameters.
        KeyboardInterrupt, SystemExit: after a step and its checkpoint, when some rank was asked to stop.
        NonFiniteError: at the end, where more than half of all steps made no update.
    """
    config, progress = run.config, run.progress
    if progress.report is not None:
        run.console.note(f"already finished at step {progress.step}; a new Trainer trains this model further")
        return progress.report
    feed = run.model.feeds.train()
    if feed is None:
        raise DataError("there is no train_dataset; give one to Trainer, or name text in data.train")
    model = run.model.module
    if not any(parameter.requires_grad for parameter in model.parameters()):
        frozen = any(True for _ in model.parameters())
        why = "has only frozen parameters (requires_grad is False)" if frozen else "has no parameters"
        raise ConfigError(f"{type(model).__name__} {why}; there is nothing to train")
    run.start_times.begin()
    with run.model.guarded("trainer.fit()"), stop_requests(run.console.note) as request:
        if run.data.eval is not None:
            # Invalid metrics are refused before training, not at the first evaluation.
            require_metric(run)
            generation_of(run, None, {}, metrics=True)
        checkpoints = RunCheckpoints(
            config,
            directory.path,
            run.model.require_engine(),
            run.model.processing_class,
            run.console.note,
            linked=run.events.of_transformers is not None,
        )
        stopped, eval_loss = 0, _resume(run, checkpoints) if progress.step == 0 else None
        run.start_times.end("checkpoints")
        if not run.finished:
            checkpoints.require_room()
        if not run.finished or progress.owes_evaluation:
            stopped, eval_loss = _train(run, feed, directory, checkpoints, request, samples)
        if not stopped:
            progress.report = _end(run, eval_loss, checkpoints, shlex.quote(str(directory.path)))
    if progress.report is None:
        run.console.note(f"stopped after step {progress.step}")
        # The process ends as it does by the signal's default action, but through `finally` blocks.
        raise KeyboardInterrupt if stopped == signal.SIGINT else SystemExit(128 + stopped)
    if progress.max_nonfinite and 2 * progress.skipped > progress.step:
        raise NonFiniteError(
            f"{progress.skipped} of {counted(progress.step, 'step')} made no update, because their gradients were not finite (in "
            f"the last such step, {progress.cause or 'of an earlier process'}). The run is complete and what it has is saved, but "
            "the model is hardly trained; look at the first line of metrics.jsonl that has `cause`. run.max_nonfinite: 0 lets such "
            "a run pass"
        )
    return progress.report


def _train(
    run: RunContext,
    feed: Feed,
    directory: RunDirectory,
    checkpoints: RunCheckpoints,
    request: StopRequest,
    samples: Samples | None,
) -> tuple[int, float | None]:
    """Return the signal that stopped the run, or 0, and the last evaluation loss."""
    config, mesh, progress, note = run.config, run.mesh, run.progress, run.console.note
    given = [name for name, how in run.inputs.names().items() if how == "given"]
    facts = {**start_facts(mesh, run.model.parameters), "given": given}
    with (
        checkpoints,
        directory.open(config, progress.step, facts, mesh) as writer,
        run.console,
        run.loader(feed, last=config.run.max_steps, state=progress.resumed.stream or None) as loader,
        Tracking.open(
            config, mesh, directory.path, step=progress.step, known=progress.resumed.tracker, note=note
        ) as tracking,
        Profile(config.profile, directory.path, run.model.require_engine(), note) as profile,
    ):
        run.start_times.end("files and trackers")
        return TrainingLoop(
            run=run,
            loader=loader,
            writer=writer,
            tracking=tracking,
            profile=profile,
            checkpoints=checkpoints,
            request=request,
            samples=samples,
        ).go()


def _resume(run: RunContext, checkpoints: RunCheckpoints) -> float | None:
    """Resume from the newest checkpoint, if any; returns its evaluation loss."""
    run.console.status("looking for checkpoints")
    state = checkpoints.resume(run.settings)
    if state is None:
        return None
    # The run's first process decides for the settings that the model has written to its configuration since.
    kept = {name: value for name, value in run.model.described.items() if f"model.{name}" not in state.written}
    first = {name.removeprefix("model."): state.settings[name] for name in state.written if name in state.settings}
    run.model.described = kept | first
    section, progress = run.config.run, run.progress
    progress.resume(state)
    run.events.restore(state.callbacks)
    if state.max_steps != section.max_steps and run.config.schedule.name not in STEADY:
        change = f"{state.max_steps} then, {section.max_steps} now"
        run.console.note(f"run.max_steps: {change}; the learning rate follows the curve of the new one from here on")
    if run.finished:
        evaluates = run.data.eval is not None and (section.eval_at_end or section.evaluates_after(state.step))
        progress.owes_evaluation = evaluates and state.eval_loss is None
        owed = ", but not evaluated there, which is done now" if progress.owes_evaluation else ""
        length = "run.max_steps" if section.epochs is None else "run.epochs"
        run.console.note(
            f"nothing was trained: run {section.name!r} is complete at step {progress.reached} of {section.max_steps}{owed}; "
            f"raise {length}, or choose another run.name"
        )
    else:
        run.console.note(f"resumed from step {state.step} ({human_count(state.tokens)} tokens)")
    return state.eval_loss


def _end(run: RunContext, eval_loss: float | None, checkpoints: RunCheckpoints, shown: str) -> FitReport:
    """Make the model whole, with its best weights if configured; returns the report, and shows it. `shown` is the directory."""
    progress, best, config = run.progress, run.progress.best, run.config.run
    if config.load_best and best.value is not None and best.step != progress.step:
        load_weights(checkpoints.store.path(best.step), run.model.require_engine(), run.mesh)
        run.console.note(f"weights of step {best.step}: {config.metric} {best.value:.4g} is the best")
    steady = progress.seconds[1:] or progress.seconds
    per_step = (progress.tokens - progress.resumed.tokens) / max(1, len(progress.seconds))
    report = FitReport(
        final_step=progress.step,
        final_loss=math.nan if progress.last_loss is None else progress.last_loss,
        losses=tuple(progress.losses),
        eval_loss=eval_loss,
        tokens=progress.tokens,
        tokens_per_second=per_step * len(steady) / sum(steady) if steady else 0.0,
        peak_memory_bytes=rank_figures(run.mesh)[0],
        skipped_steps=progress.skipped,
        passed_over=progress.without_targets,
        metrics=dict(progress.summary or run.summary_values()),
    )
    if report.losses:
        run.console.note(
            f"done: {counted(report.final_step, 'step')}, loss {report.final_loss:.4f}, "
            f"{human_count(report.tokens_per_second)} {progress.unit}/s, "
            f"peak memory {human_bytes(report.peak_memory_bytes)} a rank"
        )
    run.console.note(*progress.notes())
    if run.planned is not None and run.planned.result:
        run.console.note("\n  ".join(comparison_lines(run.planned.result)))
    run.model.make_whole()
    if checkpoints.latest is not None:
        run.console.note(f"model    {checkpoints.store.path(checkpoints.latest)!s}")
        module, tokenizer = run.model.module, run.model.processing_class
        pretrained = pretrained_of(module)
        command = f"zeromesh report {shown}"
        if is_adapted(module):
            command = f"zeromesh checkpoint export {shown} OUT --merge"
        elif pretrained is not None and pretrained.can_generate() and getattr(tokenizer, "chat_template", None):
            command = f"zeromesh generate {shown} --chat"
        run.console.note(f"next     {command}")
    return report
