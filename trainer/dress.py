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
from zeromesh.trainer.wrapped import Compile
from zeromesh.zero.options import ZeroOptions
from zeromesh.zero.plan import block_modules


@dataclass(frozen=True, kw_only=True, slots=True)
class Dressed:
    """`away`: recomputed blocks whose inputs leave the device. `notes` say what was done."""

    away: int
    notes: tuple[str, ...] = ()


def dress_model(
    model: nn.Module, section: ModelSection, options: ZeroOptions, tiers: Tiers, compile_: Compile | None = None
) -> Dressed:
    """Change `model` in place as the configuration says. `compile_`: how the model was compiled as a whole when it was given, which
    its blocks are instead, since parameters are gathered between them.

    Raises:
        ConfigError: for blocks to be compiled that are not known.
        StorageError: when there is no directory for inputs that are to rest on files.
    """
    # A model in evaluation mode is as `from_pretrained` leaves it; single modules are meant to be in it: frozen statistics.
    # In either case a `train` of the model's own is called, as every training loop calls it.
    meant = [module for module in model.modules() if model.training and not module.training]
    model.train()
    for module in meant:
        module.training = False
    compute = options.precision.compute
    notes = []
    if widened := use_fastest_products(model, compute, tiers.device.type):
        name = str(compute).removeprefix("torch.")
        notes.append(
            f"products: {widened} linear layers multiply in float32, which a trial found faster here than {name}"
        )
    blocks = block_modules(model)
    mode, choice = section.activation_checkpointing, options.offload.activations
    store = ActivationStore(tiers, choice) if choice.away else None
    count = enable_activation_checkpointing(model, mode, blocks=blocks or None, store=store)
    if compile_ is not None:
        what = (
            f"its {len(blocks)} blocks are compiled" if blocks else "no blocks are known in it, and nothing is compiled"
        )
        notes.append(f"the model was given compiled by torch.compile: {what}, with the same backend")
    elif section.compile:
        compile_ = torch.compile
        if not blocks:
            raise ConfigError(
                f"model.compile compiles repeated blocks, and {type(model).__name__} has none that are known; set "
                "model.compile: false and compile the model yourself"
            )
    if compile_ is not None:
        for block in blocks:
            block.forward = compile_(block.forward)
    away = 0
    if store is not None:
        away = store.away_of(count)
        notes.append(f"offload: inputs of {away} of {count} recomputed blocks rest on {choice.tier}")
    return Dressed(away=away, notes=tuple(notes))
