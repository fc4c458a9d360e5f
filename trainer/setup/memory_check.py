"""The memory and the disk that the states of a run need on a host: a run that cannot fit is refused before it begins."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from zeromesh.errors import StorageError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, TierChoice, available_bytes, swap_bytes
from zeromesh.offload.io.direct_io import IN_MEMORY, file_system_of, free_bytes, nearest_directory
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.options import ZeroOptions
from zeromesh.trainer.formatting import human_bytes, human_count
from zeromesh.units.plan import ModelCuts, ModelPlan, plan_model
from zeromesh.zero.memory_model import MemoryModel, predict_memory

_STEP = 0.05
"""The distance between the fractions that are tried."""
_FILE = TierChoice(tier="file")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Host:
    """The bytes that the ranks of one host need for a planned model, and those that it has.

    `parts` ranks, which compute on `device`, share the states over `transport`. `inputs` are bytes of a rank's kept inputs of
    recomputed blocks on files, as far as they are known beforehand. `memory_room` is free memory with swap, and `disk_room` is free
    on all disks of the file tier.
    """

    plan: ModelPlan
    parts: int
    transport: str
    device: torch.device
    local_ranks: int
    inputs: int
    memory_room: int
    disk_room: int

    def least(self, options: ZeroOptions) -> MemoryModel:
        """Memory of one rank, with as much kept gathered as takes least where options leave that open."""
        budgets = (0, None) if options.gathered_budget is None else (options.gathered_budget,)
        predict = partial(
            predict_memory, self.plan, options, parts=self.parts, transport=self.transport, device=self.device
        )
        return min((predict(budget=budget) for budget in budgets), key=lambda footprint: footprint.total)

    def memory(self, options: ZeroOptions) -> int:
        """Bytes of memory of all ranks of the host."""
        return self.local_ranks * self.least(options).total

    def disk(self, options: ZeroOptions) -> int:
        """Bytes of swap files of all ranks of the host."""
        return self.local_ranks * (self.least(options).on_disk + self.inputs)

    def fits(self, options: ZeroOptions) -> bool:
        """Whether there is room for memory and files."""
        return self.memory(options) <= self.memory_room and self.disk(options) <= self.disk_room

    def listed(self, terms: Mapping[Purpose, int], **others: int) -> str:
        """Terms of one rank, in bytes by purpose, as what all ranks of the host hold."""
        named = {purpose.value: nbytes for purpose, nbytes in terms.items()}
        named |= {name.replace("_", " "): nbytes for name, nbytes in others.items()}
        return ", ".join(f"{human_bytes(self.local_ranks * nbytes)} {what}" for what, nbytes in named.items() if nbytes)

    def advice(self, options: ZeroOptions) -> Iterator[str]:
        """Yield changes of the configuration that need less memory, the higher stage first."""
        higher = {stage: self.memory(replace(options, stage=stage)) for stage in range(options.stage + 1, 4)}
        best = min(higher, key=lambda stage: (higher[stage], stage), default=options.stage)
        if higher and higher[best] < self.memory(options):
            yield f"set zero.stage to {best}, which needs {human_bytes(higher[best])}"
        optimizer = replace(options.offload, optimizer=_FILE, gradients=None)
        offloads = {"offload.optimizer": optimizer}
        if best == 3:
            offloads["offload.optimizer and offload.parameters"] = replace(optimizer, parameters=_FILE)
        for keys, offload in offloads.items():
            changed = replace(options, stage=best, offload=offload)
            if self.memory(changed) < self.memory(options) and self.fits(changed):
                stage = f"zero.stage to {best} and " if best != options.stage else ""
                memory, disk = human_bytes(self.memory(changed)), human_bytes(self.disk(changed))
                yield f"set {stage}{keys} to file, which needs {memory}, and {disk} of disk"
                break
        yield "make the model smaller"
        yield "use more hosts" if options.stage else "use more hosts with a zero.stage above 0"


def _with_fraction(options: ZeroOptions, fraction: float) -> ZeroOptions:
    """The same options with a part of what is to rest on files there, and the rest in memory."""
    choices = {name: getattr(options.offload, name) for name in ("optimizer", "parameters", "gradients")}
    parts = {
        name: replace(choice, fraction=choice.fraction * fraction)
        for name, choice in choices.items()
        if choice is not None and choice.tier == "file"
    }
    return replace(options, offload=replace(options.offload, **parts))


def kept_input_bytes(model: nn.Module, blocks: int, samples: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of the inputs of so many blocks for a microbatch; 0 for a model that does not say how wide its hidden states are."""
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
    """Raise `StorageError` where a host of CPU ranks has less memory and swap, or less disk, than the states need at the least.

    `inputs`: bytes of kept inputs of recomputed blocks that leave the device. Returns notes on what rests on files.
    """
    local_ranks, free = mesh.environment.local_world_size, available_bytes()
    directories = options.offload.files.directories
    freed = local_ranks * sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    host = _Host(
        plan=plan_model(model, options.precision.compute, GroupRules(options.optimizer).group_of, cuts),
        parts=mesh.shard.size,
        transport=transport,
        device=mesh.device,
        local_ranks=local_ranks,
        inputs=inputs if options.offload.activations.tier == "file" else 0,
        memory_room=free + swap_bytes() + freed,
        disk_room=_free_on_disks(directories),
    )
    least, memory, disk = host.least(options), host.memory(options), host.disk(options)
    if mesh.device.type == "cpu" and free and memory > host.memory_room:
        terms = host.listed(
            least.terms,
            parameters_gathered_around_their_use=least.gathered,
            gradient_shards_on_their_way=least.passing,
        )
        count = human_count(sum(p.numel() for p in model.parameters()))
        *others, last = host.advice(options)
        raise StorageError(
            f"{count} parameters at stage {options.stage} need at least {human_bytes(memory)} on this host "
            f"({terms}), and {human_bytes(free)} are free; {', '.join(others)}, or {last}"
        )
    if not disk:
        return []
    where, room = ", ".join(map(str, directories)), human_bytes(host.disk_room)
    shown, terms = human_bytes(disk), host.listed({**least.files, Purpose.ACTIVATIONS: host.inputs})
    if disk > host.disk_room:
        fractions = (round(count * _STEP, 2) for count in range(round(1 / _STEP) - 1, 0, -1))
        fraction = next((each for each in fractions if host.fits(_with_fraction(options, each))), None)
        fits = f"a fraction of {fraction:g} of it fits: {{tier: file, fraction: {fraction:g}}}" if fraction else ""
        raise StorageError(
            f"offload: swap files of {shown} ({terms}) do not fit into {where}, which has {room} free; "
            f"{fits or 'no part of it fits beside the memory there is'}, or give offload.directory a larger disk"
        )
    kinds = {str(directory): file_system_of(directory) for directory in directories}
    return [
        f"offload: {shown} of swap files ({terms}) in {where}, which has {room} free; {human_bytes(memory)} of states in memory",
        *(
            f"WARNING: offload: {path} is {kind}, which is memory and no disk; set offload.directory to a directory on a disk"
            for path, kind in kinds.items()
            if kind in IN_MEMORY
        ),
    ]


def _free_on_disks(directories: tuple[Path, ...]) -> int:
    """Free bytes of the file systems of directories, or of the nearest directories above that exist, each counted once."""
    disks: dict[int, Path] = {}
    for directory in directories:
        existing = nearest_directory(directory)
        disks.setdefault(os.stat(existing).st_dev, existing)
    return sum(map(free_bytes, disks.values()))
