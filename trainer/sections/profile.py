"""The section `profile`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from zeromesh.trainer.config_types import Allowed, Count, tuple_from_list
from zeromesh.trainer.sections.section import Section


class ProfileSection(Section):
    """What is recorded of a few steps: traces of torch's profiler in the run's directory."""

    steps: Annotated[tuple[Count, Count], BeforeValidator(tuple_from_list), Allowed("a list of two steps")] | None = (
        Field(default=None, description="First and last step that are recorded on every rank; null: none.")
    )
    memory: bool = Field(default=False, description="Record allocations and shapes of operators too.")
