"""The estimate of a layout: bytes by tier and purpose of the rank with the most, and seconds of a step by phase.

States are those of `zero/memory_model.py`, activations those of the trace, over the schedule's microbatches in flight. On an
accelerator, gathers and reductions overlap with computing, and only the excess counts; on CPUs, whose cores do both, both count.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any

import torch

from zeromesh.flat.layout import UnitLayouts
from zeromesh.offload import STAGING_BYTES, Purpose, TierChoice
from zeromesh.optim.fused_optimizer import moment_dtypes
from zeromesh.options import STAGING_SHARE, Placement, ZeroOptions
from zeromesh.pipeline.schedule import Action, Kind, PipelineSchedule, make_schedule, simulate
from zeromesh.telemetry.step_recorder import Collective, StepPhase
from zeromesh.trainer.data.sampler import shares_by
from zeromesh.trainer.loop.snapshots import ROOM
from zeromesh.trainer.monitoring.plan_check import PlanCheck
from zeromesh.trainer.monitoring.step_stats import MOST_SHARE
from zeromesh.trainer.planning.layouts import Layout
from zeromesh.trainer.planning.machine import Machine
from zeromesh.trainer.planning.subject import Subject
from zeromesh.trainer.planning.tracing.meter import Segment, Work
from zeromesh.trainer.planning.tracing.trace import Trace
from zeromesh.zero.memory_model import MemoryModel

LIBRARY, GATHERED, ACTIVATIONS = "libraries", "parameters around their use", "activations"
"""Purposes of bytes that the ledger does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A layout with its estimated memory and time. Bytes are of the rank with the most."""

    layout: Layout
    device: Mapping[str, int]  # Bytes by purpose in the memory of the compute device.
    host: Mapping[str, int]  # Bytes by purpose in the host's memory beside an accelerator, per rank.
    disk: int  # Bytes of swap files, per rank.
    phases: Mapping[StepPhase, float] = field(default_factory=dict)
    """Seconds of a step by phase. Idle time of pipeline stages counts as communication."""
    bubble: float = 0.0  # The pipeline bubble as a fraction of the step.
    why_not: str = ""  # The reason why it does not fit into memory; empty if it fits.

    @property
    def fits(self) -> bool:
        return not self.why_not

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    def check(self) -> PlanCheck:
        """Return the prediction that a run compares with its measurements."""
        here, beside = (
            {purpose.name.lower(): tier[purpose.value] for purpose in Purpose if purpose.value in tier}
            for tier in (self.device, self.host)
        )
        memory = {"device": here, "host": beside} if beside else {"device": here}
        phases = {str(phase): self.phases.get(phase, 0.0) for phase in StepPhase}
        return PlanCheck(layout=str(self.layout), phases=phases, memory=memory, peak=self.device_bytes)


_OVERHEAD_LAUNCHES = 400
"""Launches that the engine and the loop add to a forward or backward, measured with `scripts/benchmarks/bench_plan.py`."""
_ESTIMATED_RANKS = 4  # The number of first pipeline ranks whose memory is estimated, beside the last one.
_PEAK_ROUNDS = 4  # The rounds of microbatches after which the memory of activations has reached its peak.
_schedule_of = lru_cache(4096)(make_schedule)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A pipeline rank's model chunk, with its costs per microbatch."""

    kept: int
    forward_peak: int
    backward_peak: int
    deferred: int  # Bytes that are kept until the gradients of weights are computed, where a schedule defers that.
    received: int  # Bytes of the hidden states received from the previous stage; 0 in the first chunk.
    forward: float
    backward: float
    weights: float  # Seconds of the part of backward for gradients of weights.
    exchanges: float  # Seconds of exchanges between tensor ranks, which `forward` and `backward` include.


