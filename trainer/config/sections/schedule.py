"""The section `schedule`, and learning-rate schedules as pure functions of the step, which have no state to save. The curves are
those of `transformers.get_scheduler`; with a warm-up of another shape they are those of DeepSpeed's schedulers."""

import math
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

from zeromesh.errors import ConfigError
from zeromesh.settings.keys import Count, CountOrOff, Fraction, Number, Positive
from zeromesh.trainer.config.sections.base import Ratio, Section

_CYCLES = {"num_cycles": "num_cycles"}
_MIN_RATIO_KEYS = {**_CYCLES, "min_ratio": "min_lr_rate"}
_DECAY_KEYS = {**_CYCLES, "min_ratio": "min_lr_ratio", "decay_steps": "num_decay_steps", "decay_shape": "decay_type"}
SCHEDULES: dict[str, dict[str, str]] = {
    "constant": {},  # 1, and no warm-up
    "constant_with_warmup": {},  # 1
    "linear": {},  # falls to 0
    "cosine": _CYCLES,  # waves, half of one (a fall to 0) if not given
    "cosine_with_restarts": _CYCLES,  # falls to 0, one if not given
    "cosine_with_min_lr": _MIN_RATIO_KEYS,  # as cosine, down to min_ratio, which it needs
    "cosine_warmup_with_min_lr": _MIN_RATIO_KEYS,  # the same a step earlier, as is its warm-up
    # (1 - progress) ** power (1 if not given), down to min_ratio
    "polynomial": {"min_ratio": "lr_end", "power": "power"},
    "warmup_stable_decay": _DECAY_KEYS,  # 1, then to min_ratio in decay_steps
    "wsd": _DECAY_KEYS,  # the same
    "inverse_sqrt": {"timescale": "timescale"},  # 1 / sqrt(step / timescale)
}
"""The options of each schedule, beside those of its warm-up, by their names in `get_scheduler`; comments give the curve."""
_WARMUP_OPTIONS = frozenset({"warmup_shape", "start_ratio"})


def default_warmup(steps: int) -> int:
    return steps // 10


class ScheduleSection(Section):
    """The learning rate over the steps. Names and curves are those of transformers' get_scheduler."""

    name: Literal[*SCHEDULES] = "cosine"  # type: ignore[valid-type]
    """The curve after the warm-up. wsd is short for warmup_stable_decay."""
    warmup_steps: CountOrOff | None = None
    """Steps over which the rate rises from 0; null: a tenth of the run. A `constant` rate has none."""
    warmup_ratio: Fraction | None = None
    """The warm-up as a fraction of the run's steps; it replaces `warmup_steps`."""
    min_ratio: Ratio | None = None
    """The lowest rate as a fraction of lr, for cosines with min_lr, polynomial and wsd; null: 0, for polynomial a rate of 1e-7."""
    num_cycles: Annotated[Number, Field(gt=0.0, le=1e6)] | None = None
    """Waves of the cosine curves; null: one fall to the lowest rate."""
    power: Positive | None = None
    """Exponent of polynomial; null: 1."""
    decay_steps: CountOrOff | None = None
    """Steps of wsd's final decay; null: a tenth of the run."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] | None = None
    """Curve of wsd's final decay; null: cosine."""
    timescale: Count | None = None
    """The time constant of inverse_sqrt in steps; null: the warm-up's steps."""
    warmup_shape: Literal["linear", "log", "cosine", "1-sqrt"] | None = None
    """Curve of the warm-up; log is that of DeepSpeed's schedulers. null: linear."""
    start_ratio: Ratio | None = None
    """The initial rate of the warm-up as a fraction of lr; null: 0, and min_ratio for wsd."""

    def warmup_of(self, steps: int) -> int:
        if self.warmup_ratio is not None:
            return math.ceil(self.warmup_ratio * steps)
        if self.warmup_steps is not None:
            return self.warmup_steps
        return 0 if self.name == "constant" else default_warmup(steps)


class LRSchedule(ScheduleSection):
    """A named schedule over `total_steps` steps. All but `constant` rise in the first `warmup_steps` from `start_ratio` (0
    if not given) by `warmup_shape` (linear if not given; log is DeepSpeed's: log(step + 1) / log(warmup steps)). Raises
    `ConfigError` for an option that the schedule does not have, and for values that do not go together."""

    warmup_steps: int
    total_steps: int

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        allowed = SCHEDULES[self.name].keys() | (_WARMUP_OPTIONS if self.name != "constant" else ())
        given = [each for each in list(ScheduleSection.model_fields)[3:] if getattr(self, each) is not None]
        problems = [f"schedule.{each} has no effect on {self.name}; remove it" for each in given if each not in allowed]
        if self.name.endswith("_with_min_lr") and self.min_ratio is None:
            problems.append(f"schedule.min_ratio is missing; {self.name} needs the fraction it falls to")
        room = max(0, self.total_steps - self.warmup_steps)
        if self.decay_steps is not None and self.decay_steps > room:
            cure = f"give 0 to {room}, what the warm-up of {self.warmup_steps} leaves of {self.total_steps} steps"
            problems.append(f"schedule.decay_steps is {self.decay_steps}; {cure}")
        if self.num_cycles is not None and self.decay_shape in ("linear", "1-sqrt"):
            problems.append(f"schedule.num_cycles has no effect on decay_shape {self.decay_shape}; remove it")
        if self.name == "constant" and self.warmup_steps:
            why = f"schedule.warmup_steps: {self.warmup_steps} has no effect on constant, here as in transformers"
            problems.append(f"{why}; set schedule.name: constant_with_warmup, or no warm-up (schedule.warmup_ratio neither)")
        if problems:
            raise ConfigError(problems)

    def factor(self, step: int) -> float:
        """Return the factor of step `step`, counted from 0; the first step of a warm-up has factor 0."""
        if self.name == "polynomial" and step >= self.total_steps:
            # transformers divides by the steps after the warm-up, which may be 0.
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
            start = self.min_ratio  # wsd's warm-up starts at the ratio of its decay's end.
        return rise * (1.0 - start) + start if start else rise

    def momentum(self, step: int) -> None:
        """Return None: the optimizer's momentum holds in every step."""


@cache
def _curve_of(schedule: LRSchedule) -> Callable[[int], float]:
    """Return the factor after the warm-up as a function of the step, by transformers' schedule at a base learning rate of 1."""
    # Imported here, so that reading a configuration loads neither torch nor transformers.
    import torch
    from torch.optim import SGD
    from transformers import get_scheduler

    tenth = max(1, schedule.total_steps // 10)
    usual = {"min_ratio": 0.0, "decay_steps": tenth, "timescale": schedule.warmup_steps or 10_000}
    names = SCHEDULES[schedule.name]
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
"""The rise of a warm-up of `steps` steps at step `step`, from 0 to 1, by shape."""

STEADY = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not depend on the run's length."""
