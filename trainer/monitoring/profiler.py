"""Profiles of this rank in the run's directory: traces of a few steps by torch's profiler, a memory timeline of one step, and a
memory snapshot after an out-of-memory error.

Beside operators, traces have the ranges of `StepRecorder`: gathers and reductions of units, forward and backward of each unit,
collectives, updates. Chrome's tracing page and ui.perfetto.dev read them.
"""

import gzip
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from zeromesh.environment import secret_values
from zeromesh.errors import StorageError, ZeromeshError, counted, summary
from zeromesh.files import write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Tier, available_bytes, peak_bytes, resident_bytes
from zeromesh.offload.accelerator import device_memory, is_accelerator, profiled, write_allocations
from zeromesh.telemetry.step_recorder import BACKWARD_RANGE
from zeromesh.trainer.config.redact import Redaction
from zeromesh.trainer.config.sections.outputs import ProfileSection
from zeromesh.trainer.formatting import human_bytes
from zeromesh.zero.engine import ZeroEngine

FOLDER = "profile"
STEP_MEMORY = "step_memory.json"
_MOST_EVENTS = 20_000
_NAME = f'"name": "{BACKWARD_RANGE}'
_ROW = re.compile(r'(?<="tid": )[^,\s]+')


class Profile(AbstractContextManager["Profile"]):
    """The profile of one run on one rank, a context manager; a run that ends early, in order, writes the steps so far. `note` shows
    a line."""

    def __init__(
        self, section: ProfileSection, directory: Path, engine: ZeroEngine, note: Callable[[str], None]
    ) -> None:
        first, last = section.steps or (0, -1)
        self.steps = range(first, last + 1)
        """The profiled steps, counted from 1."""
        self._section = section
        self._folder = directory / FOLDER
        self._engine = engine
        self._mesh = engine.mesh
        self._first = 0
        self._note = note
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
        """Profile step `number` in the block, if it is one of `steps`.

        On rank 0 the second step of a process also leaves a file with the changes of bytes by purpose, since the first one
        allocates persistent memory.
        """
        with ExitStack() as stack:
            self._first = self._first or number
            if number == self._first + 1 and self._mesh.rank == 0 and self._section.step_figures:
                stack.enter_context(self._recorded_memory(number))
            if number in self.steps:
                if self._profiler is None:
                    activities, memory = profiled(self._mesh.device), self._section.memory
                    made = profile(activities=activities, record_shapes=memory, profile_memory=memory)
                    self._profiler = self._open.enter_context(made)
                    self._open.enter_context(self._mesh.recorder.profiling_ranges())
                self._recorded.append(number)
                stack.enter_context(self._mesh.recorder.range("step", str(number)))
            yield
        if self._profiler is not None and number == self.steps[-1]:
            self._stop()
            self._mesh.meet("writing of traces")

    @contextmanager
    def _recorded_memory(self, step: int) -> Iterator[None]:
        """Write the changes of bytes by purpose in the block.

            {"step": 2, "seconds": 0.41, "events": [[0.0, "device", "parameters", 8392704], [0.0031, ...], ...]}

        An event is a time, a tier, a purpose and its bytes from then on. The ledger covers states, gathered parameters, gradients
        and saved inputs of blocks, but no other activations.
        """
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
            write_whole(self._folder.with_name(STEP_MEMORY), json.dumps(content).encode(), sync=False)

    def _stop(self) -> None:
        """Stop recording, and write the trace. A full disk does not end a run.

        gloo's threads write the end of a profiled collective into the profiler's memory even after the profiler has freed it, so
        collectives have to end first. After an error of a peer they may never end, and recording goes on until the process exits.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._engine.settle()
        self._open.close()
        path = self._folder / f"steps-{self._recorded[0]}-{self._recorded[-1]}-rank-{self._mesh.rank}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(profiler, path)
        except (OSError, RuntimeError) as error:  # torch has no narrower error for a failed write
            self._note(f"WARNING: {path} was not written: {error}")
            return
        steps = f"{self._recorded[0]} to {self._recorded[-1]}"
        self._note(f"steps {steps} are recorded in {self._folder}, a trace for each rank")


def _write(profiler: profile, path: Path) -> None:
    """Write the compressed trace. Backward ranges of units get a separate row: they begin and end amid autograd's operators,
    and viewers drop ranges that neither nest nor are disjoint."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        plain, packed = Path(folder, "trace.json"), Path(folder, "trace.json.gz")
        profiler.export_chrome_trace(str(plain))
        own = False
        with plain.open(encoding="utf-8") as lines, gzip.open(packed, "wt", encoding="utf-8", compresslevel=5) as out:
            for line in lines:
                own = own or _NAME in line  # An event has its name before its row.
                if own and _ROW.search(line):
                    line, own = _ROW.sub('"units in backward"', line), False
                out.write(line)
        packed.replace(path)


