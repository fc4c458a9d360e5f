"""The section `precision`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zeromesh.trainer.config_types import Count, Number
from zeromesh.trainer.sections.section import Section


class LossScaleSection(Section):
    """The dynamic loss scale of float16, as in torch.amp.GradScaler. Other compute dtypes do not read it."""

    initial_scale: Annotated[Number, Field(gt=0.0)] = Field(default=65536.0, description="The scale of the first step.")
    growth_factor: Annotated[Number, Field(gt=1.0)] = Field(
        default=2.0, description="Factor after `growth_interval` good steps."
    )
    backoff_factor: Annotated[Number, Field(gt=0.0, lt=1.0)] = Field(
        default=0.5, description="Factor after a step with non-finite gradients."
    )
    growth_interval: Count = Field(
        default=2000, description="Consecutive steps with finite gradients before the scale grows."
    )


class PrecisionSection(Section):
    """The dtypes of each role. They are printed once at the start of a run."""

    compute: Literal["bfloat16", "float16", "float32", "float64"] = Field(
        default="bfloat16", description="Forward and backward, and the parameters that they read."
    )
    master: Literal["float32", "float64"] = Field(default="float32", description="Master weights and optimizer state.")
    reduce: Literal["float32", "float64"] = Field(
        default="float32", description="Sums of gradients over microbatches and ranks."
    )
    loss_scale: LossScaleSection = Field(
        default_factory=LossScaleSection, description="The dynamic loss scale of float16."
    )
