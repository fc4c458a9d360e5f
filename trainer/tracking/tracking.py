"""`Tracking`: sends figures of a run from rank 0 to trackers, with one thread per tracker.

    training thread    log, log, evaluated, log ...   puts rows into queues, and never waits
    tracking threads   start, then row by row         a tracker that fails or hangs is dropped: the others go on

A resumed run keeps its id, and a tracker gets no row twice: rows that an earlier process has sent are not sent again, though this
process computes their steps anew. The id is in `tracking.json` of the run's directory, and in each checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from zeromesh.trainer.monitoring.step_metrics import StepMetrics, leaves
from zeromesh.trainer.trackers.backends import Place, TrackedRow, TrackedRun, Tracker, kind_of
from zeromesh.trainer.tracking.rows import evaluation_row, missed_rows, step_row

HAS_ALL = "metrics.jsonl has every step"
NAME = "tracking.json"
_CAPACITY = 10_000
_FINISH_SECONDS = 30.0
_ERROR_SECONDS = 5.0
"""The wait for trackers after an error, which the other ranks hear of only then."""
_ABANDON_SECONDS = 2.0
_TIMEOUT_FRACTION = 0.7
"""The fraction of the collective timeout that the end of tracking may take."""
_IDENT = re.compile(r"[A-Za-z0-9]{1,64}")


class Sender(threading.Thread):
    """Sends the rows of one tracker in a separate thread, so that it delays neither training nor other trackers.

    The training thread calls the public methods, and waits in `ended` alone.
    """

    def __init__(self, tracker: Tracker, redaction: Redaction, capacity: int) -> None:
        """`capacity` limits the queued rows; further ones are counted and dropped."""
        super().__init__(name=f"tracking by {tracker.name}", daemon=True)
        self.tracker = tracker
        self._redaction = redaction
        self._capacity = capacity
        self._rows: SimpleQueue[TrackedRow | None] = SimpleQueue()
        self._lost = 0
        self._closed = False
        self._warnings: deque[str] = deque()

    def put(self, row: TrackedRow) -> None:
        """Queue a row, unless the tracker has failed."""
        if self.is_alive() and self._rows.qsize() < self._capacity:
            self._rows.put(row)
        elif self.is_alive():
            self._lost += 1

    def close(self) -> None:
        """End the tracker after the queued rows."""
        self._closed = True
        self._rows.put(None)

    def ended(self, end: float) -> bool:
        """Wait for the tracker until `end`, in monotonic time; returns True if it has ended."""
        self.join(max(0.0, end - time.monotonic()))
        return not self.is_alive()

    def abandon(self) -> None:
        """Drop a tracker that hangs, and its later warnings."""
        self._warnings = deque(maxlen=0)
        with contextlib.suppress(Exception):
            self.tracker.abandon()

    def news(self) -> Iterator[str]:
        """Yield new warnings."""
        while self._warnings:
            yield self._warnings.popleft()
        if self._lost and self._closed:
            yield f"WARNING: {self.name} was too slow for {counted(self._lost, 'row')}, which it misses; {HAS_ALL}"
            self._lost = 0

    def run(self) -> None:
        """Run the tracker: first the rows that an earlier process did not send. No exception reaches training."""
        tracker, last, what = self.tracker, 0, "did not begin"
        try:
            tracker.start()
            missed = missed_rows(tracker.run.directory, tracker.sent, tracker.run.step)
            for row in itertools.chain(missed, iter(self._rows.get, None)):
                what = f"ended after step {last}"
                if row.place > tracker.sent:
                    tracker.log(row)
                last = row.place.step
            what = "did not end well"
            tracker.finish()
        except BaseException as error:  # noqa: BLE001 - other people's code, some of which exits; it must not end a run
            reason = describe_error(error, self._redaction)
            self._warnings.append(f"WARNING: {self.name} {what}: {reason}. Training goes on; {HAS_ALL}")
            with contextlib.suppress(Exception):
                tracker.give_up(error)


def describe_error(error: BaseException, redaction: Redaction) -> str:
    """Return an error's class and the first line of its text, without secrets."""
    return redaction.text(summary(error)).rstrip(". ")


