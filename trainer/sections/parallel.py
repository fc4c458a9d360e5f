"""The section `parallel`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zeromesh.trainer.config_types import Allowed, Count, Number, Text, tuple_from_list
from zeromesh.trainer.sections.section import Section


class ParallelSection(Section):
    """The mesh. The product of the axes is the number of ranks."""

    replicate: Count = Field(default=1, description="Replicas of each group of shards (hybrid sharding).")
    shard: Literal["auto"] | Count = Field(
        default="auto", description="Ranks that share one copy of the states; auto: all left."
    )
    tensor: Count = Field(default=1, description="Ranks that divide every layer among them, best within one host.")
    pipeline: Count = Field(default=1, description="Ranks that divide the blocks of the model into stages.")
    sequence: bool = Field(
        default=False,
        description="Between divided layers each tensor rank has a share of the sequence: less memory, the same result.",
    )
    plan: Annotated[dict[str, Text], Allowed("a mapping of patterns to styles")] | None = Field(
        default=None,
        description='Styles of layers by pattern of their names, such as `{"*.q_proj": "colwise"}`, beside those that the '
        "model or zeromesh has.",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = Field(
        default="1f1b", description="The order in which stages run the microbatches of a step."
    )
    chunks: Count = Field(
        default=1, description="Stages of each pipeline rank: more than one with the schedule `interleaved` alone."
    )
    stages: (
        Annotated[tuple[Count, ...], BeforeValidator(tuple_from_list), Allowed("a list of numbers of blocks")] | None
    ) = Field(
        default=None,
        description="Blocks of each stage, first to last; null: by `balance`.",
    )
    balance: Literal["parameters", "flops"] = Field(
        default="parameters",
        description="What stages have about as much of: parameters, which is even in memory, or multiplications of a token, "
        "which is even in time where the head is large.",
    )
    order: Literal["topology", "launch"] = Field(
        default="topology",
        description="How processes become ranks: host by host, so that tensor ranks are neighbours, or as they were launched.",
    )
    transport: Literal["auto", "shared", "gloo", "nccl"] = Field(
        default="auto",
        description="How ranks exchange tensors: host-shared memory, gloo or NCCL; auto: the fastest that works.",
    )
    timeout_seconds: Annotated[Number, Field(gt=0.0, le=86400.0)] = Field(
        default=60.0,
        description="Seconds without progress after which a wait ends with an error that names the late rank.",
    )
