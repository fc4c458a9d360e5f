"""The changes that a run makes to a model's modules before training, and their reversal: the training mode, the attention
implementation, the dtype of linear layers' products, recomputed and compiled blocks.

Activation checkpointing is always the non-reentrant form of torch, around `forward` and not around the call of the module: hooks
on a block then run once, outside of the recomputation, which is what an engine that gathers a block's parameters needs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import _CachedTorchDispatchMode, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_kernels_available

from zeromesh.errors import ConfigError, library_errors
from zeromesh.kernels.cpu_matmul import linear, product_dtype
from zeromesh.offload import Tiers, allocate_lasting
from zeromesh.offload.accelerator import device_name, is_accelerator, multiplies_float8
from zeromesh.offload.activation_store import ActivationStore
from zeromesh.options import ZeroOptions
from zeromesh.rng import GeneratorStates, kept_generators
from zeromesh.trainer.config.sections.model import Attention, ModelSection
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.models.tiles import find_token_wise, use_tiles
from zeromesh.trainer.models.user_model import Compile
from zeromesh.trainer.weights.safetensors_source import quiet_library
from zeromesh.units.plan import block_modules

Mode = Literal["none", "block", "selective"]
_Function = Callable[..., Any]

# `selective` keeps the results of matrix products and fused attention, which are expensive. It does not keep batched
# products, which unfused attention uses for scores of shape [sequence, sequence] per head.
_KEPT_OPERATORS = (
    *("aten::mm", "aten::addmm", "aten::_grouped_mm", "zeromesh::wide_linear"),
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
    "aten::_scaled_dot_product_fused_attention_overrideable",
    *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "flash_attn_3::_flash_attn_forward"),
)

_ALIGNMENT = 64  # bytes, of PyTorch's CPU tensors


def enable_activation_checkpointing(
    model: nn.Module, mode: Mode, *, blocks: Sequence[nn.Module] | None = None, store: ActivationStore | None = None
) -> int:
    """Checkpoint the activations of `model`'s blocks, by a Hugging Face model's layers themselves, else of `blocks`; returns their
    number. By `mode`, layers may recompute as the model was given (none), a block keeps its inputs and is recomputed whole (block),
    or it also keeps the results of matrix products and of fused attention (selective). A `store` offloads the inputs of blocks
    until backward, and then `torch.compile` compiles nothing of a block. Gradients are those without checkpointing, dropout
    included. Raises `ConfigError` if the model has no blocks that can be checkpointed, and for a store without checkpointing."""
    layers = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if mode == "none":
        if store is not None:
            raise ConfigError(
                "activation_checkpointing: none keeps all activations on the device, and their offload moves the inputs of "
                "recomputed blocks; set activation_checkpointing: block"
            )
        own = [module for module in layers if module.gradient_checkpointing]
        functions = [getattr(module, "_gradient_checkpointing_func", None) for module in own]
        if any(getattr(each, "keywords", {}).get("use_reentrant") for each in functions):
            raise ConfigError(
                "the model was made to checkpoint activations with use_reentrant=True, which brings gradients outside of the "
                "step's backward; pass gradient_checkpointing_kwargs={'use_reentrant': False}, or set "
                "model.activation_checkpointing: block"
            )
        return len(_innermost(own))
    by_itself = getattr(model, "supports_gradient_checkpointing", False) and bool(layers)
    if not (recomputed := _innermost(layers) if by_itself else list(blocks or ())):
        raise ConfigError(
            f"activation_checkpointing: {mode} needs repeated blocks, and {type(model).__name__} has none that "
            "are known; set activation_checkpointing: none, or name the blocks"
        )
    run = partial(checkpoint, use_reentrant=False)
    if mode == "selective":
        run = partial(run, context_fn=_selective_contexts)
    away = 0 if store is None else store.offloaded_count(len(recomputed))
    offloads = set(map(id, recomputed[:away]))
    for block in layers if by_itself else recomputed:
        recompute = partial(_run_recomputed, run, store, id(block) in offloads)
        if by_itself:
            block._gradient_checkpointing_func = recompute  # type: ignore[assignment]
            block.gradient_checkpointing = True  # type: ignore[assignment]
        else:
            _wrap_forward(block, recompute)
    return len(recomputed)


def _innermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    known = set(map(id, modules))
    return [module for module in modules if known.isdisjoint(map(id, [*module.modules()][1:]))]


def _run_recomputed(
    run: _Function, store: ActivationStore | None, offloads: bool, function: _Function, /, *args: Any, **kwargs: Any
) -> Any:
    """Run a block's `function` by `run`, a form of torch's `checkpoint`; `offloads` moves the saved inputs off the device."""
    if store is None:
        return run(_replay_rng(function), *map(_copy_input, args), **kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # `checkpoint` saves its arguments under the hooks that are active around the call; inside, it has its own hooks.
    with store.saving_inputs(offloaded=offloads):
        return run(_replay_rng(function), *[_aligned(arg) if store.copies(arg) else arg for arg in args], **kwargs)


def _replay_rng(function: _Function) -> _Function:
    """Wrap `function` to restore NumPy's and Python's random state when it is recomputed; `checkpoint` restores PyTorch's alone."""
    if torch.compiler.is_compiling():
        return function
    state, calls = GeneratorStates.now(host_only=True), itertools.count()

    def replaying(*args: Any, **kwargs: Any) -> Any:
        if not next(calls):
            return function(*args, **kwargs)
        with kept_generators(host_only=True):
            state.restore()
            return function(*args, **kwargs)

    return replaying


