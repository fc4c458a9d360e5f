"""Which parts there are, how many seconds each may take, and how they are run: in processes of their own, ended when time is up."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.device.rows import Row, broken, heard, not_run
from bench.processes import ONE_THREAD, end_all, start_ranks, wait_for
from zeromesh.environment import available_cores

_REASON_LINES = 12
_END_SECONDS = 3.0
"""The seconds of a part's time that are kept back for ending its processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Something to find out. `seconds` is its share of the budget, `least` what it needs to find out anything."""

    name: str
    title: str
    seconds: float
    least: float


ALONE = (
    Part(name="tests", title="the tests that need an accelerator, under torch's sanitizer of streams", seconds=70, least=20),
    Part(name="parity", title="beside plain PyTorch on the device and on the CPU", seconds=45, least=15),
    Part(name="train-1b", title="a Llama of 1 billion parameters, 8k tokens a step", seconds=65, least=30),
    Part(name="train-8b", title="a Llama as wide as one of 8 billion parameters, 8k tokens a step", seconds=80, least=40),
    Part(name="offload", title="the same, its states on the host and on files", seconds=180, least=50),
    Part(name="copies", title="copies between the device and the host", seconds=20, least=12),
    Part(name="saving", title="one checkpoint, written and read", seconds=45, least=20),
)
"""The parts on one device."""
TOGETHER = (
    Part(name="first", title="what a first run on several devices may hang in", seconds=150, least=30),
    Part(name="parity", title="beside plain PyTorch on the device and on the CPU", seconds=60, least=20),
    Part(name="train-1b", title="a Llama of 1 billion parameters, 8k tokens a step and rank", seconds=90, least=30),
    Part(name="train-8b", title="a Llama as wide as one of 8 billion parameters", seconds=100, least=40),
    Part(name="divided", title="ranks that divide the model", seconds=80, least=30),
    Part(name="saving", title="one checkpoint, written and read", seconds=40, least=20),
)
"""The parts on several devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of a part's processes. `device` is `auto`, `cpu` or `sim`; `dry`: all is tiny, and no time is judged."""

    device: str
    ranks: int
    dry: bool
    folder: str
    seconds: float = 0.0
    """How long the part may take."""

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        return cls(**json.loads(text))


def allowance(parts: Sequence[Part], number: int, left: float) -> float:
    """Seconds for part `number`, of `left` for it and those after it: its own share, and what earlier ones have left over."""
    later = sum(part.seconds for part in parts[number + 1 :])
    return max(min(left, parts[number].seconds), left - later)


class Budget:
    """The seconds of all parts together."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def run_part(part: Part, settings: Settings, seconds: float) -> list[Row]:
    """Run a part within `seconds`, and return its rows; whatever happens to its processes is one of them."""
    if seconds < part.least:
        return [not_run(part.name, f"{max(0.0, seconds):.0f} s are left of the budget, and it needs {part.least:.0f}")]
    with tempfile.TemporaryDirectory(prefix="zeromesh-check-", dir=settings.folder or None) as folder:
        own = replace(settings, folder=folder, seconds=seconds - _END_SECONDS)
        logs = [Path(folder, f"rank{rank}.log") for rank in range(settings.ranks)]
        command = [sys.executable, "-u", "-m", "bench.device.worker", part.name, own.to_json()]
        processes = start_ranks(command, logs, _variables(settings))
        failed = True
        try:
            in_time = wait_for(processes, own.seconds)
        finally:
            failed = end_all(processes)
        lines = [log.read_text(errors="replace").splitlines() for log in logs]
        rows, begun = heard(lines[0])
        if not in_time:
            why = f"it had not come to an end after {own.seconds:.0f} s"
            return [*rows, broken(begun or part.name, f"{why}\n{_last(lines)}")]
        if failed:
            codes = ", ".join(str(process.returncode) for process in processes)
            return [*rows, broken(begun or part.name, f"a process failed (exit codes {codes})\n{_last(lines)}")]
        return rows


def _variables(settings: Settings) -> dict[str, str]:
    if settings.device != "auto":  # The processor stands in for the device.
        return {**ONE_THREAD, "CUDA_VISIBLE_DEVICES": ""}
    threads = str(max(1, available_cores() // settings.ranks))
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads, "PYTORCH_ALLOC_CONF": allocator}


def _last(lines: Sequence[Sequence[str]]) -> str:
    """The end of the log that tells most: one with an error in it, else the first."""
    told = [[line for line in log if not line.startswith(("ROW ", "BEGIN "))] for log in lines]
    chosen = next((log for log in told if any("Error" in line for line in log)), told[0])
    return "\n".join(chosen[-_REASON_LINES:])
