"""The trackers that a run can send figures to, by name, over those of accelerate: how each begins, and how far it has got.

Nothing of the machine, the command line, the code, the repository or the output goes to a tracker. Most look at all of that unless
they are told not to, each in words of its own.
"""

import contextlib
import hashlib
import json
import re
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import psutil
import yaml

from zeromesh.files import read_whole, write_whole
from zeromesh.trainer.monitoring.step_metrics import EVALUATIONS, METRICS, leaves, metrics_of_steps

_NAMES = {
    "loss": "train/loss",
    "lr": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "tokens": "train/tokens",
    "tokens_per_second": "perf/tokens_per_second",
    "step_seconds": "perf/step_seconds",
    "mfu": "perf/mfu",
    "peak_memory_bytes": "memory/peak_bytes",
    "phases": "time",
}
"""The names of a step's fields in trackers; others are `train/NAME`, and mappings `NAME/KEY`."""


_OF_A_SET = re.compile(r"eval_(.+)_runtime")
"""The value of an evaluation that each of several sets has, whatever else its values are called."""


class Place(NamedTuple):
    """The place of a row among all rows: first that of a step, then that of the evaluation after it."""

    step: int
    evaluation: bool = False


UNKNOWN = Place(-1)
"""How far a tracker has got of which nobody knows that."""


class TrackedRow(NamedTuple):
    """Figures of a step, or of an evaluation after it."""

    place: Place
    values: Mapping[str, float]
    samples: tuple[tuple[str, str], ...] = ()
    """Prompts and what the model has written to them, which trackers with tables or text show."""


def step_row(record: Mapping[str, Any]) -> TrackedRow:
    """The row of a step, from its line in `metrics.jsonl`."""
    values: dict[str, float] = {}
    for (name, *keys), value in leaves(record):
        if isinstance(value, int | float) and name not in ("step", "time"):
            path = "/".join([_NAMES.get(name, name), *map(str, keys)]).replace(" ", "-")
            values[path if keys else _NAMES.get(name, f"train/{name}")] = value
    return TrackedRow(Place(record["step"]), values)


def evaluation_row(step: int, values: Mapping[str, Any]) -> TrackedRow:
    """The row of an evaluation after `step`, those of several sets as `eval/NAME/...`; what is no number is left out."""
    sets = sorted((match[1] for match in map(_OF_A_SET.fullmatch, values) if match), key=len, reverse=True)
    named = {}
    for name, value in values.items():
        if name != "time" and isinstance(value, int | float):
            short = name.removeprefix("eval_")
            own = next((each for each in sets if short.startswith(f"{each}_")), None)
            named["eval/" + (short if own is None else f"{own}/{short[len(own) + 1 :]}")] = value
    return TrackedRow(Place(step, evaluation=True), named)


def missed_rows(directory: Path, sent: Place, through: int) -> list[TrackedRow]:
    """Return the rows up to step `through` that a run's files have and a tracker lacks: a kill met them on their way.

    The list is empty where it is not known how far the tracker has got. Raises `StorageError` where a file cannot be read.
    """
    if sent == UNKNOWN:
        return []
    steps = map(step_row, metrics_of_steps(directory / METRICS, sent.step, through))
    lines = metrics_of_steps(directory / EVALUATIONS, sent.step, through)
    evaluations = [evaluation_row(line.pop("step"), line) for line in lines]
    return sorted((row for row in [*steps, *evaluations] if row.place > sent), key=lambda row: row.place)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """The facts that trackers know about a run. `config` holds no secrets; `step` is the one after which this process goes on."""

    ident: str
    name: str
    project: str
    tags: tuple[str, ...]
    online: bool
    directory: Path
    step: int
    config: Mapping[str, Any]


