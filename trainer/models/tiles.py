"""Finds the modules of a model that act on each token alone, by a trial on a small copy in float64, and has them run in tiles.

A module runs in tiles if the copy gives the same outputs and gradients with it in tiles, auxiliary losses of its routers included,
and saves less for backward: an MLP, or a norm of several operations, but no single linear layer."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zeromesh.errors import ConfigError, PhaseError
from zeromesh.intervals import grouped
from zeromesh.kernels.tiles import run_in_tiles
from zeromesh.overrides import override
from zeromesh.tensor.autograd_collectives import uncompiled
from zeromesh.trainer.models import small_copy
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.models.tensor_trial import example_inputs
from zeromesh.units.plan import block_modules
from zeromesh.weight_init.weight_sources import seeded_cpu
from zeromesh.zero.hooks import has_foreign_hooks

_TOKENS = 3  # Tokens of a tile in the trial, whose sequences of 8 have an uneven last tile.
_TOLERANCE = 1e-9  # relative; sums of float64 numbers in different orders differ by less than 1e-13
_LEAST_SAVED = 0.01  # of what the copy saves for backward
_MAKERS = ("zeromesh", "torchao", "peft")
"""Packages whose layers act on each token alone where the linear ones did that they replace."""
_INSIDE_ADAPTERS = {nn.Linear, nn.Dropout, nn.Identity, nn.ModuleDict, nn.ParameterDict}
TokenWise = Mapping[tuple[str, type], nn.Module]
"""Modules of a small copy that act on each token alone, by their name in their block and their class."""


def find_token_wise(model: nn.Module) -> TokenWise | str:
    """Return the outermost modules in blocks of a small copy that compute the same in tiles and save less, or why none does."""
    inside = pretrained_of(model)
    small = "it is no model of transformers" if inside is None else small_copy.small_copy(inside, _loss)
    if isinstance(small, str):
        return f"no small copy of it could be tried ({small})"
    small_copy.perturb(small)
    for module in small.train().modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()  # Tiles draw other numbers, from the same distribution.
    alike = grouped(_inside_blocks(small))
    wanted, most = _outcome(small)
    found: dict[tuple[str, type], nn.Module] = {}
    for key, modules in alike.items():
        if any(key[0].startswith(f"{outer}.") for outer, _ in found):
            continue
        with ExitStack() as undone:
            for module in modules:
                undone.callback(_tile(module, _TOKENS))
            try:
                outcome, least = _outcome(small)
            except small_copy.ERRORS:
                continue
        saves = most - least >= _LEAST_SAVED * most
        if saves and small_copy.differing_gradient(outcome, wanted, _TOLERANCE) is None:
            found[key] = modules[0]
    if any(each.dim() > 1 for module in found.values() for each in module.parameters()):
        return found
    return (
        "in a trial on a small copy, no MLP in its blocks is one module that computes the same on a part of the tokens and has no "
        "output that is read elsewhere, such as what routers choose"
    )


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
        hooked = "its MLPs have hooks, or other modules inside than their class makes"
        reason = found if isinstance(found, str) else hooked
        problem = f"{type(inside).__name__} cannot run in tiles: {reason}; set it to null"
        raise ConfigError(problem, where="model.tile_tokens")
    return f"tiles: {tokens:,} tokens at once in {', '.join(f'{count} x {name}' for name, count in names.items())}"


def _inside_blocks(model: nn.Module) -> list[tuple[tuple[str, type], nn.Module]]:
    parts = (part for block in block_modules(model) for part in block.named_modules() if part[0])
    return [((name, type(module)), module) for name, module in parts]


def _is_like(module: nn.Module, copied: nn.Module) -> bool:
    parts, kinds = list(module.modules()), {type(each) for each in copied.modules()} | _INSIDE_ADAPTERS
    replaced = [type(each) for each in parts if type(each) not in kinds]
    replaced += [vars(each)["forward"] for each in parts if "forward" in vars(each)]
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
        raise PhaseError(
            f"hooks inside a {type(module).__name__}, such as those of output_router_logits, would see {tokens:,} tokens at once, "
            "without gradients; remove them, or set model.tile_tokens: null"
        )
    return run_in_tiles(forward, [each for each in module.parameters() if each.requires_grad], tokens, x)


def _loss(small: nn.Module) -> Tensor:
    return small_copy.weighted_sum(small(**dict(example_inputs(small))))


def _outcome(small: nn.Module) -> tuple[dict[str, Tensor], int]:
    """Return the loss and gradients of a copy, by name, and the bytes that it saves for backward beside its parameters."""
    held, saved = {each.untyped_storage().data_ptr() for each in small.parameters()}, [0]

    def save(tensor: Tensor) -> Tensor:
        saved.append(0 if tensor.untyped_storage().data_ptr() in held else tensor.nbytes)
        return tensor

    with small_copy.whole_passes_in_float64(), seeded_cpu(0, "tiles"), torch.enable_grad():
        with saved_tensors_hooks(save, lambda tensor: tensor):
            loss = _loss(small)
        return small_copy.gradients_of(small, loss), sum(saved)
