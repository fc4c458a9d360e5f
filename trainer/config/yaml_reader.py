"""Parsing of YAML and JSON to plain values within limits: nothing is executed, expanded without bound, or guessed. Plain scalars
follow the core schema of YAML 1.2, of which JSON is a part: `1e-3` is a number, `no`, `on` and `2024-01-01` are text."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from zeromesh.environment import file_as_launched, setting
from zeromesh.errors import ConfigError, printable
from zeromesh.trainer.config.redact import is_secret

MAX_BYTES = 1024 * 1024  # of a file
MAX_DEPTH = 32
MAX_VALUES = 20_000
_MOST_BITS = 1000  # of an integer, which can then still become a float
_WORDS: dict[str, bool | None] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9][0-9_]{0,301}")  # more digits make a float, most often an infinite one
_PREFIXED_INTEGER = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY_OR_NAN = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read_yaml(path: Path, missing: str, *, where: str) -> Any:
    """Return the value of `parse_yaml` for a file or a pipe. Raises `ConfigError`, with the text `missing` for an absent file."""
    try:
        content = file_as_launched(path, MAX_BYTES + 1)  # One byte more than allowed detects a file that is too large.
        text = content.decode("utf-8-sig") if len(content) <= MAX_BYTES else content.decode("latin-1")
    except FileNotFoundError:
        raise ConfigError(missing, where=where) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=where) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start})", where=where) from None
    except ValueError as error:
        raise ConfigError(f"is no path: {error}", where=repr(where)) from None
    if path.suffix == ".json":  # YAML forbids tabs in indentation.
        text = re.sub(r"(?m)^[ \t]+", lambda blank: blank[0].replace("\t", " "), text)
    return parse_yaml(text, where=where)


def read_texts(path: Path) -> Any:
    """Return the value of a file beside the code, by YAML 1.1 and, if built, the loader in C: in a tenth of `parse_yaml`'s time."""
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)(path.read_text(encoding="utf-8")).get_single_data()


