"""Activation checkpointing: blocks keep their inputs only, and run again in backward.

Always torch's non-reentrant form, around `forward` and not around the call of the module: hooks on a block
then run once, outside of the recomputation, which is what an engine that gathers a block's parameters needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zeromesh.errors import ConfigError
from zeromesh.offload import allocate_lasting
from zeromesh.offload.activations.store import ActivationStore
from zeromesh.rng import HostState

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

_ALIGNMENT = 64
"""Bytes: what PyTorch gives tensors on CPU."""


def enable_activation_checkpointing(
    model: nn.Module,
    mode: Mode,
    *,
    blocks: Sequence[nn.Module] | None = None,
    store: ActivationStore | None = None,
) -> int:
    """Checkpoint the activations of `model`'s blocks; returns how many blocks do so (0 for `none`).

    Args:
        model: a Hugging Face model, whose layers know how to checkpoint themselves, or any module with `blocks`.
        mode: `none`: as the model was given, whose layers may recompute themselves; `block`: a block keeps its inputs and is
            recomputed whole; `selective`: it also keeps the results of matrix products and of fused attention, and recomputes only
            what is cheap.
        blocks: the modules to checkpoint where they do not know it themselves.
        store: keeps the inputs of blocks until backward; None: they stay on the device. Around it `torch.compile` compiles
            nothing of a block.

    Gradients are those without checkpointing, dropout included. Raises `ConfigError` for an unknown mode, if the model has no
    blocks that can be checkpointed, and for a store that nothing would be kept in.
    """
    inner, layers = recomputed_blocks(model, mode, blocks), _layers(model)
    if mode == "none":
        if store is not None:
            raise ConfigError(
                "activation_checkpointing: none keeps all activations on the device, and their offload moves the inputs of "
                "recomputed blocks; set activation_checkpointing: block"
            )
        return _own_checkpointing(layers)
    on_device, away = _checkpoint_functions(mode, store)
    count = store.away_of(len(inner)) if store is not None else 0
    run = {id(block): away for block in inner[:count]}
    if not _knows_itself(model):
        for block in inner:
            _wrap_forward(block, run.get(id(block), on_device))
        return len(inner)
    for module in layers:
        module._gradient_checkpointing_func = run.get(id(module), on_device)  # type: ignore[assignment]
        module.gradient_checkpointing = True  # type: ignore[assignment]
    return len(inner)


def _own_checkpointing(layers: Sequence[nn.Module]) -> int:
    """How many layers the user has made recompute themselves (`model.gradient_checkpointing_enable()`), which they go on doing."""
    own = [module for module in layers if module.gradient_checkpointing]
    if any(
        getattr(getattr(each, "_gradient_checkpointing_func", None), "keywords", {}).get("use_reentrant")
        for each in own
    ):
        raise ConfigError(
            "the model was made to checkpoint activations with use_reentrant=True, which brings gradients outside of the step's "
            "backward; pass gradient_checkpointing_kwargs={'use_reentrant': False}, or set model.activation_checkpointing: block"
        )
    return sum(not _contains_another(module, own) for module in own)


def recomputed_blocks(model: nn.Module, mode: Mode, blocks: Sequence[nn.Module] | None = None) -> tuple[nn.Module, ...]:
    """The blocks that `enable_activation_checkpointing` would have recomputed, in the order of the model; raises as it does."""
    if mode not in get_args(Mode):
        raise ConfigError(f"activation_checkpointing: {mode!r} is not one of {', '.join(get_args(Mode))}")
    if mode == "none":
        return ()
    if _knows_itself(model):
        layers = _layers(model)
        return tuple(module for module in layers if not _contains_another(module, layers))
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing: {mode} needs repeated blocks, and {type(model).__name__} has none that "
            "are known; set activation_checkpointing: none, or name the blocks"
        )
    return tuple(blocks)


def _knows_itself(model: nn.Module) -> bool:
    """Whether the model's layers know how to checkpoint themselves."""
    return getattr(model, "supports_gradient_checkpointing", False) and bool(_layers(model))


def _layers(model: nn.Module) -> list[nn.Module]:
    """Modules that can be told to checkpoint themselves, and those that contain them."""
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def _checkpoint_functions(mode: Mode, store: ActivationStore | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What checkpoints a block whose inputs stay on the device, and one whose inputs leave it."""
    if mode == "block":
        run = partial(checkpoint, use_reentrant=False)
    else:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        run = partial(checkpoint, use_reentrant=False, context_fn=contexts)

    def kept(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(_replaying(function), *map(_kept, args), **kwargs)

    if store is None:
        return kept, kept
    return _stored(run, store, away=False), _stored(run, store, away=True)


def _replaying(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose later calls, in backward, draw from NumPy's and Python's generators what the first one did: `checkpoint`
    itself restores PyTorch's generators alone."""
    if torch.compiler.is_compiling():
        return function
    state, calls = HostState.now(), itertools.count()

    def replaying(*args: Any, **kwargs: Any) -> Any:
        with state.replayed() if next(calls) else nullcontext():
            return function(*args, **kwargs)

    return replaying


def _stored(run: Callable[..., Any], store: ActivationStore, *, away: bool) -> Callable[..., Any]:
    def stored(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        # `checkpoint` saves its arguments under the hooks that are in force around it, and nothing else: within, it has its own.
        with store.keeping(away=away):
            return run(
                _replaying(function), *[_as_stored(value) if store.moves(value) else value for value in args], **kwargs
            )

    return stored


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


def _as_stored(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states as the store will give them back: what a kernel computes may depend on strides and on alignment."""
    if hidden.is_contiguous() and (hidden.device.type != "cpu" or hidden.data_ptr() % _ALIGNMENT == 0):
        return hidden
    return hidden.clone(memory_format=torch.contiguous_format)


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
