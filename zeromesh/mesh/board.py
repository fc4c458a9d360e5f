"""The board: where every rank of a run says what it is doing, so that a wait can name whom it waits for.

One row of 64-bit words per rank: its process id, a progress counter, the step, what it is doing and to which unit,
and a ring of the events it has gone through. Ranks of one host share the rows as memory (`SharedBoard`, a few hundred
nanoseconds an entry); ranks of several hosts publish theirs in the rendezvous store (`StoreBoard`, once in a while
and when they fail).
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from zeromesh.mesh.segments import Segment

HISTORY = 256
STREAMS = 2
"""Sequences of events that are each in one order on all ranks: gathers, and reductions."""
_MESSAGE_BYTES = 1024
_PID, _PROGRESS, _STEP, _ACTIVITY, _UNIT, _FAILED = range(6)
_EVENTS_AT = 8
_HISTORY_AT = 16
_MESSAGE_AT = _HISTORY_AT + STREAMS * HISTORY
ROW_WORDS = _MESSAGE_AT + _MESSAGE_BYTES // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one rank last said of itself."""

    pid: int
    progress: int
    step: int
    """Counted from 1; 0 before the first."""
    activity: int
    unit: int
    failure: str
    """Why it failed; empty while it has not."""


class Board(Protocol):
    """Rows of all ranks; a rank writes its own and reads the others'."""

    def post(self, step: int, activity: int, unit: int) -> None:
        """Say what this rank does now, and move its progress counter."""
        ...

    def event(self, stream: int, code: int) -> int:
        """Append an event to a stream that all ranks go through in one order; returns its number."""
        ...

    def event_of(self, rank: int, stream: int, number: int) -> int | None:
        """Event `number` of a rank, or None when it has not got there, or the board no longer knows."""
        ...

    def reached(self, rank: int, stream: int, number: int) -> bool:
        """Whether a rank has gone through event `number`."""
        ...

    def publish(self) -> None:
        """Make this rank's row visible to all now."""
        ...

    def row(self, rank: int) -> Row: ...

    def progress(self, rank: int) -> int: ...

    def failed(self, rank: int) -> bool: ...

    def fail(self, message: str) -> None:
        """Tell the others why this rank stops."""
        ...

    def alive(self, rank: int) -> bool:
        """False when the rank's process is known to be gone."""
        ...

    def silent_seconds(self, rank: int) -> float:
        """For how long nothing has been heard of a rank, as far as this rank has looked."""
        ...

    def close(self) -> None: ...


class SharedBoard:
    """The board of ranks that share one host."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment = segment
        self._words = segment.words()
        self._bytes = segment.view()
        self._rank = rank
        self._base = rank * ROW_WORDS
        self._words[self._base + _PID] = os.getpid()

    @staticmethod
    def nbytes(world_size: int) -> int:
        return world_size * ROW_WORDS * 8

    def post(self, step: int, activity: int, unit: int) -> None:
        words, base = self._words, self._base
        words[base + _STEP] = step
        words[base + _ACTIVITY] = activity
        words[base + _UNIT] = unit
        words[base + _PROGRESS] += 1

    def event(self, stream: int, code: int) -> int:
        words, base = self._words, self._base
        number = words[base + _EVENTS_AT + stream]
        words[base + _HISTORY_AT + stream * HISTORY + number % HISTORY] = code
        words[base + _EVENTS_AT + stream] = number + 1
        words[base + _PROGRESS] += 1
        return number

    def event_of(self, rank: int, stream: int, number: int) -> int | None:
        base = rank * ROW_WORDS
        written = self._words[base + _EVENTS_AT + stream]
        if not written - HISTORY < number < written:
            return None
        return self._words[base + _HISTORY_AT + stream * HISTORY + number % HISTORY]

    def reached(self, rank: int, stream: int, number: int) -> bool:
        return self._words[rank * ROW_WORDS + _EVENTS_AT + stream] > number

    def publish(self) -> None:
        """Nothing to do: the row is memory that all ranks see."""

    def row(self, rank: int) -> Row:
        words, base = self._words, rank * ROW_WORDS
        start = (base + _MESSAGE_AT) * 8
        failure = ""
        if words[base + _FAILED]:
            failure = bytes(self._bytes[start : start + _MESSAGE_BYTES]).rstrip(b"\0").decode("utf-8", "replace")
        return Row(
            pid=words[base + _PID],
            progress=words[base + _PROGRESS],
            step=words[base + _STEP],
            activity=words[base + _ACTIVITY],
            unit=words[base + _UNIT],
            failure=failure,
        )

    def progress(self, rank: int) -> int:
        return self._words[rank * ROW_WORDS + _PROGRESS]

    def failed(self, rank: int) -> bool:
        return bool(self._words[rank * ROW_WORDS + _FAILED])

    def fail(self, message: str) -> None:
        if self._words[self._base + _FAILED]:
            return
        text = message.encode()[: _MESSAGE_BYTES - 1]
        start = (self._base + _MESSAGE_AT) * 8
        self._bytes[start : start + len(text)] = text
        self._words[self._base + _FAILED] = 1

    def alive(self, rank: int) -> bool:
        return process_runs(self._words[rank * ROW_WORDS + _PID])

    def silent_seconds(self, rank: int) -> float:
        return 0.0 if self.alive(rank) else float("inf")

    def close(self) -> None:
        self._segment.close()


def process_runs(pid: int) -> bool:
    """Whether process `pid` of this host exists and is no zombie. A pid of 0 is a rank that has not said its own yet."""
    if pid == 0:
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # The name in parentheses may hold anything; the state follows the last one.
            return stat.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


class Store(Protocol):
    """What the board uses of a rendezvous store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def clone(self) -> Store:
        """Another connection to the same store, for another thread."""
        ...


