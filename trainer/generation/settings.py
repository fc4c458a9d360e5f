"""The settings of a generation: a model's own `GenerationConfig`, overridden by fields of the user, and their checks."""

import copy
import inspect
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode

from zeromesh.errors import ConfigError, DataError, summary
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.yaml_reader import read_texts
from zeromesh.trainer.data.tokenizer import Tokenizer
from zeromesh.trainer.generation.adapter_rows import AdapterRows
from zeromesh.trainer.generation.row_cache import layers_of
from zeromesh.trainer.generation.sampling import RowSampler
from zeromesh.trainer.model_on_mesh import PlacedModel
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.models.user_model import first_position, positive

_NEW_TOKENS = 128  # `max_new_tokens` where neither the caller nor the model's `generation_config.json` gives one
FIELDS = read_texts(Path(__file__).with_name("fields.yaml"))  # of `GenerationConfig`, and what they are here
_REFUSED = {name: f"{name} is not taken; {cure}" for name, cure in FIELDS["refused"].items()}
PLAIN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)  # one text of a prompt, a token at a time
_RELATIVE_POSITIONS = ("bloom", "mpt")  # Models with relative positions only, which left padding does not shift.
_CACHE_WINDOWS = ("moshi",)  # Models whose sliding window is implemented by dropping cache entries, not by a mask.


class ModelSettings:
    """Validates the settings of requests to one model, which is whole when this is created, before a pipeline stage drops its other
    modules: the model's own settings, overridden by the request's fields. `mesh` is None for a model that is not divided."""

    def __init__(self, module: Any, mesh: Mesh | None) -> None:
        self._module, self._mesh = module, mesh
        self._looks_ahead = any(getattr(part, "is_causal", True) is False for part in module.modules())
        self._tried: set[str] = set()

    def for_request(self, fields: Mapping[str, Any], prompt_tokens: int, *, trial: bool = True) -> GenerationConfig:
        """Return the settings to continue a prompt of `prompt_tokens` tokens; with `trial` they first choose one token. Raises
        `ConfigError` for fields or values that are unknown or do not go with the layout, `DataError` for a prompt too long."""
        settings = settings_with(self._module, fields, _REFUSED, "generate")
        # The library's defaults for unset fields, such as top_k=50; lengths are decided below.
        defaults = settings._get_default_generation_params()
        vocabulary = _vocabulary(self._module)
        settings.update(**{**defaults, "max_length": None}, defaults_only=True)
        if settings.pad_token_id is None:
            settings.pad_token_id = next(iter(ends_of(settings)), 0)
        if "pad_token_id" not in fields and not 0 <= settings.pad_token_id < vocabulary:
            settings.pad_token_id = 0  # Unused, but models look it up.
        longest = 0 if self._module.config.is_encoder_decoder else prompt_tokens
        positions = decoder_positions(self._module)
        if settings.max_new_tokens is None and settings.max_length is None:
            settings.max_new_tokens = min(_NEW_TOKENS, max(1, (positions or sys.maxsize) - longest))
        if settings.max_length is not None and "max_length" not in fields:
            settings.max_length = min(settings.max_length, positions or sys.maxsize)
        total = longest + settings.max_new_tokens if settings.max_new_tokens is not None else settings.max_length
        if positions is not None and total > positions:
            has = f"{longest} tokens, which with the new ones become {total}, and the model has {positions} positions"
            limit = "max_length" if settings.max_new_tokens is None else "max_new_tokens"
            raise DataError(f"the prompt has {has}; shorten it, or lower {limit}")
        if self._module.config.is_encoder_decoder:
            config = encoder_config(self._module)
            known = positive(config, "max_encoder_position_embeddings", "max_position_embeddings") or prompt_tokens
            if prompt_tokens > known:
                raise DataError(f"the prompt has {prompt_tokens} tokens, the encoder {known} positions; shorten it")
        elif settings.max_new_tokens is None:
            settings.max_new_tokens, settings.max_length = max(1, settings.max_length - prompt_tokens), None
        check_arguments(self._module, {"generation_config": settings}, self._mesh)
        if trial:
            self._choose_once(settings, fields)
        return settings

    def _choose_once(self, settings: GenerationConfig, fields: Mapping[str, Any]) -> None:
        """Choose one token by new fields, as a running batch would, so that they cannot fail inside a batch."""
        tried = {name: value for name, value in fields.items() if name != "max_new_tokens"}
        key = json.dumps(tried, sort_keys=True, default=repr)
        module, prompt = self._module, [0]
        if key in self._tried or type(module)._get_logits_processor is not GenerationMixin._get_logits_processor:
            return
        try:
            sampler = RowSampler(module, copy.deepcopy(settings), prompt, 0, torch.device("cpu"))
            if not self.why_unbatched(settings):
                sampler.choose(torch.zeros(module.config.get_text_config().vocab_size), prompt)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            text = summary(error)
            raise ConfigError(f"generate: {text}{'' if any(name in text for name in fields) else _ORIGIN}") from error
        self._tried.add(key)

    def why_unbatched(self, settings: GenerationConfig) -> str:
        """Return the reason, the same on all ranks, why such requests cannot join a running batch; empty if they can."""
        module, name = self._module, type(self._module).__name__
        mode = settings.get_generation_mode()
        if mode not in PLAIN_MODES:
            return f"{mode.value} goes on with several texts of a prompt"
        if not settings.use_cache:
            return "use_cache is false"
        for field in FIELDS["library_loop_only"]:
            if getattr(settings, field, None):
                return f"{field} is a matter of the library's own loop"
        if module.config.is_encoder_decoder:
            return f"{name} has an encoder"
        if type(module).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation:
            return f"{name} prepares its inputs in a way of its own"
        takes = inspect.signature(module.forward).parameters
        if "past_key_values" not in takes or "attention_mask" not in takes or layers_of(module.config) is None:
            return f"{name} keeps something else than keys and values between tokens"
        if "position_ids" not in takes and module.config.model_type not in _RELATIVE_POSITIONS:
            return f"{name} counts positions from the first column of a batch"
        if module.config.model_type in _CACHE_WINDOWS:
            return f"{name} looks at what its cache keeps of a window"
        if self._looks_ahead:
            return f"{name} has attention that also looks at later tokens"
        changing = ", ".join(sorted(rope_kinds(module.config) & {"dynamic", "longrope"}))
        return f"{name} turns positions by frequencies that depend on the longest text ({changing})" if changing else ""


