"""YAML and JSON text to plain values, with limits: nothing is executed, expanded without bound, or guessed.

Plain scalars follow the core schema of YAML 1.2, not 1.1: `1e-3` is a number, `no`, `on` and `2024-01-01`
are text. Tags, duplicate keys, keys that are not text, and aliases that expand to more than the limits are
errors with their line. Values are built straight from the parser's events, so what a limit refuses has
never existed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import yaml

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.parser_errors import json_mistake, line_of, unreadable, yaml_mistake

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
MAX_VALUES = 20_000
_MOST_BITS = 1000
"""Of an integer: it can still become a float."""
_MOST_DIGITS = 1000

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def parse_yaml(text: str, *, where: str) -> Any:
    """The value of the one document in `text`: dict, list, str, int, float, bool or None.

    Raises:
        ConfigError: not YAML, more than the limits, or something refused; `where` and the line are named.
    """
    _check_size(text, where)
    builder = _Builder(where, yaml.parse(text, Loader=yaml.SafeLoader))
    try:
        # A copy, so that no two keys share a value by an alias.
        return plain_value(builder.document(), where=where)
    except yaml.MarkedYAMLError as error:
        # The mark's own text would quote the line, which may hold a secret.
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{place}{yaml_mistake(error)}", where=where) from None
    except yaml.YAMLError as error:
        raise ConfigError(unreadable(error, text), where=where) from None


def parse_json(text: str, *, where: str) -> Any:
    """The value of `text` as strict JSON, under the same limits and with the same errors as `parse_yaml`."""
    _check_size(text, where)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}: "
        raise ConfigError(place + json_mistake(error), where=where) from None
    except _TooLongError as error:
        line = line_of(text, text.find(error.digits))
        raise ConfigError(f"line {line}: {error}", where=where) from None
    except RecursionError:
        raise ConfigError(f"nested deeper than {MAX_DEPTH} levels", where=where) from None
    except ValueError as error:
        raise ConfigError(str(error), where=where) from None
    return plain_value(value, where=where)


def plain_value(value: Any, *, where: str) -> Any:
    """A copy of `value` made of dict, list, str, int, float, bool and None, within the limits.

    Tuples become lists and paths text; what is none of these is left for the models to refuse. Raises
    `ConfigError`.
    """
    count = 0

    def copy(value: Any, depth: int, path: str) -> Any:
        nonlocal count
        count += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"nested deeper than {MAX_DEPTH} levels", where=where)
        if count > MAX_VALUES:
            raise ConfigError(f"holds more than {MAX_VALUES} values", where=where)
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise ConfigError(f"key {key!r} is not text; write it in quotes", where=where)
            below = f"{path}." if path else ""
            return {_whole_text(key, where): copy(item, depth + 1, f"{below}{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [copy(item, depth + 1, path) for item in value]
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ConfigError(f"{path}: an integer of {value.bit_length():,} bits, which no key takes", where=where)
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        return _whole_text(value, where) if isinstance(value, str) else value

    return copy(value, 1, "")


def _whole_text(text: str, where: str) -> str:
    r"""`text` with the halves of a character, as `\ud83d\ude00` escapes leave them, joined to one."""
    try:
        return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise ConfigError("holds half a character (a lone surrogate)", where=where) from None


def plain_scalar(text: str) -> str | int | float | bool | None:
    """What an unquoted scalar means. Raises `ValueError` for an integer of hundreds of digits."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INTEGER.fullmatch(text):
        return _integer(text.replace("_", ""))
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _SPECIAL.fullmatch(text):
        return float(f"{match[1] or ''}inf" if match[2] else "nan")
    return text


class _Builder:
    """Builds the value of one document from the parser's events, counting what it builds."""

    def __init__(self, where: str, events: Iterator[yaml.Event]) -> None:
        self._where = where
        self._events = events
        self._count = 0
        # A finished anchor's value and how many values it holds; None while it is still open.
        self._anchors: dict[str, tuple[Any, int] | None] = {}

    def document(self) -> Any:
        """The value of the only document; None where there is none."""
        next(self._events)
        if isinstance(next(self._events), yaml.StreamEndEvent):
            return None
        value = self._value(next(self._events), depth=1)
        next(self._events)
        after = next(self._events)
        if not isinstance(after, yaml.StreamEndEvent):
            self._refuse(after, "a second document starts here; a configuration is one document")
        return value

    def _value(self, event: yaml.Event, depth: int) -> Any:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if getattr(event, "tag", None) not in (None, "!"):
            self._refuse(event, "tags (!...) are not allowed; write plain values")
        if depth > MAX_DEPTH:
            self._refuse(event, f"nested deeper than {MAX_DEPTH} levels")
        before = self._count
        self._add(event, 1)
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            self._anchors[anchor] = None
        value = self._node(event, depth)
        if anchor is not None:
            self._anchors[anchor] = (value, self._count - before)
        return value

    def _node(self, event: yaml.Event, depth: int) -> Any:
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(depth)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                items.append(self._value(item, depth + 1))
            return items
        if not isinstance(event, yaml.ScalarEvent):
            self._refuse(event, "a value is missing")
        plain, _ = event.implicit
        try:
            return plain_scalar(event.value) if plain else event.value
        except ValueError as error:
            self._refuse(event, str(error))

    def _mapping(self, depth: int) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            line = _line(event)
            key = self._value(event, depth + 1)
            if not isinstance(key, str):
                self._refuse(event, "a key that is not text; write it in quotes")
            if key == "<<" and isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
                self._refuse(event, "merge keys (<<) are not supported; write the keys out")
            if key in lines:
                self._refuse(event, f"key {key!r} is given twice, first in line {lines[key]}")
            lines[key] = line
            mapping[key] = self._value(next(self._events), depth + 1)
        return mapping

    def _alias(self, event: yaml.AliasEvent) -> Any:
        name = str(event.anchor)
        if name not in self._anchors:
            self._refuse(event, f"alias *{name} has no anchor before it")
        anchored = self._anchors[name]
        if anchored is None:
            self._refuse(event, f"alias *{name} stands inside its own anchor")
        value, count = anchored
        self._add(event, count)
        return value

    def _add(self, event: yaml.Event, count: int) -> None:
        self._count += count
        if self._count > MAX_VALUES:
            self._refuse(event, f"holds more than {MAX_VALUES} values once its aliases are expanded")

    def _refuse(self, event: yaml.Event, why: str) -> NoReturn:
        raise ConfigError(f"line {_line(event)}: {why}", where=self._where)


def _line(event: yaml.Event) -> int:
    """The line that an event starts in, from 1."""
    return event.start_mark.line + 1 if event.start_mark else 0


def _check_size(text: str, where: str) -> None:
    if len(text) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES} bytes, which no configuration is", where=where)


class _TooLongError(ValueError):
    """An integer that is not even made: `digits` are those of its text."""

    def __init__(self, digits: str) -> None:
        super().__init__(f"an integer of {len(digits):,} digits, which no key takes")
        self.digits = digits


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise _TooLongError(text)
    return int(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {key!r} is given twice in one object")
        values[key] = value
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; numbers are finite")
