"""The model's `generate` on all ranks of a mesh, in any layout.

The library's loop runs on every rank. In a pipeline, each call of the model runs all stages, which gives
all ranks the same logits. Where parameters are gathered, ranks with different prompts need each other to the end: before a
call they agree whether some rank continues, and finished ranks take part with a dummy input.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from zeromesh.errors import ConfigError, DataError, LayoutError, some
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.options import Placement
from zeromesh.overrides import tensors_put_aside
from zeromesh.pipeline.generation import CACHE
from zeromesh.pipeline.pipeline import Pipeline
from zeromesh.rng import own_randomness
from zeromesh.trainer.data.feed import require_same_batches
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.models.prepare import in_evaluation_mode
from zeromesh.trainer.models.user_model import positive
from zeromesh.zero.engine import ZeroEngine

_STAGED_ARGUMENTS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "generation_config", "logits_processor", "stopping_criteria"}
) | {"prefix_allowed_tokens_fn", "streamer", "tokenizer"}
"""Arguments of `generate` beside fields of `GenerationConfig` that a pipeline accepts."""
_UNSTAGED_SETTINGS = ("output_attentions", "output_hidden_states", "prefill_chunk_size")
"""Fields of `GenerationConfig` that a pipeline does not support."""
_ON_THE_HUB = (
    *(GenerationMode.GROUP_BEAM_SEARCH, GenerationMode.CONSTRAINED_BEAM_SEARCH),
    *(GenerationMode.CONTRASTIVE_SEARCH, GenerationMode.DOLA_GENERATION),
)
"""Generation modes whose code transformers loads from the Hub."""


def end_also_at(model: nn.Module, tokens: Iterable[int], name: Callable[[Sequence[int]], str]) -> list[str]:
    """Add end tokens to a model's saved generation settings; returns a note for each new one. `name` decodes tokens."""
    settings: Any = getattr(pretrained_of(model), "generation_config", None)
    notes = []
    for token in tokens if settings is not None else ():
        if token not in ends_of(settings):
            settings.eos_token_id = [*ends_of(settings), token]
            notes.append(
                f"generation_config.eos_token_id: {token} ({name([token])!r}) is added, as it ends the answers"
            )
    return notes


def ends_of(settings: GenerationConfig) -> list[int]:
    """Return the ids of the end-of-text tokens in generation settings."""
    ends = settings.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


def settings_with(model: Any, fields: Mapping[str, Any], refused: Mapping[str, str], asked: str) -> GenerationConfig:
    """Return the model's generation settings updated by `fields`; `refused` maps unsupported fields to reasons.

    Raises `ConfigError`, which begins with `asked` (the source of the request), for refused, unknown and invalid fields.
    """
    settings: GenerationConfig = copy.deepcopy(model.generation_config)
    settings.update(use_cache=True, **dict.fromkeys(refused))
    try:
        unknown = settings.update(**{name: value for name, value in fields.items() if name not in refused})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{asked}: {' '.join(str(error).split())}") from error
    problems = [text for name, text in refused.items() if fields.get(name)]
    problems += [f"{name} is no field of transformers' GenerationConfig" for name in unknown]
    if problems:
        raise ConfigError([f"{asked}: {each}" for each in problems])
    return settings


