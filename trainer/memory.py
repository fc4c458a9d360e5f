"""What the states of a run need of a host's memory at least: a run that cannot fit is refused before it is begun."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from zeromesh.errors import StorageError
from zeromesh.mesh.groups import Mesh
from zeromesh.offload import available_bytes, swap_bytes
from zeromesh.optim.sharded import GroupRules
from zeromesh.trainer.console import human_bytes, human_count
from zeromesh.zero.footprint import Footprint, predict_memory
from zeromesh.zero.options import ZeroOptions
from zeromesh.zero.plan import ModelPlan, plan_model


@dataclass(frozen=True, kw_only=True, slots=True)
class _Need:
    """What the ranks of one host need for a planned model. `parts` ranks share the states over `transport`."""

    plan: ModelPlan
    parts: int
    transport: str
    local_ranks: int

    def least(self, options: ZeroOptions) -> Footprint:
        """Memory of one rank, with as much kept gathered as takes least where options leave that open."""
        budgets = (0, None) if options.gathered_budget is None else (options.gathered_budget,)
        found = [
            predict_memory(self.plan, options, parts=self.parts, transport=self.transport, budget=budget)
            for budget in budgets
        ]
        return min(found, key=lambda footprint: footprint.total)

    def host_bytes(self, options: ZeroOptions) -> int:
        """Bytes of all ranks of the host."""
        return self.local_ranks * self.least(options).total

    def listed(self, options: ZeroOptions) -> str:
        """The terms of it."""
        footprint = self.least(options)
        terms = {purpose.value: nbytes for purpose, nbytes in footprint.terms.items()}
        terms["parameters gathered around their use"] = footprint.gathered
        return ", ".join(f"{human_bytes(self.local_ranks * nbytes)} {what}" for what, nbytes in terms.items() if nbytes)

    def cures(self, options: ZeroOptions) -> Iterator[str]:
        """What would need less."""
        higher = {stage: self.host_bytes(replace(options, stage=stage)) for stage in range(options.stage + 1, 4)}
        best = min(higher, key=lambda stage: (higher[stage], stage), default=options.stage)
        if higher and higher[best] < self.host_bytes(options):
            yield f"set zero.stage to {best}, which needs {human_bytes(higher[best])}"
        yield "make the model smaller"
        yield "use more hosts" if options.stage else "use more hosts with a zero.stage above 0"


def require_memory(model: nn.Module, options: ZeroOptions, mesh: Mesh, *, transport: str) -> None:
    """Raise `StorageError` where a host of CPU ranks has less memory, and swap, than the states need at the least."""
    free = available_bytes()
    if mesh.device.type != "cpu" or not free:
        return
    need = _Need(
        plan=plan_model(model, options.precision.compute, GroupRules(options.optimizer).group_of),
        parts=mesh.shard.size,
        transport=transport,
        local_ranks=mesh.environment.local_world_size,
    )
    needed = need.host_bytes(options)
    given_back = need.local_ranks * sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    if needed > free + swap_bytes() + given_back:
        count = human_count(sum(p.numel() for p in model.parameters()))
        *others, last = need.cures(options)
        raise StorageError(
            f"{count} parameters at stage {options.stage} need at least {human_bytes(needed)} on this host "
            f"({need.listed(options)}), and {human_bytes(free)} are free; {', '.join(others)}, or {last}"
        )
