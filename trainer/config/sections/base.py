"""The base of all sections of a configuration, and the kinds of values that keys take."""

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
"""Below this each whole number is a float of its own."""
REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""The pattern of what may be the name of a model on the Hub. Whether it is one is found out when a run begins."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Metadata of a field: what is allowed, in words, where its type does not say it."""

    text: str


def _number_from_text(value: object) -> object:
    """YAML 1.1 and JSON writers leave `1e-3` as text; where a number is meant, take it as one."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()):
        return float(value)
    return value


def bytes_from_text(value: object) -> object:
    """`256MiB` as a number of bytes."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?i?B)", value.strip()) if isinstance(value, str) else None
    return int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else value


def whole(value: object) -> object:
    """JSON and YAML have one kind of number: 1e3 is the integer 1000 where only an integer is allowed."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    return value


_Tuple = TypeVar("_Tuple", bound=tuple[Any, ...])


def tuple_from_list(value: object) -> object:
    """Files hold lists; frozen values hold tuples."""
    return tuple(value) if isinstance(value, list) else value


Listed = Annotated[_Tuple, BeforeValidator(tuple_from_list)]
"""The kind of a tuple that files write as a list."""
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
    """A function, a class or an object of Python code, by its name. Further keys are arguments of its call."""

    model_config = ConfigDict(frozen=True, extra="allow", hide_input_in_errors=True)
    python: PythonName

    @property
    def arguments(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})


Named = Annotated[NamedFunction, Allowed("a mapping such as {python: package.module:function}")]
NamedList = Annotated[Listed[tuple[Named, ...]], Allowed("a list such as [{python: package.module:function}]")]


class Section(BaseModel):
    """A section of the configuration, frozen and strict: an integer is not a float's text, a bool is not an integer, and an unknown
    key is an error. Construction raises pydantic's `ValidationError`. The docstring below a field says what its key is.
    """

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, validate_default=True
    )
