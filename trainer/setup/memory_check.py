"""The check that a run's states fit into the memory and disks of a host before the run begins."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn

from zeromesh.errors import StorageError
from zeromesh.flat.layout import BucketLayout
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import PinnedBudget, Purpose, TierChoice, available_bytes, swap_bytes
from zeromesh.offload.accelerator import device_memory, is_accelerator, on_accelerator
from zeromesh.offload.io.direct_io import IN_MEMORY, free_bytes, mount_of, nearest_directory
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.options import STAGES, OffloadOptions, Placement, ZeroOptions
from zeromesh.trainer.formatting import human_bytes, human_count
from zeromesh.units.build import plan_layouts
from zeromesh.units.plan import ModelCuts, plan_model
from zeromesh.zero.memory_model import MemoryBytes, MemoryModel, predict_layouts

_FRACTION_STEP = 0.05
"""The step between the tried fractions of offloaded states."""
_TIGHT_DIVISOR = 10
"""The divisor of a device's free memory below which the remainder for activations gives a warning."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Host:
    """The bytes that the ranks of one host need for a planned model, and those that are available. `parts` ranks, which compute on
    `device`, share the states over `transport`. `inputs` are the known bytes of a rank's block inputs offloaded to files. `room` is
    the free memory with swap, and free disk over all directories of the file tier."""

    layouts: list[list[BucketLayout]]
    parts: int
    transport: str
    device: torch.device
    local_ranks: int
    inputs: int
    room: MemoryBytes
    _known: dict[ZeroOptions, MemoryModel] = field(default_factory=dict)

    def least(self, options: ZeroOptions) -> MemoryModel:
        """Predict the memory of one rank."""
        if options not in self._known:
            found = predict_layouts(self.layouts, options, self.parts, self.transport, self.device)
            self._known[options] = found
        return self._known[options]

    def needs(self, options: ZeroOptions) -> MemoryBytes:
        """Return the bytes that the host's ranks need in total, and each of its accelerators."""
        least, ranks = self.least(options), self.local_ranks
        disk = ranks * (least.on_disk + self.inputs)
        if is_accelerator(self.device):
            return MemoryBytes(device=least.total, host=ranks * sum(least.hosted.values()), disk=disk)
        return MemoryBytes(device=0, host=ranks * least.total, disk=disk)

    def fits(self, options: ZeroOptions) -> bool:
        return not self.needs(options).beyond(self.room)

    def listed(self, terms: Mapping[Purpose, int], ranks: int, **others: int) -> str:
        """Format one rank's bytes by purpose, multiplied by `ranks`."""
        named = {purpose.value: nbytes for purpose, nbytes in terms.items()}
        named |= {name.replace("_", " "): nbytes for name, nbytes in others.items()}
        return ", ".join(f"{human_bytes(ranks * nbytes)} {what}" for what, nbytes in named.items() if nbytes)

    def advice(self, options: ZeroOptions) -> Iterator[str]:
        """Yield configuration changes that reduce memory, a higher stage first."""
        now = self.needs(options).critical
        higher = {stage: self.needs(replace(options, stage=stage)) for stage in STAGES if stage > options.stage}
        best = min(higher, key=lambda stage: (higher[stage].critical, stage), default=options.stage)
        if higher and higher[best].critical < now:
            yield f"set zero.stage to {best}, which needs {human_bytes(higher[best].critical)}"
        for keys, tier, offload in self._offloads(options, best):
            changed = replace(options, stage=best, offload=offload)
            needs = self.needs(changed)
            if needs.critical < now and self.fits(changed):
                stage = f"zero.stage to {best} and " if best != options.stage else ""
                others = [f"{human_bytes(needs.host)} of the host's memory"] if needs.device and needs.host else []
                others += [f"{human_bytes(needs.disk)} of disk"] if needs.disk else []
                yield f"set {stage}{keys} to {tier}, which needs {human_bytes(needs.critical)}, and {' and '.join(others)}"
                break
        yield "make the model smaller (model.config)"
        more = "ranks" if is_accelerator(self.device) else "hosts"
        yield f"use more {more}" if options.stage else f"use more {more} with a zero.stage above 0"

    def _offloads(self, options: ZeroOptions, stage: int) -> Iterator[tuple[str, str, OffloadOptions]]:
        """Yield configuration keys, their new tier and the changed options; the nearest tier first."""
        tiers = [TierChoice(tier="host")] if is_accelerator(self.device) else []
        for away in (*tiers, TierChoice(tier="file")):
            optimizer = replace(options.offload, optimizer=away, gradients=None)
            yield "offload.optimizer", away.tier, optimizer
            if STAGES[stage].parameters is Placement.SHARDED:
                yield "offload.optimizer and offload.parameters", away.tier, replace(optimizer, parameters=away)


