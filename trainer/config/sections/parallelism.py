"""The sections `offload`, `parallel`, `precision` and `zero`."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from zeromesh.mesh.mesh_shape import MODEL_AXES
from zeromesh.settings import keys
from zeromesh.trainer.config.sections.base import Seconds, Section, Texts

LEAST_STAGING = 4 << 20


class TierShare(Section):
    """The tier that holds a state, or a tier and the fraction that it holds; the rest stays on the device."""

    tier: Literal["none", "host", "file"] = "none"
    """The tier."""
    fraction: Annotated[keys.Number, Field(gt=0.0, le=1.0)] = 1.0
    """The fraction that the tier holds."""

    @model_serializer(mode="wrap")
    def _serialize_tier(self, plain: SerializerFunctionWrapHandler) -> Any:
        return self.tier if self.fraction == 1 else plain(self)


class GradientShare(TierShare):
    """The tier and fraction of gradients; `auto` takes those of the optimizer state."""

    tier: Literal["auto", "none", "host", "file"] = "auto"  # type: ignore[assignment]
    """The tier."""


_TIERS = "none, host or file, or a mapping such as {tier: file, fraction: 0.7}"
_NAMED = keys.ConvertedBy(lambda value: {"tier": value} if isinstance(value, str) else value)


class OffloadSection(Section, keys.OffloadKeys):  # type: ignore[misc]  # pydantic freezes it too
    """The states that are kept outside the device's memory until they are needed. Results do not change."""

    optimizer: Annotated[TierShare, _NAMED, keys.Allowed(_TIERS)] = TierShare()
    """Master weights and moments, at any stage."""
    gradients: Annotated[GradientShare, _NAMED, keys.Allowed(f"auto, {_TIERS}")] = GradientShare()
    """Gradient shards between reduction and update; auto: as the optimizer state."""
    parameters: Annotated[TierShare, _NAMED, keys.Allowed(_TIERS)] = TierShare()
    """Parameters between their uses, at stage 3."""
    activations: Annotated[TierShare, _NAMED, keys.Allowed(_TIERS)] = TierShare()
    """Inputs of recomputed blocks until backward; a fraction counts the first blocks."""
    directory: keys.Text | Texts | None = None
    """Directory of the file tier, best on local NVMe; several hold stripes in turn. null: `offload` in the run's directory."""
    checksums: bool = False
    """Verify data read from files by checksums that stay in memory."""
    staging: Annotated[
        Literal["auto"] | Annotated[keys.Whole, keys.ConvertedBy(keys.bytes_from_text), Field(ge=LEAST_STAGING)],
        keys.Allowed("auto, or a number of bytes of 4MiB or more, such as 64MiB"),
    ] = "auto"
    """Bytes of a rank's staging buffers between offload tier and optimizer. auto: 64MiB on a CPU, a 64th of accelerator memory."""


class OuterSection(Section, keys.OuterSettings):  # type: ignore[misc]  # pydantic freezes it too
    """The optimizer of syncs after local steps; by default weights are averaged."""


AUTOMATIC = ("parallel", "batch.micro_size", "zero.stage")
"""Keys that a plan may decide. `parallel` means its axes, schedule and chunks, unless given."""


class ParallelSection(Section, keys.ParallelOptions):  # type: ignore[misc]  # pydantic freezes it too
    """The mesh. The product of the axes is the number of ranks."""

    auto: Annotated[
        keys.Listed[tuple[Literal[*AUTOMATIC], ...]],  # type: ignore[valid-type]
        keys.Allowed(f"a list of {', '.join(AUTOMATIC)}"),
    ] = ()
    """Keys that are set to the fastest plan that fits when a run begins (see `zeromesh plan`). `parallel: auto`, `batch.micro_size:
    auto` and `zero.stage: auto` are short for them."""
    replicate: keys.Count = 1
    """Replicas of each group of shards (hybrid sharding)."""
    shard: Literal["auto"] | keys.Count = "auto"
    """Ranks that shard one copy of the states; auto: all remaining ranks."""
    tensor: keys.Count = 1
    """Ranks that divide every layer among them, best within one host."""
    context: keys.Count = 1
    """Ranks that divide every sequence among them: activations take that much less memory. They shard states too."""
    expert: keys.Count = 1
    """Ranks, out of those that shard states, over which the experts of a layer are spread; tokens travel to them."""
    pipeline: keys.Count = 1
    """Ranks that divide the blocks of the model into stages."""
    sync_every: keys.Count = 1
    """Steps from one sync of the replicas to the next, between which each takes its steps alone; 1: they sum the gradients of
    every step. A step that evaluates, saves, or ends an epoch or the run is a sync too."""
    outer: OuterSection = OuterSection()
    """The optimizer of syncs; by default weights are averaged."""
    order: Literal["topology", "launch"] = "topology"
    """The order of processes as ranks: host by host, so that tensor ranks are neighbours, or in launch order."""
    timeout_seconds: Annotated[Literal["auto"] | Seconds, keys.Allowed("auto, or a number of seconds")] = 60.0
    """Seconds without progress after which waiting ranks raise an error that names the late one; five times as long at first.
    auto: 60, and after 20 steps and a sync, for ranks in a step or stopped, 20 times the longest wait in these, at least 5."""

    @property
    def patience(self) -> float:
        """The value of `timeout_seconds`, for auto the one that waits begin with."""
        return 60.0 if self.timeout_seconds == "auto" else self.timeout_seconds

    @property
    def model_size(self) -> int:
        """The number of ranks that compute one batch together."""
        return math.prod(getattr(self, axis) for axis in MODEL_AXES)

    @property
    def pieces(self) -> int:
        """The number of equal pieces into which a sequence is cut for context ranks."""
        return 2 * self.context if self.context > 1 else 1


class LossScaleSection(Section, keys.ScalerSettings):  # type: ignore[misc]  # pydantic freezes it too
    """The dynamic loss scale of float16, as in torch.amp.GradScaler. Other compute dtypes do not read it."""


class PrecisionSection(Section, keys.PrecisionKeys):  # type: ignore[misc]  # pydantic freezes it too
    """The dtypes of each role. They are printed once at the start of a run."""

    tf32: bool = False
    """Use TF32 for float32 products and convolutions on GPUs that have it: much faster, with 10 bits of fraction."""
    linear: Literal["float8"] | None = None
    """Matrix products of linear layers, except the model's head, in float8 with a scale per tensor, by torchao, on GPUs that
    support it; weights and gradients stay in `compute`, which is bfloat16. null: in `compute`."""
    loss_scale: LossScaleSection = LossScaleSection()
    """The dynamic loss scale of float16."""

    @property
    def masterless(self) -> bool:
        return self.master in ("none", "kahan")


class ZeroSection(Section, keys.ZeroKeys):  # type: ignore[misc]  # pydantic freezes it too
    """The partitioning of optimizer state, gradients and parameters, and their communication."""
