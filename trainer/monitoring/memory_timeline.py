"""Memory over one step: when bytes of each purpose come and go on the first rank, in a file of the run's directory.

    {"step": 2, "seconds": 0.41, "events": [[0.0, "device", "parameters", 8392704], [0.0031, ...], ...]}

An event says how many bytes of a purpose there are on a tier from that moment on. The ledger counts what is allocated on purpose:
states, gathered parameters, gradients, kept inputs of blocks; not what autograd keeps between.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeromesh.files import write_whole
from zeromesh.offload import Ledger

NAME = "step_memory.json"
_MOST_EVENTS = 20_000


class MemoryTimeline:
    """Records the second step of a process, for the first allocates what stays. `path` is None where nothing is written."""

    def __init__(self, path: Path | None, first_step: int) -> None:
        self._path = path
        self._step = first_step + 1

    @contextmanager
    def recorded(self, step: int, ledger: Ledger) -> Iterator[None]:
        """Around each step, counted from 1."""
        if self._path is None or step != self._step:
            yield
            return
        began = time.perf_counter()
        with ledger.recording(_MOST_EVENTS) as changes:
            yield
        seconds = time.perf_counter() - began
        events = [
            [round(max(0.0, change.at - began), 6), change.tier.value, change.purpose.name.lower(), change.nbytes]
            for change in changes
        ]
        self._write(self._path, {"step": step, "seconds": round(seconds, 6), "events": events})

    def _write(self, path: Path, content: dict[str, object]) -> None:
        try:
            write_whole(path, json.dumps(content).encode(), sync=False)
        except OSError:
            return  # Nothing depends on it, and a full disk is reported by what matters.