class Tracking:
    """The trackers of one run, which end with this context manager; without trackers, as on ranks above 0, it does nothing."""

    def __init__(
        self,
        trackers: Sequence[Tracker] = (),
        note: Callable[[str], None] = lambda text: None,
        *,
        ident: str = "",
        redaction: Redaction | None = None,
        capacity: int = _CAPACITY,
        patience: float = math.inf,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """`note` shows a line, from the training thread alone. `leave` is called when all trackers have ended.

        The end waits at most `patience` seconds, and never more than half a minute.
        """
        self.ident = ident
        """The identifier of the run for trackers; empty without trackers."""
        self._note = note
        self._leave = leave
        self._patience = patience
        self._senders = [Sender(each, redaction or Redaction(), capacity) for each in trackers]

    @classmethod
    def open(
        cls,
        config: TrainerConfig,
        mesh: Mesh,
        directory: Path,
        *,
        step: int,
        known: Mapping[str, str],
        note: Callable[[str], None],
    ) -> Tracking:
        """Open the trackers of a run that continues after `step`; `known` is the checkpoint's `identity`. All ranks call it."""
        section = config.tracking
        if not section.backends:
            return cls()
        own_ident = _ident(directory / NAME, config.run.name, step, known, note) if mesh.rank == 0 else ""
        ident = mesh.world.gather_bytes(own_ident.encode(), "id of the run in trackers")[0].decode()
        if mesh.rank:
            return cls(ident=ident)
        redaction = Redaction(secret_values())
        values = redaction.values(config.model_dump(mode="json"))
        run = TrackedRun(
            ident=ident,
            name=redaction.text(section.name or config.run.name),
            project=redaction.text(section.project),
            tags=tuple(map(redaction.text, section.tags)),
            online=section.mode == "online",
            directory=directory.absolute(),
            step=step,
            config=values,
            settings={
                ".".join(map(str, keys)): value if isinstance(value, str | int | float) else json.dumps(value)
                for keys, value in leaves(values)
                if value != {}
            },
        )
        try:
            leave = _join_accelerate(mesh.device)
        except Exception as error:  # noqa: BLE001 - a library's own, which must not end a run
            note(f"WARNING: there is no tracking: {describe_error(error, redaction)}. Training goes on; {HAS_ALL}")
            return cls(ident=ident)
        trackers = [kind_of(name).make(name, run) for name in dict.fromkeys(section.backends)]
        # The other ranks wait for this one meanwhile.
        patience = _TIMEOUT_FRACTION * config.parallel.timeout_seconds if mesh.world_size > 1 else math.inf
        return cls(trackers, note, ident=ident, redaction=redaction, patience=patience, leave=leave)

    def identity(self, run: str) -> dict[str, str]:
        """Return the part of a checkpoint of run `run` that identifies it to trackers."""
        return {"id": self.ident, "run": run} if self.ident else {}

    def log(self, metrics: StepMetrics) -> None:
        """Send a step's figures."""
        if self._senders:
            self._put(step_row(metrics.record()))

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the figures of an evaluation after `step`; values that are no numbers are left out."""
        if self._senders:
            self._put(evaluation_row(step, values))

    def sampled(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Send the completions after `step`: lines of `prompt` and `completion`."""
        if self._senders:
            self._put(
                TrackedRow(
                    Place(step, evaluation=True), {}, tuple((line["prompt"], line["completion"]) for line in lines)
                )
            )

    def _put(self, row: TrackedRow) -> None:
        for sender in self._senders:
            sender.put(row)
        self._show_news()

    def _show_news(self) -> None:
        for sender in self._senders:
            for line in sender.news():
                self._note(line)

    def __enter__(self) -> Self:
        for sender in self._senders:
            sender.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(min(_FINISH_SECONDS if kind is None else _ERROR_SECONDS, self._patience))

    def finish(self, seconds: float) -> None:
        """Send the queued rows within at most `seconds` seconds, and end the trackers."""
        end = time.monotonic() + seconds
        for sender in self._senders:
            sender.close()
        late = [sender for sender in self._senders if not sender.ended(end)]
        self._show_news()
        if late:
            names = ", ".join(sender.tracker.name for sender in late)
            self._note(f"WARNING: tracking by {names} did not end within {seconds:g} seconds; {HAS_ALL}")
            for sender in late:
                sender.abandon()
            end = time.monotonic() + _ABANDON_SECONDS
            for sender in late:
                sender.ended(end)
        elif self._senders:
            self._leave()
        self._show_news()
        self._senders = []


def _ident(path: Path, run: str, step: int, known: Mapping[str, Any], note: Callable[[str], None]) -> str:
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
    """Initialize accelerate's state, which its trackers ask for the main process, with the existing process group.

    Returns a function that resets the state, unless it existed before.
    """
    from accelerate import PartialState

    if PartialState._shared_state:
        return lambda: None
    threads = torch.get_num_threads()
    with kept_environment():
        PartialState(cpu=device.type == "cpu")
    torch.set_num_threads(threads)
    leave: Callable[[], None] = PartialState._reset_state
    return leave
