"""Chooses the next token of each row from its logits, by the row's own settings and seed, independently of the other rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig


class RowSampler:
    """Chooses the tokens of one row, with transformers' logits processors for its settings, and greedily or by drawing."""

    def __init__(self, model: Any, settings: GenerationConfig, prompt: Sequence[int], seed: int, device: torch.device) -> None:
        ids, size = torch.tensor([prompt], device=device), len(prompt)
        model._prepare_special_tokens(settings, True, device=device)
        # Some processors count the length with the prompt.
        given = {"model_input_name": "input_ids", "input_ids_length": size, "inputs_tensor": ids}
        by_default = {"has_default_max_length": settings.max_new_tokens is not None, "has_default_min_length": True}
        model._prepare_generated_length(settings, **by_default, **given)
        lengths = {"input_ids_seq_length": size, "encoder_input_ids": ids}
        self._processors = model._get_logits_processor(settings, **lengths, device=str(device))
        self._generator = torch.Generator(device).manual_seed(seed) if settings.do_sample else None
        self.is_plain = self._generator is None and not self._processors  # True for greedy decoding without processors.

    def choose(self, logits: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Return the next token after `tokens`, from the logits `[vocabulary]` of the last position."""
        ids = torch.tensor([tokens], device=logits.device)
        # Sampling in float64 would draw other tokens than the library, which samples in float32.
        dtype = logits.dtype if self._generator is None else torch.float32
        scores: torch.Tensor = self._processors(ids, logits[None].to(dtype, copy=True))[0]
        if self._generator is None:
            return scores.argmax()
        # A row of NaN, whose token is discarded, becomes uniform, here and in `RowDraws`.
        return torch.multinomial(scores.softmax(dim=-1).nan_to_num(nan=1.0), 1, generator=self._generator)[0]


class RowDraws(TorchFunctionMode):
    """Inside the block `torch.multinomial` on `[rows, choices]` draws each row by that row's own seed, as `RowSampler` does."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.multinomial or args[0].dim() != 2 or len(args[0]) != len(self._generators):
            return func(*args, **kwargs)
        pairs = zip(args[0], self._generators, strict=True)
        drawn = [func(row.nan_to_num(nan=1.0), *args[1:], **{**kwargs, "generator": own}) for row, own in pairs]
        return torch.stack(drawn)


def at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of `tokens`, one per row of `logits` [rows, vocabulary]; NaN for logits that are not finite."""
    return logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(dim=-1)
