"""`Tracking`: sends figures of a run from rank 0 to trackers, with one thread per tracker.

    training thread    send, send ...           puts rows into queues, and never waits
    tracking threads   start, then row by row   a tracker that fails or hangs is dropped: the others go on

A resumed run keeps its id, and a tracker gets no row twice: rows that an earlier process has sent are not sent again, though this
process computes their steps anew. The id is in `tracking.json` of the run's directory, and in each checkpoint.
"""

import contextlib
import itertools
import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

import torch

from zeromesh.environment import kept_environment, secret_values
from zeromesh.errors import counted, summary
from zeromesh.files import read_whole, write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.redact import Redaction
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.monitoring.step_metrics import EVALUATIONS, METRICS, leaves, read_metrics, step_of, unstrict
from zeromesh.trainer.trackers.backends import UNKNOWN, RowPosition, TrackedRow, TrackedRun, Tracker, kind_of

Note = Callable[[str], None]
HAS_ALL = "metrics.jsonl has every step"
NAME = "tracking.json"
_CAPACITY = 10_000  # rows that wait for a tracker, beyond which further ones are counted and dropped
_FINISH_SECONDS = 30.0  # for trackers at the end of a run
_ERROR_SECONDS = 5.0  # for trackers after an error, before it is reported to the other ranks
_ABANDON_SECONDS = 2.0  # for a tracker that was told to give up
_TIMEOUT_FRACTION = 0.7  # The fraction of the collective timeout that the end of tracking may take.
_IDENT = re.compile(r"[A-Za-z0-9]{1,64}")
_NAMES = {
    "lr": "train/learning_rate",
    "tokens_per_second": "perf/tokens_per_second",
    "step_seconds": "perf/step_seconds",
    "mfu": "perf/mfu",
    "peak_memory_bytes": "memory/peak_bytes",
    "phases": "time",
}
"""The names of a step's fields in trackers; others are `train/NAME`, and mappings `NAME/KEY`."""
_OF_A_SET = re.compile(r"eval_(.+)_runtime")
"""A value that every evaluation of several sets has, from which the set's name is parsed."""


def step_row(line: Mapping[str, Any]) -> TrackedRow:
    values: dict[str, float] = {}
    for (name, *keys), value in leaves(line):
        if isinstance(value, int | float) and name not in ("step", "time"):
            path = "/".join([_NAMES.get(name, name), *map(str, keys)]).replace(" ", "-")
            values[path if keys else _NAMES.get(name, f"train/{name}")] = value
    return TrackedRow(RowPosition(line["step"]), values)


def evaluation_row(line: Mapping[str, Any]) -> TrackedRow:
    """Return the row of an evaluation, of the numbers in its line of `evaluations.jsonl`, as `eval/NAME/...` for several sets."""
    sets = sorted((match[1] for match in map(_OF_A_SET.fullmatch, line) if match), key=len, reverse=True)
    named = {}
    for name, value in line.items():
        if name not in ("step", "time") and isinstance(value, int | float):
            short = name.removeprefix("eval_")
            own = next((each for each in sets if short.startswith(f"{each}_")), None)
            named["eval/" + (short if own is None else f"{own}/{short[len(own) + 1 :]}")] = value
    return TrackedRow(RowPosition(line["step"], evaluation=True), named)


def samples_row(step: int, lines: Sequence[Mapping[str, Any]]) -> TrackedRow:
    """Return the row of the completions after `step`: lines of `prompt` and `completion`."""
    return TrackedRow(RowPosition(step, evaluation=True), {}, tuple((line["prompt"], line["completion"]) for line in lines))


def missed_rows(directory: Path, sent: RowPosition, through: int) -> list[TrackedRow]:
    """Return the rows up to step `through` that a killed process did not send; none if `sent` is unknown. Raises `StorageError`."""
    kinds = ((METRICS, step_row), (EVALUATIONS, evaluation_row)) if sent != UNKNOWN else ()
    lines = ((row_of, line) for name, row_of in kinds for line in read_metrics(directory / name))
    rows = (row_of(unstrict(line)) for row_of, line in lines if sent.step <= step_of(line) <= through)
    return sorted((row for row in rows if row.position > sent), key=lambda row: row.position)


class Sender(threading.Thread):
    """Sends the rows of one tracker in a separate thread, so that it delays neither training nor other trackers."""

    def __init__(self, tracker: Tracker, redaction: Redaction) -> None:
        super().__init__(name=f"tracking by {tracker.name}", daemon=True)
        self.tracker = tracker
        self.rows: SimpleQueue[TrackedRow | None] = SimpleQueue()  # The queued rows; None ends the tracker.
        self.warnings: SimpleQueue[str] = SimpleQueue()
        self.lost = 0  # The number of rows that the tracker was too slow for.
        self._redaction = redaction

    def run(self) -> None:
        """Run the tracker: first the rows that an earlier process did not send. No exception reaches training."""
        tracker, last, what = self.tracker, 0, "did not begin"
        try:
            tracker.start()
            missed = missed_rows(tracker.run.directory, tracker.sent, tracker.run.step)
            for row in itertools.chain(missed, iter(self.rows.get, None)):
                what = f"ended after step {last}"
                if row.position > tracker.sent:
                    tracker.log(row)
                last = row.position.step
            what = "did not end well"
            tracker.finish()
        except BaseException as error:  # noqa: BLE001 - other people's code, some of which exits; it must not end a run
            self.warnings.put(f"WARNING: {self.name} {what}: {describe_error(error, self._redaction)}. Training goes on; {HAS_ALL}")
            with contextlib.suppress(Exception):
                tracker.give_up(error)


