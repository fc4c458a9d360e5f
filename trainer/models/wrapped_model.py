"""Models that come in a wrapper: what is inside is trained, by the names that it has there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zeromesh.errors import ConfigError

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes a compiled function of a function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unwrapped:
    """`compile`: how the wrapper compiles, with its backend and options; None for a model that is not compiled as a whole."""

    model: nn.Module
    compile: Compile | None = None


def unwrapped(model: nn.Module) -> Unwrapped:
    """What `torch.compile` or `DataParallel` have wrapped.

    Raises:
        ConfigError: for `DistributedDataParallel`, which would reduce gradients a second time, and for a compiled module inside.
    """
    compile_: Compile | None = None
    wrapper: Any = model
    while _compiled(wrapper) or isinstance(wrapper, DataParallel | DistributedDataParallel):
        if isinstance(wrapper, DistributedDataParallel):
            raise ConfigError(
                "model is a DistributedDataParallel, which reduces gradients itself; give the model inside (.module)"
            )
        if _compiled(wrapper):
            compile_, wrapper = wrapper.dynamo_ctx, wrapper._orig_mod
        else:
            wrapper = wrapper.module
    model = wrapper
    parts = [name for name, module in model.named_modules() if _compiled(module)]
    if parts:
        raise ConfigError(
            f"{', '.join(parts[:3])}: torch.compile was applied to a part of the model, whose parameters are gathered around its "
            "blocks; give the model as it is and set model.compile: true, which compiles each block"
        )
    return Unwrapped(model=model, compile=compile_)


def _compiled(model: Any) -> bool:
    """Whether it is what `torch.compile` makes of a module; its class would have to be imported, which takes a second."""
    return type(model).__name__ == "OptimizedModule" and isinstance(getattr(model, "_orig_mod", None), nn.Module)