_OUT_OF_MEMORY = re.compile(r"can't allocate memory|out of memory|not enough memory", re.IGNORECASE)
"""Messages of out-of-memory errors, which have no common class."""


def ran_out(error: BaseException) -> bool:
    """Return True for an out-of-memory error."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    of_zeromesh = isinstance(error, ZeromeshError) and not isinstance(error, StorageError)
    return isinstance(error, RuntimeError) and not of_zeromesh and bool(_OUT_OF_MEMORY.search(str(error)))


_CURES = (
    "lower batch.micro_size or data.sequence_length, set model.activation_checkpointing: block, raise zero.stage, or offload "
    "more (docs/offload.md)"
)


def explained(error: BaseException, engine: ZeroEngine | None, mesh: Mesh, directory: Path, step: int) -> BaseException:
    """Write the bytes of this rank after an out-of-memory error, of the process and by tier and purpose, and return an error that
    refers to the file; return any other error as it is. `step` is the number of finished steps.

    `uncounted` are bytes outside the ledger: activations, libraries, and other code's private memory.
    """
    if not ran_out(error):
        return error
    path, what, purposes = directory / f"memory-rank-{mesh.rank}.json", summary(error), {}
    process = {"resident": resident_bytes(), "resident_peak": peak_bytes(), "available": available_bytes()}
    on_device = is_accelerator(mesh.device)
    if on_device:
        process |= {f"device_{what}": nbytes for what, nbytes in asdict(device_memory(mesh.device)).items()}
    found: dict[str, Any] = {"rank": mesh.rank, "process": process}
    if engine is not None:
        ledger = engine.ledger
        held = {tier.value: ledger.by_purpose(tier) for tier in Tier}
        purposes = {
            tier: {purpose.value: nbytes for purpose, nbytes in each.items()} for tier, each in held.items() if each
        }
        covered = ledger.total(Tier.DEVICE) if on_device else ledger.total()
        beside = max(0, (process.get("device_allocated") or process["resident"]) - covered)
        found |= {"counted": covered, "counted_peak": ledger.peak(), "uncounted": beside}
    found["purposes"] = purposes
    text = f"rank {mesh.rank} ran out of memory after {counted(step, 'whole step')} ({what})"
    largest = sorted(purposes.get("device", {}).items(), key=lambda item: -item[1])[:3]
    if largest:
        text += f"; it holds {', '.join(f'{human_bytes(nbytes)} {purpose}' for purpose, nbytes in largest)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        error_text = Redaction(secret_values()).text(what)
        write_whole(path, json.dumps({"error": error_text, "step": step, **found}, indent=1).encode())
        if write_allocations(mesh.device, blocks := path.with_suffix(".pickle")):
            text += f". {blocks} has every block of the device, for https://pytorch.org/memory_viz"
            text += "; profile.allocations: true adds where each was allocated"
    except OSError as why:
        return StorageError(f"{text}. What holds the rest could not be written to {path}: {why.strerror}; {_CURES}")
    return StorageError(f"{text}. {path} says what holds the rest; {_CURES}")
