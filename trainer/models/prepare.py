"""What a run changes in the modules of a model before it trains, and how it puts that back.

It changes training mode, the dtype in which linear layers multiply, and which blocks are recomputed and compiled.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from zeromesh.errors import ConfigError
from zeromesh.kernels.cpu_matmul import linear, product_dtype
from zeromesh.offload import Tiers
from zeromesh.offload.activation_store import ActivationStore
from zeromesh.options import ZeroOptions
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.models.activation_checkpointing import enable_activation_checkpointing
from zeromesh.trainer.models.user_model import Compile
from zeromesh.units.plan import block_modules

_CHANGED = ("forward", "training", "gradient_checkpointing", "_gradient_checkpointing_func", "save_pretrained")
"""Attributes that compiled and checkpointed blocks, training mode, and saving of a partitioned model change."""


def keep_attributes(model: nn.Module) -> Callable[[], None]:
    """Return what gives every module of `model` back the attributes that a run may change, but no parameter and no buffer."""
    modules = [vars(module) for module in model.modules()]
    kept = [{name: attributes[name] for name in _CHANGED if name in attributes} for attributes in modules]

    def put_back() -> None:
        for attributes, before in zip(modules, kept, strict=True):
            for name in _CHANGED:
                attributes.pop(name, None)
            attributes.update(before)

    return put_back


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside the block; each module is afterwards in the mode in which it was."""
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


def prepare_model(
    model: nn.Module, section: ModelSection, options: ZeroOptions, tiers: Tiers, compile_: Compile | None = None
) -> tuple[int, tuple[str, ...]]:
    """Change `model` in place as the configuration says.

    Returns in how many recomputed blocks inputs leave the device, and lines about all that was done.

    `compile_` is how the model was compiled as a whole when it was given. Its blocks are compiled so instead, since parameters are
    gathered between them.

    Raises:
        ConfigError: for blocks to be compiled that are not known.
        StorageError: when there is no directory for inputs that are to rest on files.
    """
    _start_training(model)
    compute = options.precision.compute
    notes = []
    if widened := use_fastest_linear(model, compute, tiers.device.type):
        name = str(compute).removeprefix("torch.")
        notes.append(
            f"products: {widened} linear layers multiply in float32, which a trial found faster here than {name}"
        )
    blocks = block_modules(model)
    choice = options.offload.activations
    store = ActivationStore(tiers, choice) if choice.away else None
    count = enable_activation_checkpointing(model, section.activation_checkpointing, blocks=blocks or None, store=store)
    if compile_ is not None:
        done = (
            f"its {len(blocks)} blocks are compiled" if blocks else "no blocks are known in it, and nothing is compiled"
        )
        notes.append(f"the model was given compiled by torch.compile: {done}, with the same backend")
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
    if store is None:
        return 0, tuple(notes)
    away = store.away_of(count)
    notes.append(f"offload: inputs of {away} of {count} recomputed blocks rest on {choice.tier}")
    return away, tuple(notes)


def _start_training(model: nn.Module) -> None:
    """Put a model into training mode.

    A model in evaluation mode is as `from_pretrained` leaves it. In one that trains, single modules in evaluation mode are meant to
    be in it (frozen statistics), and stay. In either case a `train` of the model's own is called, as every training loop calls it.
    """
    evaluating = [module for module in model.modules() if model.training and not module.training]
    model.train()
    for module in evaluating:
        module.training = False
