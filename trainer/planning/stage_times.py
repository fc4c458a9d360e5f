"""The seconds of pipeline stages per microbatch, and of a whole step. A model in one stage is a pipeline of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import accumulate

from zeromesh.pipeline.schedule import Action, Kind, make_schedule, simulate
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.trainer.planning.layouts import Layout
from zeromesh.trainer.planning.machine import Machine
from zeromesh.trainer.planning.subject import Subject
from zeromesh.trainer.planning.tracing.meter import Segment
from zeromesh.trainer.planning.tracing.trace import Trace
from zeromesh.trainer.planning.tracing.work import Work

_OVERHEAD_LAUNCHES = 400
"""The overhead of the engine and the loop around forward or backward of a microbatch (random states, hooks, checks), in launches.
Measured with `scripts/benchmarks/bench_plan.py`; on an accelerator the host does this ahead."""
schedule_of = lru_cache(4096)(make_schedule)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A pipeline rank's model chunk, with its costs per microbatch."""

    kept: int
    forward_peak: int
    backward_peak: int
    deferred: int
    """Bytes kept until a deferred computation of gradients of weights."""
    received: int
    """Bytes received from the previous stage."""
    forward: float
    backward: float
    weights: float
    """Seconds of the part of backward for gradients of weights."""
    exchanges: float
    """Seconds of exchanges between tensor ranks, which `forward` and `backward` include."""


@dataclass(frozen=True, kw_only=True)
class StageChunks:
    """The chunks of all stages in order, assigned round-robin to `ranks` pipeline ranks."""

    chunks: Sequence[Chunk]
    ranks: int

    def of_rank(self, rank: int) -> Sequence[Chunk]:
        """Return the chunks of a rank."""
        return self.chunks[rank :: self.ranks]

    @cached_property
    def busy(self) -> Sequence[float]:
        """Seconds that each rank computes per microbatch."""
        return [sum(each.forward + each.backward for each in self.of_rank(rank)) for rank in range(self.ranks)]

    def bound(self, microbatches: int, transfer: float) -> float:
        """Return a lower bound of the step's seconds: a rank's compute time, and the time before its first and after its last
        action."""
        times = (each.forward + each.backward - each.weights for each in self.chunks[: self.ranks - 1])
        both = enumerate(zip(self.busy, accumulate(times, initial=0.0), strict=True))
        return max(microbatches * busy + ends + 2 * rank * transfer for rank, (busy, ends) in both)


class StageTimes:
    """Estimates the seconds of the stages of one subject on one machine."""

    def __init__(self, subject: Subject, machine: Machine, host: int) -> None:
        """`host` is the number of ranks per host."""
        self._subject, self._machine, self._host = subject, machine, host
        self._seconds: dict[tuple[int, int, int], tuple[float, ...]] = {}
        self._stages: dict[tuple[int, int, int, int], StageChunks] = {}
        self.collective_seconds = cache(machine.collective_seconds)

    def stages(self, trace: Trace, cut: Sequence[range], layout: Layout) -> StageChunks:
        """Return the chunks of all stages, cached by the fields that matter."""
        key = (id(trace), len(cut), layout.pipeline, min(self._host, layout.ranks))
        if key not in self._stages:
            alike: dict[tuple[int, ...], Chunk] = {}
            chunks = []
            for stage in range(len(cut)):
                segments = self._subject.segments(trace, stage, cut)
                kinds = tuple(id(segment.forward) for segment in segments)
                if kinds not in alike:
                    alike[kinds] = self._chunk(trace, segments, layout)
                chunks.append(alike[kinds])
            self._stages[key] = StageChunks(chunks=chunks, ranks=layout.pipeline)
        return self._stages[key]

    def _chunk(self, trace: Trace, segments: Sequence[Segment], layout: Layout) -> Chunk:
        base = forward_peak = backward_peak = deferred = 0
        times = [self._segment_seconds(segment, layout) for segment in segments]
        forward, backward, weights, exchanges = map(sum, zip(*times, strict=True))
        later = segments[0] is not trace.segments[0]
        around = self._around(layout)
        # Each stage computes the masks and positions of its blocks.
        prepares = self._segment_seconds(trace.segments[0], layout)[0] if later else 0.0
        for segment in segments:
            forward_peak = max(forward_peak, base + segment.forward_peak)
            backward_peak = max(backward_peak, base + segment.backward_peak)
            base += segment.kept
            deferred += sum(count * product.around for product, count in segment.forward.products)
        return Chunk(
            kept=base,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            deferred=deferred,
            received=trace.segments[1].output if later else 0,
            forward=around + prepares + forward,
            backward=around + backward,
            weights=weights,
            exchanges=exchanges,
        )

    def _segment_seconds(self, segment: Segment, layout: Layout) -> tuple[float, ...]:
        """Return the seconds of forward and backward with the exchanges of tensor ranks, of the part of backward for gradients of
        weights, and of the exchanges."""
        busy = min(self._host, layout.ranks)
        forward, backward = segment.forward, segment.backward
        key = (id(forward), id(backward), busy)
        if key not in self._seconds:
            weights = Work(products=tuple(each for each in forward.products if each[0].around))
            computes = [self._machine.work_seconds(work, ranks_on_host=busy) for work in (forward, backward, weights)]
            exchanges = [
                sum(
                    count * self.collective_seconds(each.kind, each.nbytes, ranks=layout.tensor, ranks_on_host=busy)
                    for each, count in work.exchanges
                )
                for work in (forward, backward)
            ]
            both = (computes[0] + exchanges[0], computes[1] + exchanges[1])
            self._seconds[key] = (*both, computes[2], sum(exchanges))
        return self._seconds[key]

    def length(self, layout: Layout, pipeline: StageChunks, *, exact: bool) -> float:
        """Return the seconds of all forwards and backwards of a step over several pipeline ranks, simulated if `exact`, else a
        lower bound."""
        chunks, ranks, around = pipeline.chunks, layout.pipeline, self._around(layout)
        across = layout.data * layout.tensor >= self._host
        hosts = 2 if across and layout.ranks > self._host else 1
        busy, hidden = min(self._host, layout.ranks), max(each.received for each in chunks)
        transfer = self.collective_seconds(
            Collective.POINT_TO_POINT.value, hidden, ranks=2, hosts=hosts, ranks_on_host=busy
        )
        if not exact:
            return pipeline.bound(layout.accumulation, transfer)

        def seconds(rank: int, action: Action) -> float:
            chunk = chunks[action.chunk * ranks + rank]
            if action.kind is Kind.FORWARD:
                return chunk.forward
            if action.kind is Kind.BACKWARD:
                return chunk.backward
            if action.kind is Kind.BACKWARD_WEIGHT:
                return chunk.weights + around
            return chunk.backward - chunk.weights

        schedule = schedule_of(layout.schedule, ranks=ranks, microbatches=layout.accumulation, chunks=layout.chunks)
        return simulate(schedule, seconds, transfer=transfer).duration

    def _around(self, layout: Layout) -> float:
        machine = self._machine
        launches = _OVERHEAD_LAUNCHES * machine.device.launch_seconds if machine.is_cpu else 0.0
        return launches * machine.crowding(min(self._host, layout.ranks))
