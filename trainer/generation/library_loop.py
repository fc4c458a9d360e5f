"""Transformers' own `generate` on all ranks of a mesh, in any layout, and in static batches for prompts that join no running one.
The library's loop runs on every rank. A call of the model runs all stages of a pipeline, and gives all ranks the same logits."""

import copy
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from zeromesh.errors import LayoutError, some
from zeromesh.overrides import cached_tensors_removed
from zeromesh.pipeline.generation import CACHE
from zeromesh.rng import kept_generators, seed_all
from zeromesh.trainer.data.feed import require_same_batches
from zeromesh.trainer.generation.requests import Finish, Progress, Request
from zeromesh.trainer.generation.sampling import RowDraws, at_least_float32, logprobs_of
from zeromesh.trainer.generation.settings import PLAIN_MODES, ServedModel, encoder_config, ends_of, rope_kinds
from zeromesh.trainer.model_on_mesh import PlacedModel
from zeromesh.trainer.models.prepare import in_evaluation_mode


def generate(
    placed: PlacedModel,
    arguments: Mapping[str, Any],
    *,
    seed: Callable[[], object] | None,
    on_logits: Callable[[torch.Tensor], object] = lambda logits: None,
) -> Any:
    """Return `model.generate(**arguments)`; all ranks call it, and data ranks may have different prompts. With `seed`, which seeds
    the sampling, the model is in evaluation mode, and the generator is restored afterwards. `on_logits` receives the logits
    [rows, vocabulary] of the last position of each call of the model. Raises `DataError` if ranks that share a model have different
    arguments, and `LayoutError` for a pipeline whose modules keep tensors between tokens."""
    model, mesh, pipeline = placed.module, placed.mesh, placed.divided.pipeline
    tensors = {name: each.to(mesh.device) for name, each in arguments.items() if isinstance(each, torch.Tensor)}
    arguments = {**arguments, **tensors}
    if placed.engine is not None and mesh.model_size > 1:
        require_same_batches([arguments], mesh, "give all of them the same prompts and arguments of generate")
    # An adapter's wrapper passes `generate` on to the base model, which the library's loop then calls.
    looped = next((module for module in model.modules() if isinstance(module, GenerationMixin)), model)
    looped_class = type(looped)
    calls = _ModelCalls(looped, placed, len(arguments["input_ids"]) if pipeline is not None else 0)

    def called(_model: nn.Module, *ids: Any, **inputs: Any) -> Any:
        calls.any_rank_continues(here=True)
        # Classifier-free guidance passes the ids as a positional argument.
        outputs = calls.compute({**inputs, **dict(zip(["input_ids"], ids, strict=False))})
        # Rotary frequencies, which some models compute lazily, do not depend on the text.
        if pipeline is not None and (kept := [name for name in put_aside() if not name.endswith("inv_freq")]):
            why = f"{type(model).__name__} keeps {some(kept, 3)} in its modules between tokens, which microbatches"
            raise LayoutError(f"{why} of a pipeline would share; generate without parallel.pipeline")
        on_logits(outputs.logits[:, -1])
        return outputs

    # Tensors that modules keep between tokens belong to this text alone.
    with ExitStack() as undone, torch.no_grad():
        if seed is not None:
            undone.enter_context(in_evaluation_mode(model))
            undone.enter_context(kept_generators())
            seed()
        put_aside = undone.enter_context(cached_tensors_removed(model))
        # `called` has to run before the hooks of a call, which gather, and Python looks for `__call__` at the class alone.
        namespace = {"__call__": called, "__module__": looped_class.__module__}
        undone.callback(setattr, looped, "__class__", looped_class)
        looped.__class__ = type(looped_class.__name__, (looped_class,), namespace)
        tokens = type(model).generate(model, **arguments)
        calls.join_remaining_calls()
    return tokens


