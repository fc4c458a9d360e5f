"""`RequestLoop`: requests of an inbox, continued on all ranks of a mesh.

Ranks that run one model together are a replica. All ranks make the same rounds:

    exchange    rank 0 tells what has come into the inbox, every replica what it has made; all know of all requests
    deal        requests go to the replica with the fewest open tokens, the costliest first
    turns       each replica makes forwards of its own lanes; as many as all agree on where they need each other's parameters

A pipeline has as many lanes as stages, so that none of them waits; other layouts have one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import GenerationConfig

from zeromesh.options import Placement
from zeromesh.trainer.inference.lane import Lane, LaneLimits, Turn
from zeromesh.trainer.inference.placed_model import PlacedModel
from zeromesh.trainer.inference.requests import Inbox, News, Progress, Request
from zeromesh.trainer.inference.settings import most_new_tokens

_PREFILL_TOKENS = 2048
"""Tokens of prompts in one forward."""
_MOST_TURNS = 16
"""Turns between exchanges where nobody waits for single tokens."""
_FEWEST_TURNS = 4
"""In a pipeline a run of fewer turns would fill and empty it more often than it is worth."""
_IDLE_SECONDS = 0.5
"""The longest time that rank 0 waits for requests before the ranks exchange again."""


class RequestLoop:
    """Continues the requests of an inbox. All ranks make one, and call `run` together.

    Args:
        fields: of `GenerationConfig`, on top of which are those of a request.
        rows: requests that a replica runs at a time.
        on_progress: called on every rank with what was made of requests, wherever that was.
    """

    def __init__(
        self,
        placed: PlacedModel,
        fields: Mapping[str, Any],
        *,
        rows: int,
        on_progress: Callable[[Sequence[Progress]], object],
    ) -> None:
        mesh, engine, pipeline = placed.mesh, placed.engine, placed.divided.pipeline
        self._mesh, self._engine, self._module, self._rows = mesh, engine, placed.module, rows
        self._on_progress = on_progress

        def settings_of(request: Request) -> GenerationConfig:
            return placed.settings.of({**fields, **request.fields}, len(request.tokens))

        self._settings_of = settings_of
        self._pipeline = pipeline
        lanes = mesh.pipeline.size if pipeline is not None else 1
        limits = LaneLimits(
            rows=-(-rows // lanes), prefill_tokens=_PREFILL_TOKENS, cache_tokens=placed.cache_tokens() // lanes
        )
        self._lanes = [Lane(placed.module, settings_of, limits, device=mesh.device) for _ in range(lanes)]
        self._open: list[dict[int, int]] = [{} for _ in range(mesh.data.size)]
        """The most tokens still to be computed for each open request, by replica, as all ranks know it."""
        self._queue: list[Request] = []
        self._together = engine.options.placements.parameters is Placement.SHARDED and mesh.data.size > 1
        """True if replicas need each other's parameters in every forward."""

    def run(self, inbox: Inbox | None) -> None:
        """Continue what comes into the inbox, which rank 0 has, until it is stopped and all requests have ended.

        Raises:
            CollectiveError: when a rank is gone or late.
        """
        while True:
            news = self._exchange(inbox)
            self._queue += news.requests
            # Who has asked may be gone before any rank has heard of the request.
            self._cancel(news.cancelled, inbox)
            if news.requests and not news.streams:
                self._queue.sort(key=self._cost_of, reverse=True)
            self._deal()
            if self._busy:
                self._turns(1 if news.streams else _MOST_TURNS, eager=news.streams)
            elif news.stopping:
                return

    @property
    def computed(self) -> int:
        """The tokens that this rank has computed so far, as `Lane.computed` counts them."""
        return sum(lane.computed for lane in self._lanes)

    def _cost_of(self, request: Request) -> int:
        """The tokens of a request, prompt included, at most."""
        return len(request.tokens) + most_new_tokens(self._settings_of(request), len(request.tokens))

    @property
    def _busy(self) -> bool:
        return bool(self._queue) or any(self._open)

    def _exchange(self, inbox: Inbox | None) -> News:
        """Tell all ranks what is new, and what was made of requests."""
        mesh = self._mesh
        made = [each for lane in self._lanes for each in lane.progress()]
        own: dict[str, Any] = {}
        if inbox is not None:
            own["news"] = asdict(inbox.take(wait_seconds=0.0 if self._busy else _IDLE_SECONDS))
        if mesh.model_index == 0:
            own["made"] = [asdict(each) for each in made]
        rows = mesh.world.gather_json(own, "requests and what was made of them")
        progress = [Progress(**each) for row in rows for each in row.get("made", ())]
        for each in progress:
            for found in self._open:
                if each.number in found:
                    found[each.number] -= len(each.tokens)
                if each.finish is not None:
                    found.pop(each.number, None)
        self._report(progress, inbox)
        news: dict[str, Any] = rows[0]["news"]
        return News(**{**news, "requests": [Request(**each) for each in news["requests"]]})

    def _cancel(self, numbers: Sequence[int], inbox: Inbox | None) -> None:
        """End requests: those of a lane with what they have, and those of the queue with nothing."""
        if not numbers:
            return
        gone = [request for request in self._queue if request.number in numbers]
        self._queue = [request for request in self._queue if request.number not in numbers]
        for lane in self._lanes:
            lane.cancel(numbers)
        nothing = [Progress(number=each.number, tokens=[], logprobs=[], finish="cancelled") for each in gone]
        self._report(nothing, inbox)

    def _report(self, progress: Sequence[Progress], inbox: Inbox | None) -> None:
        self._on_progress(progress)
        if inbox is not None:
            inbox.deliver(progress)

    def _deal(self) -> None:
        """Hand out the queue in its order, each request to the replica with the fewest open tokens. Where there are several, none
        gets many more than it can run, since how much the others are done with shows only later."""
        most = self._rows + -(-self._rows // 4) if len(self._open) > 1 else sys.maxsize
        while self._queue:
            takers = [index for index, found in enumerate(self._open) if len(found) < most]
            if not takers:
                return
            taker = min(takers, key=lambda index: (sum(self._open[index].values()), index))
            request = self._queue.pop(0)
            self._open[taker][request.number] = self._cost_of(request)
            if taker == self._mesh.data_index:
                min(self._lanes, key=lambda lane: lane.open_tokens).add(request)

    def _turns(self, most: int, *, eager: bool) -> None:
        """Make up to so many turns before ranks hear of each other again."""
        for lane in self._lanes:
            lane.settle()
            lane.plan(eager=eager)
        turns = self._agreed_turns(most)
        if self._pipeline is not None:
            if turns:
                with self._engine.evaluation():
                    self._pipeline.run_turns(self._lanes, turns, self._module)
            for lane in self._lanes:
                lane.settle()
            return
        (lane,) = self._lanes
        for _ in range(turns):
            if lane.plan(eager=eager) is Turn.IDLE and not self._together:
                return
            inputs = lane.inputs()
            with self._engine.evaluation():
                logits = self._module(**inputs).logits[:, -1]
            lane.take(lane.choose(logits))
            lane.settle()

    def _agreed_turns(self, most: int) -> int:
        """Return how many turns are made. Replicas that need each other's parameters all make the same number."""
        lanes = [lane for lane in self._lanes if lane.busy]
        if self._pipeline is None:
            own = min(most, max((lane.longest_turns() for lane in lanes), default=0))
            return int(self._mesh.data.max_(torch.tensor([own]), "turns")[0]) if self._together else own
        own = min((lane.steady_turns(fewest=_FEWEST_TURNS) for lane in lanes), default=0)
        if not self._together:
            return min(most, own)
        # Of those that have something to do, the fewest; the others go along.
        fewest = int(self._mesh.data.max_(torch.tensor([-min(most, own) if own else -most - 1]), "turns")[0])
        return 0 if -fewest > most else -fewest
