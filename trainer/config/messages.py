"""Descriptions, from the configuration's models, of what keys allow and of the nearest key, for errors and the reference."""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zeromesh.errors import counted
from zeromesh.settings.keys import Allowed
from zeromesh.trainer.config.redact import REDACTED, Redaction, is_secret
from zeromesh.trainer.config.sections.base import nearest
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.config.yaml_reader import read_texts

ADVICE = read_texts(Path(__file__).with_name("advice.yaml"))  # about values of keys: paths, and words of other programs


@cache
def known_paths(model: type[BaseModel] = TrainerConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """Return all keys and sections by dotted path, sections before their contents."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        found[prefix + name] = field
        if (section := section_of(field)) is not None:
            found |= known_paths(section, f"{prefix}{name}.")
    return found


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that may be a section, else None."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def allowed(field: FieldInfo) -> str:
    """Describe the values that a field allows, as in `an integer >= 1 or auto`."""
    if (section := section_of(field)) is not None and not any(isinstance(item, Allowed) for item in field.metadata):
        return f"a mapping of {', '.join(section.model_fields)}"
    return _allowed(field.annotation, field.metadata)


def choices(field: FieldInfo) -> list[str]:
    kinds = [field.annotation, *get_args(field.annotation)]
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def takes_text(path: str) -> bool:
    """Return True if the key at `path` takes any text, alone or in a list."""
    kinds = [known_paths()[path].annotation] if path in known_paths() else []
    for kind in kinds:
        if kind is str:
            return True
        kinds += () if get_origin(kind) is Literal else get_args(kind)
    return False


def nearest_path(path: str, known: Collection[str]) -> str | None:
    """Return the `known` path with the same or a similar name as an unknown one."""
    section, _, key = path.rpartition(".")
    # Of two keys with one name the one nearer to the top is meant, then the first.
    meant_first = sorted(known, key=lambda each: each.count("."))
    anywhere = {each.rpartition(".")[2]: each for each in reversed(meant_first)}
    beside = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == section}
    if key in anywhere:
        return anywhere[key]
    if slip := nearest(key, beside):
        return beside[slip]
    return anywhere[slip] if (slip := nearest(key, anywhere, cutoff=0.8)) else None


def unknown_key(path: str, value: object, known: Collection[str], hint: str = "") -> str:
    """Return the message about an unknown key, with the nearest `known` path or a `hint`."""
    got = "" if isinstance(value, Mapping) else f" (got {quote(path, value)})"
    if not hint and (near := nearest_path(path, known)):
        hint = f"did you mean {near}?"
    section = path.rpartition(".")[0]
    beside = ", ".join(each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == section)
    return f"{path}: unknown key{got}; {hint or f'allowed are {beside}'}"


def quote(path: str, value: object) -> str:
    """Format `value` for an error message, short and without possible secrets."""
    if path not in known_paths() and is_secret(path, value):
        return REDACTED
    if isinstance(value, dict):
        return f"a mapping of {counted(len(value), 'key')}"
    if isinstance(value, list | tuple) and not all(isinstance(item, str | int | float | None) for item in value):
        return f"a list of {len(value)} items"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = Redaction().text(repr(list(value)) if isinstance(value, tuple) else repr(value))
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _allowed(kind: Any, metadata: Sequence[Any]) -> str:
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        # `Field(...)` packs constraints together.
        own = [each for item in arguments[1:] for each in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _allowed(arguments[0], [*own, *metadata])
    if origin is Literal:
        return join_choices([str(argument) for argument in arguments])
    if origin in (Union, UnionType):
        return join_choices([_allowed(argument, []) for argument in arguments])
    if origin is tuple:
        return f"a list of {_allowed(arguments[0], [])}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text", NoneType: "null"}
    bounds = [
        f"{sign} {getattr(item, name):g}"
        for item in metadata
        for name, sign in {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}.items()
        if isinstance(item, annotated_types.BaseMetadata) and hasattr(item, name)
    ]
    return words.get(kind, "a mapping") + (f" {' and '.join(bounds)}" if bounds else "")


def join_choices(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
