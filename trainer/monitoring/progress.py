"""What the steps of a run add up to: lines of metrics on the way, `trainer.state.log_history` in transformers' words, and a report
at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeromesh.errors import CheckpointError, NonFiniteError
from zeromesh.telemetry.step_recorder import Figures, added, traffic_table
from zeromesh.trainer.monitoring.step_metrics import StepMetrics, strict, unstrict
from zeromesh.trainer.monitoring.step_result import StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """What a run came to. Losses are means over targets; `losses` has one per step, nan where a step had none."""

    final_step: int
    final_loss: float
    losses: tuple[float, ...]
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
    metrics: dict[str, float] = field(default_factory=dict)
    """The run in a few numbers, by transformers' names: `train_loss`, `train_runtime` in seconds, `total_flos`, `epoch`, ..."""

    @property
    def global_step(self) -> int:
        """transformers' name of `final_step`."""
        return self.final_step

    @property
    def training_loss(self) -> float:
        """The mean loss of this process's steps, as transformers has it."""
        return mean_of(self.losses) if self.losses else self.final_loss


def mean_of(losses: Sequence[float]) -> float:
    """The mean; 0 of none."""
    return sum(losses) / max(1, len(losses))


class Progress:
    """What the steps so far add up to. A run that ends after `most_nonfinite` skipped steps in a row; 0: never."""

    def __init__(self, most_nonfinite: int) -> None:
        self._most_nonfinite = most_nonfinite
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._tokens = 0
        self._skipped = 0
        self._cause = ""
        self.unit = "tokens"
        """What the last step's throughput counts."""
        self._in_a_row = 0
        self._earlier = 0
        self._last_loss: float | None = None
        self._communication: Figures = {}
        self._bubbles: list[Mapping[str, float]] = []

    @property
    def tokens(self) -> int:
        """Tokens since the start of training."""
        return self._tokens

    @property
    def skipped(self) -> int:
        """Steps without an update since the start of training."""
        return self._skipped

    @property
    def last_loss(self) -> float | None:
        """The latest step's loss."""
        return self._losses[-1] if self._losses else self._last_loss

    def resume(self, *, tokens: int, skipped: int, loss: float | None) -> None:
        """Go on from an earlier process's counts and its last loss."""
        self._tokens = self._earlier = tokens
        self._skipped = skipped
        self._last_loss = loss

    def add(
        self, result: StepResult, step: int, lr: float, peak: int, figures: Mapping[str, Any] | None = None
    ) -> StepMetrics:
        """Count a step; returns its line. `peak`: bytes that the rank with the most has needed so far; `figures`: more fields."""
        self._losses.append(result.loss)
        self._seconds.append(result.seconds)
        self._tokens += result.tokens
        self.unit = result.unit
        self._skipped += result.skipped
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        extras: dict[str, Any] = {}
        if result.skipped:
            extras["skipped"] = True
            extras["cause"] = result.cause
            self._cause = result.cause
        if result.loss_scale != 1.0:
            extras["loss_scale"] = result.loss_scale
        extras |= {f"{tier}_wait_seconds": round(seconds, 4) for tier, seconds in result.waited.items()}
        if result.bubble:
            extras["bubble"] = {name: round(part, 4) for name, part in result.bubble.items()}
            self._bubbles.append(result.bubble)
        if result.communication:
            extras["communication"] = result.communication
            self._communication = added(self._communication, result.communication)
        return StepMetrics(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=self._tokens,
            unit=result.unit,
            tokens_per_second=result.tokens / result.seconds,
            step_seconds=result.seconds,
            peak_memory_bytes=peak,
            extras=extras | dict(figures or {}),
        )

    def notes(self) -> list[str]:
        """Lines about the average step: skipped updates, communication, and how long a pipeline has stood still."""
        found = []
        if self._skipped:
            found.append(f"{self._skipped} steps made no update: their gradients were not finite")
        if self._communication:
            table = traffic_table(self._communication, steps=len(self._seconds)).replace("\n", "\n  ")
            found.append(f"communication of this rank in a step:\n  {table}")
        if self._bubbles:
            measured, predicted = (
                sorted(each[name] for each in self._bubbles)[len(self._bubbles) // 2]
                for name in ("measured", "predicted")
            )
            found.append(
                f"pipeline: ranks stood still for {measured:.0%} of a step (median; {predicted:.0%} predicted)"
            )
        return found

    def check(self, step: int) -> None:
        """Raise `NonFiniteError` after too many skipped steps in a row."""
        if self._most_nonfinite and self._in_a_row >= self._most_nonfinite:
            raise NonFiniteError(
                f"gradients were not finite in {self._in_a_row} steps in a row, up to step {step} (run.max_nonfinite; in the last, "
                f"{self._cause}); no update of these steps was made. Lower optimizer.lr, look at the data, or use "
                "precision.compute: bfloat16"
            )

    def require_trained(self, steps: int) -> None:
        """Raise `NonFiniteError` where more than half of all `steps` made no update: such a run is no success."""
        if self._most_nonfinite and 2 * self._skipped > steps:
            raise NonFiniteError(
                f"{self._skipped} of {steps} steps made no update, because their gradients were not finite (in the last such step, "
                f"{self._cause or 'of an earlier process'}). The run is complete and what it has is saved, but the model is hardly "
                "trained; look at the first line of metrics.jsonl that has `cause`. run.max_nonfinite: 0 lets such a run pass"
            )

    def summary(self, *, seconds: float, samples: int, flops: float, epoch: float) -> dict[str, float]:
        """Values of the run as transformers names them: of this process's `seconds` and `samples`, and of all its operations."""
        seconds = max(seconds, 1e-9)
        return {
            "train_runtime": round(seconds, 4),
            "train_samples_per_second": round(samples / seconds, 3),
            "train_steps_per_second": round(len(self._losses) / seconds, 3),
            "total_flos": flops,
            "train_loss": mean_of(self._losses),
            "epoch": epoch,
        }

    def report(self, final_step: int, eval_loss: float | None, peak: int, metrics: Mapping[str, float]) -> FitReport:
        """The run's report."""
        steady = self._seconds[1:] or self._seconds
        per_step = (self._tokens - self._earlier) / max(1, len(self._seconds))
        return FitReport(
            final_step=final_step,
            final_loss=float("nan") if self.last_loss is None else self.last_loss,
            losses=tuple(self._losses),
            eval_loss=eval_loss,
            tokens=self._tokens,
            tokens_per_second=per_step * len(steady) / sum(steady) if steady else 0.0,
            peak_memory_bytes=peak,
            skipped_steps=self._skipped,
            metrics=dict(metrics),
        )


Line = dict[str, Any]


class LogHistory:
    """The logged lines of one run. `kept`: whether checkpoints have them too, so that a run that goes on has all of them."""

    def __init__(self, *, kept: bool) -> None:
        self.lines: list[Line] = []
        self.kept = kept
        self._loss, self._steps = 0.0, 0
        """Sum of the losses since the last line of a step, and of how many steps."""

    def count(self, loss: float) -> None:
        """One more step."""
        self._loss += loss
        self._steps += 1

    def step(self, metrics: StepMetrics, epoch: float) -> None:
        """The line of a step: `loss` is the mean of the steps since the last such line."""
        line: Line = {"loss": self._loss / max(1, self._steps)}
        if metrics.grad_norm is not None:
            line["grad_norm"] = metrics.grad_norm
        self._loss, self._steps = 0.0, 0
        self.values({**line, "learning_rate": metrics.lr}, metrics.step, epoch)

    def values(self, values: Mapping[str, Any], step: int, epoch: float) -> None:
        """The values of an evaluation, or those of the whole run at its end."""
        self.lines.append({**values, "epoch": epoch, "step": step})

    def latest(self) -> Line:
        """The last line as transformers gives it to callbacks: they are told the step beside it."""
        return {name: value for name, value in self.lines[-1].items() if name != "step"}

    def to_json(self) -> list[Line]:
        """What a checkpoint keeps."""
        return [strict(line) for line in self.lines] if self.kept else []

    def restore(self, lines: Sequence[Any], where: str) -> None:
        """Take what `to_json` gave. Raises `CheckpointError` for what it has not made."""
        if not all(isinstance(line, dict) for line in lines):
            raise CheckpointError(f"{where}: log_history is not one that this version writes")
        self.lines[:] = [{name: unstrict(value) for name, value in line.items()} for line in lines]
