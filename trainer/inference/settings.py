"""The validated settings of a request: the model's own `GenerationConfig`, overridden by the request's fields."""

from __future__ import annotations

import copy
import inspect
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode

from zeromesh.errors import ConfigError, DataError, summary
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.inference.row_cache import layers_of
from zeromesh.trainer.inference.sampling import RowSampler
from zeromesh.trainer.models.generation import (
    check_arguments,
    decoder_positions,
    encoder_positions,
    ends_of,
    rope_kinds,
    settings_with,
)

NEW_TOKENS = 128
"""The default of `max_new_tokens` where neither the caller nor the model's `generation_config.json` gives one."""
_DECIDED_HERE = {  # Fields of `GenerationConfig` that are refused, and what to use instead.
    "num_return_sequences": "give a prompt several times",
    "max_time": "give max_new_tokens",
    "stop_strings": "give eos_token_id, or cut the text",
    "return_dict_in_generate": "results have tokens and logprobs",
    "output_scores": "results have logprobs",
    "output_logits": "results have logprobs",
    "output_attentions": "results have none",
    "output_hidden_states": "results have none",
}
_REFUSED = {name: f"{name} is not taken; {cure}" for name, cure in _DECIDED_HERE.items()}
_PLAIN_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_LIBRARY_LOOP_ONLY = ("cache_implementation", "cache_config", "guidance_scale", "token_healing", "prefill_chunk_size")
"""Fields that affect only transformers' own decoding loop."""
_RELATIVE_POSITIONS = ("bloom", "mpt")
"""Models with relative positions only, which left padding does not shift."""
_CACHE_WINDOWS = ("moshi",)
"""Models whose sliding window is implemented by dropping cache entries, not by a mask."""


