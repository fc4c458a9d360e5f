"""Activation checkpointing: blocks keep their inputs only, and run again in backward.

Always torch's non-reentrant form, around `forward` and not around the call of the module: hooks on a block
then run once, outside of the recomputation, which is what an engine that gathers a block's parameters needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zeromesh.errors import ConfigError
from zeromesh.offload import allocate_lasting

Mode = Literal["none", "block", "selective"]

# What `selective` keeps: results of matrix products and of fused attention, which are dear to compute.
# Batched products are not among them: unfused attention makes its scores with them, [sequence, sequence] for
# each head.
_KEPT_NAMES = (
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "zeromesh::wide_linear",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
)


def enable_activation_checkpointing(model: nn.Module, mode: Mode, *, blocks: Sequence[nn.Module] | None = None) -> int:
    """Checkpoint the activations of `model`'s blocks; returns how many blocks do so (0 for `none`).

    Args:
        model: a Hugging Face model, whose layers know how to checkpoint themselves, or any module with
        `blocks`. mode: `none`; `block`: a block keeps its inputs and is recomputed whole; `selective`: it
        also keeps the results
            of matrix products and of fused attention, and recomputes only what is cheap.
        blocks: the modules to checkpoint where they do not know it themselves.

    Gradients are those without checkpointing, dropout included. Raises `ConfigError` for an unknown mode, and
    if the model has no blocks that can be checkpointed.
    """
    if mode not in get_args(Mode):
        raise ConfigError(f"activation_checkpointing: {mode!r} is not one of {', '.join(get_args(Mode))}")
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if mode == "none":
        for module in layers:
            module.gradient_checkpointing = False  # type: ignore[assignment]
        return 0
    run = _checkpoint_function(mode)
    if getattr(model, "supports_gradient_checkpointing", False) and layers:
        for module in layers:
            module._gradient_checkpointing_func = run  # type: ignore[assignment]
            module.gradient_checkpointing = True  # type: ignore[assignment]
        inner = [module for module in layers if not _contains_another(module, layers)]
        return len(inner)
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing: {mode} needs repeated blocks, and {type(model).__name__} has none that "
            "are known; set activation_checkpointing: none, or name the blocks"
        )
    for block in blocks:
        _wrap_forward(block, run)
    return len(blocks)


def _checkpoint_function(mode: Mode) -> Callable[..., Any]:
    if mode == "block":
        run = partial(checkpoint, use_reentrant=False)
    else:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        run = partial(checkpoint, use_reentrant=False, context_fn=contexts)

    def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(function, *map(_kept, args), **kwargs)

    return checkpointed


class _Keep(torch.autograd.Function):
    """A copy of a block's input in memory of its own.

    It lives until backward, while all that the block computes goes at once: on the C library's heap every input would leave a
    hole behind it that the next block's results do not fit into.
    """

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return allocate_lasting(tuple(given.shape), given.dtype, given.device).copy_(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _kept(value: Any) -> Any:
    """What a block keeps of an argument: hidden states in memory of their own, everything else as it is."""
    if isinstance(value, torch.Tensor) and value.requires_grad and value.device.type == "cpu" and not value.is_leaf:
        return _Keep.apply(value)  # type: ignore[no-untyped-call]
    return value


def _policy(_context: object, operation: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    if operation.name().rpartition(".")[0] in _KEPT_NAMES or operation.name() in _KEPT_NAMES:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _contains_another(module: nn.Module, others: Sequence[nn.Module]) -> bool:
    known = {id(other) for other in others}
    return any(id(inner) in known for inner in module.modules() if inner is not module)


def _wrap_forward(block: nn.Module, run: Callable[..., Any]) -> None:
    forward = block.forward

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return run(forward, *args, **kwargs)
        return forward(*args, **kwargs)

    block.forward = checkpointed
