"""Requests to a running generator, their progress, and the inbox that passes both between threads and ranks, without torch.

inbox = Inbox(limit=64)
threading.Thread(target=serve_http, args=(inbox,)).start()
generator.serve(inbox)                  # on all ranks; returns after inbox.stop()
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from zeromesh.errors import PhaseError, QueueFullError

Finish = Literal["stop", "length", "cancelled", "not_finite"]
"""The reason why generation ended: an end token, the maximal length, a cancelled request, or NaN or infinite logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    number: int  # The sequence number of the request, in the order of submission.
    tokens: Sequence[int]  # The token ids of the prompt.
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of transformers' `GenerationConfig` that override the model's own, as JSON values."""
    seed: int = 0  # The seed of this request's sampling, which does not depend on the other requests of the batch.
    adapter: str | None = None  # Its name in the model, or `__base__` for the model without one; None: the active one.


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The tokens that were generated for a request since the last progress."""

    number: int
    tokens: list[int]
    logprobs: list[float] | None  # The log-probability of each token, as in `Generated`.
    finish: Finish | None = None  # The reason why generation ended; None: it continues.


Deliver = Callable[[Sequence[Progress]], object]
OnProgress = Callable[[Progress], object]  # Called on the generator's thread: returns at once, and raises nothing.


@dataclass(kw_only=True, slots=True)
class News:
    """The requests and cancellations that an inbox has received since the last read."""

    requests: list[Request] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    streams: bool = False  # True if clients stream single tokens, at the cost of an exchange between the ranks for each.
    stopping: bool = False  # True if no more requests will come.


class Inbox:
    """Passes requests from any thread to the generator of rank 0, and progress back; `limit` may be open at a time (None: any)."""

    def __init__(self, *, limit: int | None = None) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._news = News(streams=True)
        self._open: dict[int, OnProgress] = {}
        self._count = 0

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "Inbox":
        """Return an inbox with these requests, which takes no more."""
        inbox = cls()
        inbox._news = News(requests=list(requests), stopping=True)
        return inbox

    def __len__(self) -> int:
        with self._changed:
            return len(self._open)

    def submit(self, tokens: Sequence[int], on_progress: OnProgress, **options: Any) -> int:
        """Submit a prompt that `Generator.check_request` has accepted, with `options` of a `Request`; returns the request's number.
        Raises `QueueFullError` where `limit` requests are open, and `PhaseError` after `stop`."""
        with self._changed:
            self.require_room()
            request = Request(number=self._count, tokens=tokens, **options)
            self._open[self._count], self._count = on_progress, self._count + 1
            self._news.requests.append(request)
            self._changed.notify_all()
        return request.number

    def require_room(self) -> None:
        """Raise the errors that `submit` raises for any request."""
        with self._changed:
            if self._news.stopping:
                raise PhaseError("the generator is stopping and takes no more requests")
            if self._limit is not None and len(self._open) >= self._limit:
                raise QueueFullError(f"{len(self._open)} requests are open, as many as are allowed; try again later")

    def cancel(self, number: int) -> None:
        """End a request with the tokens so far; one that has ended is ignored."""
        with self._changed:
            if number in self._open:
                self._news.cancelled.append(number)
                self._changed.notify_all()

    def stop(self, *, abandon: bool = False) -> None:
        """Refuse new requests; the generator returns when the open ones have ended. `abandon` cancels these at once."""
        with self._changed:
            self._news.stopping = True
            if abandon:
                self._news.cancelled.extend(self._open)
            self._changed.notify_all()

    def take(self, *, wait_seconds: float = 0.0) -> News:
        """Return the news since the last call, and wait up to `wait_seconds` for some if there are none."""
        with self._changed:
            news = self._news
            if wait_seconds:
                self._changed.wait_for(lambda: news.requests or news.cancelled or news.stopping, wait_seconds)
            self._news = News(streams=news.streams, stopping=news.stopping)
        return news

    def deliver(self, progresses: Iterable[Progress]) -> None:
        for each in progresses:
            with self._changed:
                number, ended = each.number, each.finish is not None
                on_progress = self._open.pop(number, None) if ended else self._open.get(number)
            if on_progress is not None:
                on_progress(each)
