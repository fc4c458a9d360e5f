"""The changes that a run makes to a model's modules before training, and their reversal: the training mode, the attention
implementation, the dtype of linear layers' products, recomputed and compiled blocks, modules that run in tiles.

Activation checkpointing is always the non-reentrant form of torch, around `forward` and not around the call of the module: hooks
on a block then run once, outside of the recomputation, which is what an engine that gathers a block's parameters needs.

A module runs in tiles of tokens if a small copy in float64 gives the same outputs and gradients with it in tiles, auxiliary losses
of its routers included, and saves less for backward: an MLP, or a norm of several operations, but no single linear layer."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import _CachedTorchDispatchMode, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_kernels_available

from zeromesh.errors import ConfigError, PhaseError, library_errors
from zeromesh.intervals import grouped
from zeromesh.kernels.cpu_matmul import linear, product_dtype
from zeromesh.kernels.tiles import run_in_tiles
from zeromesh.offload import Tiers, allocate_lasting
from zeromesh.offload.accelerator import device_name, is_accelerator, multiplies_float8
from zeromesh.offload.activation_store import ActivationStore
from zeromesh.options import ZeroOptions
from zeromesh.overrides import override
from zeromesh.rng import GeneratorStates, kept_generators
from zeromesh.tensor.autograd_collectives import uncompiled
from zeromesh.trainer.config.sections.model import Attention, ModelSection
from zeromesh.trainer.models import small_copy
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.models.tensor_trial import example_inputs
from zeromesh.trainer.models.user_model import Compile
from zeromesh.trainer.weights.safetensors_source import quiet_library
from zeromesh.units.plan import block_modules, embedding_of
from zeromesh.weight_init.weight_sources import seeded_cpu
from zeromesh.zero.hooks import has_foreign_hooks

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

_MOST_COPIED = 1 << 18  # elements of a buffer that is copied for the recomputation of a block
_ALIGNMENT = 64  # bytes, of PyTorch's CPU tensors
_TRIAL_TOKENS = 3  # Tokens of a tile in the trial, whose sequences of 8 have an uneven last tile.
_LEAST_SAVED = 0.01  # of what the copy saves for backward
_MAKERS = ("zeromesh", "torchao", "peft")
"""Packages whose layers act on each token alone where the linear ones did that they replace."""
_INSIDE_ADAPTERS = {nn.Linear, nn.Dropout, nn.Identity, nn.ModuleDict, nn.ParameterDict}
TokenWise = Mapping[tuple[str, type], nn.Module]
"""Modules of a small copy that act on each token alone, by their name in their block and their class."""


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
            why = "none keeps all activations on the device, and their offload moves the inputs of recomputed blocks"
            raise ConfigError(f"activation_checkpointing: {why}; set activation_checkpointing: block")
        own = [module for module in layers if module.gradient_checkpointing]
        functions = [getattr(module, "_gradient_checkpointing_func", None) for module in own]
        if any(getattr(each, "keywords", {}).get("use_reentrant") for each in functions):
            why = "the model was made to checkpoint activations with use_reentrant=True, outside of backward"
            cure = "pass gradient_checkpointing_kwargs={'use_reentrant': False}, or set model.activation_checkpointing: block"
            raise ConfigError(f"{why}; {cure}")
        return len(_innermost(own))
    by_itself = getattr(model, "supports_gradient_checkpointing", False) and bool(layers)
    if not (recomputed := _innermost(layers) if by_itself else list(blocks or ())):
        why = f"activation_checkpointing: {mode} needs repeated blocks, and {type(model).__name__} has none that are known"
        raise ConfigError(f"{why}; set activation_checkpointing: none, or name the blocks")
    run = partial(checkpoint, use_reentrant=False)
    if mode == "selective":
        run = partial(run, context_fn=_selective_contexts)
    away = 0 if store is None else store.offloaded_count(len(recomputed))
    offloads = set(map(id, recomputed[:away]))
    for block in layers if by_itself else recomputed:
        recompute = partial(_run_recomputed, partial(_run_replayed, run, block), store, id(block) in offloads)
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
        return run(function, *map(_copy_input, args), **kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # `checkpoint` saves its arguments under the hooks that are active around the call; inside, it has its own hooks.
    with store.saving_inputs(offloaded=offloads):
        return run(function, *[_aligned(arg) if store.copies(arg) else arg for arg in args], **kwargs)


def _run_replayed(run: _Function, block: nn.Module, function: _Function, /, *args: Any, **kwargs: Any) -> Any:
    """Run `run(function, ...)`, in which `function` finds NumPy's and Python's random state and the buffers of `block` as they are
    now when it is recomputed, and leaves them as they are then; `checkpoint` restores PyTorch's random state alone. Raises
    `PhaseError` if `function` changes a large buffer."""
    if torch.compiler.is_compiling():
        return run(function, *args, **kwargs)
    state, calls = GeneratorStates.now(host_only=True), itertools.count()
    found = dict(block.named_buffers(remove_duplicate=False))
    before = _copied({name: each for name, each in found.items() if each.numel() <= _MOST_COPIED})
    large = [(name, each, each._version) for name, each in found.items() if name not in before]

    def replaying(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as undo:
            if next(calls):
                undo.enter_context(kept_generators(host_only=True))
                state.restore()
                for name, each in _copied(before).items():  # Of a graph that is kept, backward recomputes again.
                    owner, _, leaf = name.rpartition(".")
                    undo.callback(override(block.get_submodule(owner)._buffers, leaf, each))
            result = function(*args, **kwargs)
        if changed := [name for name, each, old in large if block.get_buffer(name) is not each or each._version != old]:
            why = f"a recomputed block changes its buffer {changed[0]}, of more than {_MOST_COPIED} elements"
            raise PhaseError(f"{why}, so backward would change it again; set model.activation_checkpointing: none")
        return result

    return run(replaying, *args, **kwargs)


def _copied(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of buffers by name; one that has several names has one copy."""
    copies = {each: each.detach().clone() for each in buffers.values()}
    return {name: copies[each] for name, each in buffers.items()}


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
        recomputes = block.training and torch.is_grad_enabled()
        return run(forward, *args, **kwargs) if recomputes else forward(*args, **kwargs)

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
    refused = partial(ConfigError, where=_ATTENTION)
    if (inside := pretrained_of(model)) is None:
        raise refused(f"{type(model).__name__} is no model of transformers, and computes as it does")
    if name in _FLASH:
        package, available = _FLASH[name]
        if not is_accelerator(device):
            raise refused(f"{name} computes on GPUs, and this run on {device.type.upper()}; take sdpa")
        if not (available() or is_kernels_available()):
            raise refused(f"{name} needs {package}, or kernels (pip install kernels), which fetches it from the Hub")
        if compute.itemsize != 2:
            computes = str(compute).removeprefix("torch.")
            raise refused(f"{name} computes in bfloat16 and float16, and precision.compute is {computes}")
    elif name == "flex_attention" and not is_accelerator(device):
        raise refused("flex_attention has no backward on CPUs; take sdpa")
    parts = (inside, *(each for each in inside.modules() if isinstance(each, PreTrainedModel)))
    with ExitStack() as undone:
        for config in {id(each.config): each.config for each in parts}.values():
            undone.callback(setattr, config, "_attn_implementation_internal", config._attn_implementation)
        with quiet_library(), library_errors(_ATTENTION, f"{type(inside).__name__} cannot compute by {name}: "):
            inside.set_attn_implementation(name)
        taken = inside.config._attn_implementation
        # Without the package, but with `kernels`, transformers loads the same kernel from the Hub under another name.
        if taken != name and not (name in _FLASH and "flash" in str(taken)):
            raise refused(f"{type(inside).__name__} computes by {taken}, and takes no other")
        return undone.pop_all().close


