"""Weights as files on the Hub have them: a few tensors at a time, by transformers' own conversions, or merged by PEFT itself."""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import nn
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping

from zeromesh.errors import CheckpointError, ConfigError, ZeromeshError, errors_as, library_errors, some, summary
from zeromesh.trainer.models.adapters import MERGED, is_adapted, pretrained_of
from zeromesh.trainer.weights.handoff import Named
from zeromesh.trainer.weights.safetensors_source import read_class
from zeromesh.units.plan import parts_in_fp32
from zeromesh.weight_init.weight_sources import INITIALISER_ERRORS, Skeleton, canonical_names, is_pretrained_model
from zeromesh.zero.full_state import persistent_buffers
from zeromesh.zero.hooks import cast

_TIED = "is also the weight of a layer with adapters, which cannot be merged into both; leave it out of the adapters' targets"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A group of tensors that are converted together, and what they become, on the meta device."""

    names: tuple[str, ...]
    converted: bool
    outputs: Mapping[str, torch.Tensor]


def in_files(wide_parts: Iterable[str], name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor as it is written where others are in `dtype`: those with these parts of a name are in float32 at least."""
    return cast(tensor, torch.promote_types(dtype, torch.float32) if any(part in name for part in wide_parts) else dtype)


class HubNames:
    """The form on the Hub of a model's tensors; `note` explains why names stay unchanged, if they do."""

    def __init__(self, model: Any, tensors: Mapping[str, torch.Tensor], note: str = "") -> None:
        """Take a transformers model, or None to keep names, and meta tensors. Raises `CheckpointError` for irreversible ones."""
        self.note = note
        tensors = {name: in_files(parts_in_fp32(model), name, each, each.dtype) for name, each in tensors.items()}
        self.dtypes = {name: each.dtype for name, each in tensors.items()}
        self._model: Any = None
        converters: list[Any] = []
        found = getattr(model, "_weight_conversions", None)
        if model is not None and found is None:
            # The conversions that transformers itself reverts for a model that was not loaded from files.
            found = get_model_conversion_mapping(model, add_legacy=False)
            found = [each for each in found if not isinstance(each, core_model_loading.PrefixChange)]
        if found:
            self._model = SimpleNamespace(config=model.config, _weight_conversions=found)
            reverse = [each.reverse_transform() for each in reversed(found)]
            converters = [each for each in reverse if isinstance(each, core_model_loading.WeightConverter)]
        members: dict[tuple[str, bool], list[str]] = {}
        for name in sorted(tensors, key=core_model_loading.dot_natural_key):
            target, pattern = core_model_loading.rename_source_key(name, [], converters)
            members.setdefault((target, pattern is not None), []).append(name)
        self.groups: list[Group] = []
        for (_, converted), names in members.items():
            outputs = self._revert({name: tensors[name] for name in names})
            self.groups.append(Group(names=tuple(names), converted=converted, outputs=outputs))
        self.outputs = {name: each for group in self.groups for name, each in group.outputs.items()}
        """The converted tensors by name, on the meta device."""

    @classmethod
    def of_directory(cls, directory: Path, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Return the form of meta tensors of the model in a directory's `config.json`. Raises `CheckpointError` as `__init__`."""
        if not (directory / "config.json").is_file():
            return cls(None, tensors, "no config.json: only the weights are written, under the model's own names")
        model_class, config, reason = read_class(directory)
        if model_class is None:
            return cls(None, tensors, f"{reason}: names stay as they are")
        before = f"{model_class.__name__} cannot be built from config.json: "
        with library_errors(before=before, kind=CheckpointError), torch.device("meta"):
            model = model_class(config)
        return cls(model, tensors)

    def _revert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._model is None:
            return dict(tensors)
        try:
            reverted: dict[str, torch.Tensor] = core_model_loading.revert_weight_conversion(self._model, dict(tensors))
        except (*INITIALISER_ERRORS, NotImplementedError) as error:
            why = f"{some(tensors)} cannot be brought into the form of the hub: {summary(error, lines=2)}"
            raise CheckpointError(f"{why}; the checkpoint itself can be loaded with from_pretrained") from error
        return reverted

    def convert(self, weights: Named) -> Named:
        """Yield the Hub form of all tensors, `(name, tensor)`; those of a conversion wait for the last. Raises as `__init__`."""
        group_of = {name: group for group in self.groups for name in group.names}
        waiting: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in weights:
            group = group_of[name]
            if not group.converted:
                yield next(iter(group.outputs)), tensor
                continue
            parts = waiting.setdefault(id(group), {})
            parts[name] = tensor if len(group.names) == 1 else tensor.clone()
            if len(parts) == len(group.names):
                yield from self._revert(waiting.pop(id(group))).items()


class HubForm:
    """Streaming conversion of a model's weights to the Hub form, with adapters merged."""

    def __init__(self, model: nn.Module) -> None:
        """Take the undivided model; its values are neither kept nor read."""
        self._why_not = ""
        kinds = {str(each.peft_type).rpartition(".")[2] for each in getattr(model, "peft_config", {}).values()}
        if unmerged := sorted(kinds - MERGED):
            self._why_not = f"nothing shows that {some(unmerged)} is merged right; save the adapter, and let PEFT merge it"
        for name, each in model.named_modules():
            if not issubclass(getattr(each, "source_cls", nn.Linear), nn.Linear):
                self._why_not = f"{name} is transposed, as bitsandbytes has quantized it; save the adapter alone"
        inside = pretrained_of(model)
        self._wide_parts = parts_in_fp32(inside)
        # The list of modules is kept: pipeline stages lose modules before `hub_names` looks conversions up, lazily as it is slow.
        submodels = [] if inside is None else [row for row in inside.named_modules() if is_pretrained_model(row[1])]
        self._library_model = inside and SimpleNamespace(
            config=inside.config,
            base_model_prefix=inside.base_model_prefix,
            named_modules=lambda: submodels,
            _weight_conversions=getattr(inside, "_weight_conversions", None),
        )
        self._prefix = next((f"{name}." for name, each in model.named_modules() if name and each is inside), "")
        self._layers: dict[str, Any] = {}  # Layers with adapters, and modules that adapters train as a copy.
        self.layer_of: dict[str, str] = {}  # The layer with adapters that holds a tensor, by the tensor's name.
        tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
        tied = {f"{self._prefix}{name}" for name in getattr(inside, "all_tied_weights_keys", ())}
        firsts = canonical_names(model).items()
        self._name_of = {first: name for name, first in firsts if first in tied and name not in tied}
        """Names in files of tied parameters, by their first names."""
        self._left_out = frozenset(getattr(inside, "_keys_to_ignore_on_save", None) or ())
        """Tensors that the model recomputes when loaded, such as positions."""
        if is_adapted(model):
            for name, each in model.named_modules():  # A PEFT layer around a model's layer, or PEFT's copy of a module.
                around = isinstance(getattr(each, "base_layer", None), nn.Module) and hasattr(each, "merge")
                outermost = self._layers.keys().isdisjoint(_parents(name))  # PEFT nests adapters of several parameters.
                if around and ".modules_to_save." in name:
                    self._why_not = f"{name} has adapters in a copy of a module (modules_to_save); save these alone"
                elif outermost and (around or isinstance(getattr(each, "modules_to_save", None), nn.ModuleDict)):
                    self._layers[name] = each
            self.layer_of = {name: layer for name in tensors for layer in _parents(name) if layer in self._layers}
            inner = {first for name, first in firsts for each in _parents(name) if hasattr(self._layers.get(each), "base_layer")}
            if both := [name for name, first in firsts if first in inner and self._layers.keys().isdisjoint(_parents(name))]:
                self._why_not = f"{some(both)} {_TIED}"
        replaced = [(first, name) for name, first in firsts if ".original_module." in first]
        self._outside = {first: name for first, name in replaced if self._layers.keys().isdisjoint(_parents(name))}
        """Weights of layers tied to a module that adapters train a copy of, by first name; these layers keep the old values."""
        self._counts = Counter(self.layer_of.values())
        pairs = self._layers.items()
        self._whole = {name: Skeleton(each).root if hasattr(each, "parameter_name") else each for name, each in pairs}
        """The layers, of which adapters of experts are as before ranks share experts: they then have numbers of a rank's."""
        plain = {name: each for name, each in tensors.items() if name not in self.layer_of}
        plain |= {name: tensors[first] for first, name in self._outside.items()}
        for layer in self._counts:
            plain |= {f"{layer}.{name}": each for name, each in _base_of(self._layers[layer]).state_dict(keep_vars=True).items()}
        stored = self._in_files(iter(plain.items()))
        self._tensors = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in stored}

    def convert(self, weights: Named, dtype: torch.dtype, failure: type[ZeromeshError] = ConfigError) -> Named:
        """Yield the Hub form of `weights`, `(name, tensor)` of each parameter and persistent buffer; floating-point tensors in
        `dtype`. Raises `failure` for adapters that cannot be merged and weights that transformers cannot convert."""
        with errors_as(failure, "", CheckpointError, ConfigError):
            if self._why_not:
                raise ConfigError(self._why_not)
            typed = ((name, in_files(self._wide_parts, name, each, dtype)) for name, each in self._in_files(self._merged(weights)))
            yield from self.hub_names.convert(typed)

    @cached_property
    def hub_names(self) -> HubNames:
        """The form on the Hub that the tensors of the model without adapters get, computed on meta in the model's dtypes."""
        return HubNames(self._library_model, self._tensors)

    def _in_files(self, weights: Named) -> Named:
        """Yield the base model's weights that are stored in files, by their names there."""
        for name, tensor in weights:
            # PEFT puts adapters of single tokens into a submodule of the embedding.
            plain = self._name_of.get(name, name).removeprefix(self._prefix).replace(".token_adapter.", ".")
            if plain not in self._left_out:
                yield plain, tensor

    def _merged(self, weights: Named) -> Named:
        """Yield the base model's weights, those of a layer with adapters merged once all its tensors have come."""
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in weights:
            layer = self.layer_of.get(name)
            if layer is None:
                yield name, tensor
                continue
            if name in self._outside:
                yield self._outside[name], tensor
            parts = waiting.setdefault(layer, {})
            parts[name.removeprefix(f"{layer}.")] = tensor.clone()
            if len(parts) == self._counts[layer]:
                for leaf, merged in _merge(self._whole[layer], self._layers[layer].active_adapters, waiting.pop(layer)):
                    if merged.is_meta:
                        raise ConfigError(f"{layer.removeprefix(self._prefix)}.{leaf} {_TIED}")
                    yield f"{layer}.{leaf}", merged


