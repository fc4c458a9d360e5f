"""The trackers of a run: `TRACKERS` has a row for each, and adding one is a row, or a class and a row.

Nothing of the machine, the command line, the code, the repository or the output is sent to a tracker. Most trackers collect all of
that by default, and each has other switches against it (`switches.yaml`). Validation reads the names from here."""

import contextlib
import hashlib
import json
import re
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zeromesh.files import read_whole, write_whole

GLOBAL_STEP = "train/global_step"  # The name of the step in each row, as in transformers' own callback.
_EVALUATION_STEP = "eval/global_step"
_WRITE_SECONDS, _FLUSH_SECONDS, _WAIT_SECONDS = 0.001, 1.0, 20.0
"""Seconds. With the first, wandb's service writes a row at once, since a kill ends it with what it has not written."""
_DYING_SECONDS = 2.0  # in which wandb's service may end after it was killed
_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d{10,12})\.")


class RowPosition(NamedTuple):
    """The position of a row among all rows: first that of a step, then that of the evaluation after it."""

    step: int
    evaluation: bool = False


UNKNOWN = RowPosition(-1)  # The position of a tracker whose last row is unknown.


class TrackedRow(NamedTuple):
    """Figures of a step, or of an evaluation after it."""

    position: RowPosition
    values: Mapping[str, float]
    samples: tuple[tuple[str, str], ...] = ()  # Prompts and their completions, for trackers that show tables or text.


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The facts about a run for trackers. `config` holds no secrets; `step` is the one after which this process continues."""

    ident: str
    name: str
    project: str
    tags: tuple[str, ...]
    online: bool
    directory: Path
    step: int
    config: Mapping[str, Any]
    settings: Mapping[str, str | int | float] = field(default_factory=dict)
    """The flattened configuration, for trackers without nested values."""


class Tracker:
    """One of accelerate's trackers in a run, by the methods that all have; `TRACKERS` has the constructors' arguments. Few can tell
    their last row, so a file of the run's directory has it. Any call may raise any error of the tracker's library."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self.name, self.run = name, run
        self._file = run.directory / f"tracking-{name}.json"
        self.tracker: Any = None
        self.sent = UNKNOWN  # The position of the last row sent.

    def start(self) -> None:
        """Begin, or resume a run with this id."""
        self._make(self.run.project, **kind_of(self.name).arguments(self.run))
        self.tracker.store_init_configuration(dict(self.run.settings))
        self.sent, _ = self._read_last_row()

    def log(self, row: TrackedRow) -> None:
        self._record_row(row.position)
        if row.values:
            self.tracker.log(dict(row.values), step=row.position.step)

    def finish(self) -> None:
        """Flush pending rows, and end."""
        self.tracker.finish()

    def give_up(self, error: BaseException) -> None:
        """Handle a call that has raised `error`; no call follows."""

    def abandon(self) -> None:
        """Handle a call that hangs, so that neither the run nor the exit of the process waits for it."""

    def _make(self, project: str, **keywords: Any) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kind: Any = LOGGER_TYPE_TO_CLASS[self.name]
        folder = [str(self.run.directory / self.name)] if kind.requires_logging_directory else []
        self.tracker = kind(project, *folder, **keywords)
        self.tracker.start()

    def _read_last_row(self) -> tuple[RowPosition, int]:
        """Return the position of the last row by the file, and the number that the tracker gave the row; -1: none."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            ident, step, evaluated, *number = json.loads(read_whole(self._file))
            if ident == self.run.ident and int(step) >= 0:
                return RowPosition(int(step), bool(evaluated)), int(*number or [-1])
        if self.run.step:
            return UNKNOWN, -1
        self._record_row(RowPosition(0))
        return RowPosition(0), -1

    def _record_row(self, position: RowPosition, *number: int) -> None:
        """Record a row before it is sent: a kill in between loses the row rather than sending it twice."""
        write_whole(self._file, json.dumps([self.run.ident, *position, *number]).encode(), sync=False)


def _switches(name: str) -> dict[str, Any]:
    return {**yaml.safe_load(Path(__file__).with_name("switches.yaml").read_text(encoding="utf-8"))[name]}


_BEGIN = "zeromesh.json"
"""The file beside an offline one of wandb's, with the last row of earlier processes and its number."""


