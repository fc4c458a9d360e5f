"""Building a Hugging Face model from a configuration or a local directory, on the meta device where that is
exact.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig
from transformers.activations import ACT2FN

from zeromesh.errors import ConfigError
from zeromesh.trainer.hf.key_matching import match
from zeromesh.trainer.hf.safetensors_files import TensorFiles
from zeromesh.trainer.hf.source import SafetensorsSource
from zeromesh.trainer.hf.values import integer, text_part
from zeromesh.zero.deferred import BuiltModel, build_deferred
from zeromesh.zero.initial import INITIALISER_ERRORS
from zeromesh.zero.sources import canonical_names

Head = Literal["causal_lm", "masked_lm", "sequence_classification", "token_classification"]

_AUTO_CLASSES = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
}
_COUNTS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    "vocab_size",
)
# Accepted by every configuration without being one of its fields, or under an older name.
_ALSO_KNOWN = {
    "attn_implementation", "auto_map", "experts_implementation", "model_type", "num_labels", "partial_rotary_factor",
    "rope_scaling", "rope_theta", "torch_dtype", "_attn_implementation", "_name_or_path",
}  # fmt: skip
_CONFIG_ERRORS = (*INITIALISER_ERRORS, StrictDataclassError, OSError, ImportError)


def build_model(
    *,
    source: str | os.PathLike[str] | None,
    config: Mapping[str, Any] | None,
    head: Head,
    seed: int,
    vocab_size: int | None = None,
    end_of_text: int | None = None,
) -> BuiltModel:
    """Build the model that a run's `model` section names.

    Args:
        source: a local directory with `config.json` and safetensors files, or None for random weights.
        config: fields of the configuration; with `source` they are set on top of `config.json`. Without
        `source`,
            `model_type` says which configuration.
        head: the task, and with it the class of the model.
        seed: of all weights that no file has.
        vocab_size, end_of_text: the tokenizer's, taken where neither `config` nor `source` says a size.

    The model's parameters are fp32 and on the meta device; `BuiltModel.source` gives their values. Where
    building on meta would lose values it is built whole on CPU, and a note says so. No code from a model
    directory is run. Raises `ConfigError` for a model type, a field or a value that does not exist, with the
    nearest names.
    """
    if head not in get_args(Head):
        raise ConfigError(f"{head!r} is not one of {', '.join(get_args(Head))}", where="model.head")
    settings = dict(config or {})
    made = (
        _from_fields(settings, vocab_size, end_of_text) if source is None else _from_directory(Path(source), settings)
    )
    _check_values(made)
    automatic = _automatic_class(type(made), head)
    files = None if source is None else TensorFiles(source)

    def build() -> Any:
        return automatic.from_config(made, dtype=torch.float32, trust_remote_code=False)

    try:
        built = build_deferred(build, seed, stored=None if files is None else lambda model: _stored(model, files))
    except ConfigError:
        raise
    except _CONFIG_ERRORS as error:
        raise ConfigError(f"{made.model_type} cannot be built: {_first_line(error)}", where="model.config") from error
    if source is None:
        return built
    streamed = SafetensorsSource(source, built.model, built.source)
    _take_generation_config(built.model, Path(source))
    return BuiltModel(model=built.model, source=streamed, notes=built.notes + streamed.notes)


def _automatic_class(config: type, head: Head) -> Any:
    automatic = getattr(transformers, _AUTO_CLASSES[head])
    if config not in automatic._model_mapping:
        heads = [h for h, name in _AUTO_CLASSES.items() if config in getattr(transformers, name)._model_mapping]
        raise ConfigError(
            f"{config.__name__} has no {head} model; it has {', '.join(heads) or 'none of the known heads'}",
            where="model.head",
        )
    return automatic


def _take_generation_config(model: Any, directory: Path) -> None:
    """How to generate is not a weight, but belongs to the directory and is written with the model again."""
    if (directory / "generation_config.json").is_file() and model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except _CONFIG_ERRORS as error:
            raise ConfigError(
                f"{directory / 'generation_config.json'}: {_first_line(error)}", where="model.source"
            ) from error


def _stored(model: Any, files: TensorFiles) -> frozenset[str]:
    """Names of parameters (their first ones) and buffers that the files have."""
    matched = match(model, files.entries)
    canonical = canonical_names(model)
    return frozenset(canonical.get(name, name) for name in (*matched.direct, *matched.converted))


def _from_fields(settings: dict[str, Any], vocab_size: int | None, end_of_text: int | None) -> Any:
    where = "model.config"
    known = sorted(transformers.CONFIG_MAPPING)
    kind = settings.pop("model_type", None)
    if kind is None:
        raise ConfigError("model_type is missing, and model.source gives no config.json", where=where)
    if kind not in transformers.CONFIG_MAPPING:
        near = difflib.get_close_matches(str(kind), known, n=3, cutoff=0.5)
        hint = f"nearest: {', '.join(near)}" if near else f"there are {len(known)}, such as llama, gpt2, bert"
        raise ConfigError(f"model_type: {kind!r} is not known to transformers ({hint})", where=where)
    cls = transformers.CONFIG_MAPPING[kind]
    _check_fields(cls, settings)
    if vocab_size is not None and "vocab_size" in _fields(cls) and settings.get("vocab_size") is None:
        settings["vocab_size"] = vocab_size
        _fit_special_ids(cls, settings, vocab_size, end_of_text)
    try:
        return AutoConfig.for_model(kind, **settings)
    except _CONFIG_ERRORS as error:
        raise ConfigError(_first_line(error), where=where) from error


def _from_directory(directory: Path, settings: dict[str, Any]) -> Any:
    if not (directory / "config.json").is_file():
        there = "has no config.json" if directory.is_dir() else "is not a directory"
        raise ConfigError(
            f"{directory} {there}; a model on the Hub is downloaded first: `hf download NAME --local-dir DIR`",
            where="model.source",
        )
    try:
        stored = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except _CONFIG_ERRORS as error:
        raise ConfigError(f"{directory / 'config.json'}: {_first_line(error)}", where="model.source") from error
    if getattr(stored, "quantization_config", None) is not None:
        raise ConfigError(f"{directory} is quantized; dequantize and save it first", where="model.source")
    kind = settings.pop("model_type", stored.model_type)
    if kind != stored.model_type:
        raise ConfigError(
            f"model_type: {kind!r} differs from {stored.model_type!r} in {directory}; leave it out",
            where="model.config",
        )
    _check_fields(type(stored), settings)
    try:
        return type(stored).from_dict({**stored.to_dict(), **settings})
    except _CONFIG_ERRORS as error:
        raise ConfigError(_first_line(error), where="model.config") from error


def _fields(cls: type) -> set[str]:
    names = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return names | set(getattr(cls, "attribute_map", {})) | _ALSO_KNOWN


def _fit_special_ids(cls: type, settings: dict[str, Any], vocab_size: int, end_of_text: int | None) -> None:
    """Ids of a class's own vocabulary mean nothing in the tokenizer's: the end of a text is the tokenizer's there."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        usual = getattr(cls, name, None)
        if name not in settings and isinstance(usual, int) and usual >= vocab_size:
            settings[name] = None if name == "pad_token_id" else end_of_text


