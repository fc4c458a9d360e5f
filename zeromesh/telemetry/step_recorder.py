"""`StepRecorder`: the seconds of a step by phase, the traffic between ranks, and named ranges for torch's profiler.

    with recorder.span(StepPhase.FORWARD): ...       # spans may lie inside each other
    recorder.take_seconds()    {"data": 0.004, "forward": 0.120, "backward": 0.251, "communication": 0.018, ...}
    recorder.take_traffic()    {"tensor": {"all-reduce": {"calls": 96, "bytes": 25165824, "seconds": 0.031}}, "shard": {...}}

Time belongs to the innermost open span, so the phases' seconds add up to those of the step. Time spent waiting for bytes of another
tier comes from a counter and belongs to the phase `offload_wait` alone. docs/mesh.md defines bytes and seconds of traffic."""

import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch.profiler import record_function

from zeromesh.offload import WaitTime
from zeromesh.overrides import override
from zeromesh.telemetry.status_board import BEGIN, END, EventRing

Figures = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Traffic by axis and collective: `calls`, `bytes` and `seconds`."""


class Collective(StrEnum):
    """The operations that ranks carry out together. An agreement is a small CPU exchange: sums of the loss, the norm, barriers."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point to point"
    AGREEMENT = "agreement"


class StepPhase(StrEnum):
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATION = "communication"
    OPTIMIZER = "optimizer"
    OFFLOAD_WAIT = "offload_wait"
    OTHER = "other"


BACKWARD_RANGE = "backward of "  # begins the name of a unit's range of the profiler, see `StepRecorder.next_range`
NOTHING: AbstractContextManager[object] = nullcontext()


