"""Static batching for prompts that cannot join a running batch, by transformers' own `generate`."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from zeromesh.rng import seed_all
from zeromesh.trainer.inference.requests import Finish, Progress, Request
from zeromesh.trainer.inference.sampling import RowDraws, logprobs_of, widened
from zeromesh.trainer.inference.source import ServedModel
from zeromesh.trainer.models.generation import encoder_config, ends_of, rope_kinds


def generate_in_rounds(
    placed: ServedModel,
    requests: Sequence[Request],
    settings: Sequence[GenerationConfig],
    batch: int,
    on_progress: Callable[[Sequence[Progress]], object],
    why: str,
) -> None:
    """Generate for requests with equal fields, those of similar length together; all ranks call it. `why` is the reason why they
    cannot join a running batch."""
    ranks, has_encoder = placed.mesh.data.size, placed.module.config.is_encoder_decoder
    one_length = not has_encoder or _counts_padding(placed.module, settings[0])
    known = "one length" if one_length else "about one length"
    placed.console.note(f"prompts are generated in batches of {known}: {why}")
    # A rank without prompts in the last round still gathers parameters with the others.
    idle = copy.deepcopy(settings[0])
    idle.update(max_new_tokens=1, min_new_tokens=None, min_length=0, max_length=None)
    for numbers in partition_prompts(
        [len(request.tokens) for request in requests],
        ranks=ranks,
        batch=batch,
        one_length=one_length,
        # An encoder's prompts are padded to the longest of all ranks.
        whole_rounds=one_length and has_encoder,
    ):
        own = [requests[number] for number in numbers[placed.mesh.data_index]]
        asked = settings[own[0].number] if own else idle
        new = _generate(placed, own or [Request(number=0, tokens=[0])], asked)
        rows = placed.mesh.data.gather_json([asdict(each) for each in new[: len(own)]], "results of a round")
        on_progress([Progress(**each) for row in rows for each in row])


def _counts_padding(module: Any, settings: GenerationConfig) -> bool:
    """Return True if padding would change an encoder's result: penalties count padding, and a padding position outside a sliding
    window attends to nothing, which gives NaN."""
    penalised = settings.encoder_repetition_penalty not in (None, 1) or settings.encoder_no_repeat_ngram_size
    return bool(getattr(encoder_config(module), "sliding_window", None) or penalised)


def _generate(placed: ServedModel, requests: Sequence[Request], settings: GenerationConfig) -> list[Progress]:
    """Generate to the end on ranks that differ along data axes; prompts are of equal length, except for an encoder."""
    _forget_lengths(placed.module)
    arguments: dict[str, Any] = dict(
        _padded(placed, [each.tokens for each in requests], int(settings.pad_token_id or 0))
    )
    # Classifier-free guidance calls the model twice for a token.
    watched = settings.guidance_scale in (None, 1) and settings.get_generation_mode() in (
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
    )
    chosen, seeds = _ChosenTokens(), [each.seed for each in requests]
    if watched:
        arguments["stopping_criteria"] = [chosen]
    with RowDraws(seeds, placed.mesh.device) if settings.do_sample else nullcontext():
        tokens = placed.continue_prompts(
            {**arguments, "generation_config": settings}, partial(seed_all, seeds[0]), chosen.see
        )
    begin = 1 if placed.module.config.is_encoder_decoder else arguments["input_ids"].shape[1]
    logprobs = torch.stack(chosen.logprobs, dim=1).tolist() if chosen.logprobs else [None] * len(requests)
    rows = zip(requests, tokens[:, begin:].tolist(), logprobs, strict=True)
    return [_until_end(each.number, row, values, settings) for each, row, values in rows]


class _ChosenTokens:
    """A stopping criterion that never stops, but records log-probabilities, with the logits of a single position in memory."""

    def __init__(self) -> None:
        self.logprobs: list[torch.Tensor] = []
        """The log-probabilities of the new tokens, one tensor `[rows]` per position."""
        self._logits = torch.empty(0)

    def see(self, logits: torch.Tensor) -> None:
        self._logits = widened(logits)

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.logprobs.append(logprobs_of(self._logits, input_ids[:, -1].to(self._logits.device)))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _padded(placed: ServedModel, prompts: Sequence[Sequence[int]], padding: int) -> Mapping[str, torch.Tensor]:
    """Return prompts padded on the right [rows, longest], and their attention mask."""
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True, padding_value=padding)
    mask = pad_sequence([torch.ones(len(prompt), dtype=torch.long) for prompt in prompts], batch_first=True)
    if placed.module.config.is_encoder_decoder and placed.mesh.data.size > 1:
        # Some encoders run further lookups for some lengths, and all ranks that gather parameters must agree on them.
        longest = placed.mesh.data.all_reduce_max(torch.tensor([ids.shape[1]]), "the longest prompt of a round")
        more = (0, int(longest[0]) - ids.shape[1])
        ids, mask = pad(ids, more, value=padding), pad(mask, more)
    return {"input_ids": ids, "attention_mask": mask}


def _until_end(number: int, row: list[int], logprobs: list[float] | None, settings: GenerationConfig) -> Progress:
    """Return the progress of a row, cut after its end token or before the first token with logits that are not finite."""
    ends = ends_of(settings)
    count = next((place for place, token in enumerate(row, start=1) if token in ends), 0)
    kept = count or len(row)
    finish: Finish = "stop" if count else "length"
    unknown = next((place for place, value in enumerate((logprobs or [])[:kept]) if math.isnan(value)), None)
    if unknown is not None:
        kept, finish = unknown, "not_finite"
    return Progress(number=number, tokens=row[:kept], logprobs=logprobs and logprobs[:kept], finish=finish)


def _forget_lengths(module: Any) -> None:
    """Reset rotary embeddings that grow with the length of the text to those of a new model."""
    if "dynamic" not in rope_kinds(module.config):
        return
    for part in module.modules():
        for name, original in list(part.named_buffers(recurse=False)):
            prefix, found, _ = name.rpartition("original_inv_freq")
            if found:
                part.get_buffer(f"{prefix}inv_freq").copy_(original)
                setattr(part, f"{prefix}max_seq_len_cached", part.original_max_seq_len)


def partition_prompts(
    lengths: Sequence[int], *, ranks: int, batch: int, one_length: bool = False, whole_rounds: bool = False
) -> list[list[list[int]]]:
    """Return for each round the indices of the prompts that each rank generates together.

    In a round a rank has at most `batch`. Prompts are dealt in turn, the longest first, so that the ranks' total lengths differ by
    at most one prompt. The prompts of a rank, or with `whole_rounds` of all ranks, in a round have similar lengths, or with
    `one_length` equal ones.
    """
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    groups, at_once = [[[number] for number in order]], ranks * batch
    if one_length:
        # Each rank gets a whole batch at a time.
        groups, at_once = [], ranks
        for _, each in groupby(order, key=lambda number: lengths[number]):
            alike = list(each)
            size = min(batch, -(-len(alike) // ranks))
            groups.append([alike[begin : begin + size] for begin in range(0, len(alike), size)])
        groups = groups if whole_rounds else [list(chain.from_iterable(groups))]
    rounds = []
    for group in groups:
        parts = sorted(group, key=lambda part: -len(part) * lengths[part[0]])
        for begin in range(0, len(parts), at_once):
            given = parts[begin : begin + at_once]
            rounds.append([list(chain.from_iterable(given[rank::ranks])) for rank in range(ranks)])
    return rounds
