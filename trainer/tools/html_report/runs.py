"""The parsed files of a run's directory. Missing or broken contents become remarks, so that the rest can still be shown."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

from zeromesh.errors import ConfigError, LayoutError, ZeromeshError, counted, some
from zeromesh.files import read_whole
from zeromesh.mesh.mesh_shape import SIZES, MeshShape
from zeromesh.trainer.config.messages import quote
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.config.yaml_reader import parse_yaml
from zeromesh.trainer.monitoring.plan_check import PlanTable, comparison_table
from zeromesh.trainer.monitoring.rank_records import read_ranks
from zeromesh.trainer.monitoring.step_metrics import CONFIG, EVALUATIONS, METRICS, RANKS, STARTS, leaves, read_metrics

CHECKPOINTS, STEP_MEMORY = "checkpoints", "step_memory.json"
_BROKEN_SHOWN, _RUNS_SHOWN = 3, 8
StepMemory = tuple[int, float, list[tuple[float, str, str, float]]]
"""A step, its seconds, and its memory changes in order: seconds since the begin of the step, tier, purpose, and the new bytes."""


@dataclass(kw_only=True, slots=True)
class RunRecord:
    name: str
    path: Path
    remarks: list[str] = field(default_factory=list)  # Sentences about unreadable files and invalid contents.
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The lines of metrics and evaluations in the order of steps, merged by step."""
    columns: dict[tuple[str, ...], dict[int, float]] = field(default_factory=dict)
    """The numbers of the lines by path of keys, then by step. They may be NaN or infinite."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Summaries as in `zeromesh checkpoint list --json`, oldest first."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    step_memory: StepMemory | None = None
    planned: PlanTable | None = None
    """The predicted and the measured figures of a finished run whose layout a plan has chosen."""

    @contextmanager
    def reading(self, name: str) -> Iterator[Path]:
        """Yield the path of a file; what cannot be read inside the block becomes a remark, unless the file is missing."""
        path = self.path / name
        try:
            yield path
        except FileNotFoundError:
            return
        except (ZeromeshError, OSError) as error:
            self.remarks.append(str(error))
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            self.remarks.append(f"{name} cannot be read: it is not as zeromesh writes it ({error!r})")

    def whole_lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a file of JSON lines; the first broken ones become remarks."""
        broken: list[str] = []
        rows: list[dict[str, Any]] = []
        with self.reading(name) as path:
            rows = read_metrics(path, broken)
        self.remarks += broken[:_BROKEN_SHOWN]
        if len(broken) > _BROKEN_SHOWN:
            self.remarks.append(f"{counted(len(broken) - _BROKEN_SHOWN, 'more line')} of {name} cannot be read")
        return rows

    def column(self, *keys: str) -> dict[int, float]:
        """Return the finite numbers of a path of keys, by step."""
        return {step: value for step, value in self.columns.get(keys, {}).items() if isfinite(value)}

    def evaluation_losses(self) -> dict[int, float]:
        """Evaluation losses by step, from lines and checkpoints."""
        stored = {each["step"]: each["eval_loss"] for each in self.checkpoints if each["eval_loss"] is not None}
        return dict(sorted((stored | self.column("eval_loss")).items()))

    @property
    def shape(self) -> MeshShape | None:
        """The mesh, from the ranks and the configuration or from the newest checkpoint; None where it is unknown."""
        try:
            if self.ranks:
                return MeshShape.resolve(len(self.ranks), **{axis: self.config["parallel"].get(axis, 1) for axis in SIZES})
            return MeshShape(**self.checkpoints[-1]["layout"]["mesh"])
        except (LayoutError, LookupError, TypeError):
            return None


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read the runs in these directories, and give them distinct names. Raises `ConfigError` with all paths that are no run's."""
    problems = []
    for path in paths:
        if not path.is_dir():
            what = "no directory" if path.exists() else "not there"
            problems.append(f"{path} is {what}; give a run's directory, <run.output_dir>/<run.name>")
        elif not any((path / name).exists() for name in (METRICS, CONFIG, CHECKPOINTS)):
            inside = sorted({each.parent.name for name in (METRICS, CONFIG) for each in path.glob(f"*/{name}")})
            hint = f"; runs in it are {some(inside, _RUNS_SHOWN)}" if inside else ""
            problems.append(f"{path} holds no run: there is neither {METRICS} nor {CONFIG}{hint}")
    if problems:
        raise ConfigError(problems)
    base = os.path.commonpath([path.absolute().parent for path in paths])
    return [_read(path, os.path.relpath(path.absolute(), base)) for path in paths]