def describe_error(error: BaseException, redaction: Redaction) -> str:
    """Return an error's class and the first line of its text, without secrets."""
    return redaction.text(summary(error)).rstrip(". ")


@dataclass
class Tracking:
    """A run's trackers, which end with the context; without any it does nothing. `note` shows lines; `leave` is called last."""

    trackers: InitVar[Sequence[Tracker]] = ()
    note: Note = lambda text: None
    _: KW_ONLY
    ident: str = ""  # The identifier of the run for trackers; empty without trackers.
    redaction: InitVar[Redaction | None] = None
    patience: float = math.inf  # The most seconds that the end waits, which are never more than half a minute.
    leave: Callable[[], None] = lambda: None

    def __post_init__(self, trackers: Sequence[Tracker], redaction: Redaction | None) -> None:
        self._senders = [Sender(each, redaction or Redaction()) for each in trackers]

    @classmethod
    def open(cls, config: TrainerConfig, mesh: Mesh, directory: Path, *, step: int, known: Mapping[str, str], note: Note) -> Self:
        """Open the trackers of a run that continues after `step`; `known` is the checkpoint's `identity`. All ranks call it."""
        section = config.tracking
        if not section.backends:
            return cls()
        own_ident = _tracking_id(directory / NAME, config.run.name, step, known, note) if mesh.rank == 0 else ""
        ident = mesh.world.gather_bytes(own_ident.encode(), "id of the run in trackers")[0].decode()
        if mesh.rank:
            return cls(ident=ident)
        redaction = Redaction(secret_values())
        values = redaction.values(config.model_dump(mode="json"))
        flat = {".".join(map(str, keys)): each for keys, each in leaves(values) if each != {}}
        run = TrackedRun(
            ident=ident,
            name=redaction.text(section.name or config.run.name),
            project=redaction.text(section.project),
            tags=tuple(map(redaction.text, section.tags)),
            online=section.mode == "online",
            directory=directory.absolute(),
            step=step,
            config=values,
            settings={key: each if isinstance(each, str | int | float) else json.dumps(each) for key, each in flat.items()},
        )
        try:
            leave = _join_accelerate(mesh.device)
        except Exception as error:  # noqa: BLE001 - a library's own, which must not end a run
            note(f"WARNING: there is no tracking: {describe_error(error, redaction)}. Training goes on; {HAS_ALL}")
            return cls(ident=ident)
        trackers = [kind_of(name).make(name, run) for name in dict.fromkeys(section.backends)]
        # The other ranks wait while this one ends its trackers, which must take less than their timeout.
        patience = _TIMEOUT_FRACTION * config.parallel.patience if mesh.world_size > 1 else math.inf
        return cls(trackers, note, ident=ident, redaction=redaction, patience=patience, leave=leave)

    def identity(self, run: str) -> dict[str, str]:
        """Return the part of a checkpoint of run `run` that identifies it to trackers."""
        return {"id": self.ident, "run": run} if self.ident else {}

    def send(self, row: TrackedRow) -> None:
        for sender in filter(Sender.is_alive, self._senders):
            if sender.rows.qsize() < _CAPACITY:
                sender.rows.put(row)
            else:
                sender.lost += 1
        self._show_warnings()

    def _show_warnings(self) -> None:
        for sender in self._senders:
            while not sender.warnings.empty():
                self.note(sender.warnings.get())

    def __enter__(self) -> Self:
        for sender in self._senders:
            sender.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        seconds = min(_FINISH_SECONDS if kind is None else _ERROR_SECONDS, self.patience)
        for sender in self._senders:
            sender.rows.put(None)
        late = _join_senders(self._senders, seconds)
        self._show_warnings()
        for sender in self._senders:
            if sender.lost:
                self.note(f"WARNING: {sender.name} was too slow for {counted(sender.lost, 'row')}, which it misses; {HAS_ALL}")
        if late:
            names = ", ".join(sender.tracker.name for sender in late)
            self.note(f"WARNING: tracking by {names} did not end within {seconds:g} seconds; {HAS_ALL}")
            for sender in late:
                with contextlib.suppress(Exception):
                    sender.tracker.abandon()
            _join_senders(late, _ABANDON_SECONDS)
        elif self._senders:
            self.leave()
        self._senders = []


def _join_senders(senders: Sequence[Sender], seconds: float) -> list[Sender]:
    """Wait for the threads of trackers to end, `seconds` in all; returns those that are still running."""
    end = time.monotonic() + seconds
    for sender in senders:
        sender.join(max(0.0, end - time.monotonic()))
    return [sender for sender in senders if sender.is_alive()]


def _tracking_id(path: Path, run: str, step: int, known: Mapping[str, Any], note: Note) -> str:
    """Return the id from the run's directory or the resumed checkpoint, or else a new one; it is stored in `path`."""
    found = ""
    if step:
        try:
            found = json.loads(read_whole(path))["id"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            found = known.get("id", "") if known.get("run") == run else ""
    if not (isinstance(found, str) and _IDENT.fullmatch(found)):
        found = secrets.token_hex(4)
    try:
        write_whole(path, json.dumps({"id": found, "run": run}).encode())
    except OSError as error:
        note(f"WARNING: {path} cannot be written ({error.strerror}); trackers know the run as {found}")
    return found


def _join_accelerate(device: torch.device) -> Callable[[], None]:
    """Initialize accelerate's state, which its trackers read, with the process group; returns a function that resets a new one."""
    from accelerate import PartialState

    if PartialState._shared_state:
        return lambda: None
    threads = torch.get_num_threads()
    with kept_environment():
        PartialState(cpu=device.type == "cpu")
    torch.set_num_threads(threads)
    leave: Callable[[], None] = PartialState._reset_state
    return leave
