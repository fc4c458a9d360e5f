"""The section `hub`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from zeromesh.trainer.config_types import REPOSITORY, Allowed, Text
from zeromesh.trainer.sections.section import Section


class HubSection(Section):
    """Where the model goes on the Hub. The token is that of `HF_TOKEN` or of `hf auth login`, and never part of a configuration."""

    push: bool = Field(default=False, description="Upload the model when the training has ended.")
    repository: (
        Annotated[str, Field(pattern=f"^{REPOSITORY.pattern}$"), Allowed("the name of a repository, such as me/model")]
        | None
    ) = Field(default=None, description="The repository, which is made if there is none; null: `run.name`.")
    private: bool | None = Field(
        default=None, description="Whether a repository that is made is private; null: as its owner has it."
    )
    revision: Text | None = Field(default=None, description="The branch that is uploaded to; null: the main one.")
