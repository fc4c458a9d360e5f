"""The rows of trackers from lines of `metrics.jsonl` and `evaluations.jsonl`, and rows that a killed process did not send."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeromesh.trainer.monitoring.step_metrics import EVALUATIONS, METRICS, leaves, metrics_of_steps
from zeromesh.trainer.trackers.backends import UNKNOWN, Place, TrackedRow

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
"""The names of a step's fields in trackers; others are `train/NAME`, and mappings `NAME/KEY`."""


_OF_A_SET = re.compile(r"eval_(.+)_runtime")
"""A value that every evaluation of several sets has, from which the set's name is parsed."""


def step_row(record: Mapping[str, Any]) -> TrackedRow:
    """Return the row of a step, from its line in `metrics.jsonl`."""
    values: dict[str, float] = {}
    for (name, *keys), value in leaves(record):
        if isinstance(value, int | float) and name not in ("step", "time"):
            path = "/".join([_NAMES.get(name, name), *map(str, keys)]).replace(" ", "-")
            values[path if keys else _NAMES.get(name, f"train/{name}")] = value
    return TrackedRow(Place(record["step"]), values)


def evaluation_row(step: int, values: Mapping[str, Any]) -> TrackedRow:
    """Return the row of an evaluation after `step`, with `eval/NAME/...` for several sets; values that are no numbers are left
    out."""
    sets = sorted((match[1] for match in map(_OF_A_SET.fullmatch, values) if match), key=len, reverse=True)
    named = {}
    for name, value in values.items():
        if name != "time" and isinstance(value, int | float):
            short = name.removeprefix("eval_")
            own = next((each for each in sets if short.startswith(f"{each}_")), None)
            named["eval/" + (short if own is None else f"{own}/{short[len(own) + 1 :]}")] = value
    return TrackedRow(Place(step, evaluation=True), named)


def missed_rows(directory: Path, sent: Place, through: int) -> list[TrackedRow]:
    """Return the rows up to step `through` that are in a run's files but that a killed process did not send to a tracker.

    The list is empty if the tracker's last row is unknown. Raises `StorageError` where a file cannot be read.
    """
    if sent == UNKNOWN:
        return []
    steps = map(step_row, metrics_of_steps(directory / METRICS, sent.step, through))
    lines = metrics_of_steps(directory / EVALUATIONS, sent.step, through)
    evaluations = [evaluation_row(line.pop("step"), line) for line in lines]
    return sorted((row for row in [*steps, *evaluations] if row.place > sent), key=lambda row: row.place)
