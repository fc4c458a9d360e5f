"""Finds the modules of a model that act on each token alone, by a trial on a small copy in float64, and has them run in tiles.

A module is run in tiles if the copy gives the same outputs and gradients with it in tiles, auxiliary losses of its routers included,
and saves less for backward: an MLP, or a norm of several operations, but no single linear layer."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.pytorch_utils import Conv1D

from zeromesh.errors import ConfigError, PhaseError, counted, some
from zeromesh.kernels.tiles import run_in_tiles
from zeromesh.overrides import override
from zeromesh.tensor.autograd_collectives import uncompiled
from zeromesh.trainer.models import small_copy
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.models.tensor_trial import example_inputs, numberless
from zeromesh.units.plan import block_modules
from zeromesh.weight_init.weight_sources import seeded_cpu
from zeromesh.zero.hooks import has_foreign_hooks, tensors_in

_TOKENS = 3  # Tokens of a tile in the trial, whose sequences of 8 have an uneven last tile.
_TOLERANCE = 1e-9  # relative; sums of float64 numbers in different orders differ by less than 1e-13
_WHERE = "model.tile_tokens"
_LINEAR = (nn.Linear, Conv1D)
TokenWise = Mapping[tuple[str, type], nn.Module]
"""Modules of a small copy that act on each token alone, by their name, with `*` for the block's number, and their class."""


def find_token_wise(model: nn.Module) -> TokenWise:
    """Return the outermost modules in a small copy's blocks that compute the same in tiles and save less. Raises `ConfigError` if
    there are none, and for a model without a small copy."""
    given: dict[str, Any] = {}

    def check(small: Any) -> Tensor:
        given.clear()
        given.update(example_inputs(small))
        with torch.no_grad():
            return torch.cat([each.flatten() for each in _floats(small(**given))])

    inside = pretrained_of(model)
    small = "it is no model of transformers" if inside is None else small_copy.small_copy(inside, check)
    kind = type(model if inside is None else inside).__name__
    if isinstance(small, str):
        raise ConfigError(f"{kind} cannot be tried in tiles on a small copy ({small}); set it to null", where=_WHERE)
    small_copy.perturb(small)
    for module in small.train().modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()  # Tiles draw other numbers, from the same distribution.
    inner = {id(each) for block in block_modules(small) for each in list(block.modules())[1:]}
    parts = {name: module for name, module in small.named_modules() if id(module) in inner}
    inputs: dict[str, list[int]] = {name: [] for name in parts}
    with ExitStack() as undone:
        for name, module in parts.items():
            forward = partial(_note_input, inputs[name].append, module.forward)
            undone.callback(override(module, "forward", forward))
        wanted, most = _outcome(small, given)
    alike: dict[tuple[str, type], list[str]] = {}
    for name, module in parts.items():
        if len(inputs[name]) == 1 and inputs[name][0] and type(module) not in _LINEAR:
            alike.setdefault((*numberless({name: ""}), type(module)), []).append(name)
    found: dict[tuple[str, type], nn.Module] = {}
    for key, names in alike.items():
        if any(key[0].startswith(f"{outer}.") for outer, _ in found):
            continue
        with ExitStack() as undone:
            for name in names:
                undone.callback(_tile(parts[name], name, _TOKENS))
            try:
                outcome, least = _outcome(small, given)
            except small_copy.ERRORS:
                continue
        if most - least < sum(inputs[name][0] for name in names):
            continue
        if all(small_copy.deviation(outcome[each], wanted[each], 1.0) <= _TOLERANCE for each in wanted):
            found[key] = parts[names[0]]
    if not any(each.dim() > 1 for module in found.values() for each in module.parameters()):
        raise ConfigError(
            f"no module in the blocks of {kind} computes the same on a part of the tokens and saves memory, in a trial on a small "
            "copy: its MLPs mix tokens, or what their routers choose is read elsewhere; set it to null",
            where=_WHERE,
        )
    return found


