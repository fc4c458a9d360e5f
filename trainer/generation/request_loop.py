"""`RequestLoop`: continues the requests of an inbox on all ranks, of which those that run one model are a replica, in rounds:

exchange    rank 0 broadcasts new requests, every replica its new tokens; all ranks know of all requests
partition   each request goes to the replica with the fewest open tokens, the costliest first
forwards    each replica runs its batches, one for each stage; all agree on the number if replicas lack parts of the model
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from operator import itemgetter
from typing import Any

import torch
from transformers import GenerationConfig

from zeromesh.trainer.generation.requests import Deliver, Inbox, News, Progress, Request
from zeromesh.trainer.generation.row_cache import token_bytes
from zeromesh.trainer.generation.running_batch import ForwardKind, RunningBatch
from zeromesh.trainer.generation.settings import ServedModel
from zeromesh.trainer.model_on_mesh import least_free_bytes

_PREFILL_TOKENS = 2048  # The limit of prompt tokens in one prefill forward.
_MOST_FORWARDS = 16  # The maximal number of forwards between exchanges where no client streams single tokens.
_FEWEST_FORWARDS = 4  # The minimal number of forwards between exchanges in a pipeline, which each run fills and drains.
_IDLE_SECONDS = 0.5  # The longest wait of rank 0 for requests before the ranks exchange again, in seconds.


class RequestLoop:
    """Continues the requests of an inbox, of which a replica runs `rows` at a time; all ranks create one and call `run` together.
    The fields of a request override `fields`. Every rank gets the new tokens of all replicas by `on_progress`."""

    def __init__(self, placed: ServedModel, fields: Mapping[str, Any], *, rows: int, on_progress: Deliver) -> None:
        mesh, engine = placed.mesh, placed.require_engine()
        self._mesh, self._engine, self._placed, self._rows = mesh, engine, placed, rows
        self._settings, self._fields, self._on_progress = placed.settings, fields, on_progress
        self._pipeline = placed.divided.pipeline
        stages = mesh.pipeline.size
        compute = engine.options.precision.compute
        nbytes = token_bytes(placed.module.config.get_text_config(), mesh.tensor.size, stages, compute)
        # Half of the memory that is free may be filled with keys and values.
        cached = max(1, least_free_bytes(mesh) // (2 * nbytes)) // stages
        limits = {"rows": -(-rows // stages), "prefill_tokens": _PREFILL_TOKENS, "cache_tokens": cached}
        self._batches = [RunningBatch(placed, **limits) for _ in range(stages)]
        self._open: list[dict[int, int]] = [{} for _ in range(mesh.data.size)]
        """The maximal number of tokens still to be computed for each open request, by replica; equal on all ranks."""
        self._queue: list[tuple[int, Request, GenerationConfig]] = []
        """Requests that no replica has yet, each with the maximal number of tokens to be computed."""
        self._together = engine.lacks_parameters and mesh.data.size > 1
        """True if every forward exchanges parameters or tokens between replicas."""

    def run(self, inbox: Inbox | None) -> int:
        """Continue the requests of rank 0's inbox until it is stopped and all have ended. Returns this rank's computed tokens."""
        while True:
            news = self._exchange(inbox)
            for each in news.requests:
                self._placed.adapters.require(each.adapter, f"request {each.number}")
                settings = self._settings.for_request({**self._fields, **(each.fields or {})}, len(each.tokens))
                self._queue.append((len(each.tokens) + int(settings.max_new_tokens), each, settings))
            if news.cancelled:
                for batch in self._batches:
                    batch.cancel(news.cancelled)
                # A client may cancel before any rank has heard of the request.
                queued = [request.number for _, request, _ in self._queue if request.number in news.cancelled]
                self._queue = [each for each in self._queue if each[1].number not in queued]
                self._on_progress([Progress(number=n, tokens=[], logprobs=[], finish="cancelled") for n in queued])
            if news.requests and not news.streams:
                self._queue.sort(key=itemgetter(0), reverse=True)
            self._partition()
            if self._queue or any(self._open):
                self._run_forwards(1 if news.streams else _MOST_FORWARDS, eager=news.streams)
            elif news.stopping:
                return sum(batch.computed for batch in self._batches)

    def _exchange(self, inbox: Inbox | None) -> News:
        """Report the progress of all replicas, and return what rank 0's inbox has received."""
        mesh, new = self._mesh, [asdict(each) for batch in self._batches for each in batch.progress()]
        message: dict[str, Any] = {"progress": new if mesh.model_index == 0 else []}
        if inbox is not None:
            idle = not self._queue and not any(self._open)
            message["news"] = asdict(inbox.take(wait_seconds=_IDLE_SECONDS if idle else 0.0))
        rows = mesh.world.gather_json(message, "requests and what was made of them")
        progress = [Progress(**each) for row in rows for each in row["progress"]]
        for each in progress:
            for costs in self._open:
                if each.number in costs:
                    costs[each.number] -= len(each.tokens)
                if each.finish is not None:
                    costs.pop(each.number, None)
        self._on_progress(progress)
        news: dict[str, Any] = rows[0]["news"]
        return News(**{**news, "requests": [Request(**each) for each in news["requests"]]})

    def _partition(self) -> None:
        """Assign queued requests in order to the replica with the fewest open tokens. With several replicas, none gets
        many more than it can run, since the load of the others is known only at the next exchange."""
        most = self._rows + -(-self._rows // 4) if len(self._open) > 1 else sys.maxsize
        while self._queue and (takers := [index for index, costs in enumerate(self._open) if len(costs) < most]):
            taker = min(takers, key=lambda index: sum(self._open[index].values()))
            cost, request, settings = self._queue.pop(0)
            self._open[taker][request.number] = cost
            if taker == self._mesh.data_index:
                min(self._batches, key=lambda batch: batch.open_tokens).add(request, settings)

    def _run_forwards(self, most: int, *, eager: bool) -> None:
        """Run up to `most` forwards of each batch, equally many on replicas that lack parts of the model."""
        for batch in self._batches:
            batch.plan(eager=eager)
        if self._pipeline is not None:
            steady = [batch.steady_forwards(fewest=_FEWEST_FORWARDS) for batch in self._batches if batch.busy]
            # All replicas run the smallest count of those with requests, which lacks the most of one more than `most`.
            if lacking := self._largest(most + 1 - min([most, *steady]) if steady else 0):
                with self._engine.evaluation():
                    self._pipeline.run_token_forwards(self._batches, most + 1 - lacking, self._placed.module)
            for batch in self._batches:
                batch.remove_ended()
            return
        (batch,) = self._batches
        for _ in range(self._largest(min(most, batch.most_forwards()))):
            if batch.plan(eager=eager) is ForwardKind.IDLE and not self._together:
                return
            inputs = batch.inputs()
            batch.enter()
            with self._engine.evaluation():
                logits = self._placed.module(**inputs).logits[:, -1]
            batch.append(batch.choose(logits))
            batch.remove_ended()

    def _largest(self, number: int) -> int:
        """Return the largest number of the replicas that lack parts of the model, where idle ones take part."""
        if not self._together:
            return number
        return int(self._mesh.data.all_reduce_max(torch.tensor([number]), "forwards")[0])
