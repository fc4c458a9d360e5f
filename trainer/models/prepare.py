"""What a run makes of a model's modules before it trains: training mode, fast products, recomputed and compiled blocks.

What a run changes on the modules of a model that is somebody else's, and how it is put back.

Linear layers that multiply in the dtype which is fastest on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from zeromesh.errors import ConfigError
from zeromesh.kernels.cpu_matmul import linear, product_dtype
from zeromesh.offload import Tiers
from zeromesh.offload.activations.store import ActivationStore
from zeromesh.options import ZeroOptions
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.models.activation_checkpointing import enable_activation_checkpointing
from zeromesh.trainer.models.user_model import Compile
from zeromesh.units.plan import block_modules

# Compiled or checkpointed blocks, Hugging Face's switch for checkpointing, training mode, its way to save.
_CHANGED = ("forward", "training", "gradient_checkpointing", "_gradient_checkpointing_func", "save_pretrained")
_ABSENT = object()


class KeptAttributes:
    """The attributes of every module of `model` that a run may change, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[nn.Module, dict[str, Any]]] = [
            (module, {name: vars(module).get(name, _ABSENT) for name in _CHANGED}) for module in model.modules()
        ]

    def put_back(self) -> None:
        """The model is as it was, but for its parameters and buffers."""
        for module, attributes in self._kept:
            for name, value in attributes.items():
                if value is _ABSENT:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = value


class TrainingModes:
    """Which modules of a model train, from step to step. `restore` before a step undoes a `model.eval()` that nobody took back; a
    module that the user puts into evaluation mode by itself (frozen statistics) stays in it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._modes = [module.training for module in self._modules]

    def restore(self) -> None:
        """Put the modules back into the modes of the last step, if the model as a whole is in evaluation mode."""
        if self._modules[0].training:
            self._modes = [module.training for module in self._modules]
            return
        for module, mode in zip(self._modules, self._modes, strict=True):
            module.training = mode


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """As `model.eval()`, but each module is afterwards in the mode in which it was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def use_fastest_linear(model: nn.Module, compute: torch.dtype, device_type: str) -> int:
    """Have the linear layers of `model` multiply in the fastest dtype for `compute`; returns how many layers do so now.

    Layers that compute otherwise than `torch.nn.Linear` and GPT-2's transposed ones (subclasses, say) stay as they are.
    """
    if product_dtype(compute, device_type) == compute:
        return 0
    layers = [module for module in model.modules() if type(module) in _FORWARDS and "forward" not in vars(module)]
    for layer in layers:
        layer.forward = MethodType(_FORWARDS[type(layer)], layer)
    return len(layers)


def _linear(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    return linear(input, layer.weight, layer.bias)


def _transposed(layer: Conv1D, x: torch.Tensor) -> torch.Tensor:
    return linear(x, layer.weight.t(), layer.bias)


_FORWARDS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {nn.Linear: _linear, Conv1D: _transposed}


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModel:
    """`away`: recomputed blocks whose inputs leave the device. `notes` say what was done."""

    away: int
    notes: tuple[str, ...] = ()


def prepare_model(
    model: nn.Module, section: ModelSection, options: ZeroOptions, tiers: Tiers, compile_: Compile | None = None
) -> PreparedModel:
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
    if widened := use_fastest_linear(model, compute, tiers.device.type):
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
    return PreparedModel(away=away, notes=tuple(notes))
