"""The section `schedule`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zeromesh.trainer.config_types import Count, CountOrOff, Fraction, Number
from zeromesh.trainer.sections.section import Section

DEFAULT_WARMUP_STEPS = 20


def default_warmup(steps: int) -> int:
    """Steps of the warm-up of a run of `steps` steps that nobody has given one."""
    return DEFAULT_WARMUP_STEPS if steps >= DEFAULT_WARMUP_STEPS else steps // 10


class ScheduleSection(Section):
    """The learning rate over the steps. Names and curves are those of transformers' get_scheduler."""

    name: Literal[
        "constant",
        "constant_with_warmup",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "polynomial",
        "warmup_stable_decay",
        "wsd",
        "inverse_sqrt",
    ] = Field(default="cosine", description="The curve after the warm-up. wsd is short for warmup_stable_decay.")
    warmup_steps: CountOrOff = Field(
        default=DEFAULT_WARMUP_STEPS,
        description="Steps over which the rate rises from 0. The default shrinks to a tenth of a run that is shorter.",
    )
    warmup_ratio: Fraction | None = Field(
        default=None, description="The same as a part of the run's steps; it replaces `warmup_steps`."
    )
    min_ratio: Annotated[Number, Field(ge=0.0, le=1.0)] | None = Field(
        default=None,
        description="The lowest rate, as a part of lr, of the cosines with min_lr, polynomial and wsd.",
    )
    num_cycles: Annotated[Number, Field(gt=0.0)] | None = Field(
        default=None, description="Waves of the cosine curves; null: one fall to the lowest rate."
    )
    power: Annotated[Number, Field(gt=0.0)] | None = Field(default=None, description="Exponent of polynomial; null: 1.")
    decay_steps: CountOrOff | None = Field(
        default=None, description="Steps of wsd's final decay; null: a tenth of the run."
    )
    decay_shape: Literal["linear", "cosine", "1-sqrt"] | None = Field(
        default=None, description="Curve of wsd's final decay; null: cosine."
    )
    timescale: Count | None = Field(
        default=None,
        description="Steps after which inverse_sqrt begins to fall, as it were; null: those of the warm-up.",
    )
    warmup_shape: Literal["linear", "log", "cosine", "1-sqrt"] | None = Field(
        default=None, description="Curve of the warm-up; log is that of DeepSpeed's schedulers. null: linear."
    )
    start_ratio: Annotated[Number, Field(ge=0.0, le=1.0)] | None = Field(
        default=None,
        description="The rate that the warm-up starts at, as a part of lr; null: 0, and min_ratio for wsd.",
    )