class WandbTracker(Tracker):
    """wandb, which numbers rows itself, so that the step is one of their values. Nothing of the machine or the code is sent."""

    _next: int | None = None

    def start(self) -> None:
        import wandb

        run, (sent, number) = self.run, self._read_last_row()
        settings = wandb.Settings(
            x_transaction_log_flush_interval=_WRITE_SECONDS,
            x_file_stream_transmit_interval=_FLUSH_SECONDS,
            login_timeout=_WAIT_SECONDS,
            finish_timeout=_WAIT_SECONDS,
            reinit="default" if wandb.run is None else "create_new",
            **_switches("wandb"),
        )
        # Files of earlier processes do not count without that of the latest one, whose rows may have been synchronized.
        whole = (run.directory / "wandb/latest-run").exists()
        earlier = list(run.directory.glob(f"wandb/offline-run-*-{run.ident}*/run-{run.ident}.wandb")) if whole else []
        known = {"id": run.ident, "name": run.name, "tags": list(run.tags), "config": dict(run.config)}
        where = {"dir": str(run.directory), "mode": "online" if run.online else "offline", "resume": "allow"}
        self._make(run.project, **known, **where, settings=settings)
        made = self.tracker.tracker
        made.define_metric(GLOBAL_STEP)
        made.define_metric("*", step_metric=GLOBAL_STEP)
        if not run.online:
            with contextlib.suppress(Exception):  # Without readable files the recorded row counts.
                sent, number = max(map(_last_row, earlier))
            self.sent, self._next = sent, number + 1
            write_whole(Path(made.settings.sync_dir, _BEGIN), json.dumps([*sent, number]).encode(), sync=False)
        elif made.resumed:
            summary = dict(made.summary)  # The server's summary: the latest value of each name.
            if isinstance(step := summary.get(GLOBAL_STEP), int):
                self.sent = RowPosition(step, summary.get(_EVALUATION_STEP) == step)

    def log(self, row: TrackedRow) -> None:
        # Only the first row has a number: wandb counts from there, beside rows that callbacks log.
        first, self._next = self._next, None
        step, evaluation = row.position
        self._record_row(row.position, self.tracker.tracker.step if first is None else first)
        where = {GLOBAL_STEP: step, **({_EVALUATION_STEP: step} if evaluation else {})}
        table: dict[str, Any] = {}
        if row.samples:
            import wandb

            table["samples"] = wandb.Table(["step", "prompt", "completion"], [[step, *each] for each in row.samples])
        self.tracker.log({**where, **row.values, **table}, step=first, commit=True)

    def give_up(self, error: BaseException) -> None:
        import psutil

        # A process that is killed closes its sockets, which is the error, some time before it has ended.
        if not psutil.wait_procs(_services(), timeout=_DYING_SECONDS)[1]:
            import wandb

            wandb.teardown()  # Its service has exited, and atexit and the hooks of imports would call it once more.

    def abandon(self) -> None:
        for each in _services():
            each.kill()


def _services() -> list[Any]:
    import psutil

    children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in children if "wandb-core" in each.name()]


def _last_row(path: Path) -> tuple[RowPosition, int]:
    """Return the position of the last row that a file of wandb's service holds, and the number of its last row of any kind.
    The file is a log as of LevelDB: blocks of chunks, each with a checksum, its length and the part of a record that it is."""
    from wandb.proto.wandb_internal_pb2 import Record

    last, number, record, at = Record().history, -1, b"", 7
    with path.open("rb") as file:
        while block := file.read(1 << 15):
            while at + 7 <= len(block):
                length, part = struct.unpack_from("<HB", block, at + 4)  # Whole record, or first, inner or last part
                record = record * (part > 2) + block[at + 7 : at + 7 + length]
                at += 7 + length
                if part in (1, 4) and at <= len(block) and (row := Record.FromString(record).history).item:
                    last, number = row if GLOBAL_STEP.encode() in record else last, row.step.num
            at = 0
    if number < 0 and (begin := path.with_name(_BEGIN)).exists():
        step, evaluation, number = json.loads(read_whole(begin))
        return RowPosition(step, evaluation), number
    values = {"/".join(each.nested_key) or each.key: each.value_json for each in last.item}
    return RowPosition(int(values.get(GLOBAL_STEP, 0)), _EVALUATION_STEP in values), number