def use_tiles(model: nn.Module, tokens: int, found: TokenWise) -> str:
    """Have the modules of `model` that are like those `found` run on `tokens` of a sequence at once; returns a line about them.
    Modules with hooks, with another `forward` than their class, or with other modules inside than the copy's stay as they are, but
    for layers that adapters or tensor parallelism put in the place of linear ones. Raises `ConfigError` if all do."""
    inside: nn.Module = pretrained_of(model) or model
    names: dict[str, int] = {}
    for name, module in inside.named_modules():
        (key,) = numberless({name: ""})
        copied = found.get((key, type(module)))
        if copied is not None and _is_like(module, copied):
            _tile(module, name, tokens)
            names[key] = names.get(key, 0) + 1
    if not names:
        raise ConfigError(
            f"{some([name for name, _ in found])} of {type(inside).__name__} could run in tiles, but here have hooks, or other modules "
            "inside than their class makes; set it to null",
            where=_WHERE,
        )
    shown = ", ".join(f"{count} x {name}" for name, count in names.items())
    return f"tiles: {counted(tokens, 'token', ',')} at once, in {shown}"


def _is_like(module: nn.Module, copied: nn.Module) -> bool:
    own = vars(module).get("forward")
    if has_foreign_hooks(module) or str(getattr(own, "__module__", "zeromesh.")).partition(".")[0] not in _MAKERS:
        return False
    if type(copied) in _LINEAR and type(module).__module__.partition(".")[0] in _MAKERS:
        return True
    children = dict(copied.named_children())
    if type(module) is not type(copied) or children.keys() != dict(module.named_children()).keys():
        return False
    return all(_is_like(each, children[name]) for name, each in module.named_children())


_MAKERS = ("zeromesh", "torchao", "peft")
"""Packages whose layers act on each token alone where the linear ones did that they replace."""


def _tile(module: nn.Module, name: str, tokens: int) -> Callable[[], None]:
    return override(module, "forward", partial(_run_tiled, module.forward, module, name, tokens))


@uncompiled
def _run_tiled(forward: Callable[[Tensor], Tensor], module: nn.Module, name: str, tokens: int, /, x: Tensor) -> Tensor:
    if x.dim() != 3 or x.shape[1] <= tokens:
        return forward(x)
    if any(map(has_foreign_hooks, list(module.modules())[1:])):
        raise PhaseError(
            f"hooks inside {name}, such as those of output_router_logits, would see {counted(tokens, 'token', ',')} at once, and "
            "without gradients; remove them, or set model.tile_tokens: null"
        )
    trained = [each for each in module.parameters() if each.requires_grad]
    return run_in_tiles(forward, trained, tokens, x)


def _floats(outputs: Any) -> list[Tensor]:
    return [each for each in tensors_in(outputs) if each.is_floating_point()]


def _note_input(note: Callable[[int], None], forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `forward`, and note the bytes of its input if it takes one tensor `[batch, sequence, width]` and returns one; else 0."""
    output = forward(*args, **kwargs)
    both = (*args, *kwargs.values(), output)
    tensors = [each for each in both if isinstance(each, Tensor) and each.dim() == 3 and each.is_floating_point()]
    fits = len(args) == 1 and len(tensors) == len(both) == 2 and tensors[0].shape[:2] == tensors[1].shape[:2]
    note(tensors[0].nbytes if fits else 0)
    return output


def _outcome(small: nn.Module, given: Mapping[str, Any]) -> tuple[dict[str, Tensor], int]:
    """Return outputs and gradients of a copy, by name, and the bytes that it saves for backward."""
    saved: dict[int, int] = {}
    held = {each.untyped_storage().data_ptr() for each in small.parameters()}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with small_copy.whole_passes_in_float64(), seeded_cpu(0, "tiles"), torch.enable_grad():
        with saved_tensors_hooks(save, lambda tensor: tensor):
            outputs = _floats(small(**given))
        # Each element has its own weight, so that errors cannot cancel.
        losses = [(each * torch.linspace(0.5, 1.5, each.numel()).view(each.shape)).sum() for each in outputs]
        gradients = small_copy.gradients_of(small, [each for each in losses if each.requires_grad])
    return {**gradients, **{str(number): each.detach() for number, each in enumerate(outputs)}}, sum(saved.values())
