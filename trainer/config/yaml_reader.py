"""YAML and JSON text to plain values, with limits: nothing is executed, expanded without bound, or guessed.

Plain scalars follow the core schema of YAML 1.2, not 1.1: `1e-3` is a number, `no`, `on` and `2024-01-01` are text. Tags, duplicate
keys, keys that are not text, and aliases that expand to more than the limits are errors with their line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import yaml

from zeromesh.errors import ConfigError, printable

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
MAX_VALUES = 20_000
_MOST_BITS = 1000
"""An integer of so many bits can still become a float."""
_MOST_DIGITS = 1000
_PLAIN, _UNTAGGED = "plain", "untagged"

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
    try:
        node = _Loader(text).get_single_node()
        return None if node is None else plain_value(_Values(where).of(node), where=where)
    except RecursionError:
        raise ConfigError(f"nested deeper than {MAX_DEPTH} levels", where=where) from None
    except yaml.MarkedYAMLError as error:
        # The mark's own text would quote the line, which may hold a secret.
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{place}{_yaml_mistake(error)}", where=where) from None
    except yaml.YAMLError as error:
        raise ConfigError(_unreadable(error, text), where=where) from None


def parse_json(text: str, *, where: str) -> Any:
    """The value of `text` as strict JSON, under the same limits and with the same errors as `parse_yaml`."""
    _check_size(text, where)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}: "
        raise ConfigError(place + _json_mistake(error), where=where) from None
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


class _Loader(yaml.SafeLoader):
    """Tags a scalar as plain where it is not quoted, and leaves explicit tags as they are."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """The tag of a node that has none: `plain_scalar` says later what a plain scalar means."""
        return _PLAIN if kind is yaml.ScalarNode and implicit[0] else _UNTAGGED


class _Values:
    """Makes plain values of the nodes of a document, an alias as often as it is used, and counts them."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._count = 0

    def of(self, node: yaml.Node, depth: int = 1) -> Any:
        self._count += 1
        if node.tag not in (_PLAIN, _UNTAGGED):
            self._refuse(node, "tags (!...) are not allowed; write plain values")
        if depth > MAX_DEPTH:
            self._refuse(node, f"nested deeper than {MAX_DEPTH} levels")
        if self._count > MAX_VALUES:
            self._refuse(node, f"holds more than {MAX_VALUES} values once its aliases are expanded")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.of(item, depth + 1) for item in node.value]
        try:
            return plain_scalar(node.value) if node.tag == _PLAIN else node.value
        except ValueError as error:
            self._refuse(node, str(error))

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self.of(key_node, depth + 1)
            if not isinstance(key, str):
                self._refuse(key_node, "a key that is not text; write it in quotes")
            if key == "<<" and key_node.tag == _PLAIN:
                self._refuse(key_node, "merge keys (<<) are not supported; write the keys out")
            if key in lines:
                self._refuse(key_node, f"key {key!r} is given twice, first in line {lines[key]}")
            lines[key] = key_node.start_mark.line + 1
            mapping[key] = self.of(value_node, depth + 1)
        return mapping

    def _refuse(self, node: yaml.Node, why: str) -> NoReturn:
        raise ConfigError(f"line {node.start_mark.line + 1}: {why}", where=self._where)


def _check_size(text: str, where: str) -> None:
    if len(text) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES} bytes, which no configuration is", where=where)


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(text):,} digits, which no key takes")
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


_YAML = (
    (r"found character '\\t'", "a tab; indent with spaces, and put spaces after ':'"),
    (
        "mapping values are not allowed",
        "a second ':' in one entry, or a line indented too far; a text with ': ' needs quotes",
    ),
    ("<stream end>", "the text ends where something is still open; close it with ], } or a quote"),
    ("while scanning a quoted scalar", "a text whose quote is never closed"),
    ("could not find expected ':'", "a line that is neither `key: value` nor `- item`"),
    ("expected <block end>", "this is not indented as the lines above; keys of one section begin in one column"),
    ("expected ',' or", "a comma or a closing bracket is missing"),
    (r"found character '[@`%]'", "a text that begins with @, ` or % needs quotes"),
    ("unknown escape character", r"an unknown escape; write \\ for a backslash, or single quotes around the text"),
    ("found undefined alias", "a text that begins with * needs quotes"),
    ("but found another document", "a second document starts here; a configuration is one document"),
    ("found duplicate anchor", "an anchor of this name is there already; give it another name"),
)


def _yaml_mistake(error: yaml.MarkedYAMLError) -> str:
    """What is wrong where `error` has its mark. The mark's own text is not quoted: it may hold a secret."""
    message = f"{error.context or ''} {error.problem or ''}"
    for pattern, words in _YAML:
        if re.search(pattern, message):
            return words
    return f"not YAML: {error.problem or error.context}"


def _unreadable(error: yaml.YAMLError, text: str) -> str:
    """What is wrong where the reader of YAML refused a character."""
    position = getattr(error, "position", None)
    if not isinstance(position, int) or not position < len(text):
        return f"not YAML: {getattr(error, 'reason', 'it cannot be read')}"
    code, line = printable(text[position]), text.count("\n", 0, position) + 1
    return f"line {line}: the character {code} is not allowed; write the text in double quotes, with {code}"


def _json_mistake(error: json.JSONDecodeError) -> str:
    """What is wrong where `error` points to."""
    text, rest = error.doc, error.doc[error.pos :]
    before = text[: error.pos].rstrip()
    if not rest.strip():
        return "the text ends where something is still open; close it with ], } or a quote"
    if rest.startswith(("//", "/*", "#")):
        return "JSON has no comments; remove this one, or name the file .yaml, whose comments begin with #"
    if rest[0] in "]}" and before.endswith(","):
        return f"a comma before {rest[0]}; remove it"
    if rest[0] == "'":
        return "a text in single quotes; JSON has double quotes"
    if word := re.match(r"(True|False|None)\b", rest):
        return f"{word[0]}; write {'null' if word[0] == 'None' else word[0].lower()}"
    if "control character" in error.msg:
        return r"a tab or a line break inside a text; write \t or \n"
    if "delimiter" in error.msg:
        return f"{error.msg.partition(' ')[2].partition(' ')[0]} is missing before this"
    if "Extra data" in error.msg:
        return "something follows the end; a configuration is one object"
    if re.match(r"[A-Za-z_]", rest):
        return "keys and texts are in double quotes in JSON"
    return f"not JSON: {error.msg}"
