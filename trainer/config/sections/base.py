"""The base of all sections of a configuration, and the types of values that the trainer alone reads."""

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from zeromesh.settings.keys import Allowed, Listed, Number, Text

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""The pattern of a model name on the Hub; existence is checked when a run begins."""
RepoName = Annotated[str, Field(pattern=f"^{REPOSITORY.pattern}$"), Allowed("a repository's name, such as me/model")]
Ratio = Annotated[Number, Field(ge=0.0, le=1.0)]
Seconds = Annotated[Number, Field(gt=0.0, le=86400.0)]
Texts = Annotated[Listed[tuple[Text, ...]], Field(min_length=1), Allowed("a list of at least one text")]
PythonName = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$"), Allowed("text such as package.module:function")]


class NamedFunction(BaseModel):
    """A function, a class or an object of Python code, by its name, with further keys as arguments of its call."""

    model_config = ConfigDict(frozen=True, extra="allow", hide_input_in_errors=True)
    python: PythonName


Named = Annotated[NamedFunction, Allowed("a mapping such as {python: package.module:function}")]
NamedList = Annotated[Listed[tuple[Named, ...]], Allowed("a list such as [{python: package.module:function}]")]


class Section(BaseModel):
    """A section of the configuration, frozen and strict: text is no number, a bool is no integer, and an unknown key is an error.
    Construction raises pydantic's `ValidationError`. The docstring below a field describes its key."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, validate_default=True
    )
