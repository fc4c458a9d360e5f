"""The section `checkpoint`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zeromesh.trainer.config_types import CountOrOff, Number, Text
from zeromesh.trainer.sections.section import Section


class CheckpointSection(Section):
    """What is kept of a run, so that nothing is lost: whole directories that transformers loads, in `checkpoints`."""

    every_steps: CountOrOff | Literal["epoch"] = Field(
        default=100,
        description="Steps between checkpoints, or epoch: after each epoch; the last step has one too. 0 = none, but those that "
        "callbacks ask for.",
    )
    keep_last: CountOrOff = Field(default=3, description="Newest checkpoints that are kept. 0 = all.")
    keep_best: CountOrOff = Field(
        default=0, description="Checkpoints with the lowest evaluation loss that are kept beside them. 0 = off."
    )
    asynchronous: bool = Field(default=True, description="Write while training goes on, straight from the live states.")
    resume: Literal["auto", "never"] | Text = Field(
        default="auto",
        description="auto goes on from the run's newest whole checkpoint; never refuses to run over an old one; a path of a "
        "checkpoint or a run starts from there.",
    )
    max_failures: CountOrOff = Field(
        default=3, description="Saves in a row that may fail before the run ends. 0 = it never ends for that."
    )
    timeout_seconds: Annotated[Number, Field(gt=0.0, le=86400.0)] = Field(
        default=600.0,
        description="Seconds that ranks wait for one whose disk takes that long for a single call, and that the end of a run waits "
        "for old checkpoints to be removed.",
    )
