"""`RunningBatch`: continuous batching of requests that join and leave while a model generates, and its forward passes, which
alternate, so that long prompts do not delay others. Ranks that run one model have copies of the batch.

    prefill     a b c d         prompts of joining requests without their last tokens, padded on the right
                e . . .
    decode      z               their last tokens, beside the latest tokens of the running requests
                f
"""

import inspect
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from transformers import GenerationConfig

from zeromesh.trainer.generation.requests import Finish, Progress, Request
from zeromesh.trainer.generation.row_cache import RowCache, layers_of
from zeromesh.trainer.generation.sampling import RowSampler, at_least_float32, logprobs_of
from zeromesh.trainer.generation.settings import ServedModel, ends_of


class ForwardKind(Enum):
    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(kw_only=True, slots=True, eq=False)
class RunningRow:
    request: Request
    sampler: RowSampler
    ends: list[int]
    limit: int  # The maximal number of new tokens.
    tokens: list[int]  # The tokens of the prompt, followed by the new ones.
    logprobs: list[float] = field(default_factory=list)
    reported: int = 0  # The number of new tokens that earlier progress has reported.
    finish: Finish | None = None

    @property
    def budget(self) -> int:
        """The number of new tokens that may still be generated."""
        return 0 if self.finish else self.limit - len(self.logprobs)

    def add(self, token: int, logprob: float) -> None:
        """Append the next token; tokens after the end are dropped. A NaN `logprob` marks a token whose logits were not finite."""
        if self.finish is None and math.isnan(logprob):
            self.finish = "not_finite"
        elif self.finish is None:
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.finish = "stop" if token in self.ends else "length" if len(self.logprobs) >= self.limit else None