class _ModelCalls:
    """The model calls of one generation, for `rows` prompts of this rank. Ranks that lack parts of the model make equally
    many: before a call they agree whether some rank continues, and finished ranks take part with a dummy input."""

    def __init__(self, model: Any, placed: PlacedModel, rows: int) -> None:
        mesh, engine, pipeline = placed.mesh, placed.engine, placed.divided.pipeline
        self._has_peers = engine is not None and engine.lacks_parameters and mesh.data.size > 1
        self._model, self._mesh = model, mesh
        self._microbatches, call = 1, partial(type(model).__call__, model)
        if pipeline is None or engine is None:
            self.compute: Callable[[dict[str, Any]], Any] = lambda inputs: call(**inputs)
            return
        # The number of microbatches is limited by the stages and by the rows of each data-parallel rank.
        fewest = -int(mesh.data.all_reduce_max(torch.tensor([-rows]), "prompts to generate")[0])
        self._microbatches = min(mesh.pipeline.size, fewest)
        staged = pipeline.generation(microbatches=self._microbatches, call=call)

        def compute(inputs: dict[str, Any]) -> CausalLMOutputWithPast:
            with engine.evaluation():
                return CausalLMOutputWithPast(logits=staged(inputs), past_key_values=inputs.get(CACHE))

        self.compute = compute

    def any_rank_continues(self, *, here: bool) -> bool:
        if not self._has_peers:
            return here
        return int(self._mesh.data.all_reduce(torch.tensor([int(here)]), "ranks that generate")[0]) > 0

    def join_remaining_calls(self) -> None:
        while self._has_peers and self.any_rank_continues(here=False):
            ids = torch.zeros(self._microbatches, 1, dtype=torch.long, device=self._mesh.device)
            inputs: dict[str, Any] = {"input_ids": ids}
            if self._model.config.is_encoder_decoder:
                width, dtype = encoder_config(self._model).hidden_size, self._model.dtype
                encoded = BaseModelOutput(last_hidden_state=ids.new_zeros(1, 1, width, dtype=dtype))
                inputs = {"encoder_outputs": encoded, "decoder_input_ids": ids}
            self.compute({**inputs, "use_cache": False, "return_dict": True})


def generate_in_rounds(
    placed: ServedModel,
    requests: Sequence[Request],
    settings: Sequence[GenerationConfig],
    batch: int,
    on_progress: Callable[[Sequence[Progress]], object],
    why: str,
) -> None:
    """Generate for requests with equal fields, similar lengths together, on all ranks; note `why` they join no running batch."""
    mesh, has_encoder, first = placed.mesh, placed.module.config.is_encoder_decoder, settings[0]
    # Padding would change an encoder's result: penalties count it, and outside a sliding window it attends to nothing: NaN.
    one_length = not has_encoder or bool(
        getattr(encoder_config(placed.module), "sliding_window", None)
        or first.encoder_repetition_penalty not in (None, 1)
        or first.encoder_no_repeat_ngram_size
    )
    placed.console.note(f"prompts are generated in batches of {'' if one_length else 'about '}one length: {why}")
    # A rank without prompts in the last round still gathers parameters with the others.
    idle = copy.deepcopy(first)
    idle.update(max_new_tokens=1, min_new_tokens=None, min_length=0, max_length=None)
    # An encoder's prompts are padded to the longest of all ranks.
    how = {"one_length": one_length, "whole_rounds": one_length and has_encoder}
    batch = 1 if first.get_generation_mode().name == "ASSISTED_GENERATION" else batch  # The library takes one prompt then.
    lengths = [len(request.tokens) for request in requests]
    for numbers in partition_prompts(lengths, ranks=mesh.data.size, batch=batch, **how):
        here = [requests[number] for number in numbers[mesh.data_index]]
        new = _generate(placed, here or [Request(number=0, tokens=[0])], settings[here[0].number] if here else idle)
        rows = mesh.data.gather_json([asdict(each) for each in new[: len(here)]], "results of a round")
        on_progress([Progress(**each) for row in rows for each in row])