_ORIGIN = " (the model's generation_config.json says so)"


def _wrong_values(settings: GenerationConfig, fields: Mapping[str, Any], vocabulary: int, beyond: Collection[str]) -> list[str]:
    """Return the reasons why values are wrong. An int becomes a float where the library expects one."""
    problems: dict[str, str] = {}
    counts, ratios, token_ids = (FIELDS[name] for name in ("counts", "ratios", "token_ids"))
    kinds = {name: type(default) for name, default in settings._get_default_generation_params().items()}
    for name, kind in {**kinds, **dict.fromkeys(ratios, float), "max_new_tokens": int, "min_new_tokens": int}.items():
        value = getattr(settings, name, None)
        if value is None or kind not in (int, float):
            continue
        least = 1 if name in counts else 0 if kind is int or name in ratios else -math.inf
        most = 1 if name in ratios else sys.maxsize if kind is int else math.inf
        if type(value) not in (int, kind) or not (least <= value <= most and math.isfinite(value)):
            problems[name] = f"{value!r}; give a {'whole ' * (kind is int)}number from {least} to {most}"
        else:
            setattr(settings, name, kind(value))
    for name in (*token_ids, *FIELDS["model_token_ids"]):
        value = getattr(settings, name, None)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        most = vocabulary if name in fields or (name in token_ids and name not in beyond) else sys.maxsize
        least = 0 if name in token_ids else -sys.maxsize
        if not all(type(each) is int and least <= each < most for each in ids):
            problems[name] = f"{value!r}; give ids of tokens, from 0 to {vocabulary - 1}"
    return [f"{name} is {text}{'' if name in fields else _ORIGIN}" for name, text in problems.items()]


@dataclass(kw_only=True)
class ServedModel(PlacedModel):
    """This rank's part of a model for generation, which holds nothing but parameters in memory."""

    settings: ModelSettings
    tokenizer: Tokenizer | None
    adapters: AdapterRows


def add_end_tokens(model: nn.Module, tokens: Iterable[int], name: Callable[[Sequence[int]], str]) -> list[str]:
    """Add end tokens to a model's saved generation settings; returns a note for each new one. `name` decodes tokens."""
    settings: Any = getattr(pretrained_of(model), "generation_config", None)
    if new := [token for token in dict.fromkeys(tokens) if settings is not None and token not in ends_of(settings)]:
        settings.eos_token_id = [*ends_of(settings), *new]
    return [f"generation_config.eos_token_id: {token} ({name([token])!r}) is added, as it ends texts of the data" for token in new]


def ends_of(settings: GenerationConfig) -> list[int]:
    ends = settings.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


