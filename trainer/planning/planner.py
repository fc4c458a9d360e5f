"""The plan: every layout that a number of ranks allows, which of them fit, and the fastest first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from zeromesh.errors import ConfigError, LayoutError
from zeromesh.offload import TierChoice
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.planning.estimate import Estimate, Estimator, PlanPhase
from zeromesh.trainer.planning.layouts import Layout, Space, divisors
from zeromesh.trainer.planning.machine import Machine
from zeromesh.trainer.planning.subject import Subject

_SIMULATED = 48
"""Layouts whose schedules are simulated; of the others the order is that of lower bounds."""
_SLACK = 0.05
"""The part of an accelerator's memory that its allocator loses to fragments."""
_FRACTIONS = (0.25, 0.5, 0.75, 1.0)
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Bytes for each rank: in the memory where it computes, of its host beside that, of disk."""

    device: int
    host: int
    disk: int

    @classmethod
    def of(cls, machine: Machine, ranks_on_host: int) -> Room:
        """Return the room that a machine has for each of so many ranks of a host."""
        if machine.is_cpu:
            each = machine.host.memory_bytes // ranks_on_host
            return cls(device=each, host=0, disk=_DISK if machine.disk else 0)
        host = machine.host.memory_bytes // ranks_on_host
        return cls(device=int(machine.device.memory_bytes * (1 - _SLACK)), host=host, disk=_DISK if machine.disk else 0)

    def lacks(self, estimate: Estimate) -> str:
        """Describe what there is too little of; returns an empty text where all fits."""
        if estimate.device_bytes > self.device:
            largest = max(estimate.device, key=lambda name: estimate.device[name])
            return (
                f"{human_bytes(estimate.device_bytes)} of {human_bytes(self.device)}, most of it {largest} "
                f"({human_bytes(estimate.device[largest])})"
            )
        if self.host and estimate.host_bytes > self.host:
            return f"{human_bytes(estimate.host_bytes)} of the host's memory for each rank, of {human_bytes(self.host)}"
        if estimate.disk > self.disk:
            return f"{human_bytes(estimate.disk)} of disk, of {human_bytes(self.disk)}"
        return ""


_DISK = 1 << 42
"""Bytes of disk for each rank where nobody has said how many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """A layout of a plan. `lacks` says why it does not fit."""

    estimate: Estimate
    lacks: str = ""

    @property
    def fits(self) -> bool:
        """True if there is room for it."""
        return not self.lacks


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Layouts of a subject on a machine, the fastest that fits first, then those that do not fit."""

    subject: str
    parameters: int
    machine: str
    ranks: int
    room: Room
    rows: Sequence[PlanRow]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Kinds of layouts that the model does not allow, with the reason."""

    @property
    def best(self) -> PlanRow | None:
        """The first row, if it fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None

    @cached_property
    def bound_by(self) -> str:
        """The phase that takes most of the best layout's step, with its share; empty where no layout fits."""
        if self.best is None:
            return ""
        phases = self.best.estimate.phases
        most = max(phases, key=lambda phase: phases[phase])
        computes = (PlanPhase.FORWARD, PlanPhase.BACKWARD)
        name = "computing" if most in computes else str(most)
        seconds = sum(phases.get(each, 0.0) for each in computes) if most in computes else phases[most]
        return f"{name} ({seconds / self.best.estimate.seconds:.0%} of a step)"

    def with_more(self, nbytes: int) -> PlanRow | None:
        """The fastest layout with so many bytes more for each rank; None where it is the same one."""
        room = replace(self.room, device=self.room.device + nbytes)
        fitting = [row.estimate for row in self.rows if not room.lacks(row.estimate)]
        found = min(fitting, key=lambda each: each.seconds, default=None)
        if found is None or (self.best is not None and found.layout == self.best.estimate.layout):
            return None
        return PlanRow(estimate=found)