class RunningBatch:
    """The requests of one replica and their forwards: at most `rows` at a time, `prefill_tokens` prompt tokens in a forward and
    `cache_tokens` in the cache, both with padding; one always runs. Finished rows stay until `remove_ended`, so shapes do too."""

    def __init__(self, placed: ServedModel, *, rows: int, prefill_tokens: int, cache_tokens: int) -> None:
        module = self._module = placed.module
        self._adapters, self._device = placed.adapters, placed.mesh.device
        self._most_rows, self._prefill_tokens, self._cache_tokens = rows, prefill_tokens, cache_tokens
        self._layers = layers_of(module.config) or 0
        takes = inspect.signature(module.forward).parameters
        self._takes_positions = "position_ids" in takes
        self._common_arguments: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if "logits_to_keep" in takes:
            self._common_arguments["logits_to_keep"] = 1
        if hasattr(module.config, "output_router_logits"):
            self._common_arguments["output_router_logits"] = False
        self._waiting: deque[RunningRow] = deque()
        self._joining: list[RunningRow] = []
        self._running: list[RunningRow] = []
        self._ended: list[RunningRow] = []
        self._joining_cache, self._cache = RowCache(self._layers), RowCache(self._layers)
        self._kind = ForwardKind.IDLE
        self._after_prefill = False
        self.computed = 0  # The number of tokens computed so far, in prefill and in decode.

    def add(self, request: Request, settings: GenerationConfig) -> None:
        """Enqueue a request; the batch owns its checked settings from now on."""
        row = RunningRow(
            request=request,
            sampler=RowSampler(self._module, settings, request.tokens, request.seed, self._device),
            ends=ends_of(settings),
            limit=int(settings.max_new_tokens),
            tokens=list(request.tokens),
        )
        self._waiting.append(row)

    def cancel(self, numbers: Sequence[int]) -> None:
        """End requests between forwards; numbers of other batches are ignored."""
        for row in self._rows:
            if row.request.number in numbers and row.finish is None:
                row.finish = "cancelled"
        self._ended += [row for row in self._waiting if row.finish]
        self._waiting = deque(row for row in self._waiting if not row.finish)
        self.remove_ended()

    @property
    def _rows(self) -> list[RunningRow]:
        return [*self._waiting, *self._joining, *self._running]

    @property
    def busy(self) -> bool:
        return bool(self._rows)

    @property
    def open_tokens(self) -> int:
        """The maximal number of tokens that are still to be computed."""
        new = sum(row.budget for row in self._rows)
        return new + sum(len(row.request.tokens) for row in (*self._waiting, *self._joining))

    def plan(self, *, eager: bool) -> ForwardKind:
        """Choose the next forward. With `eager`, requests join as soon as one row is free, not only when several are."""
        if not self._joining and self._waiting:
            self._admit(eager=eager)
        if self._joining and not self._columns():
            lengths = [len(row.request.tokens) - 1 for row in self._joining]
            self._cache.merge(self._joining_cache, lengths, most_rows=self._most_rows)
            self._running += self._joining
            self._joining, self._joining_cache = [], RowCache(self._layers)
        if self._joining and not (self._running and self._after_prefill):
            self._kind = ForwardKind.PREFILL
        else:
            self._kind = ForwardKind.DECODE if self._running else ForwardKind.IDLE
        return self._kind

    def _admit(self, *, eager: bool) -> None:
        """Choose the requests that join next: as many as fit, with prompts not much shorter than the first one's."""
        free = self._most_rows - len(self._running)
        if free < 1 or (self._running and not eager and free < min(len(self._waiting), -(-self._most_rows // 8))):
            return
        widths = [length + row.budget for row, length in zip(self._running, self._cache.columns.lengths, strict=True)]
        longest = len(self._waiting[0].tokens)
        for row in list(self._waiting)[: 2 * free]:
            length = len(row.tokens)
            width = max([*widths, row.limit + length])
            if len(self._joining) == free or (widths and (len(widths) + 1) * width > self._cache_tokens):
                break
            if longest <= 2 * length and length <= 2 * longest:
                widths.append(row.limit + length)
                self._joining.append(row)
                self._waiting.remove(row)

    def shape(self) -> tuple[int, int]:
        """Rows and columns of the planned forward."""
        if self._kind is ForwardKind.PREFILL:
            return len(self._joining), self._columns()
        return max(1, len(self._running)), 1

    def _columns(self) -> int:
        """Return the columns of the next prefill chunk; 0 after the last one."""
        left = max(len(row.request.tokens) for row in self._joining) - 1 - self._joining_cache.columns.width
        return min(left, max(1, self._prefill_tokens // len(self._joining)))

    def enter(self) -> None:
        """Give the rows of the planned forward their adapters; each part of a forward begins with it."""
        rows = {ForwardKind.PREFILL: self._joining, ForwardKind.DECODE: self._running}.get(self._kind, [])
        self._adapters.enter([row.request.adapter for row in rows] or [None], self.shape())

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of the planned forward; for an idle batch, a dummy input whose result is dropped."""
        ids = positions = torch.zeros(1, 1, dtype=torch.long)
        mask, new = torch.ones(1, 1, dtype=torch.long), 1
        cache: RowCache | None = None
        if self._kind is ForwardKind.PREFILL:
            cache, new, begin = self._joining_cache, self._columns(), self._joining_cache.columns.width
            end = begin + new
            chunks = [row.request.tokens[begin : min(end, len(row.request.tokens) - 1)] for row in self._joining]
            ids = torch.tensor([[*chunk, *[0] * (new - len(chunk))] for chunk in chunks])
            positions = torch.arange(begin, end).expand(len(chunks), -1)
            mask = torch.ones(len(chunks), end, dtype=torch.long)
        elif self._kind is ForwardKind.DECODE:
            cache, width = self._cache, self._cache.columns.width
            ids = torch.tensor([row.tokens[-1:] for row in self._running])
            # A finished row stays at its last position, as the model may have none beyond; its result is dropped.
            positions = torch.tensor([[len(row.tokens) - 1] for row in self._running])
            mask = (torch.arange(width + 1) >= (width - torch.tensor(cache.columns.lengths))[:, None]).long()
        tensors = {"input_ids": ids, "attention_mask": mask}
        if self._takes_positions:
            tensors["position_ids"] = positions
        inputs = {name: tensor.to(self._device) for name, tensor in tensors.items()} | self._common_arguments
        if cache is None:
            return inputs | {"use_cache": False}
        cache.make_room(new)
        return inputs | {"past_key_values": cache}

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose tokens by logits `[rows, vocabulary]`; returns them and log-probabilities, float64 `[2, rows]`, 0 in prefill."""
        chosen = torch.zeros(2, self.shape()[0], dtype=torch.float64)
        if self._kind is ForwardKind.DECODE:
            logits = at_least_float32(logits)
            tokens = logits.argmax(dim=-1)
            for index, row in enumerate(self._running):
                if not row.sampler.is_plain:
                    tokens[index] = row.sampler.choose(logits[index], row.tokens)
            chosen[0], chosen[1] = tokens, logprobs_of(logits, tokens)
        return chosen

    def append(self, chosen: torch.Tensor) -> None:
        """Append the result of `choose` to the rows, after the forward."""
        if self._kind is ForwardKind.IDLE:
            return
        self._after_prefill = self._kind is ForwardKind.PREFILL
        if self._after_prefill:
            begin, new = self._joining_cache.columns.width, self._columns()
            self.computed += sum(max(0, min(len(row.request.tokens) - 1, begin + new) - begin) for row in self._joining)
            self._joining_cache.record_columns(len(self._joining), new)
        else:
            self.computed += sum(row.finish is None for row in self._running)
            self._cache.record_columns(len(self._running), 1)
            for row, token, logprob in zip(self._running, chosen[0].tolist(), chosen[1].tolist(), strict=True):
                row.add(int(token), logprob)

    def remove_ended(self) -> None:
        for index in range(len(self._running) - 1, -1, -1):
            row = self._running[index]
            if row.finish is not None:
                self._ended.append(row)
                self._running[index] = self._running[-1]
                self._running.pop()
                self._cache.remove(index)

    def steady_forwards(self, *, fewest: int) -> int:
        """Return the number of forwards of the present rows, a token each: 1 while rows join, else until the first row reaches its
        limit, but at least `fewest`, whose last forwards may compute a finished row in vain."""
        if self._kind is not ForwardKind.DECODE or self._joining:
            return 1
        return max(fewest, min((row.budget for row in self._running if row.finish is None), default=1))

    def most_forwards(self) -> int:
        """Return an upper bound of the forwards until all requests have ended."""
        prompts = sum(len(row.request.tokens) for row in (*self._waiting, *self._joining))
        chunks = -(-prompts // self._prefill_tokens) + len(self._waiting) + len(self._joining)
        return sum(row.budget for row in self._rows) + chunks

    def progress(self) -> list[Progress]:
        rows, self._ended, news = [*self._ended, *self._joining, *self._running], [], []
        for row in rows:
            if row.finish or len(row.logprobs) > row.reported:
                begin, row.reported = row.reported, len(row.logprobs)
                tokens, logprobs = row.tokens[len(row.request.tokens) + begin :], row.logprobs[begin:]
                news.append(Progress(number=row.request.number, tokens=tokens, logprobs=logprobs, finish=row.finish))
        return news
