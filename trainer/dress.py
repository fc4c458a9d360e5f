"""What a run makes of a model's modules before it trains: training mode, fast products, recomputed and compiled blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zeromesh.errors import ConfigError
from zeromesh.offload import Tiers
from zeromesh.offload.activations import ActivationStore
from zeromesh.trainer.hf.checkpointing import enable_activation_checkpointing
from zeromesh.trainer.hf.products import use_fastest_products
from zeromesh.trainer.sections.model import ModelSection
from zeromesh.zero.options import ZeroOptions
from zeromesh.zero.plan import block_modules


@dataclass(frozen=True, kw_only=True, slots=True)
class Dressed:
    """`away`: recomputed blocks whose inputs leave the device. `notes` say what was done."""

    away: int
    notes: tuple[str, ...] = ()


def dress_model(model: nn.Module, section: ModelSection, options: ZeroOptions, tiers: Tiers) -> Dressed:
    """Change `model` in place as the configuration says.

    Raises:
        ConfigError: for blocks to be compiled that are not known.
        StorageError: when there is no directory for inputs that are to rest on files.
    """
    model.train()
    use_fastest_products(model, options.precision.compute, tiers.device.type)
    blocks = block_modules(model)
    mode, choice = section.activation_checkpointing, options.offload.activations
    store = ActivationStore(tiers, choice) if choice.away else None
    count = enable_activation_checkpointing(model, mode, blocks=blocks or None, store=store)
    if section.compile:
        if not blocks:
            raise ConfigError(
                f"model.compile compiles repeated blocks, and {type(model).__name__} has none that are known; set "
                "model.compile: false and compile the model yourself"
            )
        for block in blocks:
            block.forward = torch.compile(block.forward)
    if store is None:
        return Dressed(away=0)
    away = store.away_of(count)
    note = f"offload: inputs of {away} of {count} recomputed blocks rest on {choice.tier}"
    return Dressed(away=away, notes=(note,))