def check_arguments(model: nn.Module, arguments: Mapping[str, Any], mesh: Mesh | None) -> None:
    """Check the arguments of `generate`, with the same result on every rank; `mesh` is None for a model that is not partitioned.

    Raises `ConfigError` for a model that does not generate and arguments that do not go with the layout, and `DataError` for
    prompts that are padded on the right.
    """
    if not callable(getattr(model, "generate", None)):
        raise ConfigError(
            f"{type(model).__name__} has no generate; it generates where it is a Hugging Face model with a head"
        )
    if "synced_gpus" in arguments:
        raise ConfigError("generate: synced_gpus is decided here, ranks are kept together; leave it out")
    mask, config = arguments.get("attention_mask"), getattr(model, "config", None)
    if (
        isinstance(mask, torch.Tensor)
        and not getattr(config, "is_encoder_decoder", False)
        and not bool(mask[:, -1].all())
    ):
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
    if mode in _ON_THE_HUB and not (arguments.get("trust_remote_code") or arguments.get("custom_generate")):
        raise ConfigError(
            f"generate: {mode.value} is code on the Hub, which transformers itself no longer has; use beams or sampling, or "
            "load it: trainer.generate(trust_remote_code=True)"
        )
    if not shared:
        return
    if settings.max_time is not None:
        raise ConfigError("generate: max_time ends ranks of one model at different tokens; use max_new_tokens")
    if not staged:
        return
    where = "under parallel.pipeline"
    unknown = [name for name in arguments if not hasattr(settings, name) and name not in _STAGED_ARGUMENTS]
    if unknown or rest:
        named = ", ".join([*unknown, *rest])
        raise ConfigError(f"generate: {named} is not possible {where}; prompts are input_ids and attention_mask")
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigError(
            f"generate: {mode.value} is not possible {where}; allowed are greedy search and sampling (num_beams: 1)"
        )
    found = [name for name in _UNSTAGED_SETTINGS if getattr(settings, name, None)]
    if settings.guidance_scale not in (None, 1):
        found.append("guidance_scale")  # Guidance has a second cache, and stages keep one.
    if settings.cache_implementation not in (None, "dynamic"):
        found.append(f"cache_implementation: {settings.cache_implementation}")
    if found:
        raise ConfigError(f"generate: {', '.join(found)} is not possible {where}; leave it out")


def generate(
    model: Any,
    mesh: Mesh,
    arguments: Mapping[str, Any],
    *,
    seed: Callable[[], object] | None,
    engine: ZeroEngine | None = None,
    pipeline: Pipeline | None = None,
    see: Callable[[torch.Tensor], object] = lambda logits: None,
) -> Any:
    """Return `model.generate(**arguments)` in evaluation mode; all ranks call it.

    Data ranks may have different prompts. `seed` seeds the sampling, and the generator is restored afterwards. If None, the mode
    and the generator are the caller's, as in the library. `engine` and `pipeline` are those of a partitioned model.
    `see` is given the logits [rows, vocabulary] of the last position, as the model computes them, after each of its calls.

    Raises:
        DataError: if ranks that share a model have different prompts or arguments.
        LayoutError: for a pipeline whose modules keep tensors between tokens.
    """
    arguments = {
        name: value.to(mesh.device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }
    if engine is not None:
        require_same_batches([arguments], mesh, "give all of them the same prompts and arguments of generate")
    # The library's loop calls the base model inside an adapter's wrapper.
    looped = next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)
    looped_class = type(looped)
    calls = _Calls(looped, mesh, engine, pipeline, len(arguments["input_ids"]) if pipeline is not None else 0)

    def called(_model: nn.Module, *ids: Any, **inputs: Any) -> Any:
        calls.some_rank_goes_on(here=True)
        # Classifier-free guidance passes the ids as a positional argument.
        outputs = calls.compute({**inputs, **dict(zip(["input_ids"], ids, strict=False))})
        # Rotary frequencies, which some models compute lazily, do not depend on the text.
        if pipeline is not None and (kept := [name for name in put_aside() if not name.endswith("inv_freq")]):
            raise LayoutError(
                f"{type(model).__name__} keeps {some(kept, 3)} in its modules between tokens, which microbatches of a pipeline "
                "would share; generate without parallel.pipeline"
            )
        see(outputs.logits[:, -1])
        return outputs

    mode = in_evaluation_mode(model) if seed is not None else nullcontext()
    # Tensors that modules keep between tokens belong to this text alone.
    with mode, torch.no_grad(), tensors_put_aside(model) as put_aside:
        with own_randomness() if seed is not None else nullcontext():
            if seed is not None:
                seed()
            # `called` has to run before the hooks of a call, which gather, and Python looks for `__call__` at the class alone.
            looped.__class__ = type(
                looped_class.__name__, (looped_class,), {"__call__": called, "__module__": looped_class.__module__}
            )
            try:
                tokens = type(model).generate(model, **arguments)
            finally:
                looped.__class__ = looped_class
        calls.wait_for_others()
    return tokens


