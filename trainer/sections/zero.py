"""The section `zero`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zeromesh.trainer.config_types import Bytes, CountOrOff
from zeromesh.trainer.sections.section import Section


class ZeroSection(Section):
    """What is partitioned, and how it moves."""

    stage: Annotated[int, Field(ge=0, le=3)] = Field(
        default=3, description="Sharded are: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."
    )
    prefetch: CountOrOff = Field(default=1, description="Units gathered ahead of the one that computes. 0 = off.")
    gathered_budget: Literal["auto"] | Bytes = Field(
        default="auto",
        description="Bytes of gathered parameters that are kept between uses; auto: what costs no extra peak.",
    )
    overlap: bool = Field(default=True, description="Gather and reduce while forward and backward compute.")