def use_fastest_linear(model: nn.Module, compute: torch.dtype, device_type: str) -> int:
    """Set `torch.nn.Linear` and GPT-2's `Conv1D` in `model`, no subclasses, to multiply in the fastest dtype for `compute`; returns
    the number of changed layers. A frozen head multiplies slices of the hidden states without copies of its weight."""
    head = embedding_of(model, "output")
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
    head = embedding_of(model, "output")
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
        done = f"its {len(blocks)} blocks are compiled" if blocks else "no blocks are known in it, and nothing is compiled"
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


def find_token_wise(model: nn.Module) -> TokenWise | str:
    """Return the outermost modules in blocks of a small copy that compute the same in tiles and save less, or why none does."""
    inside = pretrained_of(model)
    small = "it is no model of transformers" if inside is None else small_copy.small_copy(inside, _loss_of_copy)
    if isinstance(small, str):
        return f"no small copy of it could be tried ({small})"
    small_copy.perturb(small)
    for module in small.train().modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()  # Tiles draw other numbers, from the same distribution.
    alike = grouped(_inside_blocks(small))
    wanted, most = _tiled_outcome(small)
    found: dict[tuple[str, type], nn.Module] = {}
    for key, modules in alike.items():
        if any(key[0].startswith(f"{outer}.") for outer, _ in found):
            continue
        with ExitStack() as undone:
            for module in modules:
                undone.callback(_tile(module, _TRIAL_TOKENS))
            try:
                outcome, least = _tiled_outcome(small)
            except small_copy.ERRORS:
                continue
        if most - least >= _LEAST_SAVED * most and small_copy.differing_gradient(outcome, wanted, small_copy.TOLERANCE) is None:
            found[key] = modules[0]
    if any(each.dim() > 1 for module in found.values() for each in module.parameters()):
        return found
    why = "no MLP in its blocks is one module that computes the same on a part of the tokens"
    return f"in a trial on a small copy, {why} and has no output that is read elsewhere, such as what routers choose"


