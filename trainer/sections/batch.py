"""The section `batch`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from zeromesh.trainer.config_types import Count
from zeromesh.trainer.sections.section import Section


class BatchSection(Section):
    """Sequences in a step. Gradient accumulation follows from these and the number of data-parallel ranks."""

    global_size: Count = Field(default=16, description="Sequences that make one optimizer step, over all ranks.")
    micro_size: Count = Field(default=2, description="Sequences in one forward and backward of one rank.")
    eval_micro_size: Count | None = Field(
        default=None, description="The same for evaluation and prediction; null: as `micro_size`."
    )
    last: Literal["carry", "partial", "drop"] = Field(
        default="carry",
        description="Samples at the end of an epoch that fill no global batch: go on into the next epoch's (carry), make a smaller "
        "one (partial), or are left out (drop).",
    )
    average: Literal["tokens", "samples"] = Field(
        default="tokens",
        description="What the loss of a global batch is a mean over: its targets, or its samples, where each microbatch counts by "
        "how many it has.",
    )