_FRAMEWORKS = (
    "detect_repository matplotlib tensorflow tensorboard pytorch xgboost scikit fastai lightgbm hydra tfdefines joblib megengine "
    "catboost gradio jsonargparse"
)
"""The names of what ClearML would watch; only all of them keep it from the repository and from files that are saved."""
_COMET_WATCHES = (
    "log_code log_graph parse_args log_git_metadata log_git_patch log_env_details auto_output_logging auto_param_logging "
    "auto_metric_logging auto_log_co2"
)


def arguments_of(name: str, run: TrackedRun) -> dict[str, Any]:
    """Keyword arguments for the tracker `name` of accelerate; none for one that a user has registered."""
    tags = list(run.tags)
    match name:
        case "aim":
            return {"experiment": run.name, "system_tracking_interval": None, "capture_terminal_logs": False}
        case "clearml":
            if not run.online:
                from clearml import Task

                Task.set_offline(True)
            return {
                "task_name": run.name,
                "tags": tags,
                "reuse_last_task_id": False,
                "auto_connect_arg_parser": False,
                "auto_connect_frameworks": dict.fromkeys(_FRAMEWORKS.split(), False),
                "auto_resource_monitoring": False,
                "auto_connect_streams": False,
            }
        case "comet_ml":
            from comet_ml import ExperimentConfig

            folder, quiet = str(run.directory / "comet_ml"), dict.fromkeys(_COMET_WATCHES.split(), False)
            settings = ExperimentConfig(
                name=run.name, tags=tags, offline_directory=folder, display_summary_level=0, **quiet
            )
            # A key has 32 characters at least.
            key = hashlib.sha256(run.ident.encode()).hexdigest()[:32]
            where = {} if run.online else {"online": False}
            return {"experiment_key": key, "mode": "get_or_create", "experiment_config": settings, **where}
        case "dvclive":
            # An experiment of DVC's would be a commit of all that is in the repository. In a directory of its own, `dvc.yaml` would
            # name each file once more with every step.
            paths = {"dir": str(run.directory / "dvclive"), "dvcyaml": str(run.directory / "dvc.yaml")}
            return {**paths, "resume": run.step > 0, "save_dvc_exp": False}
        case "mlflow":
            # Its tags have names, of few characters.
            return {"run_name": run.name, "tags": {"tags": ", ".join(tags)} if tags else None}
        case "swanlab":
            from swanlab import Settings

            hidden = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)
            return {
                "name": run.name,
                "tags": tags,
                "id": run.ident,
                "resume": "allow",
                "log_dir": str(run.directory / "swanlab"),
                "settings": Settings(probe=hidden, terminal={"proxy_type": "none"}),
                **({} if run.online else {"mode": "offline"}),
            }
        case "trackio":
            # It knows runs by their names alone.
            name = f"{run.name}-{run.ident}"
            return {"name": name, "resume": "allow", "auto_log_gpu": False, "auto_log_cpu": False}
    return {}


GLOBAL_STEP = "train/global_step"
"""The name under which each row says its step; transformers' own callback calls it the same."""
_EVALUATED = "eval/global_step"
"""The same of evaluations alone, in wandb."""
_FLUSH_SECONDS = 1.0
_WAIT_SECONDS = 20.0
_EVENTS = re.compile(r"events\.out\.tfevents\.(\d{10,12})\.")


@dataclass(slots=True)
class Tracker(ABC):
    """One tracker of a run. Any call may raise anything that the tracker's own library does."""

    name: str
    run: TrackedRun
    sent: Place = UNKNOWN
    tracker: Any = None

    @abstractmethod
    def start(self) -> None:
        """Begin, or go on with a run of this id."""

    @abstractmethod
    def log(self, row: TrackedRow) -> None:
        """Hand a row over."""

    def finish(self) -> None:
        """Hand over what is left, and end."""
        self.tracker.finish()

    def give_up(self, error: BaseException) -> None:  # noqa: B027 - most have nothing left to do
        """A call has raised `error`, and none will follow."""

    def abandon(self) -> None:  # noqa: B027 - most hold nothing up
        """A call has not returned for so long that nobody waits for it any more, and the end of the process should not either."""

    def _make(self, *arguments: Any, **keywords: Any) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        self.tracker = LOGGER_TYPE_TO_CLASS[self.name](*arguments, **keywords)
        self.tracker.start()


