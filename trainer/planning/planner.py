"""The plan: every layout that a number of ranks allows, those that fit first, and the fastest of them first."""

import math
from bisect import insort
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from zeromesh.errors import ConfigError, LayoutError, counted
from zeromesh.offload import TierChoice
from zeromesh.offload.tiers import TierName
from zeromesh.settings.keys import ScheduleName
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.models.prepare import Mode
from zeromesh.trainer.planning.estimate import Estimate, Estimator
from zeromesh.trainer.planning.layouts import TIERS, Layout
from zeromesh.trainer.planning.machine import Machine
from zeromesh.trainer.planning.subject import Subject
from zeromesh.zero.memory_model import MemoryBytes

_SIMULATED = 48  # The number of layouts whose schedules are simulated; the others are sorted by lower bounds.
_FRAGMENTATION = 0.05  # The fraction of an accelerator's memory lost to fragmentation.
_ENOUGH_FITTING = 12
"""The number of fitting layouts with offload, faster than all remaining candidates, after which the search ends."""
_FRACTIONS = (0.25, 0.5, 0.75, 1.0)  # The candidate fractions of states that are offloaded.
_LEAST_PIECE = 4096  # The fewest tokens of a piece of a sequence that context ranks share.
_MICROS = (1, 2, 4, 8, 16, 32, 64)  # The candidate microbatch sizes, in samples.
GIB = 1 << 30
_DISK_BYTES = 1 << 42  # of a machine whose file has a disk, but not its size


def memory_per_rank(machine: Machine, ranks_on_host: int) -> MemoryBytes:
    """Return the bytes on device, host and disk that a machine has for each of `ranks_on_host` ranks."""
    each, disk = machine.host.memory_bytes // ranks_on_host, _DISK_BYTES if machine.disk else 0
    device = 0 if machine.is_cpu else int(machine.device.memory_bytes * (1 - _FRAGMENTATION))
    return MemoryBytes(device=device, host=each, disk=disk)


