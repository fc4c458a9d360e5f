"""Low-rank adapters of PEFT (Hu et al., "LoRA", 2021): their detection by attributes, so that PEFT is imported only to make
adapters, and their addition to a model whose weights may still be in files."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from zeromesh.errors import ConfigError, some
from zeromesh.trainer.config.sections.model import Head, LoraSection
from zeromesh.weight_init.weight_sources import (
    INITIALISER_ERRORS,
    BuiltModel,
    BuiltSource,
    ParameterSource,
    is_pretrained_model,
    seeded_cpu,
)


def is_peft_model(model: nn.Module) -> bool:
    return callable(getattr(type(model), "get_base_model", None)) and bool(getattr(model, "peft_config", None))


def is_adapted(model: nn.Module) -> bool:
    """Return True if `model` is a `PeftModel`, or a Hugging Face model that adapters were added to (`model.add_adapter`)."""
    return is_peft_model(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def pretrained_of(model: nn.Module) -> Any | None:
    """Return the Hugging Face model that `model` is or wraps with adapters; None for any other module."""
    wrapper: Any = model
    inside = wrapper.get_base_model() if is_peft_model(model) else model
    return inside if is_pretrained_model(inside) else None


def output_layer(model: Any) -> Any:
    """Return the output embedding of a Hugging Face model, or the copy that PEFT trains of it (`modules_to_save`)."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    copies = getattr(head, "modules_to_save", None)
    active: list[str] = list(getattr(head, "active_adapters", ()))
    return copies[active[0]] if isinstance(copies, nn.ModuleDict) and len(active) == 1 and active[0] in copies else head


def learns_prompts(model: Any) -> bool:
    """Return True if an adapter of `model` learns prompt tokens or prefixes of keys and values."""
    return any(getattr(settings, "is_prompt_learning", False) for settings in model.peft_config.values())


def adapter_names(model: Any) -> frozenset[str]:
    """Return the names of the parameters and buffers of a saved adapter: its tensors and other trained ones."""
    adapters = set(model.peft_config)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return frozenset(name for name, tensor in tensors if tensor.requires_grad or adapters & set(name.split(".")))


def description_of_adapters(model: Any) -> dict[str, Any]:
    """Return the settings of a model's adapters that a resumed run must match, by flat keys."""
    passing = {"base_model_name_or_path", "revision", "inference_mode", "peft_version"}
    return {
        f"adapter.{name}.{key}": sorted(value) if isinstance(value, set) else value
        for name, settings in model.peft_config.items()
        for key, value in settings.to_dict().items()
        if key not in passing and value is not None
    }


_TASKS: Mapping[Head, str] = {
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
    "base": "FEATURE_EXTRACTION",
}
"""PEFT's task types, by head; PEFT also trains the heads of classification and question answering."""
_BASE_HEADS: tuple[Head, ...] = ("causal_lm", "masked_lm", "seq2seq_lm", "image_text_to_text", "speech_seq2seq", "base")
"""Tasks whose head is pretrained, so that it is not trained whole beside the adapters."""


def add_lora(built: BuiltModel, section: LoraSection, head: Head, seed: int) -> BuiltModel:
    """Return `built` with LoRA adapters drawn from `seed`; only they and a classifier's head are trained. Raises `ConfigError`
    without PEFT, for a model that is not of transformers or has adapters, and for targets that it lacks."""
    peft = import_peft()
    base: Any = built.model
    if is_adapted(base):
        problem = "the model has adapters already; leave this out, or give the model without them"
        raise ConfigError(problem, where="model.lora")
    if not is_pretrained_model(base):
        problem = f"adapters are for models of transformers, and this is a {type(base).__name__}"
        raise ConfigError(problem, where="model.lora")
    names = {id(tensor): name for name, tensor in [*base.named_parameters(), *base.named_buffers()]}
    left_out = _excluded_modules(base) if section.targets == "all-linear" else []
    heads = [
        name
        for name, each in base.named_children()
        if name != base.base_model_prefix and not is_pretrained_model(each) and [*each.parameters()]
    ]
    settings = peft.LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha or 2 * section.rank,
        lora_dropout=section.dropout,
        target_modules=list(section.targets) if isinstance(section.targets, tuple) else section.targets,
        task_type=_TASKS.get(head),
        exclude_modules=left_out or None,
        modules_to_save=None if head in _BASE_HEADS else heads,
    )
    try:
        with seeded_cpu(seed, "adapters"), warnings.catch_warnings(action="ignore", category=FutureWarning):
            model = peft.get_peft_model(base, settings, autocast_adapter_dtype=False)
    except INITIALISER_ERRORS as error:
        reason = str(error).splitlines()[0]
        if reason.startswith("No modules were targeted"):
            reason = f"no module that {section.targets} means is in {type(base).__name__}, beside a head that is trained whole"
        hint = "; name modules in model.lora.targets that can have them" if "module" in reason else ""
        raise ConfigError(f"no adapters can be added: {reason}{hint}", where="model.lora") from error
    for name, layer in model.named_modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            plain: Any = layer.get_base_layer()
            if not _maps_last_dim(plain):
                raise ConfigError(
                    f"{name.removeprefix('base_model.model.')} cannot have adapters, as a {type(plain).__name__} does more than "
                    "to multiply by its weight; name other layers",
                    where="model.lora.targets",
                )
            for adapters in (layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B):
                if any(parameter.is_meta for parameter in adapters.parameters()):
                    adapters.to_empty(device="cpu")
            with seeded_cpu(seed, name):
                for adapter in layer.active_adapters:
                    layer.reset_lora_parameters(adapter, True)
    alone = [name for name in left_out if not [*base.get_submodule(name).children()]]
    notes = (*built.notes, *([f"no adapters on {some(alone)}"] if alone else []))
    return BuiltModel(model=model, source=AdaptedSource(built.source, model, names), notes=notes)