class _SeparateCopy(torch.autograd.Function):
    """A copy of a block's input in separate memory. The input lives until backward, while the block's other tensors are freed at
    once: on the C library's heap, each input would leave a hole too small for the next block's results."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return allocate_lasting(tuple(hidden.shape), hidden.dtype, hidden.device).copy_(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _copy_input(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.requires_grad and value.device.type == "cpu" and not value.is_leaf:
        return _SeparateCopy.apply(value)  # type: ignore[no-untyped-call]
    return value


def _aligned(hidden: torch.Tensor) -> torch.Tensor:
    """Return hidden states with the strides and alignment that the store restores, as kernel results may depend on both."""
    if hidden.is_contiguous() and (hidden.device.type != "cpu" or hidden.data_ptr() % _ALIGNMENT == 0):
        return hidden
    return hidden.clone(memory_format=torch.contiguous_format)


def _is_kept(operation: Any) -> bool:
    return operation.name().partition(".")[0] in _KEPT_OPERATORS  # `aten::mm` of `aten::mm.out`


class _KeptResults(_CachedTorchDispatchMode):
    """Returns results that were kept. The base class also refuses an operator that did not run before; but a cache, such as that of
    a transport's views, may answer in the forward and not when a block is recomputed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_kept(func):
            return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _selective_contexts() -> tuple[Any, Any]:
    policy = lambda _context, operation, *_args, **_kwargs: _is_kept(operation)  # noqa: E731
    forward, _ = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return forward, _KeptResults(policy, forward.storage, False)  # Older versions of torch ask for all three.


def _wrap_forward(block: nn.Module, run: _Function) -> None:
    forward = block.forward

    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if block.training and torch.is_grad_enabled():
            return run(forward, *args, **kwargs)
        return forward(*args, **kwargs)

    block.forward = checkpointed


_ATTRIBUTES = ("forward", "training", "gradient_checkpointing", "_gradient_checkpointing_func", "save_pretrained")


def keep_attributes(model: nn.Module) -> Callable[[], None]:
    """Copy the attributes of modules that a run may change (no parameters or buffers), and return a function that restores them."""
    modules = [vars(module) for module in model.modules()]
    kept = [{name: attributes[name] for name in _ATTRIBUTES if name in attributes} for attributes in modules]

    def restore() -> None:
        for attributes, before in zip(modules, kept, strict=True):
            for name in _ATTRIBUTES:
                attributes.pop(name, None)
            attributes.update(before)

    return restore


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    with ExitStack() as undone:
        for module in model.modules():
            undone.callback(setattr, module, "training", module.training)
        model.eval()
        yield


_ATTENTION = "model.attention"
_FLASH = {
    "flash_attention_2": ("flash-attn (pip install flash-attn --no-build-isolation)", is_flash_attn_2_available),
    "flash_attention_3": (
        "flash-attn-3 (pip install flash-attn-3, from PyTorch's index, or built from flash-attention's folder hopper)",
        is_flash_attn_3_available,
    ),
}
"""The package of each implementation, and the function that tells if it is installed."""


def use_attention(model: nn.Module, name: Attention, compute: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Set a transformers model's attention implementation to `name`; returns a function that restores the previous one. Raises
    `ConfigError` if the model, the device, the dtype `compute` or a missing package does not allow it."""
    if (inside := pretrained_of(model)) is None:
        problem = f"{type(model).__name__} is no model of transformers, and computes as it does"
        raise ConfigError(problem, where=_ATTENTION)
    if name in _FLASH:
        package, available = _FLASH[name]
        computes = str(compute).removeprefix("torch.")
        missing = f"{name} needs {package}, or kernels (pip install kernels), which fetches it from the Hub"
        for refused, reason in (
            (not is_accelerator(device), f"{name} computes on GPUs, and this run on {device.type.upper()}; take sdpa"),
            (not (available() or is_kernels_available()), missing),
            (compute.itemsize != 2, f"{name} computes in bfloat16 and float16, and precision.compute is {computes}"),
        ):
            if refused:
                raise ConfigError(reason, where=_ATTENTION)
    elif name == "flex_attention" and not is_accelerator(device):
        raise ConfigError("flex_attention has no backward on CPUs; take sdpa", where=_ATTENTION)
    parts = (inside, *(each for each in inside.modules() if isinstance(each, PreTrainedModel)))
    with ExitStack() as undone:
        for config in {id(each.config): each.config for each in parts}.values():
            undone.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation)
        with quiet_library(), library_errors(_ATTENTION, f"{type(inside).__name__} cannot compute by {name}: "):
            inside.set_attn_implementation(name)
        taken = inside.config._attn_implementation
        # Without the package, but with `kernels`, transformers loads the same kernel from the Hub under another name.
        if taken != name and not (name in _FLASH and "flash" in str(taken)):
            raise ConfigError(f"{type(inside).__name__} computes by {taken}, and takes no other", where=_ATTENTION)
        return undone.pop_all().close


def use_fastest_linear(model: nn.Module, compute: torch.dtype, device_type: str) -> int:
    """Set `torch.nn.Linear` and GPT-2's `Conv1D` in `model`, no subclasses, to multiply in the fastest dtype for `compute`; returns
    the number of changed layers. A frozen head multiplies slices of the hidden states without copies of its weight."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    found = [module for module in model.modules() if type(module) in _FORWARDS and "forward" not in vars(module)]
    layers = [] if product_dtype(compute, device_type) == compute else found
    cut = [module for module in found if module is head and not head.weight.requires_grad]
    for layer in (*layers, *cut):
        layer.forward = MethodType(_FORWARDS[type(layer)], layer)
    return len(layers)


_FORWARDS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.Linear: lambda layer, input: linear(input, layer.weight, layer.bias),
    Conv1D: lambda layer, x: linear(x, layer.weight.t(), layer.bias),
}