def _base_of(layer: Any) -> nn.Module:
    """Return the layer into which PEFT merges adapters, or its trained copy of a module (`modules_to_save`)."""
    if hasattr(layer, "base_layer"):
        base: nn.Module = layer.get_base_layer()
        return base
    copies: nn.ModuleDict = layer.modules_to_save
    return next((copies[name] for name in layer.active_adapters if name in copies), layer.original_module)


def _parents(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _merge(module: nn.Module, active: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> Named:
    """Return the tensors of a wrapped layer after merging its `active` adapters; `tensors` are all that the layer has."""
    layer: Any = Skeleton(module).root
    for part in layer.modules():
        # Merging writes into these containers, which must not be the model's.
        own = {name: copy.copy(value) for name, value in vars(part).items() if isinstance(value, dict | list | set)}
        vars(part).update(own, _active_adapter=active)
    widest = reduce(torch.promote_types, (each.dtype for each in tensors.values() if each.is_floating_point()), torch.float32)
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        part = layer.get_submodule(parent)
        if leaf in part._parameters:
            part._parameters[leaf] = nn.Parameter(tensor.to(widest), requires_grad=False)
        else:
            part._buffers[leaf] = tensor
    base = _base_of(layer)
    with torch.no_grad():
        while hasattr(layer, "base_layer"):
            layer.merge()
            layer = layer.base_layer
    return ((name, tensor.detach()) for name, tensor in base.state_dict(keep_vars=True).items())