class Planner:
    """Plans one subject on one machine."""

    def __init__(
        self, subject: Subject, machine: Machine, *, host: int | None = None, fixed: Mapping[str, Any] | None = None
    ) -> None:
        """`host` is the ranks of a host, by default the machine's. `fixed` are fields of layouts that are given."""
        self._subject, self._machine = subject, machine
        self._host = host or machine.host.devices
        self._fixed = dict(fixed or {})
        self._estimator = Estimator(subject, machine, self._host)
        self._refused: dict[str, str] = {}

    def plan(self, ranks: int) -> Plan:
        """Estimate every layout of so many ranks.

        Raises:
            ConfigError: for ranks that fill no hosts, a model that cannot be traced, and ranks that no layout divides.
        """
        if ranks > self._host and ranks % self._host:
            raise ConfigError(
                f"{ranks} ranks do not fill hosts of {self._host}; give a multiple of {self._host}, or another --host"
            )
        room = Room.of(self._machine, min(ranks, self._host))
        layouts = list(self._space(ranks).layouts())
        if not layouts:
            reasons = "; ".join(f"{kind}: {reason}" for kind, reason in self._refused.items())
            given = ", ".join(f"{name} {value}" for name, value in self._fixed.items())
            raise ConfigError(
                f"no layout has {ranks} ranks{f' with {given}' if given else ''}{f' ({reasons})' if reasons else ''}"
            )
        rows = list(self._rows(layouts, room))
        if not any(row.fits for row in rows):
            rows += self._rows(self._offloaded(rows), room)
        return Plan(
            subject=self._subject.model_name,
            parameters=self._subject.parameters,
            machine=self._machine.name,
            ranks=ranks,
            room=room,
            rows=self._ranked(rows, room),
            refused=dict(self._refused),
        )

    def _space(self, ranks: int) -> Space:
        subject = self._subject
        wanted = [self._fixed["tensor"]] if "tensor" in self._fixed else divisors(min(ranks, self._host))
        tensors = []
        for tensor in wanted:
            reason = subject.tensor_refusal(tensor)
            if reason:
                self._refused[f"tensor {tensor}"] = reason
            else:
                tensors.append(tensor)
        if subject.pipeline_refusal:
            self._refused["pipeline"] = subject.pipeline_refusal
        return Space(
            ranks=ranks,
            host=self._host,
            samples=subject.config.batch.global_size,
            blocks=subject.blocks,
            tensors=tensors,
            sequence=len(tensors) > 1 and subject.can_share_sequence,
            recompute=subject.can_recompute,
            fixed=self._fixed,
        )

    def _rows(self, layouts: Iterable[Layout], room: Room) -> Iterator[PlanRow]:
        for layout in layouts:
            try:
                estimate = self._estimator.estimate(layout, exact=False)
            except LayoutError as error:
                self._refused.setdefault(f"pipeline {layout.pipeline} x chunks {layout.chunks}", str(error))
                continue
            yield PlanRow(estimate=estimate, lacks=room.lacks(estimate))

    def _ranked(self, rows: Sequence[PlanRow], room: Room) -> list[PlanRow]:
        """Rows by their seconds, of the fastest with their schedules simulated; then those that do not fit, by what they lack."""
        fitting = sorted((row for row in rows if row.fits), key=_place)
        first = [
            replace(row, estimate=self._estimator.estimate(row.estimate.layout))
            if row.estimate.layout.pipeline > 1
            else row
            for row in fitting[:_SIMULATED]
        ]
        first.sort(key=_place)
        others = sorted((row for row in rows if not row.fits), key=lambda row: row.estimate.device_bytes)
        return [*first, *fitting[_SIMULATED:], *others]

    def _offloaded(self, rows: Sequence[PlanRow]) -> Iterator[Layout]:
        """Layouts that need least, with more and more of them on tiers."""
        least = sorted(rows, key=lambda row: row.estimate.device_bytes)[:_SIMULATED]
        tiers = (["host"] if not self._machine.is_cpu else []) + (["file"] if self._machine.disk else [])
        for row in least:
            layout = row.estimate.layout
            for tier in tiers:
                for fraction in _FRACTIONS:
                    choice = TierChoice(tier=tier, fraction=fraction)  # type: ignore[arg-type]
                    yield replace(layout, optimizer=choice)
                whole = TierChoice(tier=tier)  # type: ignore[arg-type]
                if layout.stage == 3:
                    yield replace(layout, optimizer=whole, parameters=whole)
                if layout.recompute == "block":
                    yield replace(layout, optimizer=whole, activations=whole)
                if layout.stage == 3 and layout.recompute == "block":
                    yield replace(layout, optimizer=whole, parameters=whole, activations=whole)


def _place(row: PlanRow) -> tuple[float, int]:
    """By seconds to three digits, and where these are alike by memory."""
    return float(f"{row.estimate.seconds:.3g}"), row.estimate.device_bytes
