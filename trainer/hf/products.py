"""Linear layers that multiply in the dtype which is fastest on this machine."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from zeromesh.tensor.products import linear, product_dtype


def use_fastest_products(model: nn.Module, compute: torch.dtype, device_type: str) -> int:
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