def _check_values(made: Any) -> None:
    """Raise `ConfigError` for values that the library takes and that fail, or mean something else, later."""
    text = text_part(made)
    values = {name: integer(text, name) for name in _COUNTS}
    problems = [
        f"{name} is {value}; give 1 or more" for name, value in values.items() if value is not None and value < 1
    ]
    heads, groups = values["num_attention_heads"], values["num_key_value_heads"]
    if not problems and heads and groups and heads % groups:
        problems.append(f"num_key_value_heads {groups} does not divide num_attention_heads {heads}")
    for name in ("hidden_act", "activation_function"):
        value = getattr(text, name, None)
        if isinstance(value, str) and value not in ACT2FN:
            near = difflib.get_close_matches(value, list(ACT2FN), n=3, cutoff=0.5) or ["gelu", "relu", "silu"]
            problems.append(f"{name} {value!r} is not known to transformers; nearest: {', '.join(near)}")
    if problems:
        raise ConfigError(problems, where="model.config")


def _check_fields(cls: type, settings: Mapping[str, Any]) -> None:
    known = _fields(cls)
    problems = []
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            problems.append(f"{name} is not a field of {cls.__name__}{hint}")
    if problems:
        raise ConfigError(problems, where="model.config")


def _first_line(error: BaseException) -> str:
    if isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        return str(error.__cause__)  # what the field's own check said
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