def _excluded_modules(base: nn.Module) -> list[str]:
    """Return the modules that PEFT would match for "all-linear" and that cannot have adapters: linear layers with another
    computation, and modules with children that share the last part of a linear layer's name."""
    linear = {name for name, each in base.named_modules() if isinstance(each, nn.Linear)}
    leaves = {name.rpartition(".")[2] for name in linear}
    return [
        name
        for name, each in base.named_modules()
        if name.rpartition(".")[2] in leaves and (not _maps_last_dim(each) if name in linear else [*each.children()])
    ]


def _maps_last_dim(layer: nn.Module) -> bool:
    """Return False for a linear layer that does not map [..., in] to [..., out], such as a router or a grouped layer."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return True
    meta = {name: torch.empty_like(each, device="meta") for name, each in layer.named_parameters()}
    try:
        out = functional_call(layer, meta, layer.weight.new_empty(1, 1, layer.in_features, device="meta"))
    except INITIALISER_ERRORS:
        return False
    return isinstance(out, torch.Tensor) and out.shape == (1, 1, layer.out_features)


def import_peft() -> Any:
    try:
        import peft
        import peft.tuners.lora
    except ImportError as error:
        raise ConfigError("adapters need the package peft: pip install peft", where="model.lora") from error
    return peft


class AdaptedSource(ParameterSource):
    """The parameter values of a model with adapters, which are kept here; other values come from the base model's source. `names`
    maps ids of tensors to their names in the base model."""

    def __init__(self, source: ParameterSource, model: nn.Module, names: Mapping[int, str]) -> None:
        self._source = source
        parameters = dict(model.named_parameters(remove_duplicate=False))
        tensors = parameters | dict(model.named_buffers(remove_duplicate=False))
        self._inside = {name: names[id(tensor)] for name, tensor in tensors.items() if id(tensor) in names}
        # The trained copy of a head, `head.modules_to_save.default.weight`, starts from `head.original_module.weight`.
        for name in [each for each, tensor in parameters.items() if each not in self._inside and tensor.is_meta]:
            self._inside[name] = self._inside[re.sub(r"\.modules_to_save\.[^.]*\.", ".original_module.", name, count=1)]
        self._adapters = BuiltSource(model, without=self._inside)
        self._readers = Counter(self._inside[name] for name, _ in model.named_parameters() if name in self._inside)

    def origin(self, fqn: str) -> tuple[ParameterSource, str]:
        return (self._source, self._inside[fqn]) if fqn in self._inside else (self._adapters, fqn)

    def read(self, fqn: str, start: int, end: int) -> torch.Tensor:
        source, name = self.origin(fqn)
        return source.read(name, start, end)

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        self._source.expect((self._inside[name], start, end) for name, start, end in ranges if name in self._inside)

    def buffer(self, name: str) -> torch.Tensor | None:
        return self._source.buffer(self._inside[name]) if name in self._inside else None

    def release(self, fqn: str) -> None:
        source, name = self.origin(fqn)
        self._readers[name] -= source is self._source
        if self._readers[name] <= 0:
            source.release(name)

    def close(self) -> None:
        self._source.close()
        self._adapters.close()
