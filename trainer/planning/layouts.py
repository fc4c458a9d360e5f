"""Layouts, which distribute a run over ranks and memory tiers, and the configuration keys that they decide."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from zeromesh.mesh.mesh_shape import SIZES
from zeromesh.offload import TierChoice
from zeromesh.options import STAGES, Placement
from zeromesh.settings.keys import ScheduleName
from zeromesh.trainer.config.deepspeed import nested
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.models.prepare import Mode

_ON_DEVICE = TierChoice()
TIERS = ("optimizer", "parameters", "activations")
FIELDS = {f"parallel.{name}": name for name in (*SIZES, "sequence", "schedule", "chunks")}
FIELDS |= {f"zero.{name}": name for name in ("stage", "replicas", "prefetch")}
FIELDS |= {"batch.micro_size": "micro", "model.activation_checkpointing": "recompute"}
FIELDS |= {f"offload.{name}": name for name in TIERS}
"""The field of a layout for each configuration key that a layout decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to distribute a run. `accumulation` is derived: the microbatches of a rank in a step."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    sequence: bool = False
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    stage: int = 3
    replicas: Literal["whole", "divided"] = "whole"
    micro: int = 1
    accumulation: int = 1
    recompute: Mode = "none"
    prefetch: int = 1  # The number of units gathered ahead at stage 3.
    optimizer: TierChoice = _ON_DEVICE  # The tier of master weights, moments and gradient shards.
    parameters: TierChoice = _ON_DEVICE
    activations: TierChoice = _ON_DEVICE

    @property
    def ranks(self) -> int:
        return self.pipeline * self.replicate * self.states * self.tensor

    @property
    def data(self) -> int:
        return self.replicate * self.shard

    @property
    def states(self) -> int:
        """The number of ranks that shard one copy of the states."""
        return self.shard * self.context

    @property
    def gathers(self) -> bool:
        """True if parameters are gathered around their use, and so can be offloaded between uses."""
        return STAGES[self.stage].parameters is Placement.SHARDED

    def values_by_key(self) -> dict[str, Any]:
        values = {key: getattr(self, field) for key, field in FIELDS.items()}
        for key, value in values.items():
            if isinstance(value, TierChoice):
                values[key] = value.tier if value.fraction == 1 else {"tier": value.tier, "fraction": value.fraction}
        return values

    def __str__(self) -> str:
        axes = [f"{axis} {getattr(self, axis)}" for axis in SIZES]
        parts = [" x ".join(each for each in axes if not each.endswith(" 1")) or "1 rank", f"stage {self.stage}"]
        parts.append(f"micro {self.micro} x {self.accumulation}")
        if self.replicas == "divided" and self.replicate > 1:
            parts.append("divided replicas")
        if self.pipeline > 1:
            parts.append(self.schedule.replace("_", " ") + (f" {self.chunks}" if self.chunks > 1 else ""))
        if self.sequence:
            parts.append("sequence")
        if self.recompute != "none":
            parts.append("recomputed" if self.recompute == "block" else "partly recomputed")
        if self.gathers and not self.prefetch:
            parts.append("nothing gathered ahead")
        for name in TIERS:
            choice: TierChoice = getattr(self, name)
            if choice.uses_tier:
                parts.append(f"{name}{'' if choice.fraction == 1 else f' {choice.fraction:.0%}'} on {choice.tier}")
        return ", ".join(parts)


def with_layout(config: TrainerConfig, layout: Layout, free: Collection[str] = FIELDS.keys()) -> TrainerConfig:
    """Return the configuration with the keys of `free` set by a layout, and no `auto` left."""
    chosen = {key: value for key, value in layout.values_by_key().items() if key in free}
    sections = {}
    for name, values in nested({"parallel.auto": (), **chosen}).items():
        section = getattr(config, name)
        sections[name] = type(section).model_validate({key: getattr(section, key) for key in section.model_fields_set} | values)
    return config.model_copy(update=sections)
