"""`PlacedModel`: a model on the ranks of a mesh with nothing but its parameters, and the generation of one batch by it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.parallelize import Divided, divide
from zeromesh.rng import seed_all
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.tokenizer import Tokenizer
from zeromesh.trainer.inference.source import tokenizer_of, with_models_own, without_training
from zeromesh.trainer.models.attention import use_attention
from zeromesh.trainer.models.build import build_model, pin_sources
from zeromesh.trainer.models.generation import check_arguments, generate
from zeromesh.trainer.models.prepare import prepare_model
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.setup.build import require_same_settings, set_products
from zeromesh.trainer.setup.engine_options import engine_options
from zeromesh.trainer.setup.model import begin_alike, cuts_of, fill_engine
from zeromesh.units.build import open_tiers
from zeromesh.zero.engine import ZeroEngine


class _ChosenTokens:
    """A stopping criterion that never stops, and follows a generation: it keeps of each token that is chosen the logarithm of the
    probability that the model gives it.

    Only the logits of one position are kept.
    """

    def __init__(self) -> None:
        self.logprobs: list[torch.Tensor] = []
        """Of each new token, [rows]."""
        self._logits = torch.empty(0)

    def see(self, logits: torch.Tensor) -> None:
        """Take the logits [rows, vocabulary] of the position that the next token is chosen for."""
        self._logits = logits if logits.dtype is torch.float64 else logits.float()

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        chosen = self._logits.gather(1, input_ids[:, -1:].to(self._logits.device))
        self.logprobs.append(chosen[:, 0] - self._logits.logsumexp(dim=1))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTokens:
    """What one prompt was continued by."""

    tokens: list[int]
    """Up to the one that ended it, which is the last."""
    logprobs: list[float] | None
    """Of each token; None for ways of searching that choose tokens later than they see them."""
    ended: bool
    """Whether a token ended it, and not its length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedModel:
    """This rank's part of a model, without gradients, and how all ranks generate with it."""

    config: TrainerConfig
    mesh: Mesh
    console: Console
    module: Any
    divided: Divided
    engine: ZeroEngine
    tokenizer: Tokenizer | None

    @classmethod
    def build(cls, config: TrainerConfig, mesh: Mesh) -> Self:
        """Build the model that a configuration names and read its weights into this rank's part; all ranks call it.

        Raises:
            ConfigError, DataError, LayoutError, StorageError: for a model or a tokenizer that is not there, cannot be divided
                so, or does not fit.
        """
        require_same_settings(mesh, config, {})
        config = with_models_own(pin_sources(config, mesh, model_given=False))
        console = Console(sys.stderr, shown=mesh.rank == 0)
        set_products(config, mesh.device)
        tokenizer = tokenizer_of(config)
        console.status("building the model")
        built = build_model(config.model, config.run.seed)
        model = built.model.requires_grad_(False)
        check_arguments(model, {}, staged=False, shared=False)
        options = without_training(engine_options(config, 1))
        if config.model.attention is not None:
            use_attention(model, config.model.attention, options.precision.compute, mesh.device)
        notes = begin_alike(built, mesh, config.run.seed)
        tiers = open_tiers(mesh, options)
        try:
            divided = divide(model, mesh, cuts_of(config))
            _, prepared = prepare_model(model, config.model, options, tiers)
            console.note(*notes, *divided.notes, *prepared, *built.notes)
            engine = fill_engine(built, mesh, options, tiers, divided, console)
        except BaseException:
            tiers.close()
            raise
        return cls(
            config=config,
            mesh=mesh,
            console=console,
            module=model.eval(),
            divided=divided,
            engine=engine,
            tokenizer=tokenizer,
        )

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether prompts go to an encoder, and tokens come from a decoder."""
        return bool(self.module.config.is_encoder_decoder)

    def check(self, settings: GenerationConfig) -> None:
        """Raise `ConfigError` for settings that this layout cannot generate by."""
        staged = self.mesh.pipeline.size > 1
        check_arguments(
            self.module, {"generation_config": settings}, staged=staged, shared=staged or self.mesh.tensor.size > 1
        )

    def generate(self, prompts: Sequence[Sequence[int]], settings: GenerationConfig, seed: int) -> list[NewTokens]:
        """Continue prompts, given as tokens, together; all ranks call it, those along data axes with prompts of their own.

        `seed` seeds what is drawn. Prompts are padded on the left, but for an encoder, which counts positions from the left.
        """
        arguments: dict[str, Any] = dict(self._padded(prompts, int(settings.pad_token_id or 0)))
        watched = settings.get_generation_mode() in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
        chosen = _ChosenTokens()
        if watched:
            arguments["stopping_criteria"] = [chosen]
        tokens = generate(
            self.module,
            self.mesh,
            {**arguments, "generation_config": settings},
            seed=partial(seed_all, seed),
            engine=self.engine,
            pipeline=self.divided.pipeline,
            see=chosen.see,
        )
        begin = 1 if self.is_encoder_decoder else arguments["input_ids"].shape[1]
        logprobs = torch.stack(chosen.logprobs, dim=1).tolist() if chosen.logprobs else [None] * len(prompts)
        return [
            _until_end(row, values, settings) for row, values in zip(tokens[:, begin:].tolist(), logprobs, strict=True)
        ]

    def _padded(self, prompts: Sequence[Sequence[int]], padding: int) -> Mapping[str, torch.Tensor]:
        """Prompts [rows, longest], and a mask that is 0 where there is padding."""
        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), padding, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            place = slice(0, len(prompt)) if self.is_encoder_decoder else slice(longest - len(prompt), longest)
            ids[row, place] = torch.tensor(prompt)
            mask[row, place] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def close(self) -> None:
        """Give back files and shared memory."""
        self.engine.close()
        self.divided.close()


def ends_of(settings: GenerationConfig) -> list[int]:
    """The tokens that end a text."""
    ends = settings.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def _until_end(row: list[int], logprobs: list[float] | None, settings: GenerationConfig) -> NewTokens:
    """A row of new tokens without the padding behind its end."""
    ends = ends_of(settings)
    count = next((place for place, token in enumerate(row, start=1) if token in ends), 0)
    kept = count or len(row)
    return NewTokens(tokens=row[:kept], logprobs=logprobs and logprobs[:kept], ended=bool(count))


def decoder_positions(module: nn.Module) -> int | None:
    """How many positions a model knows, where it says so; None otherwise."""
    config: Any = module.config
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None