def use_tiles(model: nn.Module, tokens: int, found: TokenWise | str) -> str:
    """Have the modules of `model` that are like those `found` run on `tokens` of a sequence at once; returns a line about them.
    Modules with hooks, a `forward` of their own or other modules inside than the copy's stay as they are, but for layers that
    adapters or tensor parallelism put in the place of linear ones. Raises `ConfigError` if no module runs in tiles."""
    inside: nn.Module = pretrained_of(model) or model
    names: Counter[str] = Counter()
    copied: TokenWise = {} if isinstance(found, str) else found
    for key, module in _inside_blocks(inside):
        if key in copied and _is_like(module, copied[key]):
            _tile(module, tokens)
            names[key[0]] += 1
    if not names:
        reason = found if isinstance(found, str) else "its MLPs have hooks, or other modules inside than their class makes"
        raise ConfigError(f"{type(inside).__name__} cannot run in tiles: {reason}; set it to null", where="model.tile_tokens")
    return f"tiles: {tokens:,} tokens at once in {', '.join(f'{count} x {name}' for name, count in names.items())}"


def _inside_blocks(model: nn.Module) -> list[tuple[tuple[str, type], nn.Module]]:
    parts = (part for block in block_modules(model) for part in block.named_modules() if part[0])
    return [((name, type(module)), module) for name, module in parts]


def _is_like(module: nn.Module, copied: nn.Module) -> bool:
    parts, kinds = list(module.modules()), {type(each) for each in copied.modules()} | _INSIDE_ADAPTERS
    replaced = [type(each) for each in parts if type(each) not in kinds]
    forwards = (vars(each)["forward"] for each in parts if "forward" in vars(each))
    replaced += [getattr(each, "func", each) for each in forwards]
    made = all(str(getattr(each, "__module__", "")).partition(".")[0] in _MAKERS for each in replaced)
    return made and not any(map(has_foreign_hooks, parts[1:]))


def _tile(module: nn.Module, tokens: int) -> Callable[[], None]:
    return override(module, "forward", partial(_run_tiled, module.forward, module, tokens))


@uncompiled
def _run_tiled(forward: Callable[..., Any], module: nn.Module, tokens: int, /, *args: Any, **kwargs: Any) -> Any:
    x = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1] <= tokens:
        return forward(*args, **kwargs)
    if any(map(has_foreign_hooks, list(module.modules())[1:])):
        why = f"hooks inside a {type(module).__name__}, such as those of output_router_logits, would see {tokens:,} tokens at once"
        raise PhaseError(f"{why}, without gradients; remove them, or set model.tile_tokens: null")
    return run_in_tiles(forward, [each for each in module.parameters() if each.requires_grad], tokens, x)


def _loss_of_copy(small: nn.Module) -> Tensor:
    return small_copy.weighted_sum(small(**dict(example_inputs(small))))


def _tiled_outcome(small: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Return the loss and gradients of a copy, by name, and the bytes that it saves for backward beside its parameters."""
    held, saved = {each.untyped_storage().data_ptr() for each in small.parameters()}, [0]

    def save(tensor: Tensor) -> Tensor:
        saved.append(0 if tensor.untyped_storage().data_ptr() in held else tensor.nbytes)
        return tensor

    with small_copy.whole_passes_in_float64(), seeded_cpu(0, "tiles"), torch.enable_grad():
        with saved_tensors_hooks(save, lambda tensor: tensor):
            loss = _loss_of_copy(small)
        return small_copy.gradients_of(small, loss), sum(saved)