class WandbTracker(Tracker):
    """wandb, which numbers rows itself; the step is one of their values. Nothing of the machine or the code goes to it."""

    _next: int | None = None

    def start(self) -> None:
        import wandb

        run = self.run
        folder = run.directory / "wandb"
        row = None if run.online else last_row(folder, run.ident)
        settings = wandb.Settings(
            silent=True,
            console="off",
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_transaction_log_flush_interval=_FLUSH_SECONDS,
            x_file_stream_transmit_interval=_FLUSH_SECONDS,
            login_timeout=_WAIT_SECONDS,
            finish_timeout=_WAIT_SECONDS,
            reinit="default" if wandb.run is None else "create_new",
        )
        self._make(
            run.project,
            id=run.ident,
            name=run.name,
            tags=list(run.tags),
            dir=str(run.directory),
            mode="online" if run.online else "offline",
            resume="allow",
            config=dict(run.config),
            settings=settings,
        )
        made = self.tracker.tracker
        made.define_metric(GLOBAL_STEP)
        made.define_metric("*", step_metric=GLOBAL_STEP)
        if row is not None:
            self.sent, self._next = row[0], row[1] + 1
        elif run.online and made.resumed:
            summary = dict(made.summary)  # The server's: the latest value of each name.
            step = summary.get(GLOBAL_STEP)
            if isinstance(step, int):
                self.sent = Place(step, summary.get(_EVALUATED) == step)

    def log(self, row: TrackedRow) -> None:
        # The number of the first row alone is given: after it wandb counts, beside what callbacks log.
        first, self._next = self._next, None
        step, evaluation = row.place
        where = {GLOBAL_STEP: step, **({_EVALUATED: step} if evaluation else {})}
        table: dict[str, Any] = {}
        if row.samples:
            import wandb

            table["samples"] = wandb.Table(["step", "prompt", "completion"], [[step, *each] for each in row.samples])
        self.tracker.log({**where, **row.values, **table}, step=first, commit=True)

    def give_up(self, error: BaseException) -> None:
        if not _services():
            import wandb

            wandb.teardown()  # Its service is gone, and would be called once more when this process ends.

    def abandon(self) -> None:
        for each in _services():
            each.kill()


def _services() -> list[psutil.Process]:
    """The processes that wandb has started in this one, and that have not ended."""
    children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in children if "wandb-core" in each.name()]


_BLOCK = 32 << 10
_CHUNK = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4


def last_row(folder: Path, ident: str) -> tuple[Place, int] | None:
    """The last row that has a step in the files of offline run `ident` below `folder`, and the number that wandb gave it.

    Returns step 0 and -1 where the run has begun and no row is there, and None where it has not begun.

    Raises:
        OSError: where a file cannot be read.
    """
    begun = sorted(folder.glob(f"offline-run-*-{ident}*"), reverse=True)  # Named by the second in which they began.
    for path in (each / f"run-{ident}.wandb" for each in begun):
        found = None
        for number, values in _rows(path) if path.exists() else ():
            if (step := values.get(GLOBAL_STEP, "")).isdecimal():
                found = Place(int(step), _EVALUATED in values), number
        if found is not None:
            return found
    return (Place(0), -1) if begun else None


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The number and the values, in JSON, of each row of history in a file of wandb's, whose records are protobuf messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(path):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield record.history.step.num, {item.key or "/".join(item.nested_key): item.value_json for item in items}


