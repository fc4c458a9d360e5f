"""Requests to a running generator: what is asked, how it goes on, and the inbox through which threads and ranks hand them over.

inbox = Inbox(limit=64)
threading.Thread(target=serve_http, args=(inbox,)).start()
generator.serve(inbox)                  # on all ranks; returns after inbox.stop()

Nothing here loads torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from zeromesh.errors import PhaseError, QueueFullError

Finish = Literal["stop", "length", "cancelled", "not_finite"]
"""The reason why a text ended: an end token came, it reached its maximal length, its request was cancelled, or the logits for its
next token were NaN or infinite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt that a model is to go on from."""

    number: int
    """Counts requests in the order in which they came."""
    tokens: Sequence[int]
    """The prompt."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of transformers' `GenerationConfig`, on top of the model's own, as JSON has them."""
    seed: int = 0
    """Seeds the sampling of this request, which does not depend on the requests beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The tokens that were generated for a request since the progress before."""

    number: int
    tokens: list[int]
    logprobs: list[float] | None
    """The logarithm of the probability that the model gives each token, before temperature and other processors. None for ways of
    searching that choose tokens later than they see them, such as beams."""
    finish: Finish | None = None
    """None: more is to come."""


OnProgress = Callable[[Progress], object]
"""Called on the thread of the generator; it returns at once and raises nothing."""


@dataclass(kw_only=True, slots=True)
class News:
    """The requests and cancellations that have come into an inbox since it was last read."""

    requests: list[Request] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    streams: bool = False
    """True if clients want each token as soon as it is generated."""
    stopping: bool = False
    """True if no more requests will come."""


class Inbox:
    """Requests from any thread to the generator of rank 0, and progress back to those who asked.

    Args:
        limit: requests that may be open, waiting or generated, at a time; None: any number.
        streams: whether progress is wanted after every token, which costs an exchange between the ranks each time.
    """

    def __init__(self, *, limit: int | None = None, streams: bool = True) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._news = News(streams=streams)
        self._open: dict[int, OnProgress] = {}
        self._count = 0

    def __len__(self) -> int:
        """The number of requests that are open."""
        with self._changed:
            return len(self._open)

    def submit(
        self, tokens: Sequence[int], on_progress: OnProgress, *, fields: Mapping[str, Any] | None = None, seed: int = 0
    ) -> int:
        """Ask for a continuation of a prompt, which `Generator.check_request` has found good; returns the request's number.

        Raises:
            QueueFullError: where `limit` requests are open.
            PhaseError: after `stop`.
        """
        with self._changed:
            self.require_room()
            number, self._count = self._count, self._count + 1
            self._open[number] = on_progress
            self._news.requests.append(Request(number=number, tokens=tokens, fields=fields or {}, seed=seed))
            self._changed.notify_all()
        return number

    def require_room(self) -> None:
        """Raise what `submit` would raise for any request."""
        with self._changed:
            if self._news.stopping:
                raise PhaseError("the generator is stopping and takes no more requests")
            if self._limit is not None and len(self._open) >= self._limit:
                raise QueueFullError(f"{len(self._open)} requests are open, as many as are allowed; try again later")

    def cancel(self, number: int) -> None:
        """Have a request end with what it has so far; one that has ended is left alone."""
        with self._changed:
            if number in self._open:
                self._news.cancelled.append(number)
                self._changed.notify_all()

    def stop(self, *, abandon: bool = False) -> None:
        """Take no more requests; the generator returns when the open ones have ended. `abandon`: end these at once, too."""
        with self._changed:
            self._news.stopping = True
            if abandon:
                self._news.cancelled.extend(self._open)
            self._changed.notify_all()

    def take(self, *, wait_seconds: float = 0.0) -> News:
        """Return what has come since the last call, and wait up to `wait_seconds` for it if there is nothing."""
        with self._changed:
            news = self._news
            if wait_seconds:
                self._changed.wait_for(lambda: news.requests or news.cancelled or news.stopping, wait_seconds)
            self._news = News(streams=news.streams, stopping=news.stopping)
        return news

    def deliver(self, progresses: Iterable[Progress]) -> None:
        """Hand progress to those who asked."""
        for each in progresses:
            with self._changed:
                found = self._open.get(each.number) if each.finish is None else self._open.pop(each.number, None)
            if found is not None:
                found(each)
