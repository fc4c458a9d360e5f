"""The best evaluation of a run so far, and how long ago it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from zeromesh.checkpoint.format.safetensors_layout import is_number, is_size
from zeromesh.errors import CheckpointError, ConfigError

Goal = Literal["lowest", "highest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """`value` of the best evaluation, after `step` steps; None before there was one. `waited`: evaluations since the last one that
    was better by `run.min_improvement` or more."""

    value: float | None = None
    step: int = 0
    waited: int = 0

    def after(self, value: float, step: int, goal: Goal, min_improvement: float) -> Best:
        """The best value after one more evaluation. NaN is never better."""
        gain = -math.inf if math.isnan(value) else math.inf
        if self.value is not None and gain > 0:
            gain = value - self.value if goal == "highest" else self.value - value
        better = gain > 0
        enough = better and gain >= min_improvement
        kept = replace(self, value=value, step=step) if better else self
        return replace(kept, waited=0 if enough else self.waited + 1)

    def to_json(self) -> dict[str, Any]:
        """The values for a checkpoint; empty before the first evaluation."""
        return {} if self.value is None else asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any], where: str) -> Best:
        """Raises `CheckpointError` for what `to_json` has not made."""
        if not content:
            return cls()
        value, step, waited = (content.get(name) for name in ("value", "step", "waited"))
        whole = all(type(each) is int and is_size(each) for each in (step, waited))
        if not whole or not is_number(value) or len(content) != 3:
            raise CheckpointError(
                f"{where}: `best` is {dict(content)!r:.200}; this version writes value, step and waited"
            )
        return cls(**content)


def goal_of(metric: str, goal: Literal["auto", "lowest", "highest"]) -> Goal:
    """The lowest value of a loss, an error or a perplexity is best, and the highest of anything else, unless `goal` says which."""
    if goal != "auto":
        return goal
    return "lowest" if any(word in metric.lower() for word in ("loss", "error", "perplexity")) else "highest"


def value_of(metric: str, values: Mapping[str, float]) -> float:
    """The value of an evaluation by which it is judged, with or without the prefix `eval_`.

    Raises:
        ConfigError: when the evaluation has no such value.
    """
    for name in (metric, f"eval_{metric}"):
        if name in values:
            return float(values[name])
    raise ConfigError(
        f"run.metric: {metric!r} is no value of an evaluation; it has {', '.join(values)}. Set run.metric to one of them, or "
        "return it from compute_metrics"
    )