def use_float8_linear(model: nn.Module, device: torch.device) -> str:
    """Set the linear layers of `model` to multiply in float8 by the `forward` of torchao's training layers; returns a line about
    it. Layers with a size that is no multiple of 16, a language model's head and subclasses of `torch.nn.Linear` are unchanged.
    Raises `ConfigError` without torchao, on a device without float8 products, and for a model without such a layer."""
    where = "precision.linear"
    if not multiplies_float8(device):
        name = f"a {device_name(device)}" if is_accelerator(device) else "the CPU"
        why = "float8 needs a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell)"
        raise ConfigError(f"{why}, or an MI300, and this run computes on {name}; leave it out", where=where)
    with library_errors(where, "float8 needs the package torchao: pip install torchao; "):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear_layers = [each for each in model.modules() if type(each) is nn.Linear and "forward" not in vars(each)]
    sized = [each for each in linear_layers if not (each.in_features % 16 or each.out_features % 16)]
    layers = [each for each in sized if each is not head]
    if not layers:
        why = f"{type(model).__name__} has no torch.nn.Linear beside its head with sizes that are multiples of 16"
        raise ConfigError(f"{why}; leave it out", where=where)
    # torchao pads the number of tokens, over which weight gradients are summed, to a multiple that a product takes.
    for layer in layers:
        (twin,) = convert_to_float8_training(nn.ModuleList([layer]), config=Float8LinearConfig(pad_inner_dim=True))
        twin._parameters = layer._parameters  # Parameters that the engine replaces are shared with the twin.
        vars(layer)["forward"] = twin.forward
    return f"products: {len(layers)} of {len(linear_layers)} linear layers multiply in float8, by torchao"


def prepare_model(
    model: nn.Module, section: ModelSection, options: ZeroOptions, tiers: Tiers, compile_: Compile | None = None
) -> tuple[int, tuple[str, ...]]:
    """Change `model` in place as the configuration says; returns how many recomputed blocks have offloaded inputs, and notes. The
    blocks of a model that was given compiled are compiled by its compiler `compile_`, since parameters are gathered between them.
    Raises `ConfigError` if no blocks to compile are known or nothing can be tiled, `StorageError` for files without a directory."""
    # Modules in evaluation mode inside a model that trains (frozen statistics) stay so; `from_pretrained` leaves all in that mode.
    evaluating = [module for module in model.modules() if model.training and not module.training]
    model.train()
    for module in evaluating:
        module.training = False
    compute = options.precision.compute
    notes = []
    if widened := use_fastest_linear(model, compute, tiers.device.type):
        faster = f"which a trial found faster here than {str(compute).removeprefix('torch.')}"
        notes.append(f"products: {widened} linear layers multiply in float32, {faster}")
    if section.tile_tokens is not None:
        notes.append(use_tiles(model, section.tile_tokens, find_token_wise(model)))
    blocks = block_modules(model)
    choice = options.offload.activations
    store = ActivationStore(tiers, choice) if choice.uses_tier else None
    count = enable_activation_checkpointing(model, section.activation_checkpointing, blocks=blocks or None, store=store)
    if compile_ is not None:
        none = "no blocks are known in it, and nothing is compiled"
        done = f"its {len(blocks)} blocks are compiled" if blocks else none
        notes.append(f"the model was given compiled by torch.compile: {done}, with the same backend")
    elif section.compile:
        compile_ = torch.compile
        if not blocks:
            why = f"model.compile compiles repeated blocks, and {type(model).__name__} has none that are known"
            raise ConfigError(f"{why}; set model.compile: false and compile the model yourself")
    if compile_ is not None:
        for block in blocks:
            block.forward = compile_(block.forward)
    if store is None:
        return 0, tuple(notes)
    offloaded = store.offloaded_count(count)
    notes.append(f"offload: inputs of {offloaded} of {count} recomputed blocks rest on {choice.tier}")
    return offloaded, tuple(notes)
