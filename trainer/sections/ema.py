"""The section `ema`."""

from __future__ import annotations

from pydantic import Field

from zeromesh.trainer.config_types import Count, CountOrOff, Fraction
from zeromesh.trainer.sections.section import Section


class EmaSection(Section):
    """An exponential moving average of the weights, in shards."""

    decay: Fraction = Field(
        default=0.0, description="What the average keeps of itself at each update, such as 0.999. 0 = no average."
    )
    every_steps: Count = Field(
        default=1, description="Updates of the weights from one that the average takes in to the next."
    )
    start_step: CountOrOff = Field(
        default=0,
        description="The first update of the weights that the average takes in; before it, averaged weights are the weights.",
    )
    evaluate: bool = Field(default=False, description="Evaluate and predict with averaged weights.")
