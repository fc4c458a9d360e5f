"""The section `offload`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from zeromesh.trainer.config_types import Allowed, Number, Text, Texts, bytes_from_text
from zeromesh.trainer.sections.section import Section

LEAST_STAGING = 4 << 20


class TierShare(Section):
    """Where something rests: a tier, or a tier and the part of it that rests there; what is left stays on the device."""

    tier: Literal["none", "host", "file"] = Field(default="none", description="The tier.")
    fraction: Annotated[Number, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="The part of it that rests there."
    )

    @model_validator(mode="before")
    @classmethod
    def _tier_alone(cls, data: Any) -> Any:
        return {"tier": data} if isinstance(data, str) else data

    @model_serializer(mode="wrap")
    def _shortest(self, plain: SerializerFunctionWrapHandler) -> Any:
        return self.tier if self.fraction == 1 else plain(self)


class GradientShare(TierShare):
    """The same; `auto` is where the optimizer state rests."""

    tier: Literal["auto", "none", "host", "file"] = Field(default="auto", description="The tier.")  # type: ignore[assignment]


_TIERS = "none, host or file, or a mapping such as {tier: file, fraction: 0.7}"


class OffloadSection(Section):
    """What rests elsewhere than in the device's memory, and comes only when it is needed. Nothing that is computed changes."""

    optimizer: Annotated[TierShare, Allowed(_TIERS)] = Field(
        default_factory=TierShare, description="Master weights and moments, at any stage."
    )
    gradients: Annotated[GradientShare, Allowed(f"auto, {_TIERS}")] = Field(
        default_factory=GradientShare,
        description="Gradient shards between reduction and update; auto: as the optimizer state.",
    )
    parameters: Annotated[TierShare, Allowed(_TIERS)] = Field(
        default_factory=TierShare, description="Parameters between their uses, at stage 3."
    )
    activations: Annotated[TierShare, Allowed(_TIERS)] = Field(
        default_factory=TierShare,
        description="Inputs of recomputed blocks until backward; a fraction is that of the first blocks.",
    )
    update: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="Where updates are computed whose states are not in an accelerator's memory: on the CPU (host), or on the "
        "device; auto tries both once.",
    )
    directory: Text | Texts | None = Field(
        default=None,
        description="Where files of the file tier lie: best on a local NVMe disk; several are used in turn, stripe by stripe. "
        "null: `offload` in the run's directory.",
    )
    checksums: bool = Field(
        default=False, description="Verify what is read from files by checksums that stay in memory."
    )
    staging: Annotated[
        int,
        BeforeValidator(bytes_from_text),
        Field(ge=LEAST_STAGING),
        Allowed("a number of bytes of 4MiB or more, such as 64MiB"),
    ] = Field(default=64 << 20, description="Bytes of all buffers of a rank between files and the optimizer.")
