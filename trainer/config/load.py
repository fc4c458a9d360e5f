"""Loading of a configuration with overrides into a `TrainerConfig`, or one error with every problem."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from zeromesh.environment import read_environment, secret_values
from zeromesh.errors import ConfigError
from zeromesh.settings.keys import int_if_whole
from zeromesh.trainer.config import messages
from zeromesh.trainer.config.deepspeed import Translation, is_deepspeed, nested, read_deepspeed
from zeromesh.trainer.config.foreign_names import KEY_BY_DEEPSPEED_NAME, KEY_BY_NAME, NO_KEY, foreign_problems
from zeromesh.trainer.config.redact import REDACTED, Redaction
from zeromesh.trainer.config.sections.base import REPOSITORY, nearest
from zeromesh.trainer.config.sections.model import DEFAULT_MODEL
from zeromesh.trainer.config.sections.optimizer import optimizer_problems
from zeromesh.trainer.config.sections.outputs import name_of_file
from zeromesh.trainer.config.sections.training import EVAL, Column, MixturePart, paths_of
from zeromesh.trainer.config.trainer_config import TrainerConfig, disagreements
from zeromesh.trainer.config.yaml_reader import parse_yaml, plain_scalar, plain_value, read_yaml, with_variables
from zeromesh.trainer.trackers.backends import TRACKERS

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | TrainerConfig | None
"""A path of YAML or JSON or a mapping, of ours or DeepSpeed's, a `TrainerConfig`, or None for the defaults."""
OUR_KEY = "zeromesh"  # The key in a DeepSpeed configuration that holds zeromesh's sections, which DeepSpeed ignores.
ARGUMENTS_ADVICE = "TrainingArguments: use zeromesh.transformers.Trainer, the same constructor as transformers' own"


class Consent(Enum):
    """The sources that count as a user's consent to run third-party code, of a model's directory (`model.trust_remote_code`) or of
    any module (a key `python`). A directory's own files, `config.resolved.yaml` too, give none: anybody may have written them.
    Every configuration enters through `load_config`, whose caller says which consent is needed."""

    GIVEN = "the file that the person names to train, or what a program of their own hands over, and the command line"
    COMMAND_LINE = "read that code, and name the key on the command line too if it may run"
    NEVER = "this command runs none; leave the key out"


