"""The estimate of a layout: bytes by tier and purpose of the rank with the most, and seconds of a step by phase.

    bytes      states by `zero/memory_model.py`, activations of the trace over the schedule's microbatches in flight, and libraries
    seconds    the work of each stage at the machine's rates, combined by the simulator of schedules; communication between data
               ranks as far as it is not hidden; the update; transfers from and to tiers

On an accelerator, gathers and reductions overlap with computing, and only the excess counts. On CPUs the same cores compute and
communicate, so both count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from zeromesh.offload import STAGING_BYTES, Purpose, TierChoice
from zeromesh.optim.fused_optimizer import moment_names
from zeromesh.options import STAGING_SHARE, Placement, ZeroOptions
from zeromesh.pipeline.schedule import Kind, PipelineSchedule
from zeromesh.telemetry.step_recorder import Collective, StepPhase
from zeromesh.trainer.monitoring.plan_check import PlanCheck
from zeromesh.trainer.planning.layouts import TIERS, Layout
from zeromesh.trainer.planning.machine import Machine
from zeromesh.trainer.planning.stage_times import Chunk, StageChunks, StageTimes, schedule_of
from zeromesh.trainer.planning.subject import StageUnits, Subject
from zeromesh.zero.memory_model import MemoryModel, predict_layouts

LIBRARY, GATHERED, ACTIVATIONS = "libraries", "parameters around their use", "activations"
"""Purposes of bytes that the ledger does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A layout with its estimated memory and time. Bytes are of the rank with the most."""

    layout: Layout
    device: Mapping[str, int]
    """Bytes by purpose in the memory of the compute device."""
    host: Mapping[str, int]
    """Bytes by purpose in the host's memory beside an accelerator, per rank."""
    disk: int
    """Bytes of swap files, per rank."""
    phases: Mapping[StepPhase, float] = field(default_factory=dict)
    """Seconds of a step by phase. Idle time of pipeline stages counts as communication."""
    bubble: float = 0.0
    """The pipeline bubble as a fraction of the step."""
    rank: int = 0
    """The pipeline rank with the most bytes."""

    @property
    def device_bytes(self) -> int:
        """The peak bytes on the device."""
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory beside an accelerator, per rank."""
        return sum(self.host.values())

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
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


_ESTIMATED_RANKS = 4
"""The number of pipeline ranks whose memory is estimated: the first ones and the last one."""
_PEAK_ROUNDS = 4
"""The rounds of microbatches after which memory has reached its peak."""


class Estimator:
    """Estimates the memory and the seconds of layouts of one subject on one machine."""

    def __init__(self, subject: Subject, machine: Machine, host: int) -> None:
        """`host` is the number of ranks per host."""
        self._subject, self._machine, self._host = subject, machine, host
        self._device = torch.device(machine.device.kind)
        self._times = StageTimes(subject, machine, host)
        self._memory: dict[object, MemoryModel] = {}
        self._peaks: dict[object, int] = {}
        self._options = cache(partial(self._options_of, zero=subject.zero))

    def options(self, layout: Layout) -> ZeroOptions:
        """Return the engine's options for a layout."""
        tiers = {name: getattr(layout, name) for name in TIERS}
        # Cached by the fields that matter.
        return self._options(
            Layout(stage=layout.stage, accumulation=layout.accumulation, prefetch=layout.prefetch, **tiers)
        )

    def _options_of(self, layout: Layout, zero: ZeroOptions) -> ZeroOptions:
        offload = replace(
            zero.offload,
            optimizer=layout.optimizer,
            parameters=layout.parameters if layout.gathers else TierChoice(),
            activations=layout.activations,
            staging_bytes=self._staging(zero),
        )
        return replace(
            zero, stage=layout.stage, accumulation=layout.accumulation, prefetch=layout.prefetch, offload=offload
        )

    def _staging(self, zero: ZeroOptions) -> int | None:
        given = zero.offload.staging_bytes
        if given is not None or self._machine.is_cpu:
            return given
        return max(STAGING_BYTES, self._machine.device.memory_bytes // STAGING_SHARE)

    def estimate(self, layout: Layout, *, exact: bool = True) -> Estimate:
        """Estimate a layout. Without `exact` a pipeline's time is a lower bound without simulation.

        Raises:
            ConfigError, LayoutError: for a layout that the model does not allow, or a machine without the required figures.
        """
        subject, options = self._subject, self.options(layout)
        trace = subject.trace(layout.tensor, layout.micro, sequence=layout.sequence, recompute=layout.recompute)
        cut = subject.cut(layout.pipeline * layout.chunks)
        ranks = layout.pipeline
        looked_at = sorted({*range(min(ranks, _ESTIMATED_RANKS)), ranks - 1})
        pipeline = self._times.stages(trace, cut, layout)
        chunks = pipeline.chunks
        found: list[tuple[int, dict[str, int], MemoryModel, StageUnits]] = []
        # After a few rounds of microbatches a schedule is periodic.
        few = min(layout.accumulation, _PEAK_ROUNDS * layout.pipeline * layout.chunks)
        schedule = schedule_of(layout.schedule, ranks, few, layout.chunks)
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
        away = self._offloaded_activations(layout, chunks)
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

    def _states(self, layout: Layout, options: ZeroOptions, units: StageUnits) -> MemoryModel:
        transport = "local" if layout.shard == 1 else self._machine.transport(self._hosts(layout))
        tiers = layout.optimizer, layout.parameters
        key = (id(units), transport, layout.stage, layout.accumulation > 1, layout.prefetch, *tiers)
        if key not in self._memory:
            self._memory[key] = predict_layouts(units.layouts, options, layout.shard, transport, self._device)
        return self._memory[key]

    def _bytes(
        self,
        layout: Layout,
        options: ZeroOptions,
        memory: MemoryModel,
        own: Sequence[Chunk],
        schedule: PipelineSchedule,
        rank: int,
    ) -> dict[str, int]:
        device = {purpose.value: nbytes for purpose, nbytes in memory.terms.items()}
        gradients = device.pop(Purpose.GRADIENTS.value, 0)
        stay = options.gradients_stay(self._device)
        activations = self._activations(layout, own, schedule, rank)
        # Gradient shards reuse the blocks that freed activations return to an accelerator's allocator. The C
        # library's heap on a CPU seldom can.
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

    def _activations(self, layout: Layout, own: Sequence[Chunk], schedule: PipelineSchedule, rank: int) -> int:
        shape = (schedule.name, schedule.ranks, schedule.microbatches)
        key = (shape, rank, tuple(map(id, own)), layout.activations, layout.recompute)
        if key in self._peaks:
            return self._peaks[key]
        kept = [self._kept(layout, chunk) for chunk in own]
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
        self._peaks[key] = most
        return most

    def _kept(self, layout: Layout, chunk: Chunk) -> int:
        stays = chunk.kept + chunk.received
        leaves = layout.activations.leaves(self._device) and layout.recompute != "none"
        return stays - int(layout.activations.fraction * chunk.kept) if leaves else stays

    def _offloaded_activations(self, layout: Layout, chunks: Sequence[Chunk]) -> int:
        if not layout.activations.leaves(self._device) or layout.recompute == "none":
            return 0
        most = max(chunk.kept for chunk in chunks) * layout.chunks
        return int(layout.activations.fraction * most) * min(layout.accumulation, layout.pipeline)

    def _phases(
        self,
        layout: Layout,
        options: ZeroOptions,
        pipeline: StageChunks,
        found: Sequence[tuple[int, Mapping[str, int], MemoryModel, StageUnits]],
        *,
        exact: bool,
    ) -> tuple[dict[StepPhase, float], float]:
        count = layout.accumulation
        own = pipeline.of_rank(pipeline.busy.index(max(pipeline.busy)))
        forward, backward = (count * sum(getattr(each, name) for each in own) for name in ("forward", "backward"))
        exchanges = count * sum(each.exchanges for each in own)
        share = exchanges / (forward + backward) if forward + backward else 0.0
        length = self._times.length(layout, pipeline, exact=exact) if layout.pipeline > 1 else forward + backward
        compute = (forward + backward) - exchanges
        distinct = {id(units): (memory, units) for _, _, memory, units in found}.values()
        data = [self._data_seconds(layout, options, memory, units, compute) for memory, units in distinct]
        updates = [self._update_seconds(layout, options, units) for _, units in distinct]
        optimizer, offload = max(updates, key=sum)
        away = max(self._offload_seconds(layout, options, pipeline, units, compute) for _, units in distinct)
        phases = {
            StepPhase.FORWARD: forward * (1 - share),
            StepPhase.BACKWARD: backward * (1 - share),
            StepPhase.COMMUNICATION: exchanges + max(data) + length - forward - backward,
            StepPhase.OPTIMIZER: optimizer,
            StepPhase.OFFLOAD_WAIT: offload + away,
        }
        bubble = 1 - (forward + backward) / length if length else 0.0
        return {phase: seconds for phase, seconds in phases.items() if seconds > 0}, max(0.0, bubble)

    def _hosts(self, layout: Layout) -> int:
        return max(1, math.ceil(layout.tensor * layout.shard / self._host))

    def _data_seconds(
        self, layout: Layout, options: ZeroOptions, memory: MemoryModel, units: StageUnits, compute: float
    ) -> float:
        """Return the seconds of collectives between data ranks that are not hidden behind `compute` seconds."""
        machine, shard, hosts = self._machine, layout.shard, self._hosts(layout)
        busy, total = min(self._host, layout.ranks), 0.0
        on_device = not machine.is_cpu
        wire = sum(
            whole * options.wire_dtype(dtype, on_device=on_device).itemsize
            for dtype, (whole, _) in units.trained.items()
        )

        def moved(kind: Collective, nbytes: float, ranks: int, spread: int) -> float:
            # One collective per unit.
            number = max(1, len(units.layouts))
            return number * self._times.collective_seconds(
                kind.value, nbytes / number, ranks=ranks, hosts=spread, ranks_on_host=busy
            )

        total += layout.accumulation * self._sum_seconds(options, units, shard, busy)
        each = 1 if options.placements.accumulating is Placement.PARTIAL else layout.accumulation
        whole = options.placements.gradients is Placement.REPLICATED
        if shard > 1:
            kind = Collective.ALL_REDUCE if whole else Collective.REDUCE_SCATTER
            total += each * moved(kind, wire, shard, hosts)
            if memory.gathered:
                total += 2 * layout.accumulation * moved(Collective.ALL_GATHER, units.gathered_bytes, shard, hosts)
            elif not whole and machine.transport(hosts) != "shared":
                total += moved(Collective.ALL_GATHER, units.gathered_bytes, shard, hosts)
        if layout.replicate > 1:
            spread = max(1, min(layout.replicate, layout.data * layout.tensor // self._host))
            total += moved(Collective.ALL_REDUCE, wire / (1 if whole else shard), layout.replicate, spread)
        if machine.is_cpu:
            return total
        # The first gather and the last reduction overlap with nothing.
        least = total / max(1, len(units.layouts) * layout.accumulation)
        return max(total - compute, min(total, least))

    def _sum_seconds(self, options: ZeroOptions, units: StageUnits, shard: int, busy: int) -> float:
        """Return the seconds in which a rank accumulates a microbatch's gradients, or copies them to buckets for reduction."""
        moved = 0.0
        sums = options.precision.sums.itemsize
        for dtype, (whole, own) in units.trained.items():
            if shard == 1 or options.sums_before_reducing:
                moved += whole * (dtype.itemsize + sums * (2 if options.accumulation > 1 else 1))
            else:
                moved += whole * 2 * dtype.itemsize + own * sums * (2 if options.accumulation > 1 else 1)
        return self._machine.moved_seconds(moved, ranks_on_host=busy)

    def _offload_seconds(
        self, layout: Layout, options: ZeroOptions, pipeline: StageChunks, units: StageUnits, compute: float
    ) -> float:
        """Return the seconds of transfers of parameters and activations from and to tiers that are not hidden behind computing."""
        machine, busy, count = self._machine, min(self._host, layout.ranks), layout.accumulation
        offload, hidden, open_ = options.offload, 0.0, 0.0

        def moved(choice: TierChoice, come: float, go: float) -> float:
            if choice.tier == "file":
                return machine.disk_seconds(come, go, ranks_on_host=busy)
            return machine.copy_seconds(come, to="device") + machine.copy_seconds(go)

        if offload.parameters.leaves(self._device):
            trained = sum(own * dtype.itemsize for dtype, (_, own) in units.trained.items())
            resting = units.gathered_bytes / layout.shard
            if not offload.optimizer.leaves(self._device) and options.precision.master != options.precision.compute:
                resting -= trained  # Parameters are made from the master weights on the device.
            seconds = moved(offload.parameters, 2 * count * offload.parameters.fraction * resting, trained)
            hidden, open_ = (seconds, 0.0) if layout.prefetch else (0.0, seconds)
        if layout.recompute != "none" and offload.activations.leaves(self._device):
            kept = max(sum(each.kept for each in pipeline.of_rank(rank)) for rank in range(pipeline.ranks))
            passed = count * offload.activations.fraction * kept
            hidden += moved(offload.activations, passed, passed)
        first = hidden / max(1, len(units.layouts) * count)
        return open_ + max(hidden - compute, first)

    def _update_seconds(self, layout: Layout, options: ZeroOptions, units: StageUnits) -> tuple[float, float]:
        """Return the seconds of the update of a rank's shards, and the further seconds of waiting for tiers."""
        machine, busy = self._machine, min(self._host, layout.ranks)
        whole = options.placements.optimizer is Placement.REPLICATED
        own = sum(each[0 if whole else 1] for each in units.trained.values())
        moments = len(moment_names(options.optimizer))
        width = options.precision.master.itemsize
        choice = options.offload.optimizer
        away = choice.fraction * own if choice.leaves(self._device) else 0.0
        here = machine.update_seconds(own - away, moments=moments, ranks_on_host=busy)
        norm = machine.moved_seconds(own * width, ranks_on_host=busy)
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
