"""A model's own `generate` on all ranks of a mesh, whatever the layout.

The library's loop runs on every rank. Where a model is in stages, each of its calls of the model is one of all stages, which gives
all ranks the same logits. Where units are gathered around use, ranks that have other prompts need each other to the end: before a
call they agree that some rank goes on, and those that are done take part in it with an input of no use.
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
"""Arguments of `generate`, beside fields of `GenerationConfig`, that a model in stages accepts."""
_UNSTAGED_SETTINGS = ("output_attentions", "output_hidden_states", "prefill_chunk_size")
"""Fields of `GenerationConfig` that a model in stages cannot follow."""
_ON_THE_HUB = (
    *(GenerationMode.GROUP_BEAM_SEARCH, GenerationMode.CONSTRAINED_BEAM_SEARCH),
    *(GenerationMode.CONTRASTIVE_SEARCH, GenerationMode.DOLA_GENERATION),
)
"""Ways of searching whose code transformers loads from the Hub."""


def end_also_at(model: nn.Module, tokens: Iterable[int], name: Callable[[Sequence[int]], str]) -> list[str]:
    """Have a model's generation, as it is saved with it, end at these tokens too; returns a line for each that is new.

    `name` gives the text of tokens.
    """
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
    """The tokens that end a text."""
    ends = settings.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())


def settings_with(model: Any, fields: Mapping[str, Any], refused: Mapping[str, str], asked: str) -> GenerationConfig:
    """Return the model's own settings with `fields` on top. `refused` says of fields that are not taken why.

    Raises:
        ConfigError: for these, and for fields and values that transformers does not know, in the name of what `asked` to generate.
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
    """Check that `generate` can be given these arguments; every rank comes to the same answer.

    `mesh`: over which the model is partitioned; None: it is not.

    Raises:
        ConfigError: for a model that does not generate, and for arguments that do not go with the layout.
        DataError: for prompts that are padded on the right.
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
        found.append("guidance_scale")  # It has a second cache, and stages keep one.
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
    """Return what `model.generate(**arguments)` gives, in evaluation mode; all ranks call it.

    Ranks along data axes may have other prompts. `seed` seeds what is drawn; the generator is afterwards as it was. None: the mode
    and the generator are the caller's, as in the library. `engine` and `pipeline` are those of a model that is partitioned.
    `see` is given the logits [rows, vocabulary] of the last position, as the model computes them, after each of its calls.

    Raises:
        DataError: where ranks of one model have other prompts or arguments.
        LayoutError: for a model in stages whose modules keep tensors from one token to the next.
    """
    arguments = {
        name: value.to(mesh.device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }
    if engine is not None:
        require_same_batches([arguments], mesh, "give all of them the same prompts and arguments of generate")
    # The library's loop calls the model inside one with adapters.
    looped = next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)
    looped_class = type(looped)
    calls = _Calls(looped, mesh, engine, pipeline, len(arguments["input_ids"]) if pipeline is not None else 0)

    def called(_model: nn.Module, *ids: Any, **inputs: Any) -> Any:
        calls.some_rank_goes_on(here=True)
        # Guidance gives the tokens by their place.
        outputs = calls.compute({**inputs, **dict(zip(["input_ids"], ids, strict=False))})
        # Frequencies of rotary positions, which some models make when they need them, are of no text.
        if pipeline is not None and (kept := [name for name in put_aside() if not name.endswith("inv_freq")]):
            raise LayoutError(
                f"{type(model).__name__} keeps {some(kept, 3)} in its modules between tokens, which microbatches of a pipeline "
                "would share; generate without parallel.pipeline"
            )
        see(outputs.logits[:, -1])
        return outputs

    mode = in_evaluation_mode(model) if seed is not None else nullcontext()
    # What modules keep between tokens is of this text, and nothing to the next one.
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
    """The model's own calls in one generation, which all ranks that need each other's parameters make together, and those of a
    pipeline in all stages.

    `rows`: the prompts of this rank.
    """

    def __init__(self, model: Any, mesh: Mesh, engine: ZeroEngine | None, pipeline: Pipeline | None, rows: int) -> None:
        sharded = engine is not None and engine.options.placements.parameters is Placement.SHARDED
        self._model, self._mesh, self._engine, self._waits = model, mesh, engine, sharded and mesh.data.size > 1
        self._plain, self._pipeline, self._microbatches = partial(type(model).__call__, model), None, 1
        if pipeline is not None and engine is not None:
            # As many microbatches as stages can work on, and as all data-parallel ranks have rows for.
            fewest = -int(mesh.data.max_(torch.tensor([-rows]), "prompts to generate")[0])
            self._pipeline, self._microbatches = pipeline, min(mesh.pipeline.size, fewest)
        self.compute = self._forward()
        """Computes a forward from its arguments."""

    def _forward(self) -> Callable[[dict[str, Any]], Any]:
        plain, engine, pipeline = self._plain, self._engine, self._pipeline
        if pipeline is None or engine is None:
            return lambda inputs: plain(**inputs)
        staged = pipeline.generation(microbatches=self._microbatches, call=plain)

        def computed(inputs: dict[str, Any]) -> CausalLMOutputWithPast:
            with engine.evaluation():
                return CausalLMOutputWithPast(logits=staged(inputs), past_key_values=inputs.get(CACHE))

        return computed

    def some_rank_goes_on(self, *, here: bool) -> bool:
        """Agree with the other ranks on whether any of them makes one more call."""
        if not self._waits:
            return here
        return int(self._mesh.data.sum_(torch.tensor([int(here)]), "ranks that generate")[0]) > 0

    def wait_for_others(self) -> None:
        """Take part in the calls of ranks that go on, by inputs of no use."""
        while self._waits and self.some_rank_goes_on(here=False):
            ids = torch.zeros(self._microbatches, 1, dtype=torch.long, device=self._mesh.device)
            inputs: dict[str, Any] = {"input_ids": ids}
            if self._model.config.is_encoder_decoder:
                width, dtype = encoder_config(self._model).hidden_size, self._model.dtype
                encoded = torch.zeros(1, 1, width, dtype=dtype, device=self._mesh.device)
                inputs = {
                    "encoder_outputs": BaseModelOutput(last_hidden_state=encoded), "decoder_input_ids": ids
                }  # fmt: skip
            self._forward()({**inputs, "use_cache": False, "return_dict": True})


def decoder_positions(module: Any) -> int | None:
    """How many positions a model knows, where it says so; None otherwise."""
    config = module.config.get_text_config(decoder=True)
    # The frequencies of these grow with the text, beyond what the model was trained for.
    if "dynamic" in rope_kinds(config):
        return None
    return positive(config, "max_decoder_position_embeddings", "max_position_embeddings") or None


def encoder_positions(module: Any) -> int | None:
    """How many positions the encoder of a model knows, where it has one and says so; None otherwise."""
    if not module.config.is_encoder_decoder:
        return None
    config = encoder_config(module)
    return positive(config, "max_encoder_position_embeddings", "max_position_embeddings") or None


def encoder_config(module: Any) -> Any:
    """The configuration of the encoder of a model that has one, which may be another than the model's."""
    return getattr(module.get_encoder(), "config", module.config).get_text_config(encoder=True)


def rope_kinds(config: Any) -> set[str]:
    """The kinds of rotary positions (`rope_type`) that a configuration names, for all layers or for some."""
    given = getattr(config.get_text_config(), "rope_parameters", None) or {}
    groups = [given, *(each for each in given.values() if isinstance(each, Mapping))]
    return {str(each["rope_type"]) for each in groups if each.get("rope_type")}