def _with_fraction(options: ZeroOptions, fraction: float) -> ZeroOptions:
    """Scale the fractions of file-tier states in the options."""
    choices = {name: getattr(options.offload, name) for name in ("optimizer", "parameters", "gradients")}
    parts = {
        name: replace(choice, fraction=choice.fraction * fraction)
        for name, choice in choices.items()
        if choice is not None and choice.tier == "file"
    }
    return replace(options, offload=replace(options.offload, **parts))


def kept_input_bytes(model: nn.Module, blocks: int, samples: int, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of the inputs of `blocks` blocks for a microbatch; 0 for an unknown hidden size."""
    config = getattr(model, "config", None)
    width = getattr(config, "hidden_size", None) or getattr(config, "n_embd", None) or 0
    return blocks * samples * length * width * dtype.itemsize if isinstance(width, int) else 0


def require_memory(
    model: nn.Module,
    options: ZeroOptions,
    mesh: Mesh,
    *,
    transport: str,
    inputs: int = 0,
    cuts: ModelCuts | None = None,
) -> list[str]:
    """Raise `StorageError` if the states need more than an accelerator's memory, a host's memory and swap, or its disks.

    `inputs` are the bytes of offloaded inputs of recomputed blocks. Returns notes on tight memory, and on files.
    """
    local_ranks, free = mesh.environment.local_world_size, available_bytes()
    directories = options.offload.files.directories
    parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]
    freed = [sum(each.nbytes for each in parameters if on_accelerator(each) is there) for there in (False, True)]
    plan = plan_model(model, options.precision.compute, GroupRules(options.optimizer).group_of, cuts)
    host = _Host(
        layouts=plan_layouts(plan, mesh.shard.size),
        parts=mesh.shard.size,
        transport=transport,
        device=mesh.device,
        local_ranks=local_ranks,
        inputs=inputs if options.offload.activations.tier == "file" else 0,
        room=MemoryBytes(
            device=_free_on_device(mesh.device) + freed[True],
            host=free + swap_bytes() + local_ranks * freed[False],
            disk=_free_on_disks(directories),
        ),
    )
    _require_room(host, options, sum(parameter.numel() for parameter in model.parameters()), free)
    return [*_kept(host, options), *_tight(host, options), *_require_disk(host, options)]


def _kept(host: _Host, options: ZeroOptions) -> Iterator[str]:
    """Yield a note on the gathered parameters that stay between uses at stage 3, and their cost."""
    if options.placements.parameters is Placement.SHARDED and host.parts > 1:
        least, none = host.least(options), host.least(replace(options, gathered_budget=0))
        kept, cost = human_bytes(least.kept), human_bytes(max(0, least.total - none.total))
        yield f"memory: {kept} of gathered parameters stay between uses (zero.gathered_budget), at {cost} for each rank"


def _require_room(host: _Host, options: ZeroOptions, count: int, free: int) -> None:
    """Raise `StorageError` if states of `count` parameters do not fit into memory; `free` excludes swap."""
    least, needs, room = host.least(options), host.needs(options), host.room
    passing = {"parameters_gathered_around_their_use": least.gathered, "gradient_shards_on_their_way": least.passing}
    short = ""
    if needs.device > room.device:
        where = f"each {host.device.type.upper()} device"
        short = f"{human_bytes(needs.device)} on {where} ({host.listed(least.terms, 1, **passing)}), and {human_bytes(room.device)}"
    elif free and needs.host > room.host:
        beside = is_accelerator(host.device)
        terms = host.listed(least.hosted if beside else least.terms, host.local_ranks, **({} if beside else passing))
        short = f"{human_bytes(needs.host)} on this host ({terms}), and {human_bytes(free)}"
    if short:
        *others, last = host.advice(options)
        raise StorageError(
            f"{human_count(count)} parameters at stage {options.stage} need at least {short} are free; "
            f"{', '.join(others)}, or {last}"
        )


def _require_disk(host: _Host, options: ZeroOptions) -> list[str]:
    """Raise `StorageError` if files do not fit on the disks; returns notes on files."""
    least, needs, directories = host.least(options), host.needs(options), options.offload.files.directories
    if not (disk := needs.disk):
        return []
    where, room = ", ".join(map(str, directories)), human_bytes(host.room.disk)
    shown, terms = human_bytes(disk), host.listed({**least.files, Purpose.ACTIVATIONS: host.inputs}, host.local_ranks)
    if options.offload.in_place:
        return [
            f"offload: {terms} rest on files: in the model's own where they lie there as they are, else in swap files in {where}, "
            f"which has {room} free"
        ]
    if disk > host.room.disk:
        fractions = (round(count * _FRACTION_STEP, 2) for count in range(round(1 / _FRACTION_STEP) - 1, 0, -1))
        fraction = next((each for each in fractions if host.fits(_with_fraction(options, each))), None)
        fits = f"a fraction of {fraction:g} of it fits: {{tier: file, fraction: {fraction:g}}}" if fraction else ""
        raise StorageError(
            f"offload: swap files of {shown} ({terms}) do not fit into {where}, which has {room} free; "
            f"{fits or 'no part of it fits beside the memory there is'}, or give offload.directory a larger disk"
        )
    mounts = {str(directory): mount_of(directory) for directory in directories}
    devices = "".join(dict.fromkeys(f" ({device}, {kind})" for device, kind in mounts.values() if device))
    memory = human_bytes(needs.critical)
    return [
        f"offload: {shown} of swap files ({terms}) in {where}{devices}, which has {room} free; {memory} of states in memory",
        *(
            f"WARNING: offload: {path} is {kind}, which is memory and no disk; set offload.directory to a directory on a disk"
            for path, (_, kind) in mounts.items()
            if kind in IN_MEMORY
        ),
    ]


def _tight(host: _Host, options: ZeroOptions) -> Iterator[str]:
    """Yield a warning if states fit on an accelerator but leave little memory."""
    needs, room = host.needs(options).device, host.room.device
    if (left := room - needs) * _TIGHT_DIVISOR < room:
        *others, last = host.advice(options)
        yield (
            f"WARNING: memory: states need {human_bytes(needs)} of the {human_bytes(room)} that are free on each device, which "
            f"leaves {human_bytes(left)} for activations; if that is too little, {', '.join(others)}, or {last}"
        )


def pinned_notes(budget: PinnedBudget) -> list[str]:
    """Return a note on the host memory that is pinned for device copies, if any."""
    if not (budget.used or budget.pageable):
        return []
    text = f"offload: {human_bytes(budget.used)} of the host's memory are pinned for copies to and from the device"
    if not budget.pageable:
        return [text]
    return [
        f"WARNING: {text}, and {human_bytes(budget.pageable)} are not, because the driver refused or too little memory is free: "
        "their copies are slower and make the host wait; offload less, or to files"
    ]


def _free_on_device(device: torch.device) -> int:
    if not is_accelerator(device):
        return 0
    memory = device_memory(device)
    return memory.free + memory.reserved - memory.allocated


def _free_on_disks(directories: tuple[Path, ...]) -> int:
    """Return the free bytes of the directories' file systems, each counted once; a missing directory uses its nearest parent."""
    disks: dict[int, Path] = {}
    for directory in directories:
        existing = nearest_directory(directory)
        disks.setdefault(os.stat(existing).st_dev, existing)
    return sum(map(free_bytes, disks.values()))