def foreign_code(data: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted keys in `data` that run third-party code: `trust_remote_code`, `python`, and an optimizer's class."""
    pairs = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, value in pairs:
        named = key == "python" or f"{path}{key}" == "optimizer.name"
        if (key == "trust_remote_code" and value) or (named and isinstance(value, str) and ":" in value):
            yield f"{path}{key}"
        yield from foreign_code(value, f"{path}{key}.")


_TYPE_KEYS = ("model_type", "python")
"""Keys that name the type of a mapping. Mappings whose types differ are not merged: the upper one replaces the lower one."""


def _merge(below: dict[str, Any], above: Mapping[str, Any], *, sections: bool = True) -> dict[str, Any]:
    """Return `below` updated by `above`. A null replaces any value, and is at the top level (`sections`) an empty section."""
    merged = dict(below)
    for key, value in above.items():
        under, given = merged.get(key), {} if value is None and sections else value
        merged[key] = value
        if not isinstance(under, dict) or not isinstance(given, Mapping):
            continue
        if all(under.get(name) == given[name] for name in _TYPE_KEYS if name in given):
            merged[key] = _merge(under, given, sections=False)
    return merged


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A configuration as the user gave it, merged with its bases; `own` has zeromesh's sections."""

    where: str
    own: dict[str, Any]
    layers: tuple[tuple[str, Mapping[str, Any]], ...]
    """The files of the configuration, each base after the file that names it: a description (empty for the first) and the keys."""
    deepspeed: dict[str, Any] | None = None
    folders: tuple[str, ...] = ()


def _merge_base(given: _Source, base: Any, chain: tuple[Path, ...]) -> _Source:
    if not isinstance(base, str) or not base:
        raise ConfigError(f"base: got {messages.quote('', base)}; allowed is a YAML or JSON file", where=given.where)
    path = Path(*given.folders, Path(base).expanduser())
    if path.resolve() in chain:
        circle = " -> ".join(str(each) for each in [*chain, path.resolve()])
        raise ConfigError(f"base: {base!r} inherits itself: {circle}; leave one of them out", where=given.where)
    below = _read(path, chain, f"{given.where}: base: {str(path)!r} does not exist; it is looked for beside the file that names it")
    (_, keys), *rest = below.layers
    return replace(
        given,
        own=_merge(below.own, given.own),
        layers=(*given.layers, (f"set in {below.where}", keys), *rest),
        deepspeed=given.deepspeed or below.deepspeed,
        folders=given.folders + below.folders,
    )


def _read(source: Any, chain: tuple[Path, ...] = (), absent: str = "no such file; give the path of a YAML or JSON file") -> _Source:
    where = str(source) if isinstance(source, str | os.PathLike) else "configuration"
    folders: tuple[str, ...] = ()
    if isinstance(source, TrainerConfig):
        data = source.model_dump(mode="json", exclude_unset=True)
        # The default name may contain the time, so a copy states it.
        own = {**data, "run": {"name": source.run.name, **data.get("run", {})}}
        return _Source(where=where, own=own, layers=(("", own),), folders=source.folders)
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        data = read_yaml(path, absent, where=where)
        if not isinstance(data, dict):
            problem = "is empty; write what to train, such as `model: {source: DIRECTORY}`, or {} for all defaults"
            if data is not None:
                sections = ", ".join(TrainerConfig.model_fields)
                problem = f"holds {messages.quote('', data)}; allowed is a mapping of sections ({sections})"
            raise ConfigError(problem, where=where)
        folders, chain = (os.path.dirname(os.path.abspath(path)),), (*chain, path.resolve())
        try:
            data = with_variables(data, messages.takes_text)
        except ConfigError as error:
            raise ConfigError(error.problems, where=where) from None
    elif source is None or isinstance(source, Mapping):
        data = plain_value(source or {}, where=where)
    else:
        bases = [f"{base.__module__}.{base.__name__}" for base in type(source).__mro__]
        if "transformers.training_args.TrainingArguments" in bases:
            raise ConfigError(ARGUMENTS_ADVICE)
        raise ConfigError(f"got {type(source).__name__}; allowed is a path, a mapping or a TrainerConfig", where="config")
    base = data.pop("base", None)
    if foreign := foreign_problems(data):
        raise ConfigError(foreign, where=where)
    own, deepspeed = (data.pop(OUR_KEY, {}), data) if is_deepspeed(data) else (data, None)
    if not isinstance(own, dict):
        raise ConfigError(f"{OUR_KEY}: got {messages.quote('', own)}; allowed is a mapping of sections", where=where)
    given = _Source(where=where, own=own, layers=(("", own),), deepspeed=deepspeed, folders=folders)
    return given if base is None else _merge_base(given, base, chain)


def _missing_paths(config: TrainerConfig, wrong: frozenset[str]) -> Iterator[str]:
    for key, row in messages.ADVICE["paths"].items():
        section, _, name = key.partition(".")
        given = () if key in wrong else paths_of(getattr(getattr(config, section), name))
        for path in (each for each in given if each not in row.get("words", ())):
            try:
                there = Path(path).expanduser()
                exists = there.exists()
            except (OSError, RuntimeError) as error:  # No such user's home directory.
                yield f"{key}: {path!r} cannot be reached: {getattr(error, 'strerror', None) or error}; {row['advice']}"
                continue
            if row.get("hub") == "dataset":
                exists = exists or path.startswith("hub:") or bool(glob(str(there), recursive=True))
            if exists or (row.get("hub") == "model" and REPOSITORY.fullmatch(path)):
                continue
            place = "" if there.is_absolute() else f" in {Path.cwd()}"
            several = f", and several paths are a list: [{path}]" if "," in path else ""
            yield f"{key}: {path!r} does not exist{place}{several}; {row['advice']}"


def tracker_problems(names: Sequence[str]) -> Iterator[str]:
    # Trackers of accelerate, and those registered in this process.
    registered = getattr(sys.modules.get("accelerate.tracking"), "LOGGER_TYPE_TO_CLASS", {})
    for name in names:
        if name in TRACKERS:
            specs = map(find_spec, TRACKERS[name].modules or (name,))
            # A plain folder of that name, such as wandb's run folder, is no package.
            if not any(spec is not None and spec.origin is not None for spec in specs):
                package = name.replace("_", "-")
                yield f"tracking.backends: {name} needs a package that is not installed; run: pip install {package}"
        elif name not in registered:
            near = nearest(name, TRACKERS)
            hint = f"; did you mean {near}?" if near else ""
            what = f"tracking.backends: got {name!r}; allowed are {', '.join(TRACKERS)}"
            yield f"{what}, and names of trackers that were given to accelerate.tracking.register_tracker_class{hint}"


def suggestion(path: str) -> str | None:
    """Return the key that an unknown path may mean, by foreign or similar name, or an explanation for one without a key."""
    meant = KEY_BY_NAME.get(name := path.rpartition(".")[2].lower()) or KEY_BY_NAME.get(path, "")
    if meant.partition(" (")[0] in messages.known_paths() or meant.startswith(NO_KEY):
        return meant
    return messages.nearest_path(path, messages.known_paths()) or KEY_BY_DEEPSPEED_NAME.get(name)


def load_config(
    source: ConfigSource = None,
    overrides: Sequence[str] = (),
    *,
    unused: frozenset[str] = frozenset(),
    ranks: int | None = None,
    consent: Consent | None = None,
    tunes: str | None = None,
) -> TrainerConfig:
    """Load the configuration of `source`, with `overrides` (`section.key=value`, the value in YAML) on top. Keys in `unused`,
    which something else replaces, need neither agree with other keys nor exist as paths. Loading uses no process group, device
    or model; it checks that named paths and packages of trackers exist.

    Args:
        tunes: `whole` or `adapters`, the trained part of a pretrained model, for its defaults; None for a new model.
        ranks: the ranks of the launch, for other trainers' settings that depend on them; None takes this process's launch.
        consent: the consent that third-party code needs; None: the command line for a source that is a path, else any.

    Raises `ConfigError` with every problem at once, each with its dotted path, the value, what is allowed and the nearest name.
    """
    given = _read(source)
    own, translation = given.own, Translation({})
    problems, overridden = _apply(own, overrides)
    if given.deepspeed is not None:
        translation = read_deepspeed(given.deepspeed, ranks or read_environment().world_size, own.get("parallel"))
    data = _merge(nested(translation.values), own)
    notes = tuple(translation.notes)
    if tunes is not None and given.deepspeed is None:
        model = data.get("model") or {}
        adapted = tunes == "adapters" or bool(model.get("lora") or model.get("adapters"))
        defaults = _tuning_defaults(data, adapted=adapted)
        notes, data = (*notes, f"defaults for tuning: {json.dumps(defaults)}"), _merge(defaults, data)
    if isinstance(source, str | os.PathLike):
        run = data.get("run") or {}
        data["run"] = {"name": name_of_file(source), **run} if isinstance(run, dict) else run
    problems += translation.problems
    config, wrong = _validate(data, unused)
    consent = consent or (Consent.COMMAND_LINE if isinstance(source, str | os.PathLike) else Consent.GIVEN)
    if consent is not Consent.GIVEN:
        typed = tuple(f"{key}." for key in overridden) if consent is Consent.COMMAND_LINE else ()
        keys = [key for key in foreign_code(config.model_dump(mode="json")) if not f"{key}.".startswith(typed)]
        problems += [f"{key}: would run code that somebody else may have written; {consent.value}" for key in keys]
    only_overrides = not translation.problems
    for problem in wrong:
        only_overrides &= problem.partition(" ")[0].rstrip(":") in overridden
        problems.append(_with_origin(problem, overridden, given, translation.origins))
    if problems:
        clean = Redaction(secret_values()).text
        raise ConfigError([clean(problem) for problem in problems], where="" if only_overrides else given.where)
    earlier = source.notes if isinstance(source, TrainerConfig) else ()
    return config.with_notes((*earlier, *notes), given.folders)


def _tuning_defaults(given: Mapping[str, Any], *, adapted: bool) -> dict[str, dict[str, Any]]:
    """Return defaults for tuning a pretrained model, which takes smaller steps and weaker decay, below what is `given`."""
    batch = given.get("batch")
    size = int_if_whole(batch.get("global_size", 16)) if isinstance(batch, Mapping) else 16
    budgeted = isinstance(batch, Mapping) and batch.get("tokens") is not None
    decay = {"weight_decay": 0.0 if adapted else 0.01, "exempt": "biases_and_norms"}
    optimizer = given.get("optimizer")
    name = optimizer.get("name", "adamw") if isinstance(optimizer, Mapping) else "adamw"
    betas = {"betas": [0.9, 0.999]} if name in ("adamw", "adam") else {}
    return {
        "optimizer": {"lr": 2e-4 if adapted else 2e-5, **betas, **decay},
        "batch": {"micro_size": math.gcd(4, size) if type(size) is int and not budgeted else 1},
    }


def _has_key(data: Any, path: str) -> bool:
    key, _, rest = path.partition(".")
    return isinstance(data, Mapping) and key in data and (not rest or _has_key(data[key], rest))


def _with_origin(problem: str, overridden: Mapping[str, str], given: _Source, translated: Mapping[str, str]) -> str:
    """Append the origin of a problem's key or of its section: an override, a base file, or another trainer's setting."""
    key = problem.partition(" ")[0].rstrip(":")
    while key:
        layer = next((text for text, values in given.layers if _has_key(values, key)), translated.get(key))
        if origin := overridden.get(key) or layer:
            return f"{problem} ({origin})"
        key = key.rpartition(".")[0]
    return problem


def _apply(data: dict[str, Any], overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Set each override in `data`; returns problems of invalid ones, and descriptions of the others by key."""
    problems, overridden = [], {}
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        keys = path.split(".")
        secret = messages.quote(path, text) == REDACTED
        name = f"the override {messages.quote('', f'{path}{equals}{REDACTED if secret else text}')}"
        if path == "parallel" and text.strip() == "auto":
            data[path] = "auto"
            continue
        if not equals or len(keys) < 2 or not all(keys):
            field = messages.known_paths().get(path)
            if field is not None and (section := messages.section_of(field)) is not None:
                keys_of_it = ", ".join(section.model_fields)
                hint = f"{path} is a section; write {path}.KEY=VALUE, with one of its keys: {keys_of_it}"
            elif field is not None:
                hint = f"it has no value; write {path}=VALUE"
            else:  # A foreign key may have other values, so the value is left out.
                given = f"={messages.quote(path, text).strip(chr(39))}" if equals else "=VALUE"
                near = _phrase(suggestion(path), "" if path.lower() in KEY_BY_NAME else given)
                hint = near or "write section.key=value"
            problems.append(f"{name}: {hint}")
            continue
        overridden[path] = name
        try:
            value = with_variables(parse_yaml(text.strip(), where=""), messages.takes_text, path)
        except ConfigError as error:
            problems.append(f"{name}: {error}")
            continue
        at: Any = data
        for depth, key in enumerate(keys[:-1], start=1):
            if at.get(key) is None:
                at[key] = {}
                # Setting one key of the default model keeps its other keys.
                if keys[:depth] == ["model", "config"] and not data["model"].keys() & {"source", "python"}:
                    at[key] = dict(DEFAULT_MODEL)
            at = at[key]
            if not isinstance(at, dict):
                parent = ".".join(keys[:depth])
                problems.append(f"{name}: {path}: {parent} is {messages.quote(parent, at)}, which has no keys")
                break
        else:
            at[keys[-1]] = value
    return problems, overridden


def _phrase(near: str | None, value: str = "") -> str:
    return near if near and near.startswith(NO_KEY) else f"did you mean {near}{value}?" if near else ""


def _validate(data: dict[str, Any], unused: frozenset[str]) -> tuple[TrainerConfig, list[str]]:
    """Return the configuration of the valid part of `data`, and the problems of single keys and of combinations."""
    # A section whose keys are all commented out is null in YAML.
    data = {key: {} if value is None and key in messages.known_paths() else value for key, value in data.items()}
    wrong: dict[tuple[str, ...], str] = {}
    # An invalid key is dropped, so that rules over keys can be checked; if that is not enough, its section, as defaults are valid.
    for depth in (None, 1, 0):
        try:
            config = TrainerConfig.model_validate(data, context={"rules": False})
            break
        except ValidationError as error:
            holders = []
            for detail in error.errors(include_url=False):
                keys: tuple[str, ...] = ()
                holder = at = data
                # A location also names branches of unions and positions in lists, which are skipped.
                for step in detail["loc"][:depth]:
                    if isinstance(at, dict) and step in at:
                        keys, holder, at = (*keys, str(step)), at, at[step]
                wrong.setdefault(keys, _problem(keys, at, detail["type"]))
                holders.append((holder, keys[-1]))
        for holder, key in holders:
            holder.pop(key, None)
    # A section is wrong if a key in it is.
    paths = unused.union(".".join(keys[:depth]) for keys in wrong for depth in range(1, len(keys) + 1))
    more = [*disagreements(config, wrong=paths), *_missing_paths(config, paths)]
    more += [] if "tracking.backends" in paths else tracker_problems(config.tracking.backends)
    more += [] if "optimizer" in paths else optimizer_problems(config.optimizer)
    # Each branch of a union gives an error: the one with the deepest location is about the branch that the user meant.
    meant = [text for keys, text in wrong.items() if not any(keys == each[: len(keys)] != each for each in wrong)]
    return config, [*meant, *more]


def _problem(keys: tuple[str, ...], value: Any, kind: str) -> str:
    path = ".".join(keys)
    # The keys of these mappings are names of the user's choice or of columns, for which the models have no field.
    if keys[:2] in (("data", "mixture"), ("data", "columns")) and len(keys) > 2:
        names = get_args(Column) if keys[1] == "columns" else tuple(MixturePart.model_fields)
        if kind == "missing":
            return f"{path}: has no train; give the paths of its data"
        if keys[-1] not in names and (keys[1] == "columns" or len(keys) > 3):
            return f"{path}: unknown; allowed are {', '.join(names)}"
        what = "is text" if keys[1] == "columns" else f"is a mapping of {', '.join(names)}"
        if len(keys) == 4 and keys[1] == "mixture":
            what = f"is {messages.allowed(MixturePart.model_fields[keys[-1]])}"
    elif kind == "extra_forbidden":
        nests = "a file nests keys: write the section, and the key inside it"
        hint = nests if "." in keys[-1] else _phrase(suggestion(path))
        return messages.unknown_key(path, value, messages.known_paths(), hint)
    elif keys[-1] == "python":
        what = "is text such as package.module:function"
    elif path.startswith(f"{EVAL}."):
        what = "is a name of letters, digits, '.', '_' and '-', with text, a list of texts, or a mapping with python"
    elif (field := messages.known_paths().get(path)) is None:
        what = "are text, finite numbers, true, false, null and lists"
    else:
        what = f"is {messages.allowed(field)}"
        if isinstance(value, str) and (reason := messages.ADVICE["words"].get(path, {}).get(value.lower())):
            return f"{path}: {value} is not available: {reason}; allowed {what}"
        near, every = None, messages.known_paths().values()
        if isinstance(value, str) and not any(value in messages.choices(other) for other in every):
            near = nearest(value, messages.choices(field))
        if kind == "string_type" and isinstance(value, bool | int | float):
            what += "; write it in quotes"
        elif isinstance(value, str) and "a list" in what:
            what += f"; write a list: [{messages.quote(path, value).strip(chr(39))}]"
        elif near:
            what += f"; did you mean {near}?"
        elif isinstance(value, str) and isinstance(plain_scalar(value.strip()), bool | int | float):
            what += "; write it without quotes"
    return f"{path}: got {messages.quote(path, value)}; allowed {what}"