class StepRecorder:
    """Records the steps of one rank. `mark` returns the present time, in seconds or as an event on a device's stream, and
    `between(end, begin)` seconds, or None before `end`: what is not finished at `take_seconds` counts for the next step."""

    def __init__(
        self, mark: Callable[[], Any] = time.perf_counter, between: Callable[[Any, Any], float | None] = operator.sub
    ) -> None:
        self.enabled = True
        """True if seconds and traffic are measured; may change between steps."""
        self.profiling = False
        self.ring = EventRing()
        """The latest events of this rank, including all measured spans, by the host's clock."""
        self._mark, self._between = mark, between
        self._waits = WaitTime()
        self._waited_before = 0.0
        self._intervals: deque[tuple[StepPhase, Any, Any, float]] = deque()
        self._open_phases: list[StepPhase] = []
        self._interval_begin: Any = None
        self._accounts: dict[str, CommAccount] = {}
        self._open_ranges: list[AbstractContextManager[object]] = []
        self._unit_range = ExitStack()

    def begin_step(self, waits: WaitTime | None = None) -> None:
        """Begin a step. `waits` counts the time that this rank waits for bytes of another tier."""
        self._open_phases = [StepPhase.OTHER] if self.enabled else []
        self._waits = waits or self._waits
        self._waited_before = self._waits.total
        self._interval_begin = self._mark() if self.enabled else None

    def span(self, phase: StepPhase, name: str = "") -> AbstractContextManager[object]:
        """Return a block that belongs to `phase`, recorded as a profiler range called `name` if ranges are recorded."""
        return _Span(self, phase, name or phase.value) if self.enabled or self.profiling else NOTHING

    def take_seconds(self) -> dict[str, float]:
        """End the step and return its seconds by phase without zeros; empty if no step has begun."""
        if self._open_phases:
            self._end_interval()
        self._open_phases = []
        found: dict[StepPhase, float] = {}
        while self._intervals:
            phase, begin, end, waited = self._intervals[0]
            seconds = self._between(end, begin)
            if seconds is None:
                break
            self._intervals.popleft()
            found[phase] = found.get(phase, 0.0) + max(0.0, seconds - waited)
            if waited:
                found[StepPhase.OFFLOAD_WAIT] = found.get(StepPhase.OFFLOAD_WAIT, 0.0) + waited
        return {phase.value: found[phase] for phase in StepPhase if phase in found}

    def _end_interval(self) -> None:
        """Add the time since the last mark to the phase of the innermost open span, and set the mark to now."""
        now, waited = self._mark(), self._waits.total
        self._intervals.append((self._open_phases[-1], self._interval_begin, now, waited - self._waited_before))
        self._interval_begin, self._waited_before = now, waited

    def account(self, axis: str, ranks: int) -> "CommAccount":
        """Open the account of an axis or process set; an existing one of that name is replaced unless it has as many `ranks`."""
        if axis not in self._accounts or self._accounts[axis].ranks != ranks:
            self._accounts[axis] = CommAccount(self, axis, ranks)
        return self._accounts[axis]

    def close_account(self, axis: str) -> None:
        """Remove the account of an axis, with its traffic since the last `take_traffic`."""
        self._accounts.pop(axis, None)

    def take_traffic(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return calls, bytes and seconds by axis and collective since the last call, without unused ones."""
        return {axis: taken for axis, account in list(self._accounts.items()) if (taken := account.take())}

    @contextmanager
    def profiling_ranges(self) -> Iterator[None]:
        with override(self, "profiling", True) as undo:
            undo.callback(self.end_ranges)
            yield

    def range(self, what: str, of: str = "") -> AbstractContextManager[object]:
        """Return a profiler range, named after the operation and its object."""
        return record_function(f"{what} {of}".rstrip()) if self.profiling else NOTHING

    def begin_range(self, what: str, of: str = "") -> None:
        if self.profiling:
            self._open_ranges.append(self.range(what, of))
            self._open_ranges[-1].__enter__()

    def end_range(self) -> None:
        """End the latest range of `begin_range`, if one is open."""
        if self._open_ranges:
            self._open_ranges.pop().__exit__(None, None, None)

    def next_range(self, of: str | None) -> None:
        """End the profiler range of the unit whose backward ran before, and begin that of unit `of`; None: backward has ended."""
        self._unit_range.close()
        if self.profiling and of is not None:
            self._unit_range.enter_context(record_function(f"{BACKWARD_RANGE}{of}"))

    def end_ranges(self) -> None:
        """End all open ranges, after an error too."""
        self.next_range(None)
        while self._open_ranges:
            self.end_range()


@dataclass(slots=True, eq=False)
class _Span:
    """A context manager that counts time for one phase; the recorder keeps the state, so one object can be used repeatedly."""

    recorder: StepRecorder
    phase: StepPhase
    name: str
    figures: list[float] | None = None

    def __enter__(self) -> None:
        recorder = self.recorder
        recorder.begin_range(self.name)
        if recorder._open_phases:
            recorder._end_interval()
            recorder._open_phases.append(self.phase)
            recorder.ring.add(BEGIN | recorder.ring.name(self.name))
        if self.figures is not None:
            self.figures[3] = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        recorder = self.recorder
        if self.figures is not None:
            self.figures[2] += time.perf_counter() - self.figures[3]
        if len(recorder._open_phases) > 1:
            recorder._end_interval()
            recorder._open_phases.pop()
            recorder.ring.add(END | recorder.ring.name(self.name))
        recorder.end_range()


class CommAccount:
    """The traffic of this rank on one axis of `ranks` ranks. Timed collectives also count as communication and as ranges."""

    def __init__(self, recorder: StepRecorder, axis: str, ranks: int) -> None:
        self.ranks, share = ranks, (ranks - 1) / ranks
        self._recorder = recorder
        self._factors = dict.fromkeys(Collective, share)
        self._factors |= {Collective.ALL_REDUCE: 2 * share, Collective.POINT_TO_POINT: 1.0}
        self._figures: dict[Collective, list[float]] = {each: [0, 0.0, 0.0, 0.0] for each in Collective}
        """Calls, bytes, seconds, and the start of the block being timed."""
        self._spans = {
            each: _Span(recorder, StepPhase.COMMUNICATION, f"{each.value} over {axis}", self._figures[each]) for each in Collective
        }

    def count(self, collective: Collective, whole: int) -> None:
        """Count one `collective` of a whole tensor of `whole` bytes, of which this rank sends a part; for a message, its bytes."""
        if self._recorder.enabled:
            figures = self._figures[collective]
            figures[0] += 1
            figures[1] += whole * self._factors[collective]

    def timed(self, collective: Collective) -> AbstractContextManager[object]:
        """Return a block whose duration counts for `collective`."""
        recorder = self._recorder
        return self._spans[collective] if recorder.enabled or recorder.profiling else NOTHING

    def take(self) -> dict[str, dict[str, float]]:
        """Return calls, bytes and seconds by collective since the last call, without unused ones."""
        found = {}
        for collective, figures in self._figures.items():
            if figures[0] or figures[2]:
                calls, nbytes, seconds = figures[:3]
                figures[:3] = 0, 0.0, 0.0
                found[collective.value] = {"calls": int(calls), "bytes": round(nbytes), "seconds": round(seconds, 6)}
        return found


def added(total: Any, more: Any) -> Any:
    """Return the sum of two results of `StepRecorder.take_traffic`, nested mappings of numbers."""
    if not isinstance(total, Mapping):
        return total + more
    return {**total, **more, **{name: added(total[name], more[name]) for name in total.keys() & more.keys()}}
