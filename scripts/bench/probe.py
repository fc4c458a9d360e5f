"""How time and memory of one rank are taken, in the same way for every system.

    process starts, imports, joins the group | base | builds the model | training | steps ...
                                                     |<-- building -->|<----- peak ----->|

Memory on CPU is the proportional set size (PSS): a page that n processes map counts as its nth part, so memory that ranks share
is counted once over all of them. Pages of libraries are divided by the number of ranks, whatever other processes of the machine
map them too; where nothing else runs that is PSS as the kernel has it. It is read every 20 ms by a thread, which itself takes
processor time (some 10 ms a reading for half a gigabyte), so it rests while steps are timed. On CUDA the allocator's own highest
mark is taken.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.workload import Workload

_PERIOD_SECONDS = 0.02
_PROPORTIONAL = {"Pss_Anon:": "anonymous", "Pss_Shmem:": "shared"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes of a process: private memory, memory shared with other ranks, and mapped files (libraries), each in proportion."""

    anonymous: int = 0
    shared: int = 0
    files: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.anonymous + self.shared + self.files

    def __sub__(self, other: Memory) -> Memory:
        return Memory(**{name: value - getattr(other, name) for name, value in asdict(self).items()})


def memory_now(ranks: int) -> Memory:
    """This process's memory, which maps its libraries together with the other `ranks`."""
    found = {"files": _kibibytes("/proc/self/status", "RssFile:") * 1024 // ranks}
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(" ")
        if name in _PROPORTIONAL:
            found[_PROPORTIONAL[name]] = int(rest.split()[0]) * 1024
    return Memory(**found)


def _kibibytes(path: str, field: str) -> int:
    lines = Path(path).read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)


class Sampler:
    """The highest memory so far, looked at by a thread while `watch` is on."""

    def __init__(self, ranks: int) -> None:
        self.peak = Memory()
        self._ranks = ranks
        self.cpu_seconds = 0.0
        """The CPU seconds of the thread itself."""
        self._watching = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def watch(self, *, on: bool) -> None:
        """Look, or rest."""
        if on:
            self._watching.set()
        else:
            self._watching.clear()

    def reset(self) -> Memory:
        """Begin anew; returns the highest memory until now."""
        before, self.peak = self.peak, Memory()
        return before

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._watching.set()
        self._thread.join()

    def _run(self) -> None:
        while self._watching.wait() and not self._ended.is_set():
            self.look()
            self.cpu_seconds = time.thread_time()
            self._ended.wait(_PERIOD_SECONDS)

    def look(self) -> None:
        """Take the present memory into account."""
        now = memory_now(self._ranks)
        if now.total > self.peak.total:
            self.peak = now


@dataclass(kw_only=True, slots=True)
class Measurement:
    """The measurements of one rank. Bytes are above what was there before the model."""

    rank: int
    step_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    """User and system time of all threads of the process, per timed step."""
    losses: list[float] = field(default_factory=list)
    """The losses of all steps, over all ranks."""
    peak_bytes: int = 0
    """The highest memory during training."""
    building_bytes: int = 0
    """The highest memory before the first step."""
    base: Memory = field(default_factory=Memory)
    growth: Memory = field(default_factory=Memory)
    """The kinds of memory that the peak is made of."""
    notes: dict[str, Any] = field(default_factory=dict)
    """The facts that a system reports about itself."""

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class Probe:
    """Made after imports and the start of the process group; then `training`, `begin` and `end` of each step, `close`."""

    def __init__(self, workload: Workload, rank: int, barrier: Callable[[], None]) -> None:
        self.found = Measurement(rank=rank)
        self._workload = workload
        self._barrier = barrier
        self._step = 0
        self._cuda = workload.device == "cuda"
        self._sampler = None if self._cuda else Sampler(workload.ranks)
        self._began = (0.0, 0.0)
        self._base_allocated = torch.cuda.memory_allocated() if self._cuda else 0
        self.found.base = Memory() if self._cuda else memory_now(workload.ranks)
        self._watch(on=True)

    def training(self) -> None:
        """The model is there, training begins."""
        if self._sampler is not None:
            self.found.building_bytes = (self._sampler.reset() - self.found.base).total
        else:
            self.found.building_bytes = torch.cuda.max_memory_allocated() - self._base_allocated
            torch.cuda.reset_peak_memory_stats()

    def begin(self) -> None:
        """A step begins, on all ranks together."""
        self._watch(on=not self._workload.is_timed(self._step))
        self._meet()
        self._began = (time.perf_counter(), self._cpu_seconds())

    def end(self, loss: float) -> None:
        """The step is over when it is on all ranks."""
        self._meet()
        seconds, cpu = time.perf_counter() - self._began[0], self._cpu_seconds() - self._began[1]
        if self._workload.is_timed(self._step):
            self.found.step_seconds.append(seconds)
            self.found.cpu_seconds.append(cpu)
        self.found.losses.append(loss)
        self._step += 1

    def close(self) -> None:
        """Training is over: nothing that comes now counts."""
        if self._sampler is not None:
            self._sampler.stop()
            self.found.growth = self._sampler.peak - self.found.base
            self.found.peak_bytes = self.found.growth.total
        else:
            self.found.peak_bytes = torch.cuda.max_memory_allocated() - self._base_allocated

    def _watch(self, *, on: bool) -> None:
        if self._sampler is not None:
            self._sampler.watch(on=on)

    def _meet(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self._barrier()

    def _cpu_seconds(self) -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        sampler = self._sampler.cpu_seconds if self._sampler is not None else 0.0
        return usage.ru_utime + usage.ru_stime - sampler
