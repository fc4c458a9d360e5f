"""`Tracking`: figures of a run to trackers, from rank 0, by a thread of its own.

    training thread    log, log, evaluated, log ...   puts rows into a queue, and never waits
    tracking thread    start, then row by row         to each tracker; one that fails is left out from then on

A run that goes on keeps its id, and a tracker gets no row twice: rows that an earlier process has sent are not sent again, though
this one computes their steps anew. `tracking.json` in the run's directory has the id, and so has each checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.launch import kept_environment, secret_values
from zeromesh.trainer.config import TrainerConfig
from zeromesh.trainer.metrics import StepMetrics
from zeromesh.trainer.redaction import Redaction
from zeromesh.trainer.trackers import Row, TrackedRun, Tracker, make_tracker

NAME = "tracking.json"
_CAPACITY = 10_000
_FINISH_SECONDS = 30.0
_ERROR_SECONDS = 5.0
"""After an error, of which the other ranks are told only then."""
_ABANDON_SECONDS = 2.0
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
"""What fields of a step's line are called in trackers; others are `train/NAME`, and mappings `NAME/KEY`."""


class Tracking:
    """Of one run; without trackers, as on all ranks but the first, it does nothing. A context manager: trackers end with it."""

    def __init__(
        self,
        trackers: Sequence[Tracker] = (),
        note: Callable[[str], None] = lambda text: None,
        *,
        ident: str = "",
        redaction: Redaction | None = None,
        capacity: int = _CAPACITY,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """`note` tells a person; it is called from the training thread alone. `leave` is called when all trackers have ended."""
        self.ident = ident
        """What trackers know the run by; empty where there are none."""
        self._trackers = list(trackers)
        self._note = note
        self._redaction = redaction or Redaction()
        self._leave = leave
        self._rows: queue.Queue[Row | None] = queue.Queue(capacity)
        self._said: deque[str] = deque()
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True) if self._trackers else None

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
        """For a run that goes on after `step`; `known` is what its checkpoint has kept of `identity`. All ranks call it."""
        section = config.tracking
        if not section.backends:
            return cls()
        mine = _ident(directory / NAME, config.run.name, step, known, note) if mesh.rank == 0 else ""
        ident = mesh.world.gather_bytes(mine.encode(), "id of the run in trackers")[0].decode()
        if mesh.rank:
            return cls(ident=ident)
        redaction = Redaction(secret_values())
        run = TrackedRun(
            ident=ident,
            name=redaction.text(section.name or config.run.name),
            project=redaction.text(section.project),
            tags=tuple(map(redaction.text, section.tags)),
            online=section.mode == "online",
            directory=directory.absolute(),
            step=step,
            config=redaction.values(config.model_dump(mode="json")),
        )
        try:
            leave = _join_accelerate(mesh.device)
        except Exception as error:  # noqa: BLE001 - a library's own, which must not end a run
            note(f"WARNING: there is no tracking: {type(error).__name__}: {error}. Training goes on; {_HAS_ALL}")
            return cls(ident=ident)
        trackers = [make_tracker(name, run) for name in dict.fromkeys(section.backends)]
        return cls(trackers, note, ident=ident, redaction=redaction, leave=leave)

    def identity(self, run: str) -> dict[str, str]:
        """What a checkpoint of run `run` keeps, so that its trackers know it again."""
        return {"id": self.ident, "run": run} if self.ident else {}

    # In the training thread

    def log(self, metrics: StepMetrics) -> None:
        """Send a step's figures."""
        if self._thread is not None:
            self._put(Row(step=metrics.step, values=dict(_named(metrics.record()))))

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Send the figures of an evaluation after `step`."""
        if self._thread is not None:
            named = {f"eval/{name.removeprefix('eval_')}": value for name, value in values.items()}
            self._put(Row(step=step, values=named, evaluation=True))

    def _put(self, row: Row) -> None:
        if self._trackers:
            try:
                self._rows.put_nowait(row)
            except queue.Full:
                self._lost += 1
        self._tell()

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(_FINISH_SECONDS if error is None else _ERROR_SECONDS)

    def finish(self, seconds: float) -> None:
        """Send what is left, waiting for that so many seconds at most. Nothing is sent afterwards."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        end = time.monotonic() + seconds
        try:
            self._rows.put(None, timeout=seconds)
        except queue.Full:
            self._lost += self._rows.qsize()
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            names = ", ".join(tracker.name for tracker in self._trackers)
            self._said.append(f"WARNING: tracking by {names} did not end within {seconds:g} seconds; {_HAS_ALL}")
            self._abandon(thread)
        else:
            self._leave()
        if self._lost:
            self._said.append(f"WARNING: trackers were too slow for {self._lost} rows, which they miss; {_HAS_ALL}")
        self._tell()

    def _abandon(self, thread: threading.Thread) -> None:
        """Let go of trackers that do not answer. What they say then is not news."""
        for tracker in list(self._trackers):
            with contextlib.suppress(Exception):
                tracker.abandon()
        news = list(self._said)
        thread.join(_ABANDON_SECONDS)
        self._said = deque(news)

    def _tell(self) -> None:
        while self._said:
            self._note(self._said.popleft())

    # In the tracking thread

    def _work(self) -> None:
        for tracker in list(self._trackers):
            self._try(tracker, "did not begin", tracker.start)
        last = 0
        while (row := self._rows.get()) is not None:
            for tracker in list(self._trackers):
                if not tracker.sent.covers(row):
                    self._try(tracker, f"ended after step {last}", lambda to=tracker, sent=row: to.log(sent))  # type: ignore[misc]
            last = row.step
        for tracker in list(self._trackers):
            self._try(tracker, "did not end well", tracker.finish)

    def _try(self, tracker: Tracker, what: str, call: Callable[[], None]) -> None:
        """Whatever a tracker's library raises, training goes on without it."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - other people's code, which must not end a run
            line = self._redaction.text((str(error).strip().splitlines() or [""])[0]).rstrip(". ")
            reason = f"{type(error).__name__}: {line}".removesuffix(": ")
            self._trackers.remove(tracker)
            self._said.append(f"WARNING: tracking by {tracker.name} {what}: {reason}. Training goes on; {_HAS_ALL}")
            with contextlib.suppress(Exception):
                tracker.give_up(error)


_HAS_ALL = "metrics.jsonl has every step"


def _ident(path: Path, run: str, step: int, known: Mapping[str, str], note: Callable[[str], None]) -> str:
    """The run's id: that of its directory, else that of its checkpoint, where it goes on; else a new one. It is kept in `path`."""
    found = ""
    if step:
        try:
            found = str(json.loads(path.read_bytes())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            found = known.get("id", "") if known.get("run") == run else ""
    if not (found.isalnum() and found.isascii()):
        found = secrets.token_hex(4)
    try:
        path.write_text(json.dumps({"id": found, "run": run}), encoding="utf-8")
    except OSError as error:
        note(f"WARNING: {path} cannot be written ({error.strerror}); trackers know the run as {found}")
    return found


def _join_accelerate(device: torch.device) -> Callable[[], None]:
    """accelerate's trackers ask its state whether this is the main process; it finds the process group that is there.

    Returns what takes that state away again, where nobody else has made it.
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


def _named(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a step's line, by their names in trackers."""
    for field, value in record.items():
        if field == "step":
            continue
        if isinstance(value, Mapping):
            yield from _under(_NAMES.get(field, field), value)
        elif isinstance(value, int | float):
            yield _NAMES.get(field, f"train/{field}"), value


def _under(path: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        name = f"{path}/{key.replace(' ', '-')}"
        if isinstance(value, Mapping):
            yield from _under(name, value)
        elif isinstance(value, int | float):
            yield name, value
