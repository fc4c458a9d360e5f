"""What all sections of a configuration have in common."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

_EXACT = 1 << 53
"""Below this each whole number is a float of its own."""


class Section(BaseModel):
    """A section of the configuration, frozen and strict: an integer is not a float's text, a bool is not an integer, and an unknown
    key is an error. Construction raises pydantic's `ValidationError`.

    YAML and JSON have one kind of number: 1e3 is the integer 1000 where only an integer is allowed.
    """

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        validate_default=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: _whole(value) if _counts(cls, name) else value for name, value in data.items()}


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _EXACT else value


def _counts(section: type[BaseModel], name: str) -> bool:
    """Whether a key allows integers and no other numbers."""
    field = section.model_fields.get(name)
    kinds = set(_kinds(field.annotation)) if field is not None else set()
    return int in kinds and float not in kinds


def _kinds(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from _kinds(each)
    else:
        yield annotation