def settings_with(
    model: Any, fields: Mapping[str, Any], refused: Mapping[str, str], where: str, *, beyond: Collection[str] = ()
) -> GenerationConfig:
    """Return the model's generation settings updated by `fields`; `refused` maps unsupported fields to reasons, and the model's own
    fields `beyond` may have ids outside of its vocabulary. Raises `ConfigError`, which begins with `where`, for bad fields."""
    settings: GenerationConfig = copy.deepcopy(model.generation_config)
    settings.update(use_cache=True, **dict.fromkeys(refused))
    try:
        unknown = settings.update(**{name: value for name, value in fields.items() if name not in refused})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from error
    problems = [text for name, text in refused.items() if fields.get(name)]
    problems += [f"{name} is no field of transformers' GenerationConfig" for name in unknown]
    problems += _wrong_values(settings, fields, _vocabulary(model), beyond)
    if problems:
        raise ConfigError([f"{where}: {each}" for each in problems])
    return settings


def _vocabulary(model: Any) -> int:
    return getattr(model.config.get_text_config(), "vocab_size", None) or sys.maxsize


def check_arguments(model: nn.Module, arguments: Mapping[str, Any], mesh: Mesh | None) -> None:
    """Check the arguments of `generate`, alike on every rank; `mesh` is None for a model that is not partitioned. Raises
    `ConfigError` for the model or arguments that the layout does not allow, `DataError` for prompts padded on the right."""
    if not callable(getattr(model, "generate", None)):
        raise ConfigError(f"{type(model).__name__} has no generate; Hugging Face models with a suitable head have")
    if "synced_gpus" in arguments:
        raise ConfigError("generate: synced_gpus is decided here, ranks are kept together; leave it out")
    mask = arguments.get("attention_mask")
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if isinstance(mask, torch.Tensor) and not has_encoder and not bool(mask[:, -1].all()):
        raise DataError("generate: a prompt ends with padding (attention_mask 0); pad prompts on the left")
    staged = mesh is not None and mesh.shape.divides("blocks")
    # Several ranks compute the same tokens together.
    shared = mesh is not None and mesh.model_size > 1
    settings = copy.deepcopy(arguments.get("generation_config") or getattr(model, "generation_config", None))
    if not isinstance(settings, GenerationConfig):
        if not shared:
            return
        raise ConfigError(f"generate: generation_config is a {type(settings).__name__}, not a GenerationConfig")
    rest = settings.update(**{name: value for name, value in arguments.items() if hasattr(settings, name)})
    mode = settings.get_generation_mode()
    if mode.value in FIELDS["modes_on_the_hub"] and not (arguments.get("trust_remote_code") or arguments.get("custom_generate")):
        cure = "use beams or sampling, or load it: trainer.generate(trust_remote_code=True)"
        raise ConfigError(f"generate: {mode.value} is code on the Hub, which transformers itself no longer has; {cure}")
    if shared and settings.max_time is not None:
        raise ConfigError("generate: max_time ends ranks of one model at different tokens; use max_new_tokens")
    if not staged:
        return
    unknown = [name for name in arguments if not hasattr(settings, name) and name not in FIELDS["staged_arguments"]]
    unstaged = [name for name in FIELDS["unstaged"] if getattr(settings, name, None)]
    if settings.guidance_scale not in (None, 1):
        unstaged.append("guidance_scale")  # Guidance needs a second cache, and pipeline stages keep a single one.
    if settings.cache_implementation not in (None, "dynamic"):
        unstaged.append(f"cache_implementation: {settings.cache_implementation}")
    for names, cure in (
        ([*unknown, *rest], "prompts are input_ids and attention_mask"),
        ([] if mode in PLAIN_MODES else [mode.value], "allowed are greedy search and sampling (num_beams: 1)"),
        (unstaged, "leave it out"),
    ):
        if names:
            raise ConfigError(f"generate: {', '.join(names)} is not possible under parallel.pipeline; {cure}")


def decoder_positions(module: Any) -> int | None:
    """Return the number of positions of a model's decoder, or None if unlimited or unknown."""
    config = module.config.get_text_config(decoder=True)
    # Dynamic rotary frequencies scale with the text beyond the trained length.
    if "dynamic" in rope_kinds(config):
        return None
    return max(0, positive(config, "max_decoder_position_embeddings", "max_position_embeddings") - first_position(module)) or None


def encoder_config(module: Any) -> Any:
    """Return the configuration of a model's encoder, which may differ from the model's."""
    return getattr(module.get_encoder(), "config", module.config).get_text_config(encoder=True)


def rope_kinds(config: Any) -> set[str]:
    """Return the rotary embedding types (`rope_type`) in a configuration, over all layers."""
    given = getattr(config.get_text_config(), "rope_parameters", None) or {}
    groups = [given, *(each for each in given.values() if isinstance(each, Mapping))]
    return {str(each["rope_type"]) for each in groups if each.get("rope_type")}