class ModelSettings:
    """Validates the settings of requests to one model: its own ones, overridden by the request's fields.

    Args:
        module: the whole model, before a pipeline stage drops its other modules.
        mesh: the mesh over which the model is divided; None: none.
    """

    def __init__(self, module: Any, mesh: Mesh | None) -> None:
        self._module, self._mesh = module, mesh
        # Non-causal attention.
        self._looks_ahead = any(getattr(part, "is_causal", True) is False for part in module.modules())
        self._tried: set[str] = set()

    def of(self, fields: Mapping[str, Any], prompt_tokens: int) -> GenerationConfig:
        """Return the settings to continue a prompt of `prompt_tokens` tokens.

        Raises:
            ConfigError: for fields that do not exist, have other values than transformers knows, or that the layout does not allow.
            DataError: for a prompt that is too long for them.
        """
        settings = settings_with(self._module, fields, _REFUSED, "generate")
        # The library's defaults for unset fields, such as top_k=50; lengths are decided below.
        defaults = settings._get_default_generation_params()
        vocabulary = getattr(self._module.config.get_text_config(), "vocab_size", None) or sys.maxsize
        wrong = list(_wrong_values(settings, defaults, fields, vocabulary))
        if wrong:
            raise ConfigError([f"generate: {name} is {text}{'' if name in fields else _OWN}" for name, text in wrong])
        settings.update(**{**defaults, "max_length": None}, defaults_only=True)
        if settings.pad_token_id is None:
            settings.pad_token_id = next(iter(ends_of(settings)), 0)
        if "pad_token_id" not in fields and not 0 <= settings.pad_token_id < vocabulary:
            settings.pad_token_id = 0  # Unused, but models look it up.
        longest = 0 if self._module.config.is_encoder_decoder else prompt_tokens
        positions = decoder_positions(self._module)
        if settings.max_new_tokens is None and settings.max_length is None:
            settings.max_new_tokens = NEW_TOKENS if positions is None else min(NEW_TOKENS, max(1, positions - longest))
        if positions is not None and settings.max_length is not None and "max_length" not in fields:
            settings.max_length = min(settings.max_length, positions)
        wanted = longest + settings.max_new_tokens if settings.max_new_tokens is not None else settings.max_length
        if positions is not None and wanted > positions:
            raise DataError(
                f"the prompt has {longest} tokens, which with the new ones become {wanted}, and the model has {positions} "
                f"positions; shorten it, or lower {'max_length' if settings.max_new_tokens is None else 'max_new_tokens'}"
            )
        known = encoder_positions(self._module)
        if known is not None and prompt_tokens > known:
            raise DataError(
                f"the prompt has {prompt_tokens} tokens, and the model's encoder has {known} positions; shorten it"
            )
        if settings.max_new_tokens is None and not self._module.config.is_encoder_decoder:
            settings.max_new_tokens, settings.max_length = max(1, settings.max_length - prompt_tokens), None
        check_arguments(self._module, {"generation_config": settings}, self._mesh)
        return settings

    def checked(self, fields: Mapping[str, Any], prompt_tokens: int) -> GenerationConfig:
        """Return `of(...)` for fields from a user: they are tried once, so that they cannot fail inside a batch."""
        key = json.dumps(fields, sort_keys=True, default=repr)
        settings = self.of(fields, prompt_tokens)
        if key not in self._tried:
            try:
                self._try_sampler(settings)
            except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
                text = summary(error)
                own = "" if any(name in text for name in fields) else _OWN
                raise ConfigError(f"generate: {text}{own}") from error
            self._tried.add(key)
        return settings

    def _try_sampler(self, settings: GenerationConfig) -> None:
        """Build transformers' logits processors for these settings and choose one token, as a running batch would."""
        module, trial, prompt = self._module, copy.deepcopy(settings), [0]
        if type(module)._get_logits_processor is not GenerationMixin._get_logits_processor:
            return
        sampler = RowSampler(module, trial, prompt, 0, torch.device("cpu"))
        if not self.why_unbatched(settings):
            sampler.choose(torch.zeros(module.config.get_text_config().vocab_size), prompt)

    def why_unbatched(self, settings: GenerationConfig) -> str:
        """Return the reason why requests with these settings cannot join a running batch of this model; empty if they can. All
        ranks return the same."""
        module, name = self._module, type(self._module).__name__
        mode = settings.get_generation_mode()
        if mode not in _PLAIN_MODES:
            return f"{mode.value} goes on with several texts of a prompt"
        if not settings.use_cache:
            return "use_cache is false"
        found = [field for field in _LIBRARY_LOOP_ONLY if getattr(settings, field, None)]
        if found:
            return f"{found[0]} is a matter of the library's own loop"
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
        changing = rope_kinds(module.config) & {"dynamic", "longrope"}
        if changing:
            return (
                f"{name} turns positions by frequencies that depend on the longest text ({', '.join(sorted(changing))})"
            )
        return ""


_OWN = " (the model's generation_config.json says so)"
_SHARES = ("top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
_IDS = ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id")
_IDS_OF_MODELS = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
"""Token ids of small model copies are often beyond the vocabulary, where they have no effect; a negative one stands for none."""


def _wrong_values(
    settings: GenerationConfig, defaults: Mapping[str, Any], fields: Mapping[str, Any], vocabulary: int
) -> Iterator[tuple[str, str]]:
    """Yield fields with the reason why their value is wrong. An int becomes a float where the library expects one."""
    kinds = {name: type(default) for name, default in defaults.items()} | dict.fromkeys(_SHARES, float)
    for name, kind in {**kinds, "max_new_tokens": int, "min_new_tokens": int}.items():
        value = getattr(settings, name, None)
        if value is None or kind not in (int, float):
            continue
        least, most = 0 if kind is int or name in _SHARES else -math.inf, 1 if name in _SHARES else math.inf
        if type(value) not in (int, kind) or not (least <= value <= most and math.isfinite(value)):
            yield name, f"{value!r}; give a {'whole ' * (kind is int)}number from {least} to {most}"
        else:
            setattr(settings, name, kind(value))
    for name in (*_IDS, *_IDS_OF_MODELS):
        value = getattr(settings, name, None)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        most = vocabulary if name in _IDS or name in fields else sys.maxsize
        least = 0 if name in _IDS else -sys.maxsize
        if not all(type(each) is int and least <= each < most for each in ids):
            yield name, f"{value!r}; give ids of tokens, from 0 to {vocabulary - 1}"
