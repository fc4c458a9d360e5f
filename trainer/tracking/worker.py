"""`Sender`: hands rows to one tracker, in a thread of its own, so that it holds up neither training nor other trackers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from zeromesh.trainer.config.redact import Redaction
from zeromesh.trainer.tracking.backends import Tracker
from zeromesh.trainer.tracking.rows import TrackedRow, missed_rows

HAS_ALL = "metrics.jsonl has every step"


class Sender:
    """Sends the rows of one tracker. The training thread calls the public methods, and waits in `ended` alone."""

    def __init__(self, tracker: Tracker, redaction: Redaction, capacity: int) -> None:
        """At most `capacity` rows wait for the tracker; more are counted, and left out."""
        self.name = tracker.name
        self._tracker = tracker
        self._redaction = redaction
        self._capacity = capacity
        self._changed = threading.Condition()
        self._rows: deque[TrackedRow] = deque()
        self._closed = False
        self._lost = 0
        self._warnings: deque[str] = deque()
        self._thread = threading.Thread(target=self._work, name=f"tracking by {tracker.name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def put(self, row: TrackedRow) -> None:
        """Send a row when its turn comes, unless the tracker has failed."""
        with self._changed:
            if not self._thread.is_alive():
                return
            if len(self._rows) >= self._capacity:
                self._lost += 1
                return
            self._rows.append(row)
            self._changed.notify()

    def close(self) -> None:
        """No row follows: end the tracker after those that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def ended(self, end: float) -> bool:
        """Wait until `end`, in monotonic time, for the tracker; whether it has ended."""
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def abandon(self) -> None:
        """Let go of a tracker that does not answer. What it says then is not news."""
        self._warnings = deque(maxlen=0)
        with contextlib.suppress(Exception):
            self._tracker.abandon()

    def news(self) -> Iterator[str]:
        """What there is to tell, once."""
        while self._warnings:
            yield self._warnings.popleft()
        if self._lost and self._closed:
            yield f"WARNING: tracking by {self.name} was too slow for {self._lost} rows, which it misses; {HAS_ALL}"
            self._lost = 0

    # In the thread

    def _work(self) -> None:
        """The life of the tracker."""
        tracker, last = self._tracker, 0
        if not self._try("did not begin", self._begin):
            return
        while (row := self._next()) is not None:
            if not tracker.sent.covers(row) and not self._try(f"ended after step {last}", tracker.log, row):
                return
            last = row.step
        self._try("did not end well", tracker.finish)

    def _begin(self) -> None:
        """Begin, with what an earlier process did not get as far as to send."""
        self._tracker.start()
        run = self._tracker.run
        missed = list(missed_rows(run.directory, self._tracker.sent, run.step))
        with self._changed:
            self._rows.extendleft(reversed(missed))

    def _next(self) -> TrackedRow | None:
        """The next row, when there is one; None: no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._closed)
            return self._rows.popleft() if self._rows else None

    def _try(self, what: str, call: Callable[..., None], *arguments: TrackedRow) -> bool:
        """Whether a call went well. Whatever a tracker's library raises, training goes on without it."""
        try:
            call(*arguments)
        except BaseException as error:  # noqa: BLE001 - other people's code, some of which exits; it must not end a run
            reason = describe_error(error, self._redaction)
            self._warnings.append(f"WARNING: tracking by {self.name} {what}: {reason}. Training goes on; {HAS_ALL}")
            with contextlib.suppress(Exception):
                self._tracker.give_up(error)
            return False
        return True


def describe_error(error: BaseException, redaction: Redaction) -> str:
    """An error's type and the first line of its message, without secrets."""
    line = redaction.text(str(error).strip()).partition("\n")[0].rstrip(". ")
    return f"{type(error).__name__}: {line}".removesuffix(": ")
