"""The model that a user gives: what is inside its wrapper, and whether the layout can train it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.models.adapters import is_adapted, pretrained_of

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a compiled function of a function."""

_LAYER_DROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_encoder_layerdrop")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnwrappedModel:
    """A model without its wrapper. `compile` compiles as the wrapper did, with its backend and options; None: nothing did."""

    model: nn.Module
    compile: Compile | None = None


def unwrap(model: nn.Module) -> UnwrappedModel:
    """Return the model inside `torch.compile` and `DataParallel`, which is trained by the names that its parameters have there.

    Raises:
        ConfigError: for `DistributedDataParallel`, which would reduce gradients a second time, and for a compiled module inside.
    """
    compile_: Compile | None = None
    inside: Any = model
    while True:
        if _is_compiled(inside):
            compile_, inside = inside.dynamo_ctx, inside._orig_mod
        elif isinstance(inside, DistributedDataParallel):
            raise ConfigError(
                "model is a DistributedDataParallel, which reduces gradients itself; give the model inside (.module)"
            )
        elif isinstance(inside, DataParallel):
            inside = inside.module
        else:
            break
    parts = [name for name, module in inside.named_modules() if _is_compiled(module)]
    if parts:
        raise ConfigError(
            f"{', '.join(parts[:3])}: torch.compile was applied to a part of the model, whose parameters are gathered around its "
            "blocks; give the model as it is and set model.compile: true, which compiles each block"
        )
    return UnwrappedModel(model=inside, compile=compile_)


def _is_compiled(model: Any) -> bool:
    # By the name of its class: importing the class takes a second.
    return type(model).__name__ == "OptimizedModule" and isinstance(getattr(model, "_orig_mod", None), nn.Module)


def require_no_layer_drop(model: nn.Module, data_ranks: int) -> None:
    """Raise `ConfigError` for a model that leaves layers out at random (LayerDrop, Fan et al., 2020) on several data ranks.

    Ranks gather layers and sum gradients together. One that leaves a layer out would have the others wait for it.
    """
    inside = pretrained_of(model)
    if inside is None or data_ranks == 1:
        return
    found = [
        f"{prefix}{name} is {value}"
        for prefix, config in _nested_configs(inside.config)
        for name in _LAYER_DROP
        if isinstance(value := vars(config).get(name), int | float) and value > 0
    ]
    if found:
        raise ConfigError(
            f"{', '.join(found)}: each of {data_ranks} data ranks would leave out other layers, and they gather layers together; "
            "set it to 0 in the model's configuration, or train on one rank",
            where="model.config",
        )


def _nested_configs(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a configuration and those inside it, each with what the names of its fields begin with."""
    yield prefix, config
    for name, value in vars(config).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _nested_configs(value, f"{prefix}{name}.")


def require_adapters_that_fit(model: nn.Module, mesh: Mesh) -> None:
    """Raise `ConfigError` for adapters of a model that is to be divided."""
    if is_adapted(model) and (mesh.tensor.size > 1 or mesh.pipeline.size > 1):
        raise ConfigError(
            "a model with adapters is shared out over data axes alone: set parallel.tensor and parallel.pipeline to 1; "
            "zero.stage: 3 shares out its frozen weights"
        )
