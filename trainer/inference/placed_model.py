"""`PlacedModel`: a model on the ranks of a mesh with nothing but its parameters, and the generation of one batch by it."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.accelerator import device_memory, is_accelerator
from zeromesh.offload.memory.ledger import available_bytes
from zeromesh.parallelize import Divided
from zeromesh.rng import seed_all
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.tokenizer import Tokenizer
from zeromesh.trainer.inference.requests import Finish, Progress, Request
from zeromesh.trainer.inference.row_cache import numbers_kept
from zeromesh.trainer.inference.sampling import RowDraws, logprobs_of, widened
from zeromesh.trainer.inference.settings import ModelSettings
from zeromesh.trainer.inference.source import tokenizer_of, with_models_own, without_training
from zeromesh.trainer.models.attention import use_attention
from zeromesh.trainer.models.build import build_model, pin_sources
from zeromesh.trainer.models.generation import check_arguments, encoder_config, ends_of, generate, rope_kinds
from zeromesh.trainer.models.hub_form import HubForm
from zeromesh.trainer.models.prepare import prepare_model
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.setup.build import require_same_settings, set_products
from zeromesh.trainer.setup.model import begin_alike, divide_model, fill_engine
from zeromesh.units.build import open_tiers
from zeromesh.zero.engine import ZeroEngine


class _ChosenTokens:
    """A stopping criterion that never stops, and follows a generation: it keeps of each token that is chosen the logarithm of the
    probability that the model gives it.

    Only the logits of one position are kept.
    """

    def __init__(self) -> None:
        self.logprobs: list[torch.Tensor] = []
        """The log-probabilities of each new token, a tensor `[rows]` per token."""
        self._logits = torch.empty(0)

    def see(self, logits: torch.Tensor) -> None:
        """Take the logits [rows, vocabulary] of the position that the next token is chosen for."""
        self._logits = widened(logits)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.logprobs.append(logprobs_of(self._logits, input_ids[:, -1].to(self._logits.device)))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedModel:
    """This rank's part of a model, without gradients, and how all ranks generate with it."""

    config: TrainerConfig
    mesh: Mesh
    console: Console
    module: Any
    settings: ModelSettings
    hub_form: HubForm
    divided: Divided
    engine: ZeroEngine
    tokenizer: Tokenizer | None

    @classmethod
    def build(cls, config: TrainerConfig, mesh: Mesh, console: Console) -> Self:
        """Build the model that a configuration names and read its weights into this rank's part; all ranks call it.

        Raises:
            ConfigError, DataError, LayoutError, StorageError: for a model or a tokenizer that is not there, cannot be divided
                so, or does not fit.
        """
        require_same_settings(mesh, config, {})
        config = with_models_own(pin_sources(config, mesh, model_given=False))
        set_products(config, mesh.device)
        tokenizer = tokenizer_of(config)
        console.status("building the model")
        built = build_model(config.model, config.run.seed)
        model = built.model.requires_grad_(False)
        check_arguments(model, {}, None)
        options = without_training(config)
        if config.model.attention is not None:
            use_attention(model, config.model.attention, options.precision.compute, mesh.device)
        notes = begin_alike(built, mesh, config.run.seed, trains=False)
        tiers = open_tiers(mesh, options)
        try:
            settings, hub_form = ModelSettings(model, mesh), HubForm(model)
            divided = divide_model(model, mesh, config)
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
            settings=settings,
            hub_form=hub_form,
            divided=divided,
            engine=engine,
            tokenizer=tokenizer,
        )

    @property
    def is_encoder_decoder(self) -> bool:
        """True if prompts go to an encoder and tokens come from a decoder."""
        return bool(self.module.config.is_encoder_decoder)

    def cache_tokens(self) -> int:
        """Return for how many tokens each rank may keep keys and values: they may take half of the free memory of its device."""
        config, device = self.module.config.get_text_config(), self.mesh.device
        kept = numbers_kept(config, self.mesh.tensor.size)
        layers = -(-len(kept) // self.mesh.pipeline.size)
        each = layers * max(kept) * self.engine.options.precision.compute.itemsize
        host = available_bytes() // self.mesh.environment.local_world_size
        free = device_memory(device).free if is_accelerator(device) else host
        fewest = self.mesh.world.max_(torch.tensor([-free // (2 * each)]), "room for keys and values")
        return max(1, -int(fewest[0]))

    def needs_one_length(self, settings: GenerationConfig) -> bool:
        """Return True if prompts that are generated together must have one length, since padding would change their results.

        An encoder has a mask for it; before other prompts it would move positions, penalties would count it, and beyond a window
        it has nothing to look at, which makes NaN.
        """
        if not self.is_encoder_decoder:
            return True
        windowed = getattr(encoder_config(self.module), "sliding_window", None)
        penalised = settings.encoder_repetition_penalty not in (None, 1) or settings.encoder_no_repeat_ngram_size
        return bool(windowed or penalised)

    def generate(self, requests: Sequence[Request], settings: GenerationConfig) -> list[Progress]:
        """Continue requests together to their end by transformers' own loop; all ranks call it, those along data axes with requests
        of their own. Prompts are of one length, but for an encoder."""
        _forget_lengths(self.module)
        arguments: dict[str, Any] = dict(
            self._padded([each.tokens for each in requests], int(settings.pad_token_id or 0))
        )
        # With guidance the model is called twice for a token.
        watched = settings.guidance_scale in (None, 1) and settings.get_generation_mode() in (
            GenerationMode.GREEDY_SEARCH,
            GenerationMode.SAMPLE,
        )
        chosen, seeds = _ChosenTokens(), [each.seed for each in requests]
        if watched:
            arguments["stopping_criteria"] = [chosen]
        with RowDraws(seeds, self.mesh.device) if settings.do_sample else nullcontext():
            tokens = generate(
                self.module,
                self.mesh,
                {**arguments, "generation_config": settings},
                seed=partial(seed_all, seeds[0]),
                engine=self.engine,
                pipeline=self.divided.pipeline,
                see=chosen.see,
            )
        begin = 1 if self.is_encoder_decoder else arguments["input_ids"].shape[1]
        logprobs = torch.stack(chosen.logprobs, dim=1).tolist() if chosen.logprobs else [None] * len(requests)
        rows = zip(requests, tokens[:, begin:].tolist(), logprobs, strict=True)
        return [_until_end(each.number, row, values, settings) for each, row, values in rows]

    def _padded(self, prompts: Sequence[Sequence[int]], padding: int) -> Mapping[str, torch.Tensor]:
        """Prompts [rows, longest], and a mask that is 0 where there is padding, behind them."""
        ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True, padding_value=padding)
        mask = pad_sequence([torch.ones(len(prompt), dtype=torch.long) for prompt in prompts], batch_first=True)
        if self.is_encoder_decoder and self.mesh.data.size > 1:
            # Encoders may look tokens up once more for some lengths, which all ranks that gather them have to do.
            longest = self.mesh.data.max_(torch.tensor([ids.shape[1]]), "the longest prompt of a round")
            more = (0, int(longest[0]) - ids.shape[1])
            ids, mask = pad(ids, more, value=padding), pad(mask, more)
        return {"input_ids": ids, "attention_mask": mask}

    def close(self) -> None:
        """Give back files and shared memory."""
        self.engine.close()
        self.divided.close()


def _until_end(number: int, row: list[int], logprobs: list[float] | None, settings: GenerationConfig) -> Progress:
    """A row of new tokens without the padding behind its end, or what was chosen by logits that are not finite."""
    ends = ends_of(settings)
    count = next((place for place, token in enumerate(row, start=1) if token in ends), 0)
    kept = count or len(row)
    finish: Finish = "stop" if count else "length"
    unknown = next((place for place, value in enumerate((logprobs or [])[:kept]) if math.isnan(value)), None)
    if unknown is not None:
        kept, finish = unknown, "not_finite"
    return Progress(number=number, tokens=row[:kept], logprobs=logprobs and logprobs[:kept], finish=finish)


def _forget_lengths(module: Any) -> None:
    """Have rotary positions that grow with the text begin as in a new model, whatever was generated before."""
    if "dynamic" not in rope_kinds(module.config):
        return
    for part in module.modules():
        for name, original in list(part.named_buffers(recurse=False)):
            prefix, found, _ = name.rpartition("original_inv_freq")
            if found:
                part.get_buffer(f"{prefix}inv_freq").copy_(original)
                setattr(part, f"{prefix}max_seq_len_cached", part.original_max_seq_len)
