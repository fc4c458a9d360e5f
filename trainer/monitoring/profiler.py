"""Profiles of this rank: traces of a few steps for Chrome's tracing page and ui.perfetto.dev, and the memory over one step."""

import gzip
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from torch.profiler import profile

from zeromesh.files import write_whole
from zeromesh.offload.accelerator import profiler_activities
from zeromesh.telemetry.step_recorder import BACKWARD_RANGE
from zeromesh.trainer.config.sections.outputs import ProfileSection
from zeromesh.zero.engine import ZeroEngine

STEP_MEMORY = "step_memory.json"
_MOST_EVENTS = 20_000  # changes of bytes in the memory timeline of one step
_BACKWARD_NAME = f'"name": "{BACKWARD_RANGE}'
_ROW_NUMBER = re.compile(r'(?<="tid": )[^,\s]+')


class Profile(AbstractContextManager["Profile"]):
    """The profile of one run on one rank, a context manager; a run that ends early, in order, writes the steps so far."""

    def __init__(
        self, section: ProfileSection, directory: Path, engine: ZeroEngine, first: int, note: Callable[[str], None]
    ) -> None:
        """On rank 0 the step after `first`, which allocates persistent memory, leaves a file with changes of bytes by purpose."""
        begin, end = section.steps or (0, -1)
        self.steps = range(begin, end + 1)  # The traced steps, counted from 1.
        self.measured = first + 1 if engine.mesh.rank == 0 and section.step_figures else 0
        """The step whose changes of bytes are written; 0: none."""
        self._section, self._directory, self._note = section, directory, note
        self._engine, self._mesh = engine, engine.mesh
        self._recorded: list[int] = []
        self._open = ExitStack()
        self._profiler: profile | None = None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self._stop()
        elif self._mesh.world_size == 1:
            self._open.close()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile step `number`, one of `steps` or `measured`, in the block."""
        with ExitStack() as stack:
            if number == self.measured:
                stack.enter_context(self._record_memory(number))
            if number in self.steps:
                if self._profiler is None:
                    activities, memory = profiler_activities(self._mesh.device), self._section.memory
                    made = profile(activities=activities, record_shapes=memory, profile_memory=memory)
                    self._profiler = self._open.enter_context(made)
                    self._open.enter_context(self._mesh.recorder.profiling_ranges())
                self._recorded.append(number)
                stack.enter_context(self._mesh.recorder.range("step", str(number)))
            yield
        if self._profiler is not None and number == self.steps[-1]:
            self._stop()
            self._mesh.wait_for_all_ranks("writing of traces")

    @contextmanager
    def _record_memory(self, step: int) -> Iterator[None]:
        """Write the changes of bytes by purpose in the block; an event is a time, a tier, a purpose and its bytes from then on.
        {"step": 2, "seconds": 0.41, "events": [[0.0, "device", "parameters", 8392704], [0.0031, ...], ...]}"""
        began = time.perf_counter()
        with self._engine.ledger.recording(_MOST_EVENTS) as changes:
            yield
        seconds = time.perf_counter() - began
        events = [
            [round(max(0.0, change.at - began), 6), change.tier.value, change.purpose.name.lower(), change.nbytes]
            for change in changes
        ]
        content = {"step": step, "seconds": round(seconds, 6), "events": events}
        with suppress(OSError):  # Nothing depends on this file, and later writes report a full disk.
            write_whole(self._directory / STEP_MEMORY, json.dumps(content).encode(), sync=False)

    def _stop(self) -> None:
        """Stop recording, and write the trace. gloo's threads write the end of a profiled collective into the profiler's memory
        even after it was freed, so collectives end first. After an error of a peer they may never end, and recording goes on."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._engine.wait_for_gathers()
        self._open.close()
        first, last = self._recorded[0], self._recorded[-1]
        path = self._directory / "profile" / f"steps-{first}-{last}-rank-{self._mesh.rank}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(profiler, path)
        except (OSError, RuntimeError) as error:  # torch has no narrower error for a failed write
            self._note(f"WARNING: {path} was not written: {error}")
            return
        self._note(f"steps {first} to {last} are recorded in {path.parent}, a trace for each rank")


def _write(profiler: profile, path: Path) -> None:
    """Write the compressed trace. Backward ranges of units get a row of their own, as viewers drop ranges that overlap."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        plain, packed = Path(folder, "trace.json"), Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(plain))
        own = False
        with plain.open(encoding="utf-8") as lines, gzip.open(packed, "wt", encoding="utf-8", compresslevel=5) as out:
            for line in lines:
                own = own or _BACKWARD_NAME in line  # An event has its name before its row.
                if own and _ROW_NUMBER.search(line):
                    line, own = _ROW_NUMBER.sub('"units in backward"', line), False
                out.write(line)
        packed.replace(path)
