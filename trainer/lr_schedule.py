"""Learning-rate schedules as pure functions of the step.

`LRSchedule.factor(step)` is what the base learning rate is multiplied by in step `step` (from 0). The curves are those of
`transformers.get_scheduler`, so a run moves between the two without a change of its curve; with a warm-up of another shape they are
those of DeepSpeed's schedulers. As a function of the step, a schedule has no state to save.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache

from zeromesh.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LRSchedule:
    """A named schedule of `total_steps` optimizer steps, the first `warmup_steps` of them rising from 0.

    | name | after the warm-up | options |
    |---|---|---|
    | `constant`, `constant_with_warmup` | 1 | |
    | `linear` | falls to 0 | |
    | `cosine` | `num_cycles` waves, 0.5 (one fall to 0) if not given | `num_cycles` |
    | `cosine_with_restarts` | `num_cycles` falls to 0, 1 if not given | `num_cycles` |
    | `cosine_with_min_lr` | as `cosine`, down to `min_ratio` | `min_ratio` (needed), `num_cycles` |
    | `cosine_warmup_with_min_lr` | the same a step earlier, as is its warm-up | `min_ratio` (needed), `num_cycles` |
    | `polynomial` | (1 - progress) ** `power` (1 if not given), down to `min_ratio` | `min_ratio`, `power` |
    | `warmup_stable_decay`, `wsd` | 1, then to `min_ratio` in `decay_steps` | `min_ratio`, `decay_steps` (a \
tenth of the run), `decay_shape` (cosine, linear, 1-sqrt), `num_cycles` |
    | `inverse_sqrt` | 1 / sqrt(step / warmup steps) | `timescale`, which replaces the warmup steps |

    `min_ratio` is a fraction of the base learning rate. `constant` has no warm-up; all others rise from `start_ratio` (0
    if not given) in the form of `warmup_shape`, linear if not given; log is DeepSpeed's: log(step + 1) / log(warmup steps).
    The section `schedule` of the configuration has checked each value by itself. Raises `ConfigError` for an option that
    the schedule does not have, and for values that do not go together.
    """

    name: str
    warmup_steps: int
    total_steps: int
    min_ratio: float | None = None
    num_cycles: float | None = None
    power: float | None = None
    decay_steps: int | None = None
    decay_shape: str | None = None
    timescale: int | None = None
    warmup_shape: str | None = None
    start_ratio: float | None = None

    def __post_init__(self) -> None:
        allowed = _OPTIONS[self.name].keys() | (_WARMUP_OPTIONS if self.name != "constant" else ())
        problems = [
            f"schedule.{option.name} has no effect on {self.name}; remove it"
            for option in fields(self)[3:]
            if option.name not in allowed and getattr(self, option.name) is not None
        ]
        if self.name.endswith("_with_min_lr") and self.min_ratio is None:
            problems.append(f"schedule.min_ratio is missing; {self.name} needs the fraction it falls to")
        room = max(0, self.total_steps - self.warmup_steps)
        if self.decay_steps is not None and self.decay_steps > room:
            problems.append(
                f"schedule.decay_steps is {self.decay_steps}; give 0 to {room}, what the warm-up of {self.warmup_steps} leaves "
                f"of {self.total_steps} steps"
            )
        if self.num_cycles is not None and self.decay_shape in ("linear", "1-sqrt"):
            problems.append(f"schedule.num_cycles has no effect on decay_shape {self.decay_shape}; remove it")
        if self.name == "constant" and self.warmup_steps:
            problems.append(
                f"schedule.warmup_steps: {self.warmup_steps} has no effect on constant, here as in transformers; set "
                "schedule.name: constant_with_warmup, or no warm-up (schedule.warmup_ratio neither)"
            )
        if problems:
            raise ConfigError(problems)

    def factor(self, step: int) -> float:
        """The factor of step `step`, counted from 0; the first step of a warm-up has factor 0."""
        if self.name == "polynomial" and step >= self.total_steps:
            # transformers divides by the steps after the warm-up, of which there may be none.
            return self.min_ratio or 0.0
        if step >= self.warmup_steps:
            return _curve_of(self)(step)
        start = self.start_ratio
        if self.name == "cosine_warmup_with_min_lr" and self.warmup_shape is None:
            if start is None:
                return (step + 1) / self.warmup_steps
            return start + (1.0 - start) * step / max(1, self.warmup_steps - 1)
        rise = _RISES[self.warmup_shape or "linear"](step, self.warmup_steps)
        if self.name in ("warmup_stable_decay", "wsd") and start is None:
            start = self.min_ratio  # This warm-up starts at the ratio that the decay ends at.
        return rise * (1.0 - start) + start if start else rise

    def momentum(self, step: int) -> None:
        """None: the optimizer's own, in every step."""


@cache
def _curve_of(schedule: LRSchedule) -> Callable[[int], float]:
    """The factor of a step after the warm-up, by transformers' schedule of that name at a base learning rate of 1."""
    # Imported here, so that reading a configuration loads neither torch nor transformers.
    import torch
    from torch.optim import SGD
    from transformers import get_scheduler

    tenth = max(1, schedule.total_steps // 10)
    usual = {"min_ratio": 0.0, "decay_steps": tenth, "timescale": schedule.warmup_steps or 10_000}
    names = _OPTIONS[schedule.name]
    options = {name: getattr(schedule, own) for own, name in names.items()}
    options |= {names[own]: value for own, value in usual.items() if own in names and options[names[own]] is None}
    scheduler = get_scheduler(
        {"wsd": "warmup_stable_decay"}.get(schedule.name, schedule.name),
        SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=schedule.warmup_steps,
        num_training_steps=schedule.total_steps,
        scheduler_specific_kwargs={name: value for name, value in options.items() if value is not None},
    )
    curve: Callable[[int], float] = scheduler.lr_lambdas[0]
    return curve


_RISES: dict[str, Callable[[int, int], float]] = {
    "linear": lambda step, steps: step / steps,
    "log": lambda step, steps: math.log(step + 1) / math.log(max(2, steps)),
    "cosine": lambda step, steps: 0.5 * (1.0 - math.cos(math.pi * (step / steps))),
    "1-sqrt": lambda step, steps: 1.0 - math.sqrt(1.0 - step / steps),
}
"""The part of a warm-up of `steps` steps that lies behind step `step`, by its shape."""

_CYCLES = {"num_cycles": "num_cycles"}
_LOWEST = {**_CYCLES, "min_ratio": "min_lr_rate"}
_DECAY = {**_CYCLES, "min_ratio": "min_lr_ratio", "decay_steps": "num_decay_steps", "decay_shape": "decay_type"}
_OPTIONS: dict[str, dict[str, str]] = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": _CYCLES,
    "cosine_with_restarts": _CYCLES,
    "cosine_with_min_lr": _LOWEST,
    "cosine_warmup_with_min_lr": _LOWEST,
    "polynomial": {"min_ratio": "lr_end", "power": "power"},
    "warmup_stable_decay": _DECAY,
    "wsd": _DECAY,
    "inverse_sqrt": {"timescale": "timescale"},
}
"""The options of each schedule, beside those of its warm-up, and what `get_scheduler` calls them."""
_WARMUP_OPTIONS = frozenset({"warmup_shape", "start_ratio"})

SCHEDULE_NAMES = tuple(_OPTIONS)
STEADY = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Curves that do not depend on the length of the run."""
