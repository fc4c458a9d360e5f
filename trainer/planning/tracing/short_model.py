"""Models without values, shortened to the blocks that represent all others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.trainer.planning.tracing.meter import AFTER, BEFORE, Segment
from zeromesh.units.plan import block_modules


@contextmanager
def without_values(model: nn.Module, compute: torch.dtype) -> Iterator[None]:
    """Inside the block the model's floating-point tensors are on the meta device, with parameters in the dtype `compute`."""
    undo: list[Callable[[], None]] = []
    made: dict[int, nn.Parameter] = {}
    main = _main_dtype(model)
    try:
        for module in model.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    dtype = compute if parameter.dtype == main else parameter.dtype
                    empty = torch.empty_like(parameter, dtype=dtype, device="meta")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                undo.append(partial(module._parameters.__setitem__, leaf, parameter))
                module._parameters[leaf] = made[id(parameter)]
            for leaf, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and not buffer.is_meta:
                    undo.append(partial(module._buffers.__setitem__, leaf, buffer))
                    module._buffers[leaf] = torch.empty_like(buffer, device="meta")
        yield
    finally:
        while undo:
            undo.pop()()


def _main_dtype(model: nn.Module) -> torch.dtype:
    counts = Counter(each.dtype for each in model.parameters() if each.is_floating_point())
    return counts.most_common(1)[0][0] if counts else torch.float32


def shorten(model: nn.Module, undo: ExitStack) -> list[tuple[str, str]]:
    """Remove all but two of equal blocks from module lists; returns every block in order, with its representative.

    Blocks have the names of the whole model, representatives those of the shortened one.
    """
    blocks = set(block_modules(model))
    found: list[tuple[str, str]] = []
    for path, module in list(model.named_modules()):
        children = list(module.named_children())
        own = [(name, child) for name, child in children if child in blocks]
        if not isinstance(module, nn.ModuleList) or len(own) < len(children) or not own:
            found += [(f"{path}.{name}".strip("."), f"{path}.{name}".strip(".")) for name, _ in own]
            continue
        kinds = [_kind(child) for _, child in own]
        kept: list[int] = []
        for index, kind in enumerate(kinds):
            if sum(kinds[each] == kind for each in kept) < 2 or index == len(kinds) - 1:
                kept.append(index)
        stands = [
            kept.index(index) if index in kept else [n for n, each in enumerate(kept) if kinds[each] == kind][1]
            for index, kind in enumerate(kinds)
        ]
        found += [(f"{path}.{index}", f"{path}.{stand}") for index, stand in enumerate(stands)]
        if len(kept) < len(own):
            _replace_list(model, path, nn.ModuleList([own[index][1] for index in kept]), undo)
    return found


def _replace_list(model: nn.Module, path: str, made: nn.ModuleList, undo: ExitStack) -> None:
    """Replace a list by a shorter one, and its length in configurations."""
    parent_path, _, leaf = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    old: Any = model.get_submodule(path)
    parent._modules[leaf] = made
    undo.callback(parent._modules.__setitem__, leaf, old)
    configs = {id(each): each for module in model.modules() if (each := getattr(module, "config", None)) is not None}
    for config in configs.values():
        if getattr(config, "num_hidden_layers", None) == len(old):
            # `attribute_map` may give the field another name.
            config.num_hidden_layers = len(made)
            undo.callback(setattr, config, "num_hidden_layers", len(old))


_NUMBERS = re.compile(r"idx|index|number|layer_id")


def _kind(block: nn.Module) -> object:
    """Return a key that is equal for equal blocks: their modules, sizes and settings."""
    found = []
    for name, module in block.named_modules():
        sizes = [
            (leaf, tuple(each.shape), each.dtype, each.requires_grad)
            for leaf, each in module.named_parameters(recurse=False)
        ]
        settings = [
            (key, repr(value))
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and not _NUMBERS.search(key)
        ]
        found.append((name, type(module), tuple(sizes), tuple(sorted(settings))))
    return tuple(found)


def expand(segments: Sequence[Segment], blocks: Sequence[tuple[str, str]]) -> Iterator[Segment]:
    """Yield the segments of the whole model from those of the shortened one."""
    found = {each.name: each for each in segments}
    order = {name: number for number, name in enumerate(found)}
    ran = [(name, stand) for name, stand in blocks if stand in found]
    lists = {stand.rpartition(".")[0]: order[stand] for _, stand in reversed(ran)}
    yield found[BEFORE]
    for name, stand in sorted(ran, key=lambda each: lists[each[1].rpartition(".")[0]]):
        yield replace(found[stand], name=name)
    yield found[AFTER]
