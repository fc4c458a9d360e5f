"""`Profile`: traces of a few steps by torch's profiler, on every rank, in the run's directory.

Beside operators they show the ranges of `StepRecorder`: gathers and reductions of units, forward and backward of each,
collectives, updates. Chrome's tracing page and ui.perfetto.dev read them.
"""

import gzip
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from torch.profiler import ProfilerActivity, profile

from zeromesh.telemetry.step_recorder import BACKWARD_RANGE
from zeromesh.trainer.config.sections.outputs import ProfileSection
from zeromesh.zero.engine import ZeroEngine

FOLDER = "profile"
_NAME = f'"name": "{BACKWARD_RANGE}'
_ROW = re.compile(r'(?<="tid": )[^,\s]+')


class Profile:
    """The profile of one run on one rank, a context manager: a run that ends early, in order, writes what there is.

    `note` shows a line.
    """

    def __init__(
        self, section: ProfileSection, directory: Path, engine: ZeroEngine, note: Callable[[str], None]
    ) -> None:
        first, last = section.steps or (0, -1)
        self.steps = range(first, last + 1)
        """The steps that are recorded, counted from 1."""
        self._memory = section.memory
        self._folder = directory / FOLDER
        self._mesh = engine.mesh
        self._settle = engine.settle
        self._note = note
        self._recorded: list[int] = []
        self._open = ExitStack()
        self._profiler: profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self._stop()
        elif self._mesh.world_size == 1:
            self._open.close()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record step `number`, one of `steps`, in the block."""
        if self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if self._mesh.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            made = profile(activities=activities, record_shapes=self._memory, profile_memory=self._memory)
            self._profiler = self._open.enter_context(made)
            self._open.enter_context(self._mesh.recorder.profiling_ranges())
        self._recorded.append(number)
        with self._mesh.recorder.range("step", str(number)):
            yield
        if number == self.steps[-1]:
            self._stop()
            self._mesh.meet("writing of traces")

    def _stop(self) -> None:
        """End recording, and write what there is. A full disk is no reason to end a run.

        A collective that was begun under torch's profiler writes its end into the profiler's memory, from a thread of gloo's, even
        after the profiler has ended and freed it: so it has to end before. After an error with peers nobody can wait for that,
        and recording is left to end with the process.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._settle()
        self._open.close()
        path = self._folder / f"steps-{self._recorded[0]}-{self._recorded[-1]}-rank-{self._mesh.rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(profiler, path)
        except (OSError, RuntimeError) as error:  # torch has no narrower kind for a file that it cannot write
            self._note(f"WARNING: {path} was not written: {error}")
            return
        steps = f"{self._recorded[0]} to {self._recorded[-1]}"
        self._note(f"steps {steps} are recorded in {self._folder}, a trace for each rank")


def _write(profiler: profile, path: Path) -> None:
    """The trace, compressed. Ranges of units in backward get a row of their own: they begin and end amid operators of autograd's,
    and viewers drop what is neither inside another range nor beside it.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        plain, packed = Path(folder, "trace.json"), Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(plain))
        with plain.open(encoding="utf-8") as lines, gzip.open(packed, "wt", encoding="utf-8", compresslevel=5) as out:
            out.writelines(_in_rows(lines))
        packed.replace(path)


def _in_rows(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a trace, in which an event says its name before its row."""
    own = False
    for line in lines:
        own = own or _NAME in line
        if own and _ROW.search(line):
            yield _ROW.sub('"units in backward"', line)
            own = False
        else:
            yield line
