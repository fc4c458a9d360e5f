"""What a configuration may come from, as plain values: a path, a mapping, a `TrainerConfig`, or settings of another trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError
from zeromesh.trainer.config.messages import shown
from zeromesh.trainer.config.migration.deepspeed import is_deepspeed, read_deepspeed
from zeromesh.trainer.config.migration.translate import LaunchFacts, Translation, nested
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.config.yaml_reader import MAX_BYTES, parse_json, parse_yaml, plain_value

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | TrainerConfig | Any | None
"""A path of YAML or JSON, a mapping of sections, a `TrainerConfig`, transformers' `TrainingArguments`, or None for the defaults.

A file or a mapping may also be a DeepSpeed configuration."""
OWN = "zeromesh"
"""The key of a DeepSpeed configuration that holds sections of zeromesh. DeepSpeed itself passes it over."""
WORD = "TrainingArguments"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSource:
    """`data`: sections and keys, which who asks may change. `arguments` and `deepspeed` are to be translated below them."""

    where: str
    data: dict[str, Any]
    arguments: Any = None
    deepspeed: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


def read_source(source: ConfigSource, arguments: Any = None) -> LoadedSource:
    """What `source` says, on top of `arguments`. Raises `ConfigError` for what cannot be read."""
    if _is_training_arguments(source):
        if arguments is not None:
            raise ConfigError("both are TrainingArguments; give one of them", where="config and args")
        source, arguments = None, source
    where, data = _plain(source)
    notes = source.notes if isinstance(source, TrainerConfig) else ()
    deepspeed, own = _parted(data, where)
    if arguments is None:
        return LoadedSource(where=where, data=own, deepspeed=deepspeed, notes=notes)
    if not _is_training_arguments(arguments):
        raise ConfigError(f"got {type(arguments).__name__}; allowed is transformers' TrainingArguments", where="args")
    if isinstance(source, TrainerConfig):
        raise ConfigError("it says every key; give a path or a mapping beside args", where="config")
    where = WORD if source is None else f"{WORD} and {where}"
    if arguments.deepspeed:
        if deepspeed is not None:
            raise ConfigError("both config and deepspeed of args are DeepSpeed configurations; give one of them")
        named, plain = _plain(arguments.deepspeed)
        deepspeed, below = _parted(plain, named)
        if deepspeed is None:
            raise ConfigError(
                "deepspeed: is no DeepSpeed configuration; it has sections such as zero_optimization", where=WORD
            )
        own = _merged(below, own)
    return LoadedSource(where=where, data=own, arguments=arguments, deepspeed=deepspeed)


def _parted(data: dict[str, Any], where: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """A DeepSpeed configuration, if `data` is one, and what else there is of zeromesh's own sections."""
    if not is_deepspeed(data):
        return None, data
    own = data.pop(OWN, {})
    if not isinstance(own, dict):
        raise ConfigError(f"{OWN}: got {shown('', own)}; allowed is a mapping of sections of zeromesh", where=where)
    return data, own


def with_translation(
    source: LoadedSource, *, ranks: int | None, samples: int | None
) -> tuple[dict[str, Any], Translation]:
    """The data of `source` over what settings of other trainers come to, and how they did."""
    translation = Translation()
    if source.arguments is None and source.deepspeed is None:
        return source.data, translation
    world = read_environment().world_size if ranks is None else ranks
    place = LaunchFacts(
        ranks=world, samples=samples, tensor=_axis(source.data, "tensor"), pipeline=_axis(source.data, "pipeline")
    )
    if source.arguments is not None:
        from zeromesh.trainer.config.migration.training_arguments import read_training_arguments

        translation = read_training_arguments(source.arguments, place)
    if source.deepspeed is not None:
        translation = read_deepspeed(source.deepspeed, place, translation.values).on(translation)
    return _merged(nested(translation.values), source.data), translation


def _is_training_arguments(source: Any) -> bool:
    """Without an import of transformers, which who has some has made."""
    return any(
        (base.__module__, base.__name__) == ("transformers.training_args", "TrainingArguments")
        for base in type(source).__mro__
    )


def _axis(data: Mapping[str, Any], name: str) -> int | None:
    parallel = data.get("parallel")
    size = parallel.get(name) if isinstance(parallel, Mapping) else None
    return size if type(size) is int and size > 0 else None


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, dict) and (value is None or isinstance(value, Mapping)):
            merged[key] = _merged(under, value or {})
        else:
            merged[key] = value
    return merged


def _plain(source: ConfigSource) -> tuple[str, dict[str, Any]]:
    """A name for messages, and the plain values of `source`."""
    if source is None:
        return "configuration", {}
    if isinstance(source, TrainerConfig):
        return "configuration", source.model_dump(mode="json")
    if isinstance(source, Mapping):
        return "configuration", plain_value(source, where="configuration")
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"got {type(source).__name__}; allowed is a path, a mapping, a TrainerConfig or TrainingArguments",
            where="config",
        )
    path = Path(source).expanduser()
    text = _read_text(path)
    parse = parse_json if path.suffix == ".json" and text.strip() else parse_yaml
    value = parse(text, where=str(source))
    if value is None:
        raise ConfigError(
            "is empty; write what is to be trained, such as `model: {source: DIRECTORY}`, or {} for all defaults",
            where=str(source),
        )
    if not isinstance(value, dict):
        sections = ", ".join(TrainerConfig.model_fields)
        message = f"holds {shown('', value)}; allowed is a mapping of sections ({sections})"
        raise ConfigError(message, where=str(source))
    return str(source), value


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            # One byte more than allowed tells a file that is too large, however large it is.
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError("no such file; give the path of a YAML or JSON file", where=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except ValueError as error:
        raise ConfigError(f"is no path: {error}", where=repr(str(path))) from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES} bytes, which no configuration is", where=str(path))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text (byte {error.start})", where=str(path)) from None
