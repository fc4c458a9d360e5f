"""What a layout needs and how long a step of it takes: bytes by tier and purpose, seconds by phase, of the rank that has the most.

    bytes      states by `zero/memory_model.py`, activations of the trace over the microbatches that the schedule has in flight,
               and what libraries take
    seconds    the work of each stage at the machine's rates, put together by the simulator of schedules; what crosses between data
               ranks beside it, as far as it is not hidden; the update; tiers

On an accelerator gathers and reductions run while it computes, and only what is longer than that counts. On CPUs the cores that
compute also move, so both count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from itertools import accumulate

import torch

from zeromesh.offload import STAGING_BYTES, Purpose, Tier, TierChoice
from zeromesh.optim.fused_optimizer import moment_names
from zeromesh.options import STAGING_SHARE, Placement, ZeroOptions
from zeromesh.pipeline.schedule import Action, Kind, PipelineSchedule, ScheduleName, Timeline, make_schedule, simulate
from zeromesh.telemetry.step_recorder import Collective, StepPhase
from zeromesh.trainer.monitoring.plan_check import Prediction
from zeromesh.trainer.planning.layouts import Layout
from zeromesh.trainer.planning.machine import Machine
from zeromesh.trainer.planning.subject import StageUnits, Subject
from zeromesh.trainer.planning.tracing.meter import Segment
from zeromesh.trainer.planning.tracing.trace import Trace
from zeromesh.trainer.planning.work import Work
from zeromesh.zero.memory_model import MemoryModel, predict_layouts

LIBRARY, GATHERED, ACTIVATIONS = "libraries", "parameters around their use", "activations"
"""Names of bytes that have no purpose in the ledger."""


class PlanPhase(StrEnum):
    """What the seconds of a step go to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    TENSOR = "tensor exchanges"
    DATA = "gathers and reductions"
    PIPELINE = "pipeline"
    OPTIMIZER = "optimizer"
    OFFLOAD = "offload"


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A layout, with what it needs and takes. Bytes are of the rank that needs most."""

    layout: Layout
    device: Mapping[str, int]
    """Bytes by purpose in the memory where ranks compute."""
    host: Mapping[str, int]
    """Bytes by purpose in the host's memory beside an accelerator, for each rank."""
    disk: int
    """Bytes of swap files, for each rank."""
    phases: Mapping[PlanPhase, float] = field(default_factory=dict)
    """Seconds of a step."""
    bubble: float = 0.0
    """The part of the step in which stages wait for each other."""
    rank: int = 0
    """The pipeline rank that needs most."""

    @property
    def device_bytes(self) -> int:
        """Bytes at the peak."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of the host for each rank, beside an accelerator."""
        return sum(self.host.values())

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.phases.values())

    def prediction(self) -> Prediction:
        """What a run can compare itself with."""
        here = {purpose: self.device[purpose.value] for purpose in Purpose if purpose.value in self.device}
        beside = {purpose: self.host[purpose.value] for purpose in Purpose if purpose.value in self.host}
        phases: dict[StepPhase, float] = {}
        for phase, seconds in self.phases.items():
            phases[_MEASURED_AS[phase]] = phases.get(_MEASURED_AS[phase], 0.0) + seconds
        memory = {Tier.DEVICE: here, Tier.HOST: beside} if beside else {Tier.DEVICE: here}
        return Prediction(layout=str(self.layout), phases=phases, memory=memory, peak=self.device_bytes)