class StoreBoard:
    """The board of ranks on several hosts, over the rendezvous store.

    A daemon thread publishes this rank's row twice a second, so steps never wait for the store. Reading a row asks
    the store, which only a rank that has already waited for a while does. The store is usually kept by rank 0: when
    it cannot be reached, rank 0 is taken to be gone, and of all rows the last ones seen count.
    """

    PERIOD_SECONDS = 0.5

    def __init__(self, store: Store, publisher: Store, rank: int, stale_seconds: float) -> None:
        self._store = store
        self._publisher = publisher
        self._rank = rank
        self._stale_seconds = stale_seconds
        self._row = [os.getpid()] + [0] * (_EVENTS_AT + STREAMS - 1)
        self._history = [0] * (STREAMS * HISTORY)
        self._failure = ""
        self._seen: dict[int, tuple[int, float]] = {}
        self._rows: dict[int, str] = {}
        self._store_is_gone = False
        self._beat = 0
        self._closed = threading.Event()
        self.publish()
        self._thread = threading.Thread(target=self._run, name="zeromesh-board", daemon=True)
        self._thread.start()

    def post(self, step: int, activity: int, unit: int) -> None:
        self._row[_STEP], self._row[_ACTIVITY], self._row[_UNIT] = step, activity, unit
        self._row[_PROGRESS] += 1

    def event(self, stream: int, code: int) -> int:
        number = self._row[_EVENTS_AT + stream]
        self._history[stream * HISTORY + number % HISTORY] = code
        self._row[_EVENTS_AT + stream] = number + 1
        self._row[_PROGRESS] += 1
        return number

    def event_of(self, rank: int, stream: int, number: int) -> int | None:
        numbers, history, _ = self._read(rank)
        written = numbers[_EVENTS_AT + stream]
        known = written - HISTORY < number < written
        return history[stream * HISTORY + number % HISTORY] if known else None

    def reached(self, rank: int, stream: int, number: int) -> bool:
        return self._read(rank)[0][_EVENTS_AT + stream] > number

    def row(self, rank: int) -> Row:
        numbers, _, failure = self._read(rank)
        return Row(
            pid=numbers[_PID],
            progress=numbers[_PROGRESS],
            step=numbers[_STEP],
            activity=numbers[_ACTIVITY],
            unit=numbers[_UNIT],
            failure=failure,
        )

    def progress(self, rank: int) -> int:
        return self._read(rank)[0][_PROGRESS]

    def failed(self, rank: int) -> bool:
        return bool(self._read(rank)[0][_FAILED])

    def fail(self, message: str) -> None:
        if not self._row[_FAILED]:
            self._failure = message[:_MESSAGE_BYTES]
            self._row[_FAILED] = 1
            try:
                self.publish()
            except RuntimeError:
                self._store_is_gone = True  # Nobody can be told; the failure itself matters more.

    def alive(self, rank: int) -> bool:
        silent = self.silent_seconds(rank)
        return silent < self._stale_seconds and not (rank == 0 and self._store_is_gone)

    def silent_seconds(self, rank: int) -> float:
        beat = int(self._text(rank).split("|", 1)[0])
        now = time.monotonic()
        last, since = self._seen.get(rank, (-1, now))
        if beat != last:
            self._seen[rank] = (beat, now)
            return 0.0
        return now - since

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2 * self.PERIOD_SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(self.PERIOD_SECONDS):
            try:
                self.publish()
                self._rows[0] = self._publisher.get(self._key(0)).decode()
            except RuntimeError:
                self._store_is_gone = True
                return  # This run is ending, and waits will say so.

    def publish(self) -> None:
        self._beat += 1
        numbers = ",".join(map(str, self._row))
        history = ",".join(map(str, self._history))
        self._publisher.set(self._key(self._rank), f"{self._beat}|{numbers}|{history}|{self._failure}")

    def _read(self, rank: int) -> tuple[list[int], list[int], str]:
        if rank == self._rank:
            return self._row, self._history, self._failure
        _, numbers, history, failure = self._text(rank).split("|", 3)
        return [int(n) for n in numbers.split(",")], [int(n) for n in history.split(",")], failure

    def _text(self, rank: int) -> str:
        """What a rank has published; the last that was seen of it when the store cannot be reached."""
        try:
            self._rows[rank] = self._store.get(self._key(rank)).decode()
        except RuntimeError:
            self._store_is_gone = True
        return self._rows.get(rank, _NO_ROW)

    def _key(self, rank: int) -> str:
        return f"zeromesh/board/{rank}"


_NO_ROW = "0|" + ",".join(["0"] * (_EVENTS_AT + STREAMS)) + "|" + ",".join(["0"] * (STREAMS * HISTORY)) + "|"
