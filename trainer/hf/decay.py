"""Which parameters weight decay leaves out in transformers' Trainer."""

from __future__ import annotations

from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

# As in `transformers.Trainer.get_decay_parameter_names`, which a test compares: searched for in names in lower case.
_LEFT_OUT = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


def biases_and_norms(model: nn.Module) -> list[str]:
    """The names of `model`'s parameters that are biases, or belong to a normalisation by its name or as an `nn.LayerNorm`."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], list(_LEFT_OUT)))
    return [name for name, _ in model.named_parameters() if name not in decayed]