class TensorBoardTracker(Tracker):
    """TensorBoard, which supports purging the rows of earlier processes from a step on; they are written anew."""

    def start(self) -> None:
        run, folder, (noted, _) = self.run, self.run.directory / "tensorboard", self._read_last_row()
        first = run.step + 1 if noted == UNKNOWN else min(noted.step, run.step + 1)
        self.sent = RowPosition(max(0, first - 1), first > 0)
        # TensorBoard sorts files by name, `events.out.tfevents.SECOND.HOST.PID...`: the later of one second might lose its rows.
        matches = [_EVENT_FILE.match(path.name) for path in folder.glob("events.out.tfevents.*")]
        wait = max((int(match[1]) for match in matches if match), default=0) + 1 - time.time()
        if wait > _WAIT_SECONDS:
            why = f"files in {folder} are {wait:.0f} seconds ahead of this machine's clock"
            raise RuntimeError(f"{why}, and TensorBoard would read them last; set the clock, or move them away")
        time.sleep(max(0.0, wait))
        self._make("", purge_step=first, flush_secs=_FLUSH_SECONDS)
        text = yaml.safe_dump(dict(run.config), sort_keys=False)
        self.tracker.tracker.add_text("config", f"```yaml\n{text}```", global_step=run.step)

    def log(self, row: TrackedRow) -> None:
        super().log(row)
        for number, (prompt, completion) in enumerate(row.samples):
            self.tracker.tracker.add_text(f"samples/{number}", f"**{prompt}**\n\n{completion}", global_step=row.position.step)


def _clearml(run: TrackedRun) -> dict[str, Any]:
    if not run.online:
        from clearml import Task

        Task.set_offline(True)
    return {"task_name": run.name, "tags": list(run.tags), "reuse_last_task_id": False, **_switches("clearml")}


def _comet_ml(run: TrackedRun) -> dict[str, Any]:
    from comet_ml import ExperimentConfig

    folder, off = str(run.directory / "comet_ml"), _switches("comet_ml")
    settings = ExperimentConfig(name=run.name, tags=list(run.tags), offline_directory=folder, **off)
    key = hashlib.sha256(run.ident.encode()).hexdigest()[:32]  # A key has at least 32 characters.
    where = {} if run.online else {"online": False}
    return {"experiment_key": key, "mode": "get_or_create", "experiment_config": settings, **where}


def _swanlab(run: TrackedRun) -> dict[str, Any]:
    from swanlab import Settings

    settings = Settings(**_switches("swanlab"))
    where = {} if run.online else {"mode": "offline"}
    known = {"name": run.name, "tags": list(run.tags), "id": run.ident, "resume": "allow"}
    return {**known, "log_dir": str(run.directory / "swanlab"), "settings": settings, **where}


@dataclass(frozen=True, slots=True)
class TrackerKind:
    arguments: Callable[[TrackedRun], dict[str, Any]] = lambda run: {}  # The keyword arguments of accelerate's class.
    make: type[Tracker] = Tracker
    modules: tuple[str, ...] = ()  # Alternative modules, one of which must be installed; by default the tracker's name.


TRACKERS = {
    "aim": TrackerKind(lambda run: {"experiment": run.name, **_switches("aim")}),
    "clearml": TrackerKind(_clearml),
    "comet_ml": TrackerKind(_comet_ml),
    # Elsewhere, `dvc.yaml` would name each file once more at every step.
    "dvclive": TrackerKind(
        lambda run: (
            {"dir": str(run.directory / "dvclive"), "dvcyaml": str(run.directory / "dvc.yaml")}
            | {"resume": run.step > 0, **_switches("dvclive")}
        )
    ),
    # A tag of MLflow has a name of few characters, so one tag holds all of them.
    "mlflow": TrackerKind(lambda run: {"run_name": run.name, "tags": {"tags": ", ".join(run.tags)} if run.tags else None}),
    "swanlab": TrackerKind(_swanlab),
    "tensorboard": TrackerKind(make=TensorBoardTracker, modules=("tensorboard", "tensorboardX")),
    # Trackio identifies runs by name alone, so the name contains the id.
    "trackio": TrackerKind(lambda run: {"name": f"{run.name}-{run.ident}", "resume": "allow", **_switches("trackio")}),
    "wandb": TrackerKind(make=WandbTracker),
}
"""The trackers that `tracking.backends` may name, beside those that a user has registered with accelerate."""


def kind_of(name: str) -> TrackerKind:
    """Return the row of a tracker; for one registered by the user, the default row."""
    return TRACKERS.get(name, TrackerKind())
