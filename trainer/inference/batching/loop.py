"""`RequestLoop`: requests of an inbox, continued on all ranks of a mesh.

Ranks that run one model together are a replica. All ranks make the same rounds:

    exchange    rank 0 tells what has come into the inbox, every replica what it has made; all know of all requests
    deal        requests go to the replica with the fewest open tokens, the costliest first
    turns       each replica makes forwards of its own lanes; as many as all agree on where they need each other's parameters

A pipeline has as many lanes as stages, so that none of them waits; other layouts have one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from zeromesh.mesh.process_mesh import Mesh
from zeromesh.options import Placement
from zeromesh.pipeline.pipeline import Pipeline
from zeromesh.trainer.inference.batching.lane import Lane, LaneLimits, LaneModel, LaneWork, Turn
from zeromesh.trainer.inference.requests import Inbox, News, Progress, Request
from zeromesh.zero.engine import ZeroEngine

_MOST_TURNS = 16
"""Turns between exchanges where nobody waits for single tokens."""
_FEWEST_TURNS = 4
"""In a pipeline a run of fewer turns would fill and empty it more often than it is worth."""
_IDLE_SECONDS = 0.5
"""The longest time that rank 0 waits for requests before the ranks exchange again."""


@dataclass(slots=True)
class _Share:
    """The open requests of a replica, as all ranks know them."""

    open: dict[int, int] = field(default_factory=dict)
    """The most tokens of each request, by its number, that are still to be computed."""

    @property
    def tokens(self) -> int:
        return sum(self.open.values())

    def take(self, made: Progress) -> None:
        """Count what was made of a request, if it is one of these."""
        if made.number in self.open:
            self.open[made.number] -= len(made.tokens)
            if made.finish is not None:
                del self.open[made.number]


class RequestLoop:
    """Continues the requests of an inbox. All ranks make one, and call `run` together.

    Args:
        limits: of a replica, whatever lanes it has.
        call: the model's own call.
        cost_of: the tokens of a request, prompt included, at most.
        on_progress: called on every rank with what was made of requests, wherever that was.
    """

    def __init__(
        self,
        mesh: Mesh,
        engine: ZeroEngine,
        pipeline: Pipeline | None,
        *,
        model: LaneModel,
        limits: LaneLimits,
        call: Callable[..., Any],
        cost_of: Callable[[Request], int],
        on_progress: Callable[[Sequence[Progress]], object] = lambda progress: None,
    ) -> None:
        self._mesh, self._engine, self._call, self._cost_of = mesh, engine, call, cost_of
        self._on_progress = on_progress
        self._rows = limits.rows
        self._staged = pipeline.turns(call) if pipeline is not None else None
        lanes = mesh.pipeline.size if self._staged is not None else 1
        each = LaneLimits(
            rows=-(-limits.rows // lanes),
            prefill_tokens=limits.prefill_tokens,
            cache_tokens=limits.cache_tokens // lanes,
        )
        self._lanes = [Lane(model, each, keeps_rows=self._staged is not None) for _ in range(lanes)]
        self._shares = [_Share() for _ in range(mesh.data.size)]
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

    def work(self) -> LaneWork:
        """Return the work of all lanes of this rank."""
        lanes = [lane.work for lane in self._lanes]
        return LaneWork(
            forwards=sum(lane.forwards for lane in lanes),
            tokens=sum(lane.tokens for lane in lanes),
            padded_tokens=sum(lane.padded_tokens for lane in lanes),
        )

    @property
    def _busy(self) -> bool:
        return bool(self._queue) or any(share.open for share in self._shares)

    def _exchange(self, inbox: Inbox | None) -> News:
        """Tell all ranks what is new, and what was made of requests."""
        mesh = self._mesh
        made = [each for lane in self._lanes for each in lane.progress()]
        own: dict[str, Any] = {}
        if inbox is not None:
            own["news"] = asdict(inbox.take(wait_seconds=0.0 if self._busy else _IDLE_SECONDS))
        if mesh.tensor.index == 0 and mesh.pipeline.index == 0:
            own["made"] = [asdict(each) for each in made]
        rows = mesh.world.gather_json(own, "requests and what was made of them")
        progress = [Progress(**each) for row in rows for each in row.get("made", ())]
        for each in progress:
            for share in self._shares:
                share.take(each)
        self._on_progress(progress)
        if inbox is not None:
            inbox.deliver(progress)
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
        self._on_progress(nothing)
        if inbox is not None:
            inbox.deliver(nothing)

    def _deal(self) -> None:
        """Hand out the queue in its order, each request to the replica with the fewest open tokens. Where there are several, none
        gets many more than it can run, since how much the others are done with shows only later."""
        most = self._rows + -(-self._rows // 4) if len(self._shares) > 1 else sys.maxsize
        while self._queue:
            takers = [index for index, share in enumerate(self._shares) if len(share.open) < most]
            if not takers:
                return
            taker = min(takers, key=lambda index: (self._shares[index].tokens, index))
            request = self._queue.pop(0)
            self._shares[taker].open[request.number] = self._cost_of(request)
            if taker == self._mesh.data_index:
                min(self._lanes, key=lambda lane: lane.open_tokens).add(request)

    def _turns(self, most: int, *, eager: bool) -> None:
        """Make up to so many turns before ranks hear of each other again."""
        for lane in self._lanes:
            lane.settle()
            lane.plan(eager=eager)
        turns = self._agreed_turns(most)
        if self._staged is not None:
            if turns:
                with self._engine.evaluation():
                    self._staged.run(self._lanes, turns)
            for lane in self._lanes:
                lane.settle()
            return
        (lane,) = self._lanes
        for _ in range(turns):
            if lane.plan(eager=eager) is Turn.IDLE and not self._together:
                return
            inputs = lane.inputs()
            with self._engine.evaluation():
                logits = self._call(**inputs).logits[:, -1]
            lane.take(lane.choose(logits))

    def _agreed_turns(self, most: int) -> int:
        """Return how many turns are made. Replicas that need each other's parameters all make the same number."""
        lanes = [lane for lane in self._lanes if lane.busy]
        if self._staged is None:
            own = min(most, max((lane.longest_turns() for lane in lanes), default=0))
            return int(self._mesh.data.max_(torch.tensor([own]), "turns")[0]) if self._together else own
        own = min((lane.steady_turns(fewest=_FEWEST_TURNS) for lane in lanes), default=0)
        if not self._together:
            return min(most, own)
        # Of those that have something to do, the fewest; the others go along.
        fewest = int(self._mesh.data.max_(torch.tensor([-min(most, own) if own else -most - 1]), "turns")[0])
        return 0 if -fewest > most else -fewest
