"""A model's own `generate` on all ranks of a mesh, whatever the layout.

The library's loop runs on every rank. Where a model is in stages, each of its calls of the model is one of all stages, which gives
all ranks the same logits. Where units are gathered around use, ranks that have other prompts need each other to the end: before a
call they agree that some rank goes on, and those that are done take part in it with an input of no use.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from zeromesh.errors import ConfigError, DataError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.options import Placement
from zeromesh.pipeline.generation import CACHE, StagedForward
from zeromesh.pipeline.pipeline import Pipeline
from zeromesh.rng import own_randomness
from zeromesh.trainer.data.feed import require_same_batches
from zeromesh.trainer.models.prepare import in_evaluation_mode
from zeromesh.zero.engine import ZeroEngine

Call = Callable[..., Any]

_STAGED_ARGUMENTS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "generation_config", "logits_processor", "stopping_criteria"}
) | {"prefix_allowed_tokens_fn", "streamer"}
"""Arguments of `generate`, beside fields of `GenerationConfig`, that a model in stages accepts."""
_UNSTAGED_SETTINGS = ("output_attentions", "output_hidden_states", "prefill_chunk_size")
"""Fields of `GenerationConfig` that a model in stages cannot follow."""


def check_arguments(model: nn.Module, arguments: Mapping[str, Any], *, staged: bool, shared: bool) -> None:
    """Check that `generate` can be given these arguments; every rank comes to the same answer.

    `staged`: the model is in stages of a pipeline. `shared`: several ranks compute the same tokens together.

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
    if not shared:
        return
    settings = copy.deepcopy(arguments.get("generation_config") or model.generation_config)
    if not isinstance(settings, GenerationConfig):
        raise ConfigError(f"generate: generation_config is a {type(settings).__name__}, not a GenerationConfig")
    rest = settings.update(**{name: value for name, value in arguments.items() if hasattr(settings, name)})
    if settings.max_time is not None:
        raise ConfigError("generate: max_time ends ranks of one model at different tokens; use max_new_tokens")
    if staged:
        _check_staged(arguments, settings, rest)


def _check_staged(arguments: Mapping[str, Any], settings: GenerationConfig, rest: Mapping[str, Any]) -> None:
    where = "under parallel.pipeline"
    unknown = [name for name in arguments if not hasattr(settings, name) and name not in _STAGED_ARGUMENTS]
    if unknown or rest:
        named = ", ".join([*unknown, *rest])
        raise ConfigError(f"generate: {named} is not possible {where}; prompts are input_ids and attention_mask")
    mode = settings.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ConfigError(
            f"generate: {mode.value} is not possible {where}; allowed are greedy search and sampling (num_beams: 1)"
        )
    found = [name for name in _UNSTAGED_SETTINGS if getattr(settings, name, None)]
    if settings.cache_implementation not in (None, "dynamic"):
        found.append(f"cache_implementation: {settings.cache_implementation}")
    if found:
        raise ConfigError(f"generate: {', '.join(found)} is not possible {where}; leave it out")


def generate(
    model: Any,
    mesh: Mesh,
    arguments: Mapping[str, Any],
    *,
    seed: Callable[[], object],
    engine: ZeroEngine | None = None,
    pipeline: Pipeline | None = None,
) -> Any:
    """Return what `model.generate(**arguments)` gives, in evaluation mode; all ranks call it.

    Ranks along data axes may have other prompts. `seed` seeds what is drawn; the generator is afterwards as it was. `engine` and
    `pipeline` are those of a model that is partitioned.

    Raises:
        DataError: where ranks of one model have other prompts or arguments.
    """
    arguments = {
        name: value.to(mesh.device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }
    if engine is not None:
        require_same_batches([arguments], mesh, "give all of them the same prompts and arguments of generate")
    calls = _GenerationCalls(model, mesh, arguments, engine, pipeline)
    with in_evaluation_mode(model), torch.no_grad(), own_randomness(), _calls_of(model, calls.call):
        seed()
        tokens = model.generate(**arguments)
    with in_evaluation_mode(model), torch.no_grad():
        calls.end()
    return tokens


@contextmanager
def _calls_of(model: nn.Module, call: Callable[[Call, dict[str, Any]], Any]) -> Iterator[None]:
    """Make calls of the model inside the block `call(plain, arguments)`.

    It has to come before everything that a call does (hooks gather), and Python finds `__call__` at the class alone.
    """
    own = type(model)

    def called(self: nn.Module, **arguments: Any) -> Any:
        return call(partial(own.__call__, self), arguments)

    model.__class__ = type(own.__name__, (own,), {"__call__": called, "__module__": own.__module__})
    try:
        yield
    finally:
        model.__class__ = own


class _GenerationCalls:
    """The calls of the model in one generation, which ranks make together."""

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        arguments: Mapping[str, Any],
        engine: ZeroEngine | None,
        pipeline: Pipeline | None,
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._engine = engine
        self._pipeline = pipeline if engine is not None else None
        self._plain: Call = partial(type(model).__call__, model)
        gathers = engine is not None and engine.options.placements.parameters is Placement.SHARDED
        self._waits = gathers and mesh.data.size > 1
        self._microbatches = 1
        if self._pipeline is not None:
            # As many as stages can work on, and as all data-parallel ranks have rows for.
            rows = mesh.data.max_(torch.tensor([-len(arguments["input_ids"])]), "prompts to generate")
            self._microbatches = min(mesh.pipeline.size, -int(rows[0]))
        self._staged = self._new_stages()

    def _new_stages(self) -> StagedForward | None:
        if self._pipeline is None:
            return None
        return self._pipeline.generation(microbatches=self._microbatches, call=self._plain)

    def call(self, plain: Call, arguments: dict[str, Any]) -> Any:
        """One call that the library's loop makes."""
        self._any_goes_on(here=True)
        if self._staged is None or self._engine is None:
            return plain(**arguments)
        with self._engine.evaluation():
            logits = self._staged(arguments)
        return CausalLMOutputWithPast(logits=logits, past_key_values=arguments.get(CACHE))

    def end(self) -> None:
        """Join the calls of ranks that go on, with an input of no use."""
        while self._waits and self._any_goes_on(here=False):
            ids = torch.zeros(self._microbatches, 1, dtype=torch.long, device=self._mesh.device)
            inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": True}
            config = self._model.config
            staged = self._new_stages()
            if staged is not None and self._engine is not None:
                with self._engine.evaluation():
                    staged(inputs)
                continue
            if config.is_encoder_decoder:
                encoded = torch.zeros(1, 1, config.hidden_size, dtype=self._model.dtype, device=ids.device)
                inputs |= {"encoder_outputs": BaseModelOutput(last_hidden_state=encoded), "decoder_input_ids": ids}
                del inputs["input_ids"]
            self._plain(**inputs)

    def _any_goes_on(self, *, here: bool) -> bool:
        """Whether a rank still generates; `here`: whether this one does."""
        if not self._waits:
            return here
        return int(self._mesh.data.sum_(torch.tensor([int(here)]), "ranks that generate")[0]) > 0