class Estimator:
    def __init__(self, subject: Subject, machine: Machine, host: int) -> None:
        self.subject, self.machine, self.host = subject, machine, host
        self.device = torch.device(machine.device.kind)
        self.collective_seconds = cache(machine.collective_seconds)
        self._memory: dict[object, MemoryModel] = {}
        self._seconds: dict[object, tuple[float, ...]] = {}
        self._stages: dict[object, Sequence[Chunk]] = {}
        self.peaks: dict[object, int] = {}  # Peak bytes of activations by chunks and schedule.

    def estimate(self, layout: Layout, *, exact: bool = True) -> Estimate:
        """Estimate a layout; without `exact` a pipeline's time is a lower bound. Raises `ConfigError` or `LayoutError`."""
        return _LayoutCosts(self, layout).estimate(exact=exact)

    def options(self, layout: Layout) -> ZeroOptions:
        zero, staging = self.subject.zero, self.subject.zero.offload.staging_bytes
        if staging is None and not self.machine.is_cpu:
            staging = max(STAGING_BYTES, self.machine.device.memory_bytes // STAGING_SHARE)
        offload = replace(
            zero.offload,
            optimizer=layout.optimizer,
            parameters=layout.parameters if layout.gathers else TierChoice(),
            activations=layout.activations,
            staging_bytes=staging,
        )
        accumulation, prefetch = layout.accumulation, layout.prefetch
        chosen: dict[str, Any] = {"stage": layout.stage, "replicas": layout.replicas}
        return replace(zero, **chosen, accumulation=accumulation, prefetch=prefetch, offload=offload)

    def memory_model(self, layout: Layout, units: UnitLayouts, transport: str) -> MemoryModel:
        key = (id(units), transport, layout.stage, layout.accumulation > 1, layout.prefetch, layout.optimizer, layout.parameters)
        if key not in self._memory:
            self._memory[key] = MemoryModel(units, self.options(layout), layout.states, transport, self.device)
        return self._memory[key]

    def stages(self, trace: Trace, cut: Sequence[range], layout: Layout) -> Sequence[Chunk]:
        """Return the chunks of all stages in order, cached by the fields of `layout` that affect them."""
        key = (id(trace), len(cut), layout.pipeline, min(self.host, layout.ranks))
        if key not in self._stages:
            stages = [self.subject.segments(trace, stage, cut) for stage in range(len(cut))]
            kinds = [tuple(id(segment.forward) for segment in segments) for segments in stages]
            alike = {kind: self._chunk(trace, stages[kinds.index(kind)], layout) for kind in dict.fromkeys(kinds)}
            self._stages[key] = [alike[kind] for kind in kinds]
        return self._stages[key]

    def _chunk(self, trace: Trace, segments: Sequence[Segment], layout: Layout) -> Chunk:
        base = forward_peak = backward_peak = deferred = 0
        times = [self._segment_seconds(segment, layout) for segment in segments]
        forward, backward, weights, exchanges = map(sum, zip(*times, strict=True))
        later = segments[0] is not trace.segments[0]
        overhead = self.overhead_seconds(layout)
        # Every later stage computes masks and positions again, which the first segment does.
        prepares = self._segment_seconds(trace.segments[0], layout)[0] if later else 0.0
        for segment in segments:
            forward_peak = max(forward_peak, base + segment.forward_peak)
            backward_peak = max(backward_peak, base + segment.backward_peak)
            base += segment.kept
            deferred += sum(product.activation_bytes for product in segment.forward.products)
        return Chunk(
            kept=base,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            deferred=deferred,
            received=trace.segments[1].output if later else 0,
            forward=overhead + prepares + forward,
            backward=overhead + backward,
            weights=weights,
            exchanges=exchanges,
        )

    def _segment_seconds(self, segment: Segment, layout: Layout) -> tuple[float, ...]:
        """Return the seconds of forward and backward, exchanges included, of gradients of weights, and of exchanges alone."""
        ranks = min(self.host, layout.ranks)
        forward, backward = segment.forward, segment.backward
        key = (id(forward), id(backward), ranks)
        if key not in self._seconds:
            weights = Work(products=[each for each in forward.products if each.activation_bytes])
            computes = [self.machine.work_seconds(work, ranks_on_host=ranks) for work in (forward, backward, weights)]
            seconds = partial(self.collective_seconds, ranks_on_host=ranks)
            exchanges = [
                sum(seconds(each.kind, each.nbytes, ranks=each.ranks) for each in work.exchanges) for work in (forward, backward)
            ]
            self._seconds[key] = (computes[0] + exchanges[0], computes[1] + exchanges[1], computes[2], sum(exchanges))
        return self._seconds[key]

    def overhead_seconds(self, layout: Layout) -> float:
        """Return the seconds that the engine and the loop add to forward or to backward of a microbatch; 0 on an accelerator."""
        if not self.machine.is_cpu:
            return 0.0
        return _OVERHEAD_LAUNCHES * self.machine.device.launch_seconds * self.machine.ranks_per_core(min(self.host, layout.ranks))


class _LayoutCosts:
    def __init__(self, known: Estimator, layout: Layout) -> None:
        subject, self._machine, self._device = known.subject, known.machine, known.device
        self._known, self._layout, self._options = known, layout, known.options(layout)
        self._ranks_on_host = min(known.host, layout.ranks)  # The number of ranks that compute on a host.
        self._collective_seconds = partial(known.collective_seconds, ranks_on_host=self._ranks_on_host)
        self._hosts = max(1, math.ceil(layout.tensor * layout.states / known.host))
        """The number of hosts over which the ranks of a shard and tensor group extend."""
        traced = partial(subject.trace, layout.tensor)
        how = layout.sequence, layout.recompute, layout.context
        trace = traced(layout.micro, *how)
        cut, ranks = subject.cut(layout.pipeline * layout.chunks), layout.pipeline
        self._ranks = sorted({*range(min(ranks, _ESTIMATED_RANKS)), ranks - 1})
        self._chunks = known.stages(trace, cut, layout)
        """The chunks of all stages, assigned round-robin to pipeline ranks."""
        self._largest = known.stages(traced(self._largest_share(), *how), cut, layout)
        """The chunks with the most samples that a rank takes in a microbatch."""
        choice = layout.activations
        self._moved_inputs = choice.fraction if choice.leaves_device(self._device) and layout.recompute != "none" else 0.0
        """The fraction of the inputs of recomputed blocks that leave the device."""
        self._transport = "local" if layout.states == 1 else self._machine.transport(self._hosts)
        stages = (tuple(range(rank, len(cut), ranks)) for rank in self._ranks)
        shares = layout.expert, self._options.dividing(layout.replicate)
        every = (subject.stage_units(layout.tensor, own, cut, layout.states, *shares) for own in stages)
        self._memory = [known.memory_model(layout, units, self._transport) for units in every]

    def _largest_share(self) -> int:
        """Return the most samples in a microbatch, by `batch.balance`."""
        balance, layout = self._known.subject.config.batch.balance, self._layout
        if balance == "speed":
            return MOST_SHARE * layout.micro
        if balance == "even" or len(balance) != layout.data:
            return layout.micro
        round_size = layout.micro * layout.data
        return max(shares_by([1 / each for each in balance], round_size, round_size))

    def estimate(self, *, exact: bool) -> Estimate:
        layout, is_cpu = self._layout, self._machine.is_cpu
        every = [(self._bytes(rank, memory), memory) for rank, memory in zip(self._ranks, self._memory, strict=True)]
        device, memory = max(every, key=lambda each: sum(each[0].values()))
        phases, bubble = self._phases(exact=exact)
        host = {purpose.value: nbytes for purpose, nbytes in memory.host_terms.items()}
        disk = sum(memory.files.values())
        kept = max(chunk.kept for chunk in self._largest) * layout.chunks * self._moved_inputs
        away = int(kept) * min(layout.accumulation, layout.pipeline)
        if layout.activations.tier == "host" and not is_cpu:
            host[Purpose.ACTIVATIONS.value] = away
        elif layout.activations.tier == "file":
            disk += away
        if not is_cpu:
            host[LIBRARY] = self._machine.library.host
        in_memory = device if is_cpu else host
        if snapshots := self._snapshots(memory, sum(in_memory.values())):
            in_memory[Purpose.SNAPSHOTS.value] = snapshots
        return Estimate(layout=layout, device=device, host=host, disk=disk, phases=phases, bubble=bubble)

    def _snapshots(self, memory: MemoryModel, others: int) -> int:
        """Return the bytes of snapshots beside `others` in a rank's share of a host's memory; 0 where a run takes none."""
        section, host = self._known.subject.config.recovery, self._machine.host.memory_bytes // self._ranks_on_host
        copied = section.copies > 0 and self._layout.ranks > self._known.host
        takes = copied or section.memory == "snapshots" or (section.memory == "auto" and not self._machine.is_cpu)
        nbytes = (4 if copied else 2) * memory.snapshot
        return nbytes if takes and section.survivors != "end" and nbytes <= ROOM * (host - others) else 0

    def _chunks_of(self, rank: int) -> Sequence[Chunk]:
        return self._chunks[rank :: self._layout.pipeline]

    def _schedule(self, microbatches: int) -> PipelineSchedule:
        layout = self._layout
        return _schedule_of(layout.schedule, ranks=layout.pipeline, microbatches=microbatches, chunks=layout.chunks)

    def _bytes(self, rank: int, memory: MemoryModel) -> dict[str, int]:
        device = {purpose.value: nbytes for purpose, nbytes in memory.terms.items()}
        gradients = device.pop(Purpose.GRADIENTS.value, 0)
        activations, is_cpu = self._activations(rank), self._machine.is_cpu
        # Gradient shards reuse blocks that freed activations return to an accelerator's allocator; a CPU's heap seldom can.
        stay = is_cpu or self._options.gradients_keep_memory(self._device)
        beside = 0 if stay else min(gradients + memory.transit_bytes, activations)
        library = self._machine.library
        device |= {
            GATHERED: memory.gathered,
            Purpose.GRADIENTS.value: gradients + memory.transit_bytes - beside,
            ACTIVATIONS: activations,
            LIBRARY: library.host + library.shared // self._ranks_on_host if is_cpu else library.device,
        }
        return {name: nbytes for name, nbytes in device.items() if nbytes}

    def _activations(self, rank: int) -> int:
        layout, own = self._layout, self._largest[rank :: self._layout.pipeline]
        # After a few rounds of microbatches a schedule is periodic.
        schedule = self._schedule(min(layout.accumulation, _PEAK_ROUNDS * layout.pipeline * layout.chunks))
        shape = (schedule.name, schedule.ranks, schedule.microbatches)
        key = (shape, rank, tuple(map(id, own)), layout.activations, layout.recompute)
        if key not in self._known.peaks:
            kept = [each.kept + each.received - int(self._moved_inputs * each.kept) for each in own]
            live = most = 0
            for action in schedule.actions[rank]:
                chunk, stays = own[action.chunk], kept[action.chunk]
                if action.kind is Kind.FORWARD:
                    most = max(most, live + chunk.forward_peak + chunk.received)
                    live += stays
                elif action.kind is Kind.BACKWARD_WEIGHT:
                    live -= min(chunk.deferred, stays)
                else:
                    live -= stays
                    most = max(most, live + max(stays, chunk.backward_peak + chunk.received))
                    live += min(chunk.deferred, stays) if action.kind is Kind.BACKWARD_INPUT else 0
            self._known.peaks[key] = most
        return self._known.peaks[key]

    def _phases(self, *, exact: bool) -> tuple[dict[StepPhase, float], float]:
        layout, count = self._layout, self._layout.accumulation
        busy = [sum(each.forward + each.backward for each in self._chunks_of(rank)) for rank in range(layout.pipeline)]
        own = self._chunks_of(busy.index(max(busy)))
        forward, backward = (count * sum(getattr(each, name) for each in own) for name in ("forward", "backward"))
        exchanges = count * sum(each.exchanges for each in own)
        # Rows of tokens go to experts and back, in forward, in backward, and where blocks are computed again.
        swaps = count * (6 if layout.recompute == "block" else 4) * self._known.subject.expert_layers / layout.pipeline
        rows = layout.micro * self._known.subject.expert_bytes / layout.context
        swapped = swaps * self._collective_seconds(Collective.ALL_TO_ALL, rows, ranks=layout.expert)
        length = busiest = forward + backward
        share = exchanges / busiest if busiest else 0.0
        if layout.pipeline > 1:
            length = self._pipeline_seconds(busy, exact=exact)
        compute = busiest - exchanges
        distinct = {id(memory): memory for memory in self._memory}.values()
        data = [self._data_seconds(memory, compute) for memory in distinct]
        optimizer, offload = max(map(self._update_seconds, distinct), key=sum)
        phases = {
            StepPhase.FORWARD: forward * (1 - share),
            StepPhase.BACKWARD: backward * (1 - share),
            StepPhase.COMMUNICATION: exchanges + swapped + max(data) + length - busiest,
            StepPhase.OPTIMIZER: optimizer,
            StepPhase.OFFLOAD_WAIT: offload + max(self._offload_seconds(memory, compute) for memory in distinct),
        }
        bubble = 1 - busiest / length if length else 0.0
        return {phase: seconds for phase, seconds in phases.items() if seconds > 0}, max(0.0, bubble)

    def _pipeline_seconds(self, busy: Sequence[float], *, exact: bool) -> float:
        """Return the seconds of all forwards and backwards of a step by its schedule; a microbatch takes rank i `busy[i]` seconds.
        Without `exact` a lower bound: a rank's compute time, and the time before its first and after its last action."""
        layout, chunks, overhead = self._layout, self._chunks, self._known.overhead_seconds(self._layout)
        across = layout.data * layout.context * layout.tensor >= self._known.host and layout.ranks > self._known.host
        received, hosts = max(each.received for each in chunks), 2 if across else 1
        transfer = self._collective_seconds(Collective.POINT_TO_POINT, received, ranks=2, hosts=hosts)
        if not exact:
            times = (each.forward + each.backward - each.weights for each in chunks[: layout.pipeline - 1])
            both = enumerate(zip(busy, accumulate(times, initial=0.0), strict=True))
            return max(layout.accumulation * own + ends + 2 * rank * transfer for rank, (own, ends) in both)
        costs = [
            {
                Kind.FORWARD: each.forward,
                Kind.BACKWARD: each.backward,
                Kind.BACKWARD_INPUT: each.backward - each.weights,
                Kind.BACKWARD_WEIGHT: each.weights + overhead,
            }
            for each in chunks
        ]

        def seconds(rank: int, action: Action) -> float:
            return costs[action.chunk * layout.pipeline + rank][action.kind]

        return simulate(self._schedule(layout.accumulation), seconds, transfer=transfer).duration

    def _data_seconds(self, memory: MemoryModel, compute: float) -> float:
        """Return the seconds of collectives between data ranks that are not hidden behind `compute` seconds."""
        layout, options, is_cpu = self._layout, self._options, self._machine.is_cpu
        shard, count, number = layout.states, layout.accumulation, max(1, len(memory.units))

        def moved(kind: Collective, nbytes: float, ranks: int, hosts: int = self._hosts) -> float:
            # One collective per unit.
            return number * self._collective_seconds(kind, nbytes / number, ranks=ranks, hosts=hosts)

        # A rank accumulates a microbatch's gradients, or copies them to buckets for reduction.
        accumulated = 0.0
        sums = options.precision.sums.itemsize * (2 if options.accumulation > 1 else 1)
        for dtype, (elements, own) in memory.trained.items():
            copies = shard > 1 and not options.sums_before_reducing
            accumulated += elements * dtype.itemsize * (2 if copies else 1) + (own if copies else elements) * sums
        total = count * self._machine.moved_seconds(accumulated, ranks_on_host=self._ranks_on_host)
        each = 1 if options.placements.accumulating is Placement.PARTIAL else count
        whole = options.placements.gradients is Placement.REPLICATED
        summed = Collective.ALL_REDUCE if whole else Collective.REDUCE_SCATTER
        gathers = 2 * count if memory.gathered else int(not whole and self._transport != "shared")
        for ranks, (nbytes, wire) in memory.moved.items():
            total += each * moved(summed, wire, ranks) + gathers * moved(Collective.ALL_GATHER, nbytes, ranks)
        spread = max(1, min(layout.replicate, layout.data * layout.context * layout.tensor // self._known.host))
        held = {dtype: each[0 if whole else 1] for dtype, each in memory.trained.items()}
        summed = Collective.REDUCE_SCATTER if layout.replicas == "divided" else Collective.ALL_REDUCE
        every = self._known.subject.config.parallel.sync_every  # What replicas sum then are master weights.
        width = options.precision.sums.itemsize if every == 1 else options.precision.master.itemsize
        total += moved(summed, sum(held.values()) * width, layout.replicate, spread) / every
        if layout.replicas == "divided":
            values = sum(elements * dtype.itemsize for dtype, elements in held.items())
            total += moved(Collective.ALL_GATHER, values, layout.replicate, spread)
        if is_cpu:
            return total
        # The first gather and the last reduction overlap with nothing.
        return max(total - compute, min(total, total / (number * count)))

    def _offload_seconds(self, memory: MemoryModel, compute: float) -> float:
        """Return the seconds of transfers of parameters and activations from and to tiers that are not hidden behind computing."""
        machine, layout, options, count = self._machine, self._layout, self._options, self._layout.accumulation
        offload, hidden, open_ = options.offload, 0.0, 0.0

        def moved(choice: TierChoice, come: float, go: float) -> float:
            if choice.tier == "file":
                return machine.disk_seconds(come, go, ranks_on_host=self._ranks_on_host)
            return machine.copy_seconds(come, to="device") + machine.copy_seconds(go)

        if offload.parameters.leaves_device(self._device):
            trained = sum(own * dtype.itemsize for dtype, (_, own) in memory.trained.items())
            resting, written, roles = memory.parameters / layout.states, trained, options.precision
            if not offload.optimizer.leaves_device(self._device) and roles.master != roles.compute:
                # Trained parameters are cast from the master weights on the device, and rest nowhere else.
                resting, written = resting - trained, 0
            seconds = moved(offload.parameters, 2 * count * offload.parameters.fraction * resting, written)
            hidden, open_ = (seconds, 0.0) if layout.prefetch else (0.0, seconds)
        if self._moved_inputs:
            kept = max(sum(each.kept for each in self._chunks_of(rank)) for rank in range(layout.pipeline))
            passed = count * self._moved_inputs * kept
            hidden += moved(offload.activations, passed, passed)
        return open_ + max(hidden - compute, hidden / max(1, len(memory.units) * count))

    def _update_seconds(self, memory: MemoryModel) -> tuple[float, float]:
        """Return the seconds of the update of a rank's shards, and the further seconds of waiting for tiers."""
        machine, options, ranks = self._machine, self._options, self._ranks_on_host
        whole = options.placements.optimizer is Placement.REPLICATED
        shards = sum(each[0 if whole else 1] for each in memory.trained.values())
        own = shards / options.dividing(self._layout.replicate)
        moments = len(moment_dtypes(options.optimizer, options.precision.sums))
        width = options.precision.master.itemsize
        choice = options.offload.optimizer
        away = choice.fraction * own if choice.leaves_device(self._device) else 0.0
        here = machine.update_seconds(own - away, moments=moments, ranks_on_host=ranks)
        norm = machine.moved_seconds(own * width, ranks_on_host=ranks)
        states = away * width * (1 + moments)
        on_host = machine.update_seconds(away, moments=moments, on="host", ranks_on_host=ranks)
        if machine.is_cpu:
            return here + norm + on_host, max(0.0, machine.disk_seconds(states, states, ranks_on_host=ranks) - on_host)
        through = machine.copy_seconds(away * width) + machine.copy_seconds(away * 2, to="device") + on_host
        moved = min(through, machine.copy_seconds(2 * states) + machine.update_seconds(away, moments=moments, ranks_on_host=ranks))
        if choice.tier == "file":
            moved = max(moved, machine.disk_seconds(states, states, ranks_on_host=ranks))
        return here + norm, moved