class _Calls:
    """The model calls of one generation, which all ranks that share parameters make together, in all stages of a pipeline. `rows`
    is the number of this rank's prompts."""

    def __init__(self, model: Any, mesh: Mesh, engine: ZeroEngine | None, pipeline: Pipeline | None, rows: int) -> None:
        sharded = engine is not None and engine.options.placements.parameters is Placement.SHARDED
        self._model, self._mesh, self._waits = model, mesh, sharded and mesh.data.size > 1
        self._microbatches, call = 1, partial(type(model).__call__, model)
        if pipeline is None or engine is None:
            self.compute: Callable[[dict[str, Any]], Any] = lambda inputs: call(**inputs)
            return
        # The number of microbatches is limited by the stages and by the rows of each data-parallel rank.
        fewest = -int(mesh.data.all_reduce_max(torch.tensor([-rows]), "prompts to generate")[0])
        self._microbatches = min(mesh.pipeline.size, fewest)
        staged = pipeline.generation(microbatches=self._microbatches, call=call)

        def compute(inputs: dict[str, Any]) -> CausalLMOutputWithPast:
            with engine.evaluation():
                return CausalLMOutputWithPast(logits=staged(inputs), past_key_values=inputs.get(CACHE))

        self.compute = compute

    def some_rank_goes_on(self, *, here: bool) -> bool:
        """Agree with the other ranks on whether any of them makes another call."""
        if not self._waits:
            return here
        return int(self._mesh.data.all_reduce(torch.tensor([int(here)]), "ranks that generate")[0]) > 0

    def wait_for_others(self) -> None:
        """Take part in the remaining calls of other ranks with dummy inputs."""
        while self._waits and self.some_rank_goes_on(here=False):
            ids = torch.zeros(self._microbatches, 1, dtype=torch.long, device=self._mesh.device)
            inputs: dict[str, Any] = {"input_ids": ids}
            if self._model.config.is_encoder_decoder:
                width, dtype = encoder_config(self._model).hidden_size, self._model.dtype
                encoded = torch.zeros(1, 1, width, dtype=dtype, device=self._mesh.device)
                inputs = {
                    "encoder_outputs": BaseModelOutput(last_hidden_state=encoded), "decoder_input_ids": ids
                }  # fmt: skip
            self.compute({**inputs, "use_cache": False, "return_dict": True})


def decoder_positions(module: Any) -> int | None:
    """Return the number of positions of a model's decoder, or None if unlimited or unknown."""
    config = module.config.get_text_config(decoder=True)
    # Dynamic rotary frequencies scale with the text beyond the trained length.
    if "dynamic" in rope_kinds(config):
        return None
    return positive(config, "max_decoder_position_embeddings", "max_position_embeddings") or None


def encoder_positions(module: Any) -> int | None:
    """Return the number of positions of a model's encoder, or None without an encoder or if unknown."""
    if not module.config.is_encoder_decoder:
        return None
    config = encoder_config(module)
    return positive(config, "max_encoder_position_embeddings", "max_position_embeddings") or None


def encoder_config(module: Any) -> Any:
    """Return the configuration of a model's encoder, which may differ from the model's."""
    return getattr(module.get_encoder(), "config", module.config).get_text_config(encoder=True)


def rope_kinds(config: Any) -> set[str]:
    """Return the rotary embedding types (`rope_type`) in a configuration, over all layers."""
    given = getattr(config.get_text_config(), "rope_parameters", None) or {}
    groups = [given, *(each for each in given.values() if isinstance(each, Mapping))]
    return {str(each["rope_type"]) for each in groups if each.get("rope_type")}
