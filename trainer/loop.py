"""The loop over steps: train, log, evaluate, save, stop in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zeromesh.trainer import setup
from zeromesh.trainer.checkpoints import RunCheckpoints
from zeromesh.trainer.console import human_count
from zeromesh.trainer.metrics import MetricsWriter
from zeromesh.trainer.signals import StopRequest
from zeromesh.trainer.state import TrainerState
from zeromesh.trainer.step import Feed, Votes
from zeromesh.trainer.step_memory import NAME as STEP_MEMORY
from zeromesh.trainer.step_memory import StepMemory
from zeromesh.trainer.stragglers import Stragglers

if TYPE_CHECKING:
    from zeromesh.trainer.run import Run


class TrainingLoop:
    """Takes a run from the step where it is to its last one, or to one after which somebody wants it to stop."""

    def __init__(
        self,
        run: Run,
        feed: Feed,
        *,
        writer: MetricsWriter | None,
        checkpoints: RunCheckpoints,
        request: StopRequest,
    ) -> None:
        self._run = run
        self._feed = feed
        self._writer = writer
        self._checkpoints = checkpoints
        self._request = request
        self._schedule = setup.learning_rate_schedule(run.config)
        self._last = run.config.run.max_steps
        self._stragglers = Stragglers()
        self._memory = StepMemory(writer.path.with_name(STEP_MEMORY) if writer is not None else None, run.step + 1)
        self._stopped = 0
        """The signal by which some rank was asked to stop."""
        self._seconds = 0.0
        """Of steps since ranks were last looked at."""
        self._evaluated: tuple[int, float] | None = None
        """The latest evaluation: after which step, and its loss."""

    @property
    def eval_loss(self) -> float | None:
        """Of the evaluation after the present step."""
        return self._evaluated[1] if self._evaluated and self._evaluated[0] == self._run.step else None

    def go(self) -> int:
        """Train; returns 0 after the last step, or the number of the signal that some rank was stopped by."""
        run = self._run
        run.call("on_train_begin")
        run.console.start(total_steps=self._last, first_step=run.step)
        while run.step < self._last and not self._stopped:
            self._train_one()
        if run.data.eval is not None and not self._stopped:
            self._evaluate()
        self._save(wait=True)
        if not self._stopped:
            run.call("on_train_end")
        return self._stopped

    def _train_one(self) -> None:
        run = self._run
        number = run.step + 1
        run.call("on_step_begin", number)
        factor = self._schedule.factor(run.step)
        wish = Votes.of(self._request.signal)
        with self._memory.recorded(number, run.require_engine().ledger):
            result = run.stepper.train_step(self._feed, run.step, factor, lambda: run.before_update(number), wish)
        run.step = number
        self._note_stop(result.votes.number)
        every = run.config.run.log_every
        logged = bool(every) and (number % every == 0 or number == self._last)
        self._seconds += result.seconds
        figures = run.rank_figures() if logged else None
        peak = figures.peak_bytes if figures else 0
        metrics = run.progress.add(result, number, run.config.optimizer.lr * factor, peak)
        if figures:
            slow = self._stragglers.look(number, self._seconds, figures.waited)
            self._seconds = 0.0
            if self._writer is not None:
                self._writer.write(metrics)
            run.console.step(metrics)
            if slow:
                run.console.note(slow)
        else:
            run.console.advance(number)
        if result.skipped and result.loss_scale == 1.0:
            run.console.note(f"step {number}: no update on any rank: {result.cause}")
        run.call("on_step_end", number, metrics.record())
        run.progress.check(number)
        every = run.config.run.eval_every
        if every and number % every == 0 and number < self._last and run.data.eval is not None and not self._stopped:
            self._evaluate()
        self._checkpoints.poll()
        if number < self._last and self._checkpoints.due(number):
            self._save(wait=False)

    def _note_stop(self, number: int) -> bool:
        """Whether some rank has been asked to stop, by signal `number` if that is none yet."""
        self._stopped = self._stopped or number
        return bool(self._stopped)

    def _asked(self) -> bool:
        """Whether some rank has been asked to stop; between two microbatches of an evaluation, which may be long."""
        asked = self._run.mesh.world.max_(torch.tensor([int(self._request.signal)]), "wishes to stop")
        return self._note_stop(int(asked[0]))

    def _evaluate(self) -> None:
        run = self._run
        result = run.evaluate_until(None, self._asked)
        if result is None:
            return
        text = f"step {run.step}: evaluation loss {result.loss:.4f} over {human_count(result.targets)} targets"
        loaded = run.data.loaded
        if loaded is not None and loaded.byte_pair_entropy is not None:
            word = "below" if result.loss < loaded.byte_pair_entropy else "above"
            text += f", {word} the byte-pair entropy {loaded.byte_pair_entropy:.4f}"
        run.console.note(text)
        self._evaluated = (run.step, result.loss)
        run.call("on_evaluate", run.step, result.loss)

    def _save(self, *, wait: bool) -> None:
        if self._checkpoints.latest != self._run.step:
            self._checkpoints.save(self._state(), self._run.model, self._run.processing_class, wait=wait)
        if wait:
            self._checkpoints.finish()

    def _state(self) -> TrainerState:
        run = self._run
        engine = run.require_engine()
        scaler = engine.updater.scaler
        return TrainerState(
            step=run.step,
            samples=run.step * run.config.batch.global_size,
            tokens=run.progress.tokens,
            updates=engine.updater.updates,
            skipped=run.progress.skipped,
            loss=run.progress.last_loss,
            eval_loss=self.eval_loss,
            metric=self.eval_loss,
            loss_scale=scaler.scale,
            good_steps=scaler.good_steps,
            seed=run.config.run.seed,
            max_steps=self._last,
            learning_rate=run.config.optimizer.lr * self._schedule.factor(max(0, run.step - 1)),
            settings=run.settings,
        )
