"""Rows for trackers: the figures of a step or an evaluation by their names there, and those that a tracker has missed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.trainer.monitoring.step_metrics import EVALUATIONS, METRICS, last_metrics

_NAMES = {
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "tokens": "train/tokens",
    "tokens_per_second": "perf/tokens_per_second",
    "step_seconds": "perf/step_seconds",
    "mfu": "perf/mfu",
    "peak_memory_bytes": "memory/peak_bytes",
    "phases": "time",
}
"""What fields of a step's line are called in trackers; others are `train/NAME`, and mappings `NAME/KEY`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRow:
    """Figures of a step, or of an evaluation after it."""

    step: int
    values: Mapping[str, float]
    evaluation: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """How far a tracker has got: the last step, and whether its evaluation too."""

    step: int = -1
    """-1: nobody knows."""
    evaluated: bool = False

    def covers(self, row: TrackedRow) -> bool:
        """Whether the tracker has a row."""
        return row.step < self.step or (row.step == self.step and (self.evaluated or not row.evaluation))


def step_row(record: Mapping[str, Any]) -> TrackedRow:
    """The row of a step, from its line in `metrics.jsonl`."""
    return TrackedRow(step=record["step"], values=dict(_named(record)))


def evaluation_row(step: int, values: Mapping[str, Any]) -> TrackedRow:
    """The row of an evaluation after `step`; what is no number among its values is left out."""
    numbers = {name: value for name, value in values.items() if name != "time" and _is_number(value)}
    named = {f"eval/{name.removeprefix('eval_')}": value for name, value in numbers.items()}
    return TrackedRow(step=step, values=named, evaluation=True)


def missed_rows(directory: Path, sent: Sent, through: int) -> Iterator[TrackedRow]:
    """What the files of a run's directory have of the steps up to `through` and a tracker has not: a kill met it on its way.

    None where it is not known how far the tracker has got. Raises `StorageError` where a file cannot be read.
    """
    if sent.step < 0:
        return
    steps = map(step_row, last_metrics(directory / METRICS, sent.step, through))
    lines = last_metrics(directory / EVALUATIONS, sent.step, through)
    evaluations = (evaluation_row(line.pop("step"), line) for line in lines)
    for row in heapq.merge(steps, evaluations, key=lambda row: (row.step, row.evaluation)):
        if not sent.covers(row):
            yield row


def _named(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a step's line, by their names in trackers."""
    for field, value in record.items():
        if field in ("step", "time"):
            continue
        if isinstance(value, Mapping):
            yield from _under(_NAMES.get(field, field), value)
        elif _is_number(value):
            yield _NAMES.get(field, f"train/{field}"), value


def _under(path: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        name = f"{path}/{key.replace(' ', '-')}"
        if isinstance(value, Mapping):
            yield from _under(name, value)
        elif _is_number(value):
            yield name, value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
