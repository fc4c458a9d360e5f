"""Greedy generation across stages, token by token, each stage with the keys and values of its own blocks."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from zeromesh.errors import DataError, PhaseError
from zeromesh.pipeline.executor import Executor
from zeromesh.pipeline.schedule import forward_only
from zeromesh.pipeline.stage import Stages


class _TokenRunner:
    """The next token of every microbatch: `tokens`, on the last stage."""

    def __init__(self, stages: Stages, *, cached: bool) -> None:
        self._stages = stages
        self._cached = cached
        self._caches: dict[tuple[int, int], Any] = {}
        """What the model keeps, by chunk and microbatch: in one chunk, stubs keep something for the blocks of another."""
        self._ids: Sequence[torch.Tensor] = ()
        self._masks: Sequence[torch.Tensor] = ()
        names = inspect.signature(stages.model.forward).parameters
        self._with_positions = "position_ids" in names
        self._one_logit = {"logits_to_keep": 1} if "logits_to_keep" in names else {}
        self.tokens: dict[int, torch.Tensor] = {}

    def feed(self, ids: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> None:
        """What is new, `[batch, new]`, and the mask of all so far, `[batch, length]`, of every microbatch."""
        self._ids, self._masks = ids, masks

    def signature(self, microbatch: int) -> Hashable:
        return "tokens", tuple(self._ids[microbatch].shape)

    def forward(self, chunk: int, microbatch: int, received: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        key, ids, mask = (chunk, microbatch), self._ids[microbatch], self._masks[microbatch]
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": self._cached}
        if self._with_positions:
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            batch["position_ids"] = positions[:, -ids.shape[1] :]
        if hasattr(getattr(self._stages.model, "config", None), "output_router_logits"):
            batch["output_router_logits"] = False
        if key in self._caches:
            batch["past_key_values"] = self._caches[key]
        if self._stages.is_last(chunk):
            with self._stages.chunk(chunk, received, balance=False):
                output = self._stages.model(**batch, **self._one_logit)
            self.tokens[microbatch] = output.logits[:, -1].argmax(-1).cpu()
            made: tuple[torch.Tensor, ...] = ()
        else:
            made, output = self._stages.run(chunk, batch, received, balance=False)
        if self._cached:
            self._caches[key] = output.past_key_values
        return made

    def backward(self, chunk: int, microbatch: int, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        raise PhaseError("generation has no backward")

    backward_input = backward

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        raise PhaseError("generation has no backward")


def generate(
    executor: Executor,
    stages: Stages,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    new_tokens: int,
    end: int | None = None,
    pad: int = 0,
    microbatches: int = 1,
    cached: bool = True,
) -> torch.Tensor:
    """Continue prompts `[batch, length]`, padded on the left, greedily; returns all tokens `[batch, length + new]` on every rank.

    A row that has come to `end` goes on with `pad`; generation ends when all have, or after `new_tokens`. All ranks of the pipeline
    give the same prompts. With several `microbatches` ranks work at the same time. `cached`: keys and values are kept.

    Raises:
        DataError: for fewer rows than microbatches.
    """
    if not 1 <= microbatches <= len(input_ids):
        raise DataError(
            f"{len(input_ids)} prompts cannot be generated in {microbatches} microbatches; at least one row each"
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    schedule = forward_only(ranks=executor.group.size, microbatches=microbatches, chunks=len(stages.own))
    runner = _TokenRunner(stages, cached=cached)
    last = stages.is_last(len(stages.own) - 1)
    tokens, new, over = input_ids, input_ids, torch.zeros(len(input_ids), dtype=torch.bool)
    with torch.no_grad():
        for _ in range(new_tokens):
            runner.feed(new.tensor_split(microbatches), mask.tensor_split(microbatches))
            executor.run(schedule, runner)
            mine = (
                torch.cat([runner.tokens[number] for number in range(microbatches)]) if last else torch.zeros_like(over)
            )
            found = executor.share(mine.long(), "the next tokens").masked_fill(over, pad)
            tokens = torch.cat([tokens, found[:, None].to(tokens.device)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            new = tokens[:, -1:] if cached else tokens
            over |= torch.zeros_like(over) if end is None else found == end
            if over.all():
                break
    return tokens
