"""The base of all sections of a configuration, and the value types of keys."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = (
    {"B": 1}
    | {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
    | {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
)
_EXACT = 1 << 53
"""The limit below which every integer is exact as a float."""
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""The pattern of a model name on the Hub; existence is checked when a run begins."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Field metadata with a description of allowed values that the type does not give."""

    text: str


def _number_from_text(value: object) -> object:
    """Convert text such as `1e-3`, which YAML 1.1 and JSON writers leave as text, to a number."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()):
        return float(value)
    return value


def bytes_from_text(value: object) -> object:
    """Convert text such as `256MiB` to a number of bytes."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?i?B)", value.strip()) if isinstance(value, str) else None
    return int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else value


def whole(value: object) -> object:
    """Convert a float without a fraction, such as 1e3, to an integer, as JSON and YAML have one kind of number."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


_Tuple = TypeVar("_Tuple", bound=tuple[Any, ...])


Listed = Annotated[_Tuple, BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""The type of a tuple that files write as a list."""
Number = Annotated[float, BeforeValidator(_number_from_text)]
Fraction = Annotated[Number, Field(ge=0.0, lt=1.0)]
Positive = Annotated[Number, Field(gt=0.0)]
NotNegative = Annotated[Number, Field(ge=0.0)]
Ratio = Annotated[Number, Field(ge=0.0, le=1.0)]
Seconds = Annotated[Number, Field(gt=0.0, le=86400.0)]
Whole = Annotated[int, BeforeValidator(whole)]
Seed = Annotated[Whole, Field(ge=0, lt=2**63), Allowed("an integer >= 0 and < 2**63")]
Count = Annotated[Whole, Field(ge=1)]
CountOrOff = Annotated[Whole, Field(ge=0)]
Bytes = Annotated[
    Whole, BeforeValidator(bytes_from_text), Field(ge=0), Allowed("a number of bytes, such as 268435456 or 256MiB")
]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Names = Listed[tuple[Text, ...]]
Texts = Annotated[Listed[tuple[Text, ...]], Field(min_length=1), Allowed("a list of at least one text")]
PythonName = Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$"), Allowed("text such as package.module:function")]


class NamedFunction(BaseModel):
    """A function, a class or an object of Python code, by its name, with further keys as arguments of its call."""

    model_config = ConfigDict(frozen=True, extra="allow", hide_input_in_errors=True)
    python: PythonName

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


Named = Annotated[NamedFunction, Allowed("a mapping such as {python: package.module:function}")]
NamedList = Annotated[Listed[tuple[Named, ...]], Allowed("a list such as [{python: package.module:function}]")]


class Section(BaseModel):
    """A section of the configuration, frozen and strict: text is no number, a bool is no integer, and an unknown key is an error.
    Construction raises pydantic's `ValidationError`. The docstring below a field describes its key."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, validate_default=True
    )
