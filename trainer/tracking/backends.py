"""The trackers that a run can send figures to, by name, over those of accelerate: how each begins, and how far it has got."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from zeromesh.files import read_whole, write_whole
from zeromesh.trainer.tracking.backend_options import TrackedRun, arguments_of
from zeromesh.trainer.tracking.rows import Sent, TrackedRow
from zeromesh.trainer.tracking.wandb_log import last_row

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
    sent: Sent = field(default_factory=Sent)
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
        row = None if run.online else last_row(folder, run.ident, GLOBAL_STEP)
        begun = any(folder.glob(f"offline-run-*-{run.ident}*"))
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
        self._next = row.number + 1 if row else None
        if row is not None:
            self.sent = Sent(step=row.value, evaluated=_EVALUATED in row.names)
        elif run.online:
            self.sent = _of_summary(dict(made.summary)) if made.resumed else Sent()
        elif begun:
            self.sent = Sent(step=0)

    def log(self, row: TrackedRow) -> None:
        # The number of the first row alone is given: after it wandb counts, beside what callbacks log.
        first, self._next = self._next, None
        where = {GLOBAL_STEP: row.step, **({_EVALUATED: row.step} if row.evaluation else {})}
        self.tracker.log({**where, **row.values}, step=first, commit=True)

    def give_up(self, error: BaseException) -> None:
        if not any(_children("wandb-core")):
            import wandb

            wandb.teardown()  # Its service is gone, and would be called once more when this process ends.

    def abandon(self) -> None:
        for pid in _children("wandb-core"):
            os.kill(pid, signal.SIGKILL)


def _children(program: str) -> Iterator[int]:
    """Processes that this one has started of a program."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text(encoding="ascii").split():
            if program.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield int(pid)


def _of_summary(summary: Mapping[str, Any]) -> Sent:
    """How far wandb's server has got: the latest value of each name."""
    step = summary.get(GLOBAL_STEP)
    return Sent(step=step, evaluated=summary.get(_EVALUATED) == step) if isinstance(step, int) else Sent()


class NotedTracker(Tracker):
    """One that cannot be asked how far it has got: a file of the run's directory says so."""

    def _noted(self) -> Sent:
        try:
            ident, step, evaluated = json.loads(read_whole(self._file))
            sent = Sent(step=int(step), evaluated=bool(evaluated))
        except (OSError, ValueError, TypeError, RecursionError):
            sent = Sent()
        else:
            sent = sent if ident == self.run.ident else Sent()
        if sent.step < 0 and self.run.step == 0:
            sent = Sent(step=0)
            self._note(sent)
        return sent

    def _note(self, sent: Sent) -> None:
        write_whole(self._file, json.dumps([self.run.ident, sent.step, sent.evaluated]).encode(), sync=False)

    @property
    def _file(self) -> Path:
        return self.run.directory / f"tracking-{self.name}.json"


class TensorBoardTracker(NotedTracker):
    """TensorBoard, which can be told to leave out what earlier processes have written from some step on; they are written anew."""

    def start(self) -> None:
        run, folder, noted = self.run, self.run.directory / "tensorboard", self._noted()
        first = run.step + 1 if noted.step < 0 else min(noted.step, run.step + 1)
        self.sent = Sent(step=max(0, first - 1), evaluated=first > 0)
        _pass_second(folder)
        self._make("", folder, purge_step=first, flush_secs=_FLUSH_SECONDS)
        text = yaml.safe_dump(dict(run.config), sort_keys=False)
        self.tracker.tracker.add_text("config", f"```yaml\n{text}```", global_step=run.step)

    def log(self, row: TrackedRow) -> None:
        self.tracker.log(row.values, step=row.step)
        self._note(Sent(step=row.step, evaluated=row.evaluation))


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
    """Any other of accelerate's, by the calls that all of them have; what each is told to begin with is in `tracker_arguments`."""

    def start(self) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        run = self.run
        folder = [str(run.directory / self.name)] if LOGGER_TYPE_TO_CLASS[self.name].requires_logging_directory else []
        self._make(run.project, *folder, **arguments_of(self.name, run))
        self.tracker.store_init_configuration(dict(_flat(run.config)))
        self.sent = self._noted()

    def log(self, row: TrackedRow) -> None:
        self._note(Sent(step=row.step, evaluated=row.evaluation))  # Rather lost in a kill just now than there twice.
        self.tracker.log(dict(row.values), step=row.step)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted paths, as numbers and texts."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str | int | float) else json.dumps(value)


_KINDS: dict[str, type[Tracker]] = {"wandb": WandbTracker, "tensorboard": TensorBoardTracker}


def make_tracker(name: str, run: TrackedRun) -> Tracker:
    """A tracker by its name, which `tracker_problems` has nothing against."""
    return _KINDS.get(name, OtherTracker)(name, run)
