"""The check that a run's states fit into the memory and disks of a host before the run begins."""

import glob
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from zeromesh.errors import StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, TierChoice, available_bytes
from zeromesh.offload.accelerator import device_memory, is_accelerator, on_accelerator
from zeromesh.offload.io.direct_io import IN_MEMORY, free_bytes, mount_of, nearest_directory
from zeromesh.offload.memory.allocation import PinnedBudget
from zeromesh.offload.memory.ledger import swap_bytes
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.options import STAGES, OffloadOptions, Placement, ZeroOptions
from zeromesh.trainer.formatting import human_bytes, human_count
from zeromesh.units.build import plan_layouts
from zeromesh.units.plan import ModelCuts, plan_model
from zeromesh.zero.memory_model import MemoryBytes, MemoryModel

_TIGHT_DIVISOR = 10
"""The divisor of a device's free memory: if states leave less than the quotient for activations, there is a warning."""


class HostMemory:
    """The bytes a host's ranks have, also those `kept` since an earlier start, and need for states and block `inputs` on files."""

    def __init__(
        self, model: nn.Module, options: ZeroOptions, mesh: Mesh, transport: str, inputs: int, cuts: ModelCuts | None, kept: int = 0
    ) -> None:
        self.options, self.device, self.shards = options, mesh.device, mesh.shard.size
        self.ranks = mesh.environment.local_world_size
        self.on_device = is_accelerator(mesh.device)
        self.directories = options.offload.files.directories
        self.parameter_count = sum(parameter.numel() for parameter in model.parameters())
        self.offloaded_inputs = inputs if options.offload.activations.tier == "file" else 0
        plan = plan_model(model, options.precision.compute, GroupRules(options.optimizer).group_of, cuts, options.weights)
        dividers = options.dividing(mesh.replicate.size)
        layouts = plan_layouts(plan, self.shards, options.alignment, experts=mesh.experts.size, dividers=dividers)
        self.rank_memory = cache(lambda changed: MemoryModel(layouts, changed, self.shards, transport, mesh.device))
        held = [each for each in model.parameters() if not (each.is_meta or hasattr(each, "stored"))]
        freed = [sum(each.nbytes for each in held if on_accelerator(each) is there) for there in (False, True)]
        self.free = (free := available_bytes()) and free + kept
        memory = device_memory(mesh.device) if self.on_device else None
        # A missing directory is on the disk of its nearest parent, and each disk counts once.
        disks = {os.stat(near).st_dev: near for near in map(nearest_directory, self.directories)}
        # The files that stay from an earlier start are used again.
        name = f"zeromesh-{glob.escape(options.offload.files.label)}-*.states"
        files = [path for directory in self.directories for path in directory.glob(name)]
        self.room = MemoryBytes(
            device=0 if memory is None else memory.free + memory.reserved - memory.allocated + freed[True],
            host=self.free + swap_bytes() + self.ranks * freed[False],
            disk=sum(map(free_bytes, disks.values())) + sum(path.stat().st_size for path in files),
        )

    def check(self) -> list[str]:
        """Raise `StorageError` if memory, with the host's swap, or disks are short. Returns notes on tight memory, and on files."""
        rank, needs, room = self.rank_memory(self.options), self.needs(self.options), self.room
        terms: dict[Any, int] = {**rank.terms, "parameters gathered around their use": rank.gathered}
        terms["gradient shards on their way"] = rank.transit_bytes
        short = ""
        if needs.device > room.device:
            where = f"each {self.device.type.upper()} device"
            short = f"{human_bytes(needs.device)} on {where} ({_format_terms(terms)}), and {human_bytes(room.device)}"
        elif self.free and needs.host > room.host:
            listed = _format_terms(rank.host_terms if self.on_device else terms, self.ranks)
            short = f"{human_bytes(needs.host)} on this host ({listed}), and {human_bytes(self.free)}"
        if short:
            need = f"{human_count(self.parameter_count)} parameters at stage {self.options.stage} need at least"
            raise StorageError(f"{need} {short} are free; {self.advice()}")
        return [*self._notes(), *self._require_disk()]

    def needs(self, options: ZeroOptions) -> MemoryBytes:
        """Return the bytes that the host's ranks need in total, and each of its accelerators."""
        rank, ranks = self.rank_memory(options), self.ranks
        disk = ranks * (sum(rank.files.values()) + self.offloaded_inputs)
        if self.on_device:
            return MemoryBytes(device=rank.total, host=ranks * sum(rank.host_terms.values()), disk=disk)
        return MemoryBytes(device=0, host=ranks * rank.total, disk=disk)

    def advice(self) -> str:
        """Return configuration changes that reduce memory, a higher stage first."""
        options, found = self.options, []
        now = self.needs(options).critical
        higher = {stage: self.needs(replace(options, stage=stage)) for stage in STAGES if stage > options.stage}
        best = min(higher, key=lambda stage: (higher[stage].critical, stage), default=options.stage)
        if higher and higher[best].critical < now:
            found.append(f"set zero.stage to {best}, which needs {human_bytes(higher[best].critical)}")
        for keys, tier, offload in _offload_changes(options.offload, best, host=self.on_device):
            needs = self.needs(replace(options, stage=best, offload=offload))
            if needs.critical < now and not needs.beyond(self.room):
                stage = f"zero.stage to {best} and " if best != options.stage else ""
                others = [f"{human_bytes(needs.host)} of the host's memory"] if needs.device and needs.host else []
                others += [f"{human_bytes(needs.disk)} of disk"] if needs.disk else []
                found.append(f"set {stage}{keys} to {tier}, which needs {human_bytes(needs.critical)}, and {' and '.join(others)}")
                break
        found.append("make the model smaller (model.config)")
        more = "use more ranks" if self.on_device else "use more hosts"
        return f"{', '.join(found)}, or {more}{'' if options.stage else ' with a zero.stage above 0'}"

    def _notes(self) -> Iterator[str]:
        """Yield a note on the gathered parameters that stay between uses, and a warning if states leave a device little memory."""
        needs, room = self.needs(self.options).device, self.room.device
        if self.options.placements.parameters is Placement.SHARDED and self.shards > 1:
            rank, none = self.rank_memory(self.options), self.rank_memory(replace(self.options, gathered_budget=0))
            kept, cost = human_bytes(rank.kept_bytes), human_bytes(max(0, rank.total - none.total))
            yield f"memory: {kept} of gathered parameters stay between uses (zero.gathered_budget), at {cost} for each rank"
        if (left := room - needs) * _TIGHT_DIVISOR < room:
            why = f"WARNING: memory: states need {human_bytes(needs)} of the {human_bytes(room)} that are free on each device"
            yield f"{why}, which leaves {human_bytes(left)} for activations; if that is too little, {self.advice()}"

    def _require_disk(self) -> Iterator[str]:
        needs, files = self.needs(self.options), self.rank_memory(self.options).files
        if not (disk := needs.disk):
            return
        where, room = ", ".join(map(str, self.directories)), human_bytes(self.room.disk)
        shown, terms = human_bytes(disk), _format_terms({**files, Purpose.ACTIVATIONS: self.offloaded_inputs}, self.ranks)
        if self.options.offload.in_place:
            what = f"offload: {terms} rest on files: in the model's own where they lie there as they are"
            yield f"{what}, else in swap files in {where}, which has {room} free"
            return
        if disk > self.room.disk:
            offload = self.options.offload
            choices = {name: getattr(offload, name) for name in ("optimizer", "parameters", "gradients")}
            on_files = {name: each for name, each in choices.items() if each is not None and each.tier == "file"}

            def fits_with(fraction: float) -> bool:
                parts: Any = {name: replace(each, fraction=each.fraction * fraction) for name, each in on_files.items()}
                return not self.needs(replace(self.options, offload=replace(offload, **parts))).beyond(self.room)

            fraction = next(filter(fits_with, (percent / 100 for percent in range(95, 0, -5))), None)
            fits = f"a fraction of {fraction:g} of it fits: {{tier: file, fraction: {fraction:g}}}" if fraction else ""
            why = f"offload: swap files of {shown} ({terms}) do not fit into {where}, which has {room} free"
            cure = f"{fits or 'no part of it fits beside the memory there is'}, or give offload.directory a larger disk"
            raise StorageError(f"{why}; {cure}")
        mounts = {str(directory): mount_of(directory) for directory in self.directories}
        devices = "".join(dict.fromkeys(f" ({device}, {kind})" for device, kind in mounts.values() if device))
        memory = human_bytes(needs.critical)
        yield f"offload: {shown} of swap files ({terms}) in {where}{devices}, which has {room} free; {memory} of states in memory"
        for path, (_, kind) in mounts.items():
            if kind in IN_MEMORY:
                yield f"WARNING: offload: {path} is {kind}, which is memory and no disk; set offload.directory to one on a disk"