_MEASURED_AS = {
    PlanPhase.FORWARD: StepPhase.FORWARD,
    PlanPhase.BACKWARD: StepPhase.BACKWARD,
    PlanPhase.TENSOR: StepPhase.COMMUNICATION,
    PlanPhase.DATA: StepPhase.COMMUNICATION,
    PlanPhase.PIPELINE: StepPhase.COMMUNICATION,
    PlanPhase.OPTIMIZER: StepPhase.OPTIMIZER,
    PlanPhase.OFFLOAD: StepPhase.OFFLOAD_WAIT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment of a step: seconds since it began, an action that begins or ends then, and bytes by purpose on the device."""

    seconds: float
    action: str
    device: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _SegmentSeconds:
    """Seconds of a segment: what it computes, of that the gradients of weights, and what tensor ranks exchange."""

    forward: float
    backward: float
    weights: float
    forward_exchanges: float
    backward_exchanges: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """A chunk of a pipeline rank for one microbatch."""

    kept: int
    forward_peak: int
    backward_peak: int
    deferred: int
    """Bytes that wait for gradients of weights, where these come later."""
    received: int
    """Bytes that come from the stage before."""
    forward: float
    backward: float
    weights: float
    exchanges: float
    """Seconds of exchanges between tensor ranks, which are in `forward` and `backward` too."""


@dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """The chunks of all stages, in their order, which `ranks` pipeline ranks have in turn."""

    chunks: Sequence[_Chunk]
    ranks: int

    def of_rank(self, rank: int) -> Sequence[_Chunk]:
        """The chunks of a rank."""
        return self.chunks[rank :: self.ranks]

    @cached_property
    def busy(self) -> Sequence[float]:
        """Seconds that each rank computes for a microbatch."""
        return [sum(each.forward + each.backward for each in self.of_rank(rank)) for rank in range(self.ranks)]

    @cached_property
    def ends(self) -> Sequence[float]:
        """Seconds of each rank before the first and after the last action of a step."""
        times = [each.forward + each.backward - each.weights for each in self.chunks[: self.ranks - 1]]
        return list(accumulate(times, initial=0.0))

    def bound(self, microbatches: int, transfer: float) -> float:
        """A lower bound of seconds: what a rank computes, and what comes before its first and after its last action."""
        both = enumerate(zip(self.busy, self.ends, strict=True))
        return max(microbatches * busy + ends + 2 * rank * transfer for rank, (busy, ends) in both)


_DISTINCT = 4
"""Pipeline ranks whose memory is looked at: the first ones and the last one."""
_AROUND = 400
"""How many launches take as long as what the engine and the loop do around forward, or backward, of a microbatch: streams of random
numbers, hooks, checks. Found with `scripts/bench_plan.py`; on an accelerator the host does it ahead."""
_ROUNDS = 4
"""Rounds of microbatches after which memory has had its peak."""
_HIGHEST = " at its highest"


class Estimator:
    """Estimates layouts of one subject on one machine."""

    def __init__(self, subject: Subject, machine: Machine, host: int) -> None:
        """`host` is the ranks of a host."""
        self._subject, self._machine, self._host = subject, machine, host
        self._device = torch.device(machine.device.kind)
        self._seconds: dict[tuple[int, int, int], _SegmentSeconds] = {}
        self._memory: dict[object, MemoryModel] = {}
        self._pipelines: dict[tuple[int, int, int, int], _Pipeline] = {}
        self._peaks: dict[object, int] = {}
        self._options: dict[object, ZeroOptions] = {}
        self._collective_seconds = cache(machine.collective_seconds)

    def options(self, layout: Layout) -> ZeroOptions:
        """The options of the engine for a layout."""
        key = (layout.stage, layout.accumulation, layout.optimizer, layout.parameters, layout.activations)
        if key not in self._options:
            self._options[key] = self._options_of(layout, self._subject.zero)
        return self._options[key]

    def _options_of(self, layout: Layout, zero: ZeroOptions) -> ZeroOptions:
        offload = replace(
            zero.offload,
            optimizer=layout.optimizer,
            gradients=None,
            parameters=layout.parameters if layout.stage == 3 else TierChoice(),
            activations=layout.activations,
            staging_bytes=self._staging(zero),
        )
        return replace(zero, stage=layout.stage, accumulation=layout.accumulation, offload=offload)

    def _staging(self, zero: ZeroOptions) -> int | None:
        """Bytes of buffers on the way from tiers, as the machine's device would have them."""
        given = zero.offload.staging_bytes
        if given is not None or self._machine.is_cpu:
            return given
        return max(STAGING_BYTES, self._machine.device.memory_bytes // STAGING_SHARE)

    def estimate(self, layout: Layout, *, exact: bool = True) -> Estimate:
        """Estimate a layout. Without `exact` a pipeline's time is a lower bound, which takes no simulation.

        Raises:
            ConfigError, LayoutError: for a layout that the model does not allow, or a machine without figures of what it needs.
        """
        subject, options = self._subject, self.options(layout)
        trace = subject.trace(layout.tensor, layout.micro, sequence=layout.sequence, recompute=layout.recompute)
        cut = subject.cut(layout.pipeline * layout.chunks)
        ranks = layout.pipeline
        looked_at = sorted({*range(min(ranks, _DISTINCT)), ranks - 1})
        pipeline = self._pipeline(trace, cut, layout)
        chunks = pipeline.chunks
        found: list[tuple[int, dict[str, int], MemoryModel, StageUnits]] = []
        # After a few rounds of microbatches a schedule repeats itself.
        few = min(layout.accumulation, _ROUNDS * layout.pipeline * layout.chunks)
        schedule = _schedule(layout.schedule, ranks, few, layout.chunks)
        for rank in looked_at:
            stages = range(rank, len(cut), ranks)
            units = subject.stage_units(layout.tensor, tuple(stages), cut, layout.shard)
            memory = self._states(layout, options, units)
            device = self._bytes(layout, options, memory, pipeline.of_rank(rank), schedule, rank)
            found.append((sum(device.values()), device, memory, units))
        most = max(range(len(found)), key=lambda at: found[at][0])
        _, device, memory, _ = found[most]
        phases, bubble = self._phases(layout, options, pipeline, found, exact=exact)
        host = {purpose.value: nbytes for purpose, nbytes in memory.hosted.items()}
        away = self._activations_away(layout, chunks)
        disk = memory.on_disk
        if layout.activations.tier == "host" and not self._machine.is_cpu:
            host[Purpose.ACTIVATIONS.value] = away
        elif layout.activations.tier == "file":
            disk += away
        if not self._machine.is_cpu:
            host[LIBRARY] = self._machine.library.host
        return Estimate(
            layout=layout, device=device, host=host, disk=disk, phases=phases, bubble=bubble, rank=looked_at[most]
        )

    def over_step(self, layout: Layout) -> Iterator[Moment]:
        """The memory of the rank that needs most over a step, which grows or shrinks evenly between two moments: activations come
        while forward makes them and go while backward uses them, and gradient shards that do not stay come meanwhile."""
        subject, options, estimate = self._subject, self.options(layout), self.estimate(layout)
        trace = subject.trace(layout.tensor, layout.micro, sequence=layout.sequence, recompute=layout.recompute)
        cut, rank = subject.cut(layout.pipeline * layout.chunks), estimate.rank
        units = subject.stage_units(layout.tensor, tuple(range(rank, len(cut), layout.pipeline)), cut, layout.shard)
        memory, pipeline = self._states(layout, options, units), self._pipeline(trace, cut, layout)
        schedule = _schedule(layout.schedule, layout.pipeline, layout.accumulation, layout.chunks)
        timeline, stay = self._timeline(layout, pipeline), options.gradients_stay(self._device)
        shards = memory.terms.get(Purpose.GRADIENTS, 0) + memory.passing
        backwards, done, live, length = layout.accumulation * layout.chunks, 0, 0, timeline.duration

        def moment(seconds: float, action: str, activations: int, **more: int) -> Moment:
            now = {ACTIVATIONS: activations}
            if not stay and (not action.endswith(_HIGHEST) or action.startswith(Kind.FORWARD.value)):
                now[Purpose.GRADIENTS.value] = shards * done // backwards
            return Moment(seconds=seconds, action=action, device={**estimate.device, **now, **more})

        yield moment(0.0, "the step begins", 0)
        walk = self._walk(layout, pipeline.of_rank(rank), schedule, rank)
        for (action, during, after), start, end in zip(walk, timeline.starts[rank], timeline.ends[rank], strict=True):
            backward = action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            yield moment(start, f"{action} begins", live)
            yield moment(start if backward else end, f"{action}{_HIGHEST}", during)
            done, live = done + backward, after
            yield moment(end, f"{action} ends", live)
        update = {GATHERED: 0} if layout.stage == 3 else {}
        yield moment(length, "all actions have ended", 0)
        yield moment(length, "what nothing hides, and the update", 0, **update)
        yield moment(max(length, estimate.seconds), "the step ends", 0, **update)

    # Bytes

    def _states(self, layout: Layout, options: ZeroOptions, units: StageUnits) -> MemoryModel:
        transport = "local" if layout.shard == 1 else self._machine.transport(self._hosts(layout))
        key = (id(units), transport, layout.stage, layout.accumulation > 1, layout.optimizer, layout.parameters)
        if key not in self._memory:
            self._memory[key] = predict_layouts(units.layouts, options, layout.shard, transport, None, self._device)
        return self._memory[key]

    def _bytes(
        self,
        layout: Layout,
        options: ZeroOptions,
        memory: MemoryModel,
        own: Sequence[_Chunk],
        schedule: PipelineSchedule,
        rank: int,
    ) -> dict[str, int]:
        device = {purpose.value: nbytes for purpose, nbytes in memory.terms.items()}
        gradients = device.pop(Purpose.GRADIENTS.value, 0)
        stay = options.gradients_stay(self._device)
        activations = self._activations(layout, own, schedule, rank)
        # Gradient shards come while activations go, in the blocks that an accelerator's allocator has just got back. The C
        # library's heap on a CPU seldom finds them room there.
        beside = 0 if stay or self._machine.is_cpu else min(gradients + memory.passing, activations)
        library = self._machine.library
        busy = min(self._host, layout.ranks)
        device |= {
            GATHERED: memory.gathered,
            Purpose.GRADIENTS.value: gradients + memory.passing - beside,
            ACTIVATIONS: activations,
            LIBRARY: library.host + library.shared // busy if self._machine.is_cpu else library.device,
        }
        return {name: nbytes for name, nbytes in device.items() if nbytes}

    def _activations(self, layout: Layout, own: Sequence[_Chunk], schedule: PipelineSchedule, rank: int) -> int:
        """The most bytes of activations of a pipeline rank over its actions."""
        shape = (schedule.name, schedule.ranks, schedule.microbatches)
        key = (shape, rank, tuple(map(id, own)), layout.activations, layout.recompute)
        if key not in self._peaks:
            self._peaks[key] = max(during for _, during, _ in self._walk(layout, own, schedule, rank))
        return self._peaks[key]

    def _walk(
        self, layout: Layout, own: Sequence[_Chunk], schedule: PipelineSchedule, rank: int
    ) -> Iterator[tuple[Action, int, int]]:
        """The actions of a pipeline rank, each with the most bytes of activations during it and those after it."""
        kept = [self._kept(layout, chunk) for chunk in own]
        live = 0
        for action in schedule.actions[rank]:
            chunk, stays = own[action.chunk], kept[action.chunk]
            during = live
            if action.kind is Kind.FORWARD:
                during += chunk.forward_peak + chunk.received
                live += stays
            elif action.kind is Kind.BACKWARD_WEIGHT:
                live -= min(chunk.deferred, stays)
            else:
                live -= stays
                during = live + max(stays, chunk.backward_peak + chunk.received)
                live += min(chunk.deferred, stays) if action.kind is Kind.BACKWARD_INPUT else 0
            yield action, during, live

    def _kept(self, layout: Layout, chunk: _Chunk) -> int:
        """Bytes that a microbatch leaves on the device from forward to backward."""
        stays = chunk.kept + chunk.received
        leaves = layout.activations.leaves(self._device) and layout.recompute != "none"
        return stays - int(layout.activations.fraction * chunk.kept) if leaves else stays

    def _activations_away(self, layout: Layout, chunks: Sequence[_Chunk]) -> int:
        """Bytes of the inputs of blocks that rest elsewhere, of one rank."""
        if not layout.activations.leaves(self._device) or layout.recompute == "none":
            return 0
        most = max(chunk.kept for chunk in chunks) * layout.chunks
        return int(layout.activations.fraction * most) * min(layout.accumulation, layout.pipeline)

    def _pipeline(self, trace: Trace, cut: Sequence[range], layout: Layout) -> _Pipeline:
        """The chunks of all stages. Layouts that differ in other things alone share them."""
        key = (id(trace), len(cut), layout.pipeline, min(self._host, layout.ranks))
        if key not in self._pipelines:
            alike: dict[tuple[int, ...], _Chunk] = {}
            chunks = []
            for stage in range(len(cut)):
                segments = self._subject.segments(trace, stage, cut)
                kinds = tuple(id(segment.forward) for segment in segments)
                if kinds not in alike:
                    alike[kinds] = self._chunk(trace, segments, layout)
                chunks.append(alike[kinds])
            self._pipelines[key] = _Pipeline(chunks=chunks, ranks=layout.pipeline)
        return self._pipelines[key]

    def _chunk(self, trace: Trace, segments: Sequence[Segment], layout: Layout) -> _Chunk:
        base = forward_peak = backward_peak = deferred = 0
        times = [self._segment_seconds(segment, layout) for segment in segments]
        later = segments[0] is not trace.segments[0]
        around = self._around(layout)
        # Each stage makes the masks and positions of its blocks itself.
        prepares = self._segment_seconds(trace.segments[0], layout).forward if later else 0.0
        for segment in segments:
            forward_peak = max(forward_peak, base + segment.forward_peak)
            backward_peak = max(backward_peak, base + segment.backward_peak)
            base += segment.kept
            deferred += _inputs_and_gradients(segment.forward)
        exchanges = sum(each.forward_exchanges + each.backward_exchanges for each in times)
        return _Chunk(
            kept=base,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            deferred=deferred,
            received=trace.segments[1].output if later else 0,
            forward=around + prepares + sum(each.forward + each.forward_exchanges for each in times),
            backward=around + sum(each.backward + each.backward_exchanges for each in times),
            weights=sum(each.weights for each in times),
            exchanges=exchanges,
        )

    # Seconds

    def _segment_seconds(self, segment: Segment, layout: Layout) -> _SegmentSeconds:
        busy = min(self._host, layout.ranks)
        key = (id(segment.forward), id(segment.backward), busy)
        if key not in self._seconds:
            machine, forward, backward = self._machine, segment.forward, segment.backward
            weights = Work(products=tuple(each for each in forward.products if each[0].batch == 1))
            computes = [machine.work_seconds(work, ranks_on_host=busy) for work in (forward, backward, weights)]
            exchanges = [
                sum(
                    count * self._collective_seconds(each.kind, each.nbytes, ranks=layout.tensor)
                    for each, count in work.exchanges
                )
                + self._waits(sum(count for _, count in work.exchanges), computing, layout)
                for work, computing in ((forward, computes[0]), (backward, computes[1]))
            ]
            self._seconds[key] = _SegmentSeconds(
                forward=computes[0],
                backward=computes[1],
                weights=computes[2],
                forward_exchanges=exchanges[0],
                backward_exchanges=exchanges[1],
            )
        return self._seconds[key]

    def _phases(
        self,
        layout: Layout,
        options: ZeroOptions,
        pipeline: _Pipeline,
        found: Sequence[tuple[int, Mapping[str, int], MemoryModel, StageUnits]],
        *,
        exact: bool,
    ) -> tuple[dict[PlanPhase, float], float]:
        """Seconds by phase, and the part of the step that is bubble."""
        count = layout.accumulation
        own = pipeline.of_rank(pipeline.busy.index(max(pipeline.busy)))
        forward, backward = (count * sum(getattr(each, name) for each in own) for name in ("forward", "backward"))
        exchanges = count * sum(each.exchanges for each in own)
        share = exchanges / (forward + backward) if forward + backward else 0.0
        length = self._pipeline_seconds(layout, pipeline, exact=exact) if layout.pipeline > 1 else forward + backward
        compute = (forward + backward) - exchanges
        distinct = {id(units): (memory, units) for _, _, memory, units in found}.values()
        data = [self._data_seconds(layout, options, memory, units, compute) for memory, units in distinct]
        updates = [self._update_seconds(layout, options, units) for _, units in distinct]
        optimizer, offload = max(updates, key=sum)
        phases = {
            PlanPhase.FORWARD: forward * (1 - share),
            PlanPhase.BACKWARD: backward * (1 - share),
            PlanPhase.TENSOR: exchanges,
            PlanPhase.DATA: max(data),
            PlanPhase.PIPELINE: length - forward - backward,
            PlanPhase.OPTIMIZER: optimizer,
            PlanPhase.OFFLOAD: offload,
        }
        bubble = 1 - (forward + backward) / length if length else 0.0
        return {phase: seconds for phase, seconds in phases.items() if seconds > 0}, max(0.0, bubble)

    def _pipeline_seconds(self, layout: Layout, pipeline: _Pipeline, *, exact: bool) -> float:
        """Seconds of all forwards and backwards of a step."""
        if not exact:
            return pipeline.bound(layout.accumulation, self._transfer(layout, pipeline))
        return self._timeline(layout, pipeline).duration

    def _transfer(self, layout: Layout, pipeline: _Pipeline) -> float:
        """Seconds in which a microbatch goes from a stage to the next one."""
        hidden = max(each.received for each in pipeline.chunks)
        across = layout.data * layout.tensor >= self._host
        hosts = 2 if across and layout.ranks > self._host else 1
        transfer = self._collective_seconds(Collective.POINT_TO_POINT.value, hidden, ranks=2, hosts=hosts)
        mean = sum(each.forward + each.backward for each in pipeline.chunks) / (2 * len(pipeline.chunks))
        return transfer + self._waits(1, mean, layout)

    def _timeline(self, layout: Layout, pipeline: _Pipeline) -> Timeline:
        """When each rank does what."""
        chunks, ranks, around = pipeline.chunks, layout.pipeline, self._around(layout)

        def seconds(rank: int, action: Action) -> float:
            chunk = chunks[action.chunk * ranks + rank]
            if action.kind is Kind.FORWARD:
                return chunk.forward
            if action.kind is Kind.BACKWARD:
                return chunk.backward
            if action.kind is Kind.BACKWARD_WEIGHT:
                return chunk.weights + around
            return chunk.backward - chunk.weights

        schedule = _schedule(layout.schedule, ranks, layout.accumulation, layout.chunks)
        return simulate(schedule, seconds, transfer=self._transfer(layout, pipeline) if ranks > 1 else 0.0)

    def _around(self, layout: Layout) -> float:
        """Seconds of the engine and the loop around forward, or around backward, of a microbatch."""
        machine = self._machine
        launches = _AROUND * machine.device.launch_seconds if machine.is_cpu else 0.0
        return launches * machine.crowding(min(self._host, layout.ranks))

    def _waits(self, exchanges: int, computing: float, layout: Layout) -> float:
        """Seconds in which ranks of a host wait for each other at so many exchanges in as many seconds of computing."""
        each = self._machine.waiting_seconds(min(self._host, layout.ranks), computing / max(1, exchanges))
        return exchanges * each

    def _hosts(self, layout: Layout) -> int:
        """Hosts over which ranks with the same states are spread."""
        return max(1, math.ceil(layout.tensor * layout.shard / self._host))

    def _data_seconds(
        self, layout: Layout, options: ZeroOptions, memory: MemoryModel, units: StageUnits, compute: float
    ) -> float:
        """Seconds of gathers and reductions between data ranks that are not hidden behind `compute` seconds."""
        machine, shard, hosts = self._machine, layout.shard, self._hosts(layout)
        total = 0.0
        on_device = not machine.is_cpu
        wire = sum(
            whole * options.wire_dtype(dtype, on_device=on_device).itemsize
            for dtype, (whole, _) in units.trained.items()
        )

        def moved(kind: Collective, nbytes: float, ranks: int, spread: int) -> float:
            # One exchange for each unit.
            number = max(1, len(units.layouts))
            each = self._collective_seconds(kind.value, nbytes / number, ranks=ranks, hosts=spread)
            return number * each + self._waits(number, compute / layout.accumulation, layout)

        total += layout.accumulation * self._sum_seconds(options, units, shard)
        each = 1 if layout.stage < 2 or options.reduce_once else layout.accumulation
        if shard > 1:
            kind = Collective.ALL_REDUCE if layout.stage == 0 else Collective.REDUCE_SCATTER
            total += each * moved(kind, wire, shard, hosts)
            if layout.stage == 3 and memory.gathered:
                total += 2 * layout.accumulation * moved(Collective.ALL_GATHER, units.gathered_bytes, shard, hosts)
            elif layout.stage in (1, 2) and machine.transport(hosts) != "shared":
                total += moved(Collective.ALL_GATHER, units.gathered_bytes, shard, hosts)
        if layout.replicate > 1:
            spread = max(1, min(layout.replicate, layout.data * layout.tensor // self._host))
            total += moved(Collective.ALL_REDUCE, wire / (shard if layout.stage else 1), layout.replicate, spread)
        if machine.is_cpu:
            return total
        # The first gather and the last reduction have nothing beside them.
        least = total / max(1, len(units.layouts) * layout.accumulation)
        return max(total - compute, min(total, least))

    def _sum_seconds(self, options: ZeroOptions, units: StageUnits, shard: int) -> float:
        """Seconds in which a rank adds the gradients of a microbatch to the sum of a step, or puts them where they are reduced."""
        moved = 0.0
        sums = options.precision.sums.itemsize
        for dtype, (whole, own) in units.trained.items():
            if shard == 1 or options.sums_before_reducing:
                moved += whole * (dtype.itemsize + sums * (2 if options.accumulation > 1 else 1))
            else:
                moved += whole * 2 * dtype.itemsize + own * sums * (2 if options.accumulation > 1 else 1)
        return self._machine.moved_seconds(moved)

    def _update_seconds(self, layout: Layout, options: ZeroOptions, units: StageUnits) -> tuple[float, float]:
        """Seconds of the update of what a rank owns, and those for which it waits for tiers besides."""
        machine, busy = self._machine, min(self._host, layout.ranks)
        whole = options.placements.optimizer is Placement.REPLICATED
        own = sum(each[0 if whole else 1] for each in units.trained.values())
        moments = len(moment_names(options.optimizer))
        width = options.precision.master.itemsize
        choice = options.offload.optimizer
        away = choice.fraction * own if choice.leaves(self._device) else 0.0
        here = machine.update_seconds(own - away, moments=moments, ranks_on_host=busy)
        norm = machine.moved_seconds(own * width)
        if not away:
            return here + norm, 0.0
        states = away * width * (1 + moments)
        on_host = machine.update_seconds(away, moments=moments, on="host", ranks_on_host=busy)
        if machine.is_cpu:
            streamed = machine.disk_seconds(states, states, ranks_on_host=busy)
            return here + norm + on_host, max(0.0, streamed - on_host)
        through = machine.copy_seconds(away * width) + machine.copy_seconds(away * 2, to="device") + on_host
        on_device = machine.copy_seconds(2 * states) + machine.update_seconds(away, moments=moments, ranks_on_host=busy)
        moved = min(through, on_device)
        if choice.tier == "file":
            moved = max(moved, machine.disk_seconds(states, states, ranks_on_host=busy))
        return here + norm, moved


def _inputs_and_gradients(work: Work) -> int:
    """Bytes of the inputs of linear layers and of the gradients of their outputs."""
    width = {"float64": 8, "float32": 4}
    return sum(
        count * product.rows * (product.inner + product.columns) * width.get(product.dtype, 2)
        for product, count in work.products
        if product.batch == 1
    )


@lru_cache(4096)
def _schedule(name: ScheduleName, ranks: int, microbatches: int, chunks: int) -> PipelineSchedule:
    return make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
