"""Chooses the next token of each row from its logits, by settings and a seed of its own and independent of the rows beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, LogitsProcessorList


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSampler:
    """Chooses the tokens of one row."""

    processors: LogitsProcessorList
    """Change scores, as in transformers' `generate`: penalties, temperature, top-k and the like."""
    generator: torch.Generator | None
    """The source of random numbers for sampling; None: the token with the best score is taken."""

    @classmethod
    def of(
        cls, model: Any, settings: GenerationConfig, prompt: Sequence[int], seed: int, device: torch.device
    ) -> RowSampler:
        """The sampler of a request, by the library's own processors for its settings."""
        ids, count = torch.tensor([prompt], device=device), len(prompt)
        model._prepare_special_tokens(settings, True, device=device)
        # Processors go by lengths that count the prompt.
        model._prepare_generated_length(
            settings,
            has_default_max_length=settings.max_new_tokens is not None,
            has_default_min_length=True,
            model_input_name="input_ids",
            input_ids_length=count,
            inputs_tensor=ids,
        )
        processors = model._get_logits_processor(
            settings, input_ids_seq_length=count, encoder_input_ids=ids, device=str(device)
        )
        generator = torch.Generator(device).manual_seed(seed) if settings.do_sample else None
        return cls(processors=processors, generator=generator)

    @property
    def is_plain(self) -> bool:
        """True if it takes the largest logit and nothing else."""
        return self.generator is None and not self.processors

    def choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """The next token after `tokens`, from the logits `[vocabulary]` of the last position."""
        ids = torch.tensor([tokens], device=logits.device)
        # Numbers that are drawn in float64 are other ones, and the library draws in float32.
        dtype = logits.dtype if self.generator is None else torch.float32
        scores: torch.Tensor = self.processors(ids, logits[None].to(dtype, copy=True))[0]
        if self.generator is None:
            return scores.argmax()
        return torch.multinomial(_drawable(scores.softmax(dim=-1)), 1, generator=self.generator)[0]


class RowDraws(TorchFunctionMode):
    """Inside the block `torch.multinomial` draws from `[rows, choices]` for each row by a seed of its own, as `RowSampler` does."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.multinomial or args[0].dim() != 2 or len(args[0]) != len(self._generators):
            return func(*args, **kwargs)
        rows = zip(args[0], self._generators, strict=True)
        return torch.stack(
            [func(_drawable(row), *args[1:], **{**kwargs, "generator": generator}) for row, generator in rows]
        )


def _drawable(probabilities: torch.Tensor) -> torch.Tensor:
    """Probabilities that something can be drawn by; those of a row of NaN, whose token is of no use, are all the same."""
    return probabilities.nan_to_num(nan=1.0)


def widened(logits: torch.Tensor) -> torch.Tensor:
    """Logits of less than 32 bits in 32."""
    return logits if logits.dtype is torch.float64 else logits.float()


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The logarithms of the probabilities that `logits` [rows, vocabulary] give these tokens, one of each row: NaN where logits are
    NaN or infinite."""
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