def why_not(estimate: Estimate, room: MemoryBytes) -> str:
    """Return the reason why a layout exceeds the memory `room` of a rank, in bytes of a tier; empty if it fits."""
    here, beside = estimate.device_bytes, estimate.host_bytes
    device, host = (here, beside) if room.device else (0, here)
    short = MemoryBytes(device=device, host=host, disk=estimate.disk).beyond(room)
    if short == ("device" if room.device else "host"):
        largest = max(estimate.device, key=lambda name: estimate.device[name])
        most = f"most of it {largest} ({human_bytes(estimate.device[largest])})"
        return f"{human_bytes(here)} of {human_bytes(room.critical)}, {most}"
    if short == "host":
        return f"{human_bytes(beside)} of the host's memory for each rank, of {human_bytes(room.host)}"
    return f"{human_bytes(estimate.disk)} of disk, of {human_bytes(room.disk)}" if short else ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The layouts of a subject on a machine: those that fit, the fastest first, then the others."""

    subject: str
    parameters: int
    machine: str
    ranks: int
    room: MemoryBytes
    rows: Sequence[Estimate]
    refused: Mapping[str, str] = field(default_factory=dict)
    """The first refused layout by the reason why a run refuses such layouts."""

    @cached_property
    def least(self) -> Estimate:
        """The row with the fewest device bytes, of those that fit or, where none fits, of all."""
        return min([row for row in self.rows if row.fits] or self.rows, key=lambda row: row.device_bytes)

    @property
    def best(self) -> Estimate | None:
        return self.rows[0] if self.rows and self.rows[0].fits else None


class Planner:
    def __init__(
        self, subject: Subject, machine: Machine, *, host: int | None = None, fixed: Mapping[str, Any] | None = None
    ) -> None:
        """`host`: ranks per host, by default the machine's. `fixed`: the fields of layouts that the user has set."""
        self._subject, self._machine = subject, machine
        self._host = host or machine.host.devices
        self._fixed = dict(fixed or {})
        self._estimator = Estimator(subject, machine, self._host)
        self._refused: dict[str, str] = {}

    def plan(self, ranks: int) -> Plan:
        """Estimate every layout. Raises `ConfigError` for `ranks` that fill no hosts or have no layout, else `LayoutError`."""
        host = self._host
        if ranks > host and ranks % host:
            raise ConfigError(f"{ranks} ranks do not fill hosts of {host}; give a multiple of it, or another --host")
        self._subject.cut(1)  # Other layouts that cannot be traced are refused alone.
        room = memory_per_rank(self._machine, min(ranks, host))
        if self._machine.disk is None:
            reason = "the machine has no disk; add disk with read and written (bytes a second) to its file"
            self._refused.setdefault(reason, "states on files")
        rows = list(self._rows(self._layouts(ranks), room))
        if not rows:
            reasons = "; ".join(f"{layout}: {reason}" for reason, layout in self._refused.items())
            given = ", ".join(f"{name} {value}" for name, value in self._fixed.items())
            why = (f" with {given}" if given else "") + (f" ({reasons})" if reasons else "")
            raise ConfigError(f"no layout has {counted(ranks, 'rank')}{why}")
        rows += self._offloaded(rows, room)
        fitting = sorted((row for row in rows if row.fits), key=_sort_key)
        first = [self._estimator.estimate(row.layout) for row in fitting[:_SIMULATED]]
        others = sorted((row for row in rows if not row.fits), key=lambda row: row.device_bytes)
        return Plan(
            subject=self._subject.model_name,
            parameters=self._subject.parameters,
            machine=self._machine.name,
            ranks=ranks,
            room=room,
            rows=[*sorted(first, key=_sort_key), *fitting[_SIMULATED:], *others],
            refused=dict(self._refused),
        )

    def _layouts(self, ranks: int) -> Iterator[Layout]:
        """Yield every layout without offload, those with fewer tensor ranks and stages first."""
        subject, host, batch = self._subject, self._host, self._subject.config.batch
        samples = -(-batch.global_size // subject.rows)
        sizes = self._choices("tensor", _divisors(min(ranks, host)))
        tensors = [size for size in sizes if self._accepts_mesh(f"tensor {size}", tensor=size)]
        blocks = subject.blocks if ranks > 1 and self._accepts_mesh("pipeline", pipeline=2) else 0
        pipelines = self._choices("pipeline", [size for size in _divisors(ranks) if size == 1 or size <= blocks])
        sequence = len(tensors) > 1 and subject.can_trace(2, sequence=True)
        # Shares of short sequences would save little memory.
        longest = subject.config.data.sequence_length // (2 * _LEAST_PIECE)
        sizes = self._choices("context", [size for size in _divisors(min(ranks, host)) if size == 1 or size <= longest])
        contexts = [size for size in sizes if size == 1 or subject.can_trace(1, context=size)]
        modes: tuple[Mode, ...] = ("none", "selective", "block") if subject.can_trace(1, recompute="block") else ("none",)
        meshes = [
            Layout(
                pipeline=pipeline,
                replicate=replicate,
                shard=ranks // (tensor * context * pipeline * replicate),
                context=context,
                tensor=tensor,
                sequence=self._fixed.get("sequence", tensor > 1 and sequence),
                **{name: self._fixed[name] for name in (*TIERS, "prefetch") if name in self._fixed},
            )
            for tensor, context, pipeline in product(tensors, contexts, pipelines)
            if ranks % (tensor * context * pipeline) == 0 and tensor * context <= host
            for replicate in self._replicas(ranks // (tensor * context * pipeline), tensor * context)
        ]
        spread = self._choices("expert", subject.expert_sizes(min(ranks, host)))
        meshes = [replace(mesh, expert=size) for mesh in meshes for size in spread if mesh.states % size == 0]
        divides = not (subject.zero.optimizer_in_backward or subject.zero.outer or subject.needs_whole)
        for mesh in meshes:
            stages = (3,) if mesh.parameters.uses_tier else (0, 1, 2, 3) if mesh.states > 1 else (1,)
            sizes = (1,) if batch.tokens is not None else _MICROS
            micros = [size for size in sizes if size * mesh.data <= samples] or [1]
            recomputes = modes[1:] if len(modes) > 1 and mesh.activations.uses_tier else modes
            for stage, micro, recompute in product(
                self._choices("stage", stages), self._choices("micro", micros), self._choices("recompute", recomputes)
            ):
                accumulation = -(-samples // (micro * mesh.data))
                schedules = self._schedules(mesh.pipeline, accumulation, blocks)
                # Divided states take less memory and less traffic.
                usual = "divided" if mesh.replicate > 1 and stage and divides else "whole"
                for replicas, (schedule, chunks) in product(self._choices("replicas", (usual,)), schedules):
                    chosen = {"stage": stage, "micro": micro, "accumulation": accumulation, "recompute": recompute}
                    yield replace(mesh, schedule=schedule, chunks=chunks, replicas=replicas, **chosen)

    def _replicas(self, data: int, inner: int) -> list[int]:
        """Return the numbers of replicas to try: one, one on each host, or one on each group of 8 hosts."""
        shard, replicas = self._fixed.get("shard", "auto"), self._fixed.get("replicate")
        if replicas is None and shard == "auto":
            inside = max(1, self._host // inner)
            return sorted({data // size for size in (inside, 8 * inside) if data % size == 0 and size < data} | {1})
        replicas = replicas or data // shard
        return [replicas] if replicas and data % replicas == 0 and shard in ("auto", data // replicas) else []

    def _schedules(self, pipeline: int, accumulation: int, blocks: int) -> Sequence[tuple[ScheduleName, int]]:
        if pipeline == 1:
            return [("1f1b", 1)]
        if "schedule" in self._fixed:
            return [(self._fixed["schedule"], self._fixed.get("chunks", 1))]
        chunks = [size for size in (2, 4, 8) if size * pipeline <= blocks and accumulation >= pipeline]
        return [("1f1b", 1), ("zero_bubble", 1), *(("interleaved", size) for size in chunks)]

    def _offload_options(self, layout: Layout, tiers: Sequence[TierName]) -> Iterator[Sequence[dict[str, Any]]]:
        """Yield, for each kind of state that can be offloaded, the possible changes of a layout, from most to fewest device bytes.
        Parameters are offloaded at stage 3 alone, which on one rank of the shard axis equals the others."""
        parts, fixed = [TierChoice(tier=tier, fraction=each) for tier in tiers for each in _FRACTIONS], self._fixed
        if "optimizer" not in fixed:
            yield [{}, *({"optimizer": choice} for choice in parts)]
        if "activations" not in fixed and layout.recompute != "none":
            yield [{}, *({"activations": choice} for choice in parts[3::4])]
        if layout.gathers or (layout.states == 1 and "stage" not in fixed):
            if "parameters" not in fixed:
                yield [{}, *({"parameters": choice, "stage": 3} for choice in parts[1::2])]
            if "prefetch" not in fixed:
                yield [{}, {"prefetch": 0}]

    def _choices(self, name: str, choices: Sequence[Any]) -> Sequence[Any]:
        return (self._fixed[name],) if name in self._fixed else choices

    def _accepts_mesh(self, kind: str, **axes: int) -> bool:
        if reason := self._subject.mesh_refusal(**axes):
            self._refused.setdefault(reason, kind)
        return not reason

    def _rows(self, layouts: Iterable[Layout], room: MemoryBytes) -> Iterator[Estimate]:
        for layout in layouts:
            refused = self._subject.refusal(layout)
            try:
                estimate = None if refused else self._estimator.estimate(layout, exact=False)
            except LayoutError as error:
                refused, estimate = str(error), None
            if estimate is None:
                self._refused.setdefault(refused, str(layout))
            else:
                yield replace(estimate, why_not=why_not(estimate, room))

    def _offloaded(self, rows: Sequence[Estimate], room: MemoryBytes) -> list[Estimate]:
        """Return the fastest fitting layouts with offload based on `rows`, and those that need the least memory. Layouts that fit
        need no offload, and a layout's time plus that of each kind of offload alone is a lower bound of any combination."""
        tiers: list[TierName] = [] if self._machine.is_cpu else ["host"]
        tiers += ["file"] if self._machine.disk else []
        seconds = sorted(row.seconds for row in rows if row.fits)

        def size(row: Estimate) -> tuple[int, bool, int]:
            layout = row.layout
            return layout.micro, layout.recompute != "block", row.device_bytes

        smallest = {id(row) for row in sorted(rows, key=size)[:_SIMULATED]}
        found: list[Estimate] = []
        for row in sorted(rows, key=lambda row: row.seconds):
            layout = row.layout
            bound = seconds[_ENOUGH_FITTING - 1] if len(seconds) >= _ENOUGH_FITTING else math.inf
            wanted, lowest = not row.fits and row.seconds < bound, id(row) in smallest
            if not (wanted or lowest):
                continue
            parts = list(self._offload_options(layout, tiers))

            def made(chosen: Iterable[Mapping[str, Any]], layout: Layout = layout) -> Estimate | None:
                return next(self._rows([replace(layout, **dict(ChainMap(*map(dict, chosen))))], room), None)

            def added(change: Mapping[str, Any], before: float = row.seconds) -> float:
                changed = made([change])
                return math.inf if changed is None else max(0.0, changed.seconds - before)

            def largest(part: Sequence[Mapping[str, Any]], tier: TierName) -> Mapping[str, Any]:
                on = [change for change in part if any(getattr(value, "tier", "") == tier for value in change.values())]
                return (on or part)[-1]

            least = [made(largest(part, tier) for part in parts) for tier in tiers]
            found += [each for each in least if each is not None and lowest]
            if not wanted or not any(each and each.device_bytes <= room.critical for each in least):
                continue
            priced = [[(added(change), change) for change in part] for part in parts]
            for chosen in sorted(product(*priced), key=lambda chosen: sum(price for price, _ in chosen)):
                if row.seconds + sum(price for price, _ in chosen) >= bound:
                    break
                if (fits := made(change for _, change in chosen)) is not None and fits.fits:
                    found.append(fits)
                    insort(seconds, fits.seconds)
                    break
        return found


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _sort_key(row: Estimate) -> tuple[float, int]:
    return float(f"{row.seconds:.3g}"), row.device_bytes
