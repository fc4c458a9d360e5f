"""What holds of the lines of `metrics.jsonl` in any run."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def metrics(step: int = 1, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "step": step,
        "loss": 3.25,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "tokens": 4096,
        "tokens_per_second": 12_345.0,
        "step_seconds": 0.25,
        "peak_memory_bytes": 3 << 29,
    }
    return values | changes


def check_phases(lines: Sequence[Mapping[str, Any]]) -> None:
    """The phases of a step add up to it, in most steps: where the process is held up between two looks at the clock, one has it."""
    left = [line["step_seconds"] - sum(line["phases"].values()) for line in lines]
    assert min(left) > -1e-3, left
    typical = statistics.median(line["step_seconds"] for line in lines)
    assert statistics.median(left) < 2e-3 + 0.05 * typical, left