def _read(path: Path, name: str) -> RunRecord:
    run = RunRecord(name=name, path=path)
    if not (path / METRICS).exists():
        run.remarks.append(f"there is no {METRICS}: the run has logged no step (run.log_every)")
    by_step: dict[int, dict[str, Any]] = {}
    repeated = 0
    for file in (METRICS, EVALUATIONS):
        for line in run.whole_lines(file):
            if type(step := line.get("step")) is int and step >= 0:
                repeated += file == METRICS and step in by_step
                by_step[step] = by_step.get(step, {}) | line
    if repeated:
        run.remarks.append(f"{METRICS} has {counted(repeated, 'step')} more than once; of each the last line counts")
    if not by_step and not run.remarks:
        run.remarks.append(f"{METRICS} has no step yet")
    run.lines = [by_step[step] for step in sorted(by_step)]
    for line in run.lines:
        for keys, value in leaves(line):
            if (number := as_number(value)) is not None:
                run.columns.setdefault(keys, {})[line["step"]] = number
    for plan in [line["plan"] for line in run.lines if "plan" in line][-1:]:  # A resumed run may have several.
        with run.reading(METRICS):
            run.planned = comparison_table(plan)
    if not (path / CONFIG).exists():
        run.remarks.append(f"there is no {CONFIG}")
    with run.reading(CONFIG) as config_path:
        config = parse_yaml(read_whole(config_path).decode(), where=CONFIG)
        if not isinstance(config, dict):
            raise ConfigError(f"{CONFIG} holds no mapping of sections")
        run.config = config
    run.starts = [line for line in run.whole_lines(STARTS) if type(line.get("step")) is int]
    with run.reading(RANKS) as ranks_path:
        run.ranks = read_ranks(ranks_path)
    with run.reading(STEP_MEMORY) as memory_path:
        content = json.loads(read_whole(memory_path))
        events = [(float(at), str(tier), str(purpose), float(size)) for at, tier, purpose, size in content["events"]]
        times, seconds = [at for at, *_ in events], float(content["seconds"])
        if times != sorted(times) or not all(0 <= each < inf for each in (seconds, *times, *(e[3] for e in events))):
            raise ValueError("times or sizes that cannot be")
        run.step_memory = int(content["step"]), seconds, events
    if (path / CHECKPOINTS).exists():
        from zeromesh.checkpoint.store import CheckpointStore
        from zeromesh.trainer.tools.checkpoint.reading import summary_of

        with run.reading(CHECKPOINTS) as folder:
            store = CheckpointStore(folder)
            run.checkpoints = [summary_of(store, step) for step in reversed(store.steps())]
    return run


def as_number(value: Any) -> float | None:
    """Convert a JSON value to a number, which may be NaN or infinite (strings in strict JSON); None for anything else."""
    try:
        return float(value) if type(value) in (int, float) or value in ("nan", "inf", "-inf") else None
    except OverflowError:
        return None


def settings_of(run: RunRecord) -> dict[str, tuple[str, str | None]]:
    """Return each key of a run's configuration: its value, never a secret, and its default where that differs."""
    defaults = {".".join(keys): value for keys, value in leaves(TrainerConfig().model_dump(mode="json"))}
    settings = {}
    for keys, value in leaves(run.config):
        path = ".".join(keys)
        default = quote(path, defaults[path]).strip("'") if path in defaults else "(none)"
        settings[path] = quote(path, value).strip("'"), None if value == defaults.get(path, ...) else default
    return settings