def _records(path: Path) -> Iterator[bytes]:
    """The records of a file up to where a kill has cut it off.

    It is a log as LevelDB has them: after 7 bytes, blocks of 32 KiB of chunks, each with a checksum, its length and whether it is a
    whole record or a first, middle or last part of one.
    """
    record, at = b"", 7
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            while at + _CHUNK.size <= len(block):
                checksum, length, kind = _CHUNK.unpack_from(block, at)
                body = block[at + _CHUNK.size : at + _CHUNK.size + length]
                if len(body) < length or crc32(body, crc32(bytes([kind]))) != checksum:
                    return
                at += _CHUNK.size + length
                record = body if kind in (_WHOLE, _FIRST) else record + body
                if kind in (_WHOLE, _LAST):
                    yield record
            at = 0


class NotedTracker(Tracker):
    """One that cannot be asked how far it has got: a file of the run's directory says so."""

    def _noted(self) -> Place:
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            ident, step, evaluated = json.loads(read_whole(self._file))
            if ident == self.run.ident and int(step) >= 0:
                return Place(int(step), bool(evaluated))
        if self.run.step:
            return UNKNOWN
        self._note(Place(0))
        return Place(0)

    def _note(self, place: Place) -> None:
        write_whole(self._file, json.dumps([self.run.ident, *place]).encode(), sync=False)

    @property
    def _file(self) -> Path:
        return self.run.directory / f"tracking-{self.name}.json"


class TensorBoardTracker(NotedTracker):
    """TensorBoard, which can be told to leave out what earlier processes have written from some step on; they are written anew."""

    def start(self) -> None:
        run, folder, noted = self.run, self.run.directory / "tensorboard", self._noted()
        first = run.step + 1 if noted == UNKNOWN else min(noted.step, run.step + 1)
        self.sent = Place(max(0, first - 1), first > 0)
        _pass_second(folder)
        self._make("", folder, purge_step=first, flush_secs=_FLUSH_SECONDS)
        text = yaml.safe_dump(dict(run.config), sort_keys=False)
        self.tracker.tracker.add_text("config", f"```yaml\n{text}```", global_step=run.step)

    def log(self, row: TrackedRow) -> None:
        if row.values:
            self.tracker.log(row.values, step=row.place.step)
        for number, (prompt, completion) in enumerate(row.samples):
            shown = f"**{prompt}**\n\n{completion}"
            self.tracker.tracker.add_text(f"samples/{number}", shown, global_step=row.place.step)
        self._note(row.place)


def _pass_second(folder: Path) -> None:
    """Wait until a new file of events is named by a later second than all that are there.

    TensorBoard reads them in the order of their names, `events.out.tfevents.SECOND.HOST.PID...`: of two that began within one
    second the later could come first, and the other would purge what it says.
    """
    started = [int(match[1]) for path in folder.glob("events.out.tfevents.*") if (match := _EVENTS.match(path.name))]
    wait = max(started, default=0) + 1 - time.time()
    if wait > _WAIT_SECONDS:
        raise RuntimeError(
            f"files in {folder} are {wait:.0f} seconds ahead of this machine's clock, and TensorBoard would read them last; "
            f"set the clock, or move them away"
        )
    time.sleep(max(0.0, wait))


class OtherTracker(NotedTracker):
    """Any other of accelerate's, by the calls that all of them have; `arguments_of` has what each begins with."""

    def start(self) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        run = self.run
        folder = [str(run.directory / self.name)] if LOGGER_TYPE_TO_CLASS[self.name].requires_logging_directory else []
        self._make(run.project, *folder, **arguments_of(self.name, run))
        self.tracker.store_init_configuration(
            {
                ".".join(map(str, keys)): value if isinstance(value, str | int | float) else json.dumps(value)
                for keys, value in leaves(run.config)
                if value != {}
            }
        )
        self.sent = self._noted()

    def log(self, row: TrackedRow) -> None:
        self._note(row.place)  # Rather lost in a kill just now than there twice.
        if row.values:
            self.tracker.log(dict(row.values), step=row.place.step)


KINDS: dict[str, type[Tracker]] = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker}
"""The trackers that have a class of their own, by name; others are an `OtherTracker`."""
