"""The parsed files of a run's directory. Missing or broken contents become remarks, so that the rest can still be shown."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from zeromesh.errors import ConfigError, LayoutError, ZeromeshError, counted
from zeromesh.files import read_whole
from zeromesh.mesh.mesh_shape import AXES, MeshShape
from zeromesh.trainer.config.messages import shown
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.config.yaml_reader import parse_yaml
from zeromesh.trainer.monitoring.plan_check import ComparisonRow, comparison_rows
from zeromesh.trainer.monitoring.step_metrics import EVALUATIONS, METRICS, RANKS, STARTS, leaves, read_metrics

CONFIG, CHECKPOINTS, STEP_MEMORY = "config.resolved.yaml", "checkpoints", "step_memory.json"
_BROKEN_SHOWN, _RUNS_SHOWN = 3, 8
T = TypeVar("T")
StepMemory = tuple[int, float, list[tuple[float, str, str, float]]]
"""A step, its seconds, and its memory changes in order: seconds since the begin of the step, tier, purpose, and the new bytes."""
PlanComparison = tuple[str, list[ComparisonRow]]
"""The layout, and its terms as predicted and as measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The parsed contents of a run's directory."""

    name: str
    path: Path
    remarks: list[str]
    """Sentences about unreadable files and invalid contents."""
    lines: list[dict[str, Any]]
    """The lines of metrics and evaluations in the order of steps, merged by step."""
    columns: dict[tuple[str, ...], dict[int, float]]
    """The numbers of the lines by path of keys, then by step. They may be NaN or infinite."""
    starts: list[dict[str, Any]]
    config: dict[str, Any]
    checkpoints: list[dict[str, Any]]
    """Summaries as in `zeromesh checkpoint list --json`, oldest first."""
    ranks: list[dict[str, Any]]
    """The last known activity of each rank."""
    step_memory: StepMemory | None
    planned: PlanComparison | None
    """The predicted and the measured figures of a finished run whose layout a plan has chosen."""

    def column(self, *keys: str) -> dict[int, float]:
        """Return the finite numbers of a path of keys, by step."""
        return {step: value for step, value in self.columns.get(keys, {}).items() if math.isfinite(value)}

    def evaluation_losses(self) -> dict[int, float]:
        """Evaluation losses by step, from lines and checkpoints."""
        stored = {each["step"]: each["eval_loss"] for each in self.checkpoints if each["eval_loss"] is not None}
        return dict(sorted((stored | self.column("eval_loss")).items()))

    @property
    def shape(self) -> MeshShape | None:
        """The mesh, from the ranks and the configuration or from the newest checkpoint; None where it is unknown."""
        try:
            if self.ranks:
                return MeshShape.resolve(len(self.ranks), **{axis: self.config["parallel"][axis] for axis in AXES})
            return MeshShape(**self.checkpoints[-1]["layout"]["mesh"])
        except (LayoutError, LookupError, TypeError):
            return None


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read the runs in these directories, and give them distinct names.

    Raises:
        ConfigError: with all paths that are no run's directory.
    """
    if problems := [problem for path in paths if (problem := _problem(path))]:
        raise ConfigError(problems)
    base = os.path.commonpath([path.absolute().parent for path in paths])
    return [_read(path, os.path.relpath(path.absolute(), base)) for path in paths]


def _problem(path: Path) -> str:
    if not path.is_dir():
        return f"{path} is {'no directory' if path.exists() else 'not there'}; give a run's directory, <run.output_dir>/<run.name>"
    if any((path / name).exists() for name in (METRICS, CONFIG, CHECKPOINTS)):
        return ""
    runs = sorted({each.parent.name for name in (METRICS, CONFIG) for each in path.glob(f"*/{name}")})
    more = f" and {len(runs) - _RUNS_SHOWN} more" if len(runs) > _RUNS_SHOWN else ""
    hint = f"; runs in it are {', '.join(runs[:_RUNS_SHOWN])}{more}" if runs else ""
    return f"{path} holds no run: there is neither {METRICS} nor {CONFIG}{hint}"


def _read(path: Path, name: str) -> RunRecord:
    remarks: list[str] = []
    lines = _lines(path, remarks)
    columns: dict[tuple[str, ...], dict[int, float]] = {}
    for line in lines:
        for keys, value in leaves(line):
            if (number := as_number(value)) is not None:
                columns.setdefault(keys, {})[line["step"]] = number
    if not (path / CONFIG).exists():
        remarks.append(f"there is no {CONFIG}")
    return RunRecord(
        name=name,
        path=path,
        remarks=remarks,
        lines=lines,
        columns=columns,
        starts=[line for line in _whole_lines(path / STARTS, remarks) if type(line.get("step")) is int],
        config=_tried(path / CONFIG, _config, remarks) or {},
        checkpoints=_tried(path / CHECKPOINTS, _checkpoints, remarks) or [],
        ranks=_tried(path / RANKS, _ranks, remarks) or [],
        step_memory=_tried(path / STEP_MEMORY, _step_memory, remarks),
        planned=_tried(path / METRICS, lambda _: _planned(lines), remarks),
    )


def _tried(path: Path, read: Callable[[Path], T], remarks: list[str]) -> T | None:
    """Return None if the path is missing, or unreadable, which becomes a remark."""
    try:
        return read(path) if path.exists() else None
    except (ZeromeshError, OSError) as error:
        remarks.append(str(error))
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        remarks.append(f"{path.name} cannot be read: it is not as zeromesh writes it ({error!r})")
    return None


def _lines(path: Path, remarks: list[str]) -> list[dict[str, Any]]:
    if not (path / METRICS).exists():
        remarks.append(f"there is no {METRICS}: the run has logged no step (run.log_every)")
    by_step: dict[int, dict[str, Any]] = {}
    repeated = 0
    for name in (METRICS, EVALUATIONS):
        for line in _whole_lines(path / name, remarks):
            if type(step := line.get("step")) is int and step >= 0:
                repeated += name == METRICS and step in by_step
                by_step[step] = by_step.get(step, {}) | line
    if repeated:
        remarks.append(f"{METRICS} has {counted(repeated, 'step')} more than once; of each the last line counts")
    if not by_step and not remarks:
        remarks.append(f"{METRICS} has no step yet")
    return [by_step[step] for step in sorted(by_step)]


def _whole_lines(path: Path, remarks: list[str]) -> list[dict[str, Any]]:
    broken: list[str] = []
    found = _tried(path, lambda path: read_metrics(path, broken), remarks) or []
    remarks += broken[:_BROKEN_SHOWN]
    if len(broken) > _BROKEN_SHOWN:
        remarks.append(f"{counted(len(broken) - _BROKEN_SHOWN, 'more line')} of {path.name} cannot be read")
    return found


def as_number(value: Any) -> float | None:
    """Convert a JSON value to a number, which may be NaN or infinite (strings in strict JSON); None for anything else."""
    try:
        return float(value) if type(value) in (int, float) or value in ("nan", "inf", "-inf") else None
    except OverflowError:
        return None


def _config(path: Path) -> dict[str, Any]:
    found = parse_yaml(read_whole(path).decode(), where=CONFIG)
    if not isinstance(found, dict):
        raise ConfigError(f"{CONFIG} holds no mapping of sections")
    return found


def settings_of(run: RunRecord) -> dict[str, tuple[str, str | None]]:
    """Return each key of a run's configuration: its value, never a secret, and its default where that differs."""
    defaults = {".".join(keys): value for keys, value in leaves(TrainerConfig().model_dump(mode="json"))}
    found = {}
    for keys, value in leaves(run.config):
        path = ".".join(keys)
        default = shown(path, defaults[path]).strip("'") if path in defaults else "(none)"
        found[path] = shown(path, value).strip("'"), None if value == defaults.get(path, ...) else default
    return found


def _ranks(path: Path) -> list[dict[str, Any]]:
    return sorted((dict(row) for row in json.loads(read_whole(path))["ranks"]), key=lambda row: int(row["rank"]))


def _step_memory(path: Path) -> StepMemory:
    content = json.loads(read_whole(path))
    events = [(float(at), str(tier), str(purpose), float(nbytes)) for at, tier, purpose, nbytes in content["events"]]
    times, seconds = [at for at, *_ in events], float(content["seconds"])
    if times != sorted(times) or not all(0 <= each < math.inf for each in (seconds, *times, *(e[3] for e in events))):
        raise ValueError("times or sizes that cannot be")
    return int(content["step"]), seconds, events


def _planned(lines: Sequence[Mapping[str, Any]]) -> PlanComparison | None:
    record = next((line["plan"] for line in reversed(lines) if "plan" in line), None)
    if record is None:
        return None
    return str(record["layout"]), list(comparison_rows(record))


def _checkpoints(path: Path) -> list[dict[str, Any]]:
    from zeromesh.checkpoint.store import CheckpointStore
    from zeromesh.trainer.tools.checkpoint.reading import summary_of

    store = CheckpointStore(path)
    return [summary_of(store, step) for step in reversed(store.steps())]
