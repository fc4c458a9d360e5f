"""Which tensors of a file make which tensors of a model: by name, by the library's renamings and conversions, or not.

A conversion (eight expert matrices into one parameter, a fused projection into three) is planned here on meta tensors, so names,
shapes and failures are known before anything is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from zeromesh.checkpoint.format.safetensors_layout import Entry
from zeromesh.errors import ConfigError
from zeromesh.weight_init.recompute_init import INITIALISER_ERRORS
from zeromesh.weight_init.weight_sources import canonical_names

_SHOWN = 20
_OLD_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")

ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Tensors of the file that together become one or several tensors of the model.

    `sources` holds (pattern, name in the file) in the order in which the library combines them.
    """

    target: str
    converter: Any
    sources: tuple[tuple[str, str], ...]

    def run(self, read: ReadTensor, model: Any) -> dict[str, torch.Tensor]:
        """The model's tensors by name; `read` gives a whole tensor of the file, in its shape."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, partial(read, name))
        result = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Matched:
    """Where the values of the model's tensors are."""

    direct: Mapping[str, str]
    """Tensors that are in the file unchanged, to their names there."""
    converted: Mapping[str, Conversion]
    new: tuple[str, ...]
    """Parameters of a new head, which are in no file."""
    unused: tuple[str, ...]
    """Tensors of the file for another head."""

    def provides(self, name: str) -> bool:
        """Whether the file has a value for `name`."""
        return name in self.direct or name in self.converted


def match(model: Any, entries: Mapping[str, Entry]) -> Matched:
    """Match the tensors of `entries` with the state of the Hugging Face model `model`, which may be on meta.

    Parameters outside of the base model may be absent (a new head) and present without use (another head), and so may poolers.
    Anything else that is missing, unexpected or of another shape is listed in one `ConfigError`.
    """
    state: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    direct, groups, unexpected = _rename(model, entries, state)
    converted: dict[str, Conversion] = {}
    shapes = {name: entries[source].shape for name, source in direct.items()}
    for conversion in groups:
        for name, value in _planned(conversion, entries, model).items():
            if name in state:
                converted[name] = conversion
                shapes[name] = tuple(value.shape)
            else:
                unexpected.append(name)
    found = {*direct, *converted}
    missing = _missing(model, state, found)
    new = [name for name in missing if _optional(model, name)]
    unused = [name for name in unexpected if _ignored(model, name) or _for_another_head(model, entries, name)]
    problems = [f"{name} is missing" for name in missing if name not in new]
    problems += [f"{name} is not part of {type(model).__name__}" for name in unexpected if name not in unused]
    for name, shape in shapes.items():
        if shape != tuple(state[name].shape):
            problems.append(f"{name} has shape {list(shape)}, the model has {list(state[name].shape)}")
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ConfigError(problems[:_SHOWN] + more, where="model.source: the files do not fit the model")
    shown = [name for name in unused if not _ignored(model, name)]
    return Matched(direct=direct, converted=converted, new=tuple(new), unused=tuple(shown))


def _rename(
    model: Any, entries: Mapping[str, Entry], state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, str], list[Conversion], list[str]]:
    """Match in the library's own order (`convert_and_load_state_dict_in_model`): what is direct, converted and unexpected."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    direct: dict[str, str] = {}
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    unexpected: list[str] = []
    for name in sorted(entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if pattern is not None:
            group = groups.setdefault(target, (by_pattern[pattern], []))
            group[1].append((pattern, name))
        elif target in state:
            direct[target] = name
        else:
            unexpected.append(target)
    conversions = [
        Conversion(target=target, converter=converter, sources=tuple(sources))
        for target, (converter, sources) in groups.items()
    ]
    return direct, conversions, unexpected


def _planned(conversion: Conversion, entries: Mapping[str, Entry], model: Any) -> dict[str, torch.Tensor]:
    def empty(name: str) -> torch.Tensor:
        return torch.empty(entries[name].shape, dtype=entries[name].dtype, device="meta")

    try:
        return conversion.run(empty, model)
    except INITIALISER_ERRORS as error:
        names = ", ".join(name for _, name in conversion.sources[:4])
        raise ConfigError(
            f"{conversion.target} cannot be made from {names} ({len(conversion.sources)} tensors): {error}",
            where="model.source: the files do not fit the model",
        ) from error


def _missing(model: Any, state: Mapping[str, torch.Tensor], found: set[str]) -> list[str]:
    """Parameters without a value. One of several names of a tied parameter is enough, and buffers can be recomputed."""
    canonical = canonical_names(model)
    have = {canonical[name] for name in found if name in canonical}
    return [name for name in state if canonical.get(name) == name and name not in have]


def _optional(model: Any, name: str) -> bool:
    """Whether a parameter may be absent: a head, or the pooler that only some heads use."""
    prefix = model.base_model_prefix
    outside = bool(prefix) and hasattr(model, prefix) and not name.startswith(f"{prefix}.")
    return (
        _fits(name, getattr(model, "_keys_to_ignore_on_load_missing", None)) or outside or "pooler" in name.split(".")
    )


def _ignored(model: Any, name: str) -> bool:
    """Whether the library itself passes over a tensor of this name: old buffers, and layers that it does not implement."""
    return _fits(name, getattr(model, "_keys_to_ignore_on_load_unexpected", None)) or _fits(name, _OLD_BUFFERS)


def _for_another_head(model: Any, entries: Mapping[str, Entry], name: str) -> bool:
    prefix = f"{model.base_model_prefix}."
    has_base = model.base_model_prefix != "" and any(entry.startswith(prefix) for entry in entries)
    return (has_base and not name.startswith(prefix)) or "pooler" in name.split(".")


def _fits(name: str, patterns: Iterable[str] | None) -> bool:
    return any(re.search(pattern, name) for pattern in patterns or ())
