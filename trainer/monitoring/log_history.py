"""What a run has logged, line by line, in the words of transformers: `trainer.state.log_history`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zeromesh.errors import CheckpointError
from zeromesh.trainer.monitoring.step_metrics import StepMetrics, strict, unstrict

Line = dict[str, Any]


class LogHistory:
    """Of one run. `kept`: whether checkpoints have it too, so that a run that goes on has all of it."""

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
