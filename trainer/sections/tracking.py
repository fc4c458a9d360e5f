"""The section `tracking`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zeromesh.trainer.config_types import Text, tuple_from_list
from zeromesh.trainer.sections.section import Section


class TrackingSection(Section):
    """Where figures of a run go beside its own files. Nothing that fails here stops or slows training."""

    backends: Annotated[tuple[Text, ...], BeforeValidator(tuple_from_list)] = Field(
        default=(),
        description="Trackers: wandb, tensorboard, aim, clearml, comet_ml, dvclive, mlflow, swanlab, trackio, or one that "
        "was given to accelerate's register_tracker_class.",
    )
    project: Text = Field(default="zeromesh", description="The project that trackers file the run under.")
    name: Text | None = Field(default=None, description="What trackers call the run; null: `run.name`.")
    mode: Literal["offline", "online"] = Field(
        default="offline",
        description="Whether wandb, clearml, comet_ml and swanlab send what they keep; online needs a network and a key.",
    )
    tags: Annotated[tuple[Text, ...], BeforeValidator(tuple_from_list)] = Field(
        default=(), description="Labels of the run."
    )
