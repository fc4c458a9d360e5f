"""YAML and JSON text to plain values, with limits: nothing is executed, expanded without bound, or guessed.

Plain scalars follow the core schema of YAML 1.2, not 1.1: `1e-3` is a number, `no`, `on` and `2024-01-01` are text. Tags, duplicate
keys, keys that are not text, and aliases that expand to more than the limits are errors with their line.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
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
    except RecursionError:
        raise ConfigError(f"nested deeper than {MAX_DEPTH} levels", where=where) from None
    except yaml.MarkedYAMLError as error:
        # The mark's own text would quote the line, which may hold a secret.
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{place}{_yaml_mistake(error)}", where=where) from None
    except yaml.YAMLError as error:
        raise ConfigError(_unreadable(error, text), where=where) from None
    return plain_value(node, where=where)


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

    Nodes of YAML become what they mean, an alias as often as it is used, tuples become lists and paths text; what is none of these
    is left for the models to refuse. Raises `ConfigError`.
    """
    count = 0

    def refuse(part: Any, why: str) -> NoReturn:
        line = f"line {part.start_mark.line + 1}: " if isinstance(part, yaml.Node) else ""
        raise ConfigError(line + why, where=where)

    def copy(part: Any, depth: int, path: str) -> Any:
        nonlocal count
        count += 1
        if isinstance(part, yaml.Node) and part.tag not in (_PLAIN, _UNTAGGED):
            refuse(part, "tags (!...) are not allowed; write plain values")
        if depth > MAX_DEPTH:
            refuse(part, f"nested deeper than {MAX_DEPTH} levels")
        if count > MAX_VALUES:
            aliases = " once its aliases are expanded" if isinstance(part, yaml.Node) else ""
            refuse(part, f"holds more than {MAX_VALUES} values{aliases}")
        if isinstance(part, yaml.MappingNode | Mapping):
            return copy_mapping(part.value if isinstance(part, yaml.MappingNode) else part.items(), depth + 1, path)
        if isinstance(part, list | tuple | yaml.SequenceNode):
            parts = part.value if isinstance(part, yaml.SequenceNode) else part
            return [copy(each, depth + 1, path) for each in parts]
        try:
            value = part
            if isinstance(part, yaml.ScalarNode):
                value = plain_scalar(part.value) if part.tag == _PLAIN else part.value
            elif isinstance(part, os.PathLike):
                value = os.fspath(part)
        except ValueError as error:
            refuse(part, str(error))
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            refuse(None, f"{path}: an integer of {value.bit_length():,} bits, which no key takes")
        try:
            # The halves of a character, as \\ud83d\\ude00 escapes leave them, are joined to one.
            halved = isinstance(value, str) and not value.isascii()
            return value.encode("utf-16", "surrogatepass").decode("utf-16") if halved else value
        except UnicodeDecodeError:
            refuse(None, "holds half a character (a lone surrogate)")

    def copy_mapping(pairs: Iterable[tuple[Any, Any]], depth: int, path: str) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_part, part in pairs:
            key = copy(key_part, depth, path)
            if not isinstance(key, str):
                name = "" if isinstance(key, dict | list) else f" ({key})"
                refuse(key_part, f"a key that is not text{name}; write it in quotes")
            if isinstance(key_part, yaml.Node):
                if key == "<<" and key_part.tag == _PLAIN:
                    refuse(key_part, "merge keys (<<) are not supported; write the keys out")
                if key in lines:
                    refuse(key_part, f"key {key!r} is given twice, first in line {lines[key]}")
                lines[key] = key_part.start_mark.line + 1
            mapping[key] = copy(part, depth, f"{path}.{key}" if path else key)
        return mapping

    return copy(value, 1, "")


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
