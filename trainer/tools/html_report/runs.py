"""A run's directory as values. What is missing or broken is a remark, so that the rest can still be looked at."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zeromesh.errors import ConfigError, LayoutError, StorageError, ZeromeshError
from zeromesh.files import read_whole
from zeromesh.mesh.mesh_shape import AXES, MeshShape
from zeromesh.trainer.config.messages import known_paths, shown
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.config.yaml_reader import MAX_BYTES, parse_yaml, plain_scalar
from zeromesh.trainer.monitoring.step_metrics import EVALUATIONS, METRICS, STARTS, read_metrics

CONFIG, RANKS = "config.resolved.yaml", "ranks.json"
CHECKPOINTS, STEP_MEMORY = "checkpoints", "step_memory.json"
_BROKEN_SHOWN = 3
_PURPOSES = 64
_RUNS_SHOWN = 8
_ABSENT = object()
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """A key of the configuration: its dotted path, its value for people, never a secret, and its default where it differs."""

    path: str
    value: str
    default: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes over a step of so many seconds: changes in order of time, each with seconds since it began, tier, purpose and bytes."""

    step: int
    seconds: float
    events: tuple[tuple[float, str, str, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """What a run's directory holds. Lines are in order of their steps, each step once."""

    name: str
    path: Path
    lines: tuple[Mapping[str, Any], ...] = ()
    """Lines of metrics, each with a `step`."""
    starts: tuple[Mapping[str, Any], ...] = ()
    """When it began and went on, and after which step."""
    keys: tuple[Key, ...] = ()
    """The configuration, flat."""
    max_steps: int | None = None
    """Steps that the run was to have."""
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    """As `zeromesh checkpoint list --json` has them, oldest first."""
    ranks: tuple[Mapping[str, Any], ...] = ()
    """What ranks were last seen at."""
    shape: MeshShape | None = None
    step_memory: StepMemory | None = None
    remarks: tuple[str, ...] = ()
    """What could not be read, or was not as it should be."""


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Runs by their directories, under names that tell them apart.

    Raises:
        ConfigError: for what is no run's directory; all of them are named.
    """
    problems = [problem for path in paths if (problem := _problem(path)) is not None]
    if problems:
        raise ConfigError(problems)
    return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _problem(path: Path) -> str | None:
    if not path.is_dir():
        return f"{path} is {'no directory' if path.exists() else 'not there'}; give a run's directory, <run.output_dir>/<run.name>"
    if any((path / name).exists() for name in (METRICS, CONFIG, CHECKPOINTS)):
        return None
    inside = sorted(each.parent.name for name in (METRICS, CONFIG) for each in path.glob(f"*/{name}"))
    runs = list(dict.fromkeys(inside))
    more = f" and {len(runs) - _RUNS_SHOWN} more" if len(runs) > _RUNS_SHOWN else ""
    hint = f"; runs in it are {', '.join(runs[:_RUNS_SHOWN])}{more}" if runs else ""
    return f"{path} holds no run: there is neither {METRICS} nor {CONFIG}{hint}"


def _names(paths: Sequence[Path]) -> list[str]:
    """As much of the end of each path as tells it from the others."""
    parts = [path.absolute().parts for path in paths]
    length = 1
    while len({each[-length:] for each in parts}) < len(set(parts)):
        length += 1
    names = ["/".join(each[-length:]) for each in parts]
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]


def _read(path: Path, name: str) -> RunRecord:
    remarks: list[str] = []
    lines = _lines(path, remarks)
    config = _tried(lambda: _config(path / CONFIG), remarks) or {}
    starts = _whole_lines(path / STARTS, remarks)
    checkpoints = _tried(lambda: _checkpoints(path), remarks) or []
    ranks = _tried(lambda: _ranks(path / RANKS), remarks) or []
    steps = config.get("run", {}).get("max_steps") if isinstance(config.get("run"), dict) else None
    return RunRecord(
        name=name,
        path=path,
        lines=tuple(lines),
        starts=tuple(each for each in starts if type(each.get("step")) is int),
        keys=tuple(_keys(config)),
        max_steps=steps if type(steps) is int else None,
        checkpoints=tuple(checkpoints),
        ranks=tuple(ranks),
        step_memory=_tried(lambda: _step_memory(path / STEP_MEMORY), remarks),
        shape=_shape(config, checkpoints, len(ranks)),
        remarks=tuple(remarks),
    )


def _tried(read: Callable[[], T], remarks: list[str]) -> T | None:
    """What `read` gives; a file that cannot be read is a remark, and None."""
    try:
        return read()
    except (ZeromeshError, OSError) as error:
        remarks.append(str(error))
        return None


# Metrics


def _lines(path: Path, remarks: list[str]) -> list[Mapping[str, Any]]:
    """Lines of metrics and of evaluations, those of one step as one."""
    if not (path / METRICS).exists():
        remarks.append(f"there is no {METRICS}: the run has logged no step (run.log_every)")
    by_step: dict[int, dict[str, Any]] = {}
    twice = 0
    for name in (METRICS, EVALUATIONS):
        for line in _whole_lines(path / name, remarks):
            step = line.get("step")
            if type(step) is not int or step < 0:
                continue
            before = by_step.get(step)
            if before is not None:
                twice += "loss" in before and "loss" in line
                line = before | line
            by_step[step] = line
    if twice:
        remarks.append(f"{METRICS} has {twice} steps more than once; of each the last line counts")
    if not by_step and not remarks:
        remarks.append(f"{METRICS} has no step yet")
    return [by_step[step] for step in sorted(by_step)]


def _whole_lines(path: Path, remarks: list[str]) -> list[dict[str, Any]]:
    """The lines of a file that can be read; none where there is no such file."""
    if not path.exists():
        return []
    broken: list[str] = []
    found = _tried(lambda: read_metrics(path, broken), remarks) or []
    remarks += broken[:_BROKEN_SHOWN]
    if len(broken) > _BROKEN_SHOWN:
        remarks.append(f"{len(broken) - _BROKEN_SHOWN} more lines of {path.name} cannot be read")
    return found


def number(value: object) -> float | None:
    """A value of a line as a number, which may be NaN or infinite (they are texts in strict JSON); None for what is none."""
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return None
    return float(value) if isinstance(value, str) and value in ("nan", "inf", "-inf") else None


def value_at(path: Sequence[str], line: Mapping[str, Any]) -> object:
    """The value at a path of names inside of mappings; None where there is none."""
    found: object = line
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


# Configuration


def _config(path: Path) -> dict[str, Any]:
    try:
        content = read_whole(path, MAX_BYTES)
        found = parse_yaml(content.decode("utf-8"), where=CONFIG)
    except FileNotFoundError:
        raise StorageError(f"there is no {CONFIG}") from None
    except UnicodeDecodeError as error:
        raise StorageError(f"{CONFIG} is no UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise StorageError(f"{CONFIG} cannot be read: {error.strerror or error}") from error
    if not isinstance(found, dict):
        raise StorageError(f"{CONFIG} holds no mapping of sections")
    return found


def _keys(config: Mapping[str, Any]) -> list[Key]:
    if not config:
        return []
    defaults = dict(_flat(TrainerConfig().model_dump(mode="json")))
    found = []
    for path, value in _flat(config):
        default = defaults.get(path, _ABSENT)
        text = "(no such key in this version)" if default is _ABSENT and not _free(path) else _word(path, default)
        found.append(Key(path=path, value=_word(path, value), default=None if value == default else text))
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every value under its dotted path; mappings are taken apart, but for empty ones."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        found += _flat(value, f"{path}.") if isinstance(value, Mapping) and value else [(path, value)]
    return found


def _free(path: str) -> bool:
    """Whether a key lies inside of one that holds whatever it is given, such as `model.config`."""
    parents = [path[:place] for place, letter in enumerate(path) if letter == "."]
    return any(parent in known_paths() and "." in parent for parent in parents)


def _word(path: str, value: object) -> str:
    """A value as one would write it: plain text without quotes where it means nothing else."""
    text = "(none)" if value is _ABSENT else shown(path, value)
    return value if isinstance(value, str) and text == repr(value) and plain_scalar(value) == value else text


# Mesh and ranks


def _shape(config: Mapping[str, Any], checkpoints: Sequence[Mapping[str, Any]], ranks: int) -> MeshShape | None:
    """The mesh, from the newest checkpoint or from the configuration and the number of ranks; None where it is not known."""
    for each in reversed(checkpoints):
        mesh = each["layout"].get("mesh")
        if isinstance(mesh, dict) and set(mesh) == set(AXES):
            try:
                shape = MeshShape(**mesh)
            except LayoutError:
                continue
            if not ranks or shape.world_size == ranks:
                return shape
    parallel = config.get("parallel")
    if not ranks or not isinstance(parallel, dict):
        return None
    try:
        return MeshShape.resolve(ranks, **{axis: parallel[axis] for axis in AXES if axis in parallel})
    except (LayoutError, TypeError):
        return None


def _ranks(path: Path) -> list[Mapping[str, Any]]:
    try:
        rows = json.loads(read_whole(path))["ranks"]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StorageError(f"{RANKS} cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) and type(row.get("rank")) is int for row in rows):
        raise StorageError(f"{RANKS} holds no list of ranks")
    return sorted(rows, key=lambda row: int(row["rank"]))


def _step_memory(path: Path) -> StepMemory | None:
    try:
        content = json.loads(read_whole(path))
        events = [
            (float(at), str(tier), str(purpose), float(nbytes)) for at, tier, purpose, nbytes in content["events"]
        ]
        found = StepMemory(step=int(content["step"]), seconds=float(content["seconds"]), events=tuple(events))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise StorageError(f"{STEP_MEMORY} cannot be read: {error}") from error
    if len({(tier, purpose) for _, tier, purpose, _ in found.events}) > _PURPOSES:
        raise StorageError(f"{STEP_MEMORY} has more than {_PURPOSES} purposes, which no run has")
    times = [at for at, *_ in found.events]
    good = all(math.isfinite(each) and each >= 0 for at, _, _, nbytes in found.events for each in (at, nbytes))
    if not good or times != sorted(times) or not (math.isfinite(found.seconds) and found.seconds > 0):
        raise StorageError(f"{STEP_MEMORY} has times or sizes that cannot be")
    return found


def _checkpoints(path: Path) -> list[Mapping[str, Any]]:
    if not (path / CHECKPOINTS).is_dir():
        return []
    from zeromesh.checkpoint.store import CheckpointStore
    from zeromesh.trainer.tools.checkpoint.inspect import summary_of

    store = CheckpointStore(path / CHECKPOINTS)
    return [summary_of(store, step) for step in reversed(store.steps())]