def _format_terms(terms: Mapping[Any, int], ranks: int = 1) -> str:
    texts = {what.value if isinstance(what, Purpose) else what: nbytes for what, nbytes in terms.items()}
    return ", ".join(f"{human_bytes(ranks * nbytes)} {what}" for what, nbytes in texts.items() if nbytes)


def _offload_changes(offload: OffloadOptions, stage: int, *, host: bool) -> Iterator[tuple[str, str, OffloadOptions]]:
    """Yield ways to offload more states: the configuration keys, their new tier and the changed options; the host before files."""
    tiers = [TierChoice(tier="host")] if host else []
    for away in (*tiers, TierChoice(tier="file")):
        optimizer = replace(offload, optimizer=away, gradients=None)
        yield "offload.optimizer", away.tier, optimizer
        if STAGES[stage].parameters is Placement.SHARDED:
            yield "offload.optimizer and offload.parameters", away.tier, replace(optimizer, parameters=away)


def pinned_notes(budget: PinnedBudget) -> list[str]:
    if not (budget.used or budget.pageable):
        return []
    text = f"offload: {human_bytes(budget.used)} of the host's memory are pinned for copies to and from the device"
    if not budget.pageable:
        return [text]
    why = f"{human_bytes(budget.pageable)} are not, because the driver refused or too little memory is free"
    return [f"WARNING: {text}, and {why}: their copies are slower and make the host wait; offload less, or to files"]