def parse_yaml(text: str, *, where: str) -> Any:
    """Return the value of the document in `text`. Raises `ConfigError`, with `where` and mostly the line, for refused text."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES} bytes, which no configuration is", where=where)
    try:
        return plain_value(_Loader(text).get_single_data(), where=where)
    except RecursionError:
        raise ConfigError(f"nested deeper than {MAX_DEPTH} levels", where=where) from None
    except yaml.reader.ReaderError as error:
        code, line = printable(text[error.position]), text.count("\n", 0, error.position) + 1
        why = f"line {line}: the character {code} is not allowed; write the text in double quotes, with {code}"
        raise ConfigError(why, where=where) from None
    except yaml.MarkedYAMLError as error:
        mark, message = error.problem_mark or error.context_mark, f"{error.context or ''} {error.problem or ''}"
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        table = read_texts(Path(__file__).with_name("parser_messages.yaml"))
        why = next((words for pattern, words in table.items() if re.search(pattern, message)), str(error.problem))
        if mark and "${" in "".join(text.splitlines()[mark.line : mark.line + 1]):
            why += "; a text with ${...} needs quotes between { } or [ ]"
        raise ConfigError(place + why, where=where) from None


def plain_value(value: Any, *, where: str) -> Any:
    """Return a copy of `value` in plain types, within the limits; other objects are left to the models. Raises `ConfigError`."""
    count = 0

    def copy(part: Any, depth: int, path: str) -> Any:
        nonlocal count
        count += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"nested deeper than {MAX_DEPTH} levels", where=where)
        if count > MAX_VALUES:
            raise ConfigError(f"holds more than {MAX_VALUES} values once its aliases are expanded", where=where)
        if isinstance(part, Mapping):
            found = {}
            for key, each in part.items():
                if not isinstance(key, str):
                    raise ConfigError(f"a key that is not text ({key}); write it in quotes", where=where)
                found[copy(key, depth + 1, path)] = copy(each, depth + 1, f"{path}.{key}" if path else key)
            return found
        if isinstance(part, list | tuple):
            return [copy(each, depth + 1, path) for each in part]
        if isinstance(part, int) and part.bit_length() > _MOST_BITS:
            raise ConfigError(f"{path}: an integer of {part.bit_length():,} bits, which no key takes", where=where)
        part = os.fspath(part) if isinstance(part, os.PathLike) else part
        try:
            # The halves of a character, as \\ud83d\\ude00 escapes leave them, are joined to one.
            halved = isinstance(part, str) and not part.isascii()
            return part.encode("utf-16", "surrogatepass").decode("utf-16") if halved else part
        except UnicodeDecodeError:
            raise ConfigError("holds half a character (a lone surrogate)", where=where) from None

    return copy(value, 1, "")


def plain_scalar(text: str) -> str | int | float | bool | None:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text.replace("_", ""))
    if _PREFIXED_INTEGER.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _INFINITY_OR_NAN.fullmatch(text):
        return float(f"{match[1] or ''}inf" if match[2] else "nan")
    return text


_VARIABLE = re.compile(r"\$\$\{|\$\{(\w*)(:-)?([^{}]*)\}")


def with_variables(value: Any, takes_text: Callable[[str], bool], path: str = "") -> Any:
    """Substitute environment variables in the texts of `value`: `${NAME}`, or `${NAME:-default}`. `$${` stands for `${`, also in
    keys. A text of a single variable is parsed as YAML, unless `takes_text` holds for the key's dotted path. Raises `ConfigError`
    for an unset variable, and for one with a secret, which a configuration must not hold."""

    def text_of(match: re.Match[str]) -> str:
        name, default, text = match.groups()
        if name is None:
            return "${"
        if not name or (text and not default):
            problem = f"{match[0]} is no variable; write ${{NAME}}, ${{NAME:-default}}, or $${{ for two characters"
        elif is_secret(name, "text"):
            problem = f"${{{name}}} names a secret, and configurations are written down; leave it in the environment"
        elif (present := setting(name)) is None and not default:
            problem = f"the variable {name} is not set; set it, or give a default: ${{{name}:-default}}"
        else:
            return text if present is None else present
        raise ConfigError(f"{path}: {problem}")

    if isinstance(value, dict):
        values = {key: with_variables(one, takes_text, f"{path}.{key}" if path else key) for key, one in value.items()}
        return {key.replace("$${", "${"): each for key, each in values.items()}
    if isinstance(value, list):
        return [with_variables(each, takes_text, path) for each in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    whole, text = _VARIABLE.fullmatch(value), _VARIABLE.sub(text_of, value)
    return plain_scalar(text) if whole and whole[1] and not takes_text(path) else text


class _Loader(yaml.SafeLoader):
    """A YAML loader that parses plain scalars by the core schema, and refuses tags, duplicate keys and keys that are not text."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        return "plain" if kind is yaml.ScalarNode and implicit[0] else kind.__name__

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = True) -> dict[Any, Any]:
        mapping: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, problem = self.construct_object(key_node, deep=True), ""
            if not isinstance(key, str):
                name = "" if isinstance(key, dict | list) else f" ({key})"
                problem = f"a key that is not text{name}; write it in quotes"
            elif key == "<<" and key_node.tag == "plain":
                problem = "merge keys (<<) are not supported; write the keys out"
            elif key in lines:
                problem = f"key {key!r} is given twice, first in line {lines[key]}"
            if problem:
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            lines[key] = key_node.start_mark.line + 1
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping


_Loader.yaml_constructors = {
    "plain": lambda _, node: plain_scalar(node.value),
    "ScalarNode": lambda loader, node: loader.construct_scalar(node),
    "SequenceNode": lambda loader, node: loader.construct_sequence(node, deep=True),
    "MappingNode": lambda loader, node: loader.construct_mapping(node),
    None: yaml.SafeLoader.construct_undefined,
}
