"""The section `optimizer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zeromesh.trainer.config_types import Allowed, Fraction, Number, Text, tuple_from_list
from zeromesh.trainer.sections.section import Section


class OptimizerSection(Section):
    """The update, by torch's fused optimizers on flat shards."""

    name: Literal["adamw", "adam", "sgd", "adagrad"] = Field(default="adamw", description="The optimizer.")
    lr: Annotated[Number, Field(ge=0.0)] = Field(default=3.0e-4, description="Learning rate after the warm-up.")
    betas: Annotated[
        tuple[Fraction, Fraction],
        BeforeValidator(tuple_from_list),
        Allowed("a list of two numbers, each >= 0 and < 1"),
    ] = Field(default=(0.9, 0.95), description="Decay rates of the two moments of adamw and adam.")
    eps: Annotated[Number, Field(ge=0.0)] = Field(
        default=1.0e-8, description="Added to the denominator of adamw, adam and adagrad."
    )
    weight_decay: Annotated[Number, Field(ge=0.0)] = Field(
        default=0.1,
        description="Decay of every parameter that `no_decay` does not match; adamw decouples it from the gradient.",
    )
    momentum: Fraction = Field(default=0.0, description="Momentum of sgd.")
    no_decay: Annotated[tuple[Text, ...], BeforeValidator(tuple_from_list)] = Field(
        default=(), description="Patterns such as '*.bias' of the names of parameters without weight decay."
    )
    exempt: Literal["none", "biases_and_norms"] = Field(
        default="none",
        description="Parameters without weight decay besides those of `no_decay`: none, or those that transformers' Trainer leaves "
        "out.",
    )
    in_backward: bool = Field(
        default=False,
        description="Update each bucket inside backward, so that its gradient is freed at once. Needs "
        "clip_norm 0, "
        "on_nonfinite stop and no float16.",
    )
    granularity: Literal["element"] = Field(
        default="element", description="Shards are cut at any element of a parameter."
    )
