"""What holds of the lines of `metrics.jsonl` in any run."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def check_phases(lines: Sequence[Mapping[str, Any]]) -> None:
    """The phases of a step add up to it, in most steps: where the process is held up between two looks at the clock, one has it."""
    left = [line["step_seconds"] - sum(line["phases"].values()) for line in lines]
    assert min(left) > -1e-3, left
    typical = statistics.median(line["step_seconds"] for line in lines)
    assert statistics.median(left) < 2e-3 + 0.05 * typical, left