def _generate(placed: ServedModel, requests: Sequence[Request], settings: GenerationConfig) -> list[Progress]:
    """Generate to the end on ranks that differ along data axes; prompts are of equal length, except for an encoder."""
    module, mesh, has_encoder = placed.module, placed.mesh, placed.module.config.is_encoder_decoder
    # Rotary frequencies that an earlier, longer text has changed are reset to the model's initial ones.
    for part in module.modules() if "dynamic" in rope_kinds(module.config) else ():
        for name, original in list(part.named_buffers(recurse=False)):
            prefix, is_original, _ = name.rpartition("original_inv_freq")
            if is_original:
                part.get_buffer(f"{prefix}inv_freq").copy_(original)
                setattr(part, f"{prefix}max_seq_len_cached", part.original_max_seq_len)
    prompts, padding = [torch.tensor(each.tokens) for each in requests], int(settings.pad_token_id or 0)
    ids = pad_sequence(prompts, batch_first=True, padding_value=padding)
    mask = pad_sequence(list(map(torch.ones_like, prompts)), batch_first=True)
    if has_encoder and mesh.data.size > 1:
        # Some encoders run further lookups for some lengths, and all ranks that gather parameters must agree on them.
        longest = mesh.data.all_reduce_max(torch.tensor([ids.shape[1]]), "the longest prompt of a round")
        more = (0, int(longest[0]) - ids.shape[1])
        ids, mask = pad(ids, more, value=padding), pad(mask, more)
    arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "generation_config": settings}
    recorded = list[torch.Tensor]()  # Log-probabilities of the new tokens, one tensor `[rows]` per position.
    latest = deque[torch.Tensor](maxlen=1)  # The logits of the latest position.

    def record(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Record the log-probabilities of the latest tokens, as a stopping criterion that never stops."""
        recorded.append(logprobs_of(latest[0], input_ids[:, -1].to(latest[0].device)))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    guided = settings.guidance_scale not in (None, 1)  # The model is called twice for a token.
    if not guided and settings.get_generation_mode() in PLAIN_MODES:
        arguments["stopping_criteria"] = [record]
    seeds = [each.seed for each in requests]
    with RowDraws(seeds, mesh.device) if settings.do_sample else nullcontext():
        keep = lambda logits: latest.append(at_least_float32(logits))  # noqa: E731
        tokens = generate(placed, arguments, seed=partial(seed_all, seeds[0]), on_logits=keep)
    begin, ends, results = 1 if has_encoder else ids.shape[1], ends_of(settings), list[Progress]()
    probabilities = torch.stack(recorded, dim=1).tolist() if recorded else [None] * len(requests)
    for request, row, logprobs in zip(requests, tokens[:, begin:].tolist(), probabilities, strict=True):
        # A row is cut after its end token, or before the first token with logits that are not finite.
        count = next((index for index, token in enumerate(row, start=1) if token in ends), 0)
        kept = count or len(row)
        finish: Finish = "stop" if count else "length"
        unknown = next((index for index, value in enumerate((logprobs or [])[:kept]) if math.isnan(value)), None)
        if unknown is not None:
            kept, finish = unknown, "not_finite"
        logprobs = logprobs and logprobs[:kept]
        results.append(Progress(number=request.number, tokens=row[:kept], logprobs=logprobs, finish=finish))
    return results


def partition_prompts(
    lengths: Sequence[int], *, ranks: int, batch: int, one_length: bool = False, whole_rounds: bool = False
) -> list[list[list[int]]]:
    """Return for each round the indices of the prompts, at most `batch`, that each rank generates together. Ranks take turns, the
    longest prompt first, so that the total lengths of two ranks differ by one prompt at most. The prompts of a rank, or with
    `whole_rounds` of all ranks, in a round have similar lengths, or with `one_length` equal ones."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])
    if not one_length:
        size = ranks * batch
        rounds = [order[begin : begin + size] for begin in range(0, len(order), size)]
        return [[each[rank::ranks] for rank in range(ranks)] for each in rounds]
    # Each rank gets a whole batch at a time.
    groups = []
    for _, each in groupby(order, key=lambda number: lengths[number]):
        alike = list(each)
        size = min(batch, -(-len(alike) // ranks))
        groups.append([alike[begin : begin + size] for begin in range(0, len(alike), size)])
    if not whole_rounds:
        groups = [sorted(chain.from_iterable(groups), key=lambda part: -len(part) * lengths[part[0]])]
    rounds_of_batches = [parts[begin : begin + ranks] for parts in groups for begin in range(0, len(parts), ranks)]
    return [[*parts, *[[]] * (ranks - len(parts))] for parts in rounds_of_batches]
