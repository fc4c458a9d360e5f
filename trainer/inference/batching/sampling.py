"""Chooses the next token of each row from its logits, by settings and a seed of its own and independent of the rows beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
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
        scores: torch.Tensor = self.processors(ids, logits[None].clone())[0]
        if self.generator is None:
            return scores.argmax()
        return torch.multinomial(scores.softmax(dim=-1), 1, generator=self.generator)[0]


def choose_tokens(
    logits: torch.Tensor, samplers: Sequence[RowSampler], tokens: Sequence[Sequence[int]]
) -> tuple[list[int], list[float]]:
    """Choose a token for each row of `logits` [rows, vocabulary]; `tokens` are those that the rows have, prompts included.

    Returns them, and of each the logarithm of the probability that the model gives it. Logits of less than 32 bits are widened.
    """
    logits = logits if logits.dtype is torch.float64 else logits.float()
    chosen = logits.argmax(dim=-1)
    for row, sampler in enumerate(samplers):
        if not sampler.is_plain:
            chosen[row] = sampler.choose(logits[row], tokens[row])
    logprobs = logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(dim=-1)
    found: list[int] = chosen.tolist()
    return found, logprobs.tolist()
