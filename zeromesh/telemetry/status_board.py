"""The board: where every rank of a run says what it is doing, so that a wait can name whom it waits for.

One row of 64-bit words per rank: its process id, a progress counter, what it is doing to which unit at which step, and a ring of
the events it has gone through; and its notes, short texts such as why it failed. Ranks of one host share the rows as memory
(`SharedBoard`, a few hundred nanoseconds an entry); ranks of several hosts publish theirs in the rendezvous store (`StoreBoard`,
once in a while and when they fail).

What belongs together is read together: step, activity and unit are one word, a note has a stamp that is 0 while it is
written, and an event is looked at again after it was read. The order of stores is that of x86.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from zeromesh.offload.memory.shared_segment import SharedSegment

HISTORY = 256
STREAMS = 3
"""Sequences of events that are each in one order on all ranks: gathers, reductions, and calls of methods."""
_PID, _PROGRESS, _STATE = range(3)
_STAMPS_AT = 3
_EVENTS_AT = 8
_HISTORY_AT = 16
_NOTES_AT = _HISTORY_AT + STREAMS * HISTORY
UNIT_BITS, _ACTIVITY_BITS = 28, 8
STEP_SHIFT = UNIT_BITS + _ACTIVITY_BITS
"""What a rank is doing is one word: the step, below it the activity, and below that the unit plus 1, where 0 is no unit."""


class RankNote(IntEnum):
    """The notes of a rank. Each has a stamp, which says whether it is there, and of what it is."""

    FAILURE = 0
    """Why this rank stops."""
    CALL = 1
    """The innermost method in which it is that all ranks call; the stamp is the number of the call, counted from 1."""
    LEFT = 2
    """The error with which it has left a call, whose number is the stamp."""
    DISK = 3
    """What it has been waiting for a disk to do."""


_NOTE_BYTES = (1024, 256, 512, 512)
_NOTE_STARTS = tuple(_NOTES_AT * 8 + sum(_NOTE_BYTES[:note]) for note in RankNote)
ROW_WORDS = _NOTES_AT + sum(_NOTE_BYTES) // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """What one rank last said of itself."""

    pid: int
    progress: int
    step: int
    """Counted from 1; 0 before the first."""
    activity: int
    unit: int
    failure: str
    """Why it failed; empty while it has not."""

    @classmethod
    def of(cls, pid: int, progress: int, state: int, failure: str) -> RankStatus:
        """The row whose state is the word `state`."""
        rest, unit = divmod(state, 1 << UNIT_BITS)
        step, activity = divmod(rest, 1 << _ACTIVITY_BITS)
        return cls(pid=pid, progress=progress, step=step, activity=activity, unit=unit - 1, failure=failure)


class StatusBoard(Protocol):
    """Rows of all ranks; a rank writes its own and reads the others'."""

    def post(self, state: int) -> None:
        """Say what this rank does now, as one word (see `STEP_SHIFT`), and move its progress counter."""
        ...

    def beat(self) -> None:
        """Move this rank's progress counter."""
        ...

    def event(self, stream: int, code: int, state: int) -> int:
        """Append an event to a stream that all ranks go through in one order, and post `state`; returns the event's number."""
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

    def row(self, rank: int) -> RankStatus: ...

    def progress(self, rank: int) -> int: ...

    def failed(self, rank: int) -> bool: ...

    def fail(self, message: str) -> None:
        """Tell the others why this rank stops; the first reason stays."""
        ...

    def write(self, note: RankNote, stamp: int, text: str = "") -> None:
        """Replace a note of this rank; a stamp of 0 takes it away. One thread writes a kind of note."""
        ...

    def read(self, rank: int, note: RankNote) -> tuple[int, str]:
        """The stamp and the text of a rank's note; (0, "") where there is none."""
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

    def __init__(self, segment: SharedSegment, rank: int) -> None:
        self._segment = segment
        self._words = segment.words()
        self._bytes = segment.view()
        self._rank = rank
        self._base = rank * ROW_WORDS
        self._words[self._base + _PID] = os.getpid()

    @staticmethod
    def nbytes(world_size: int) -> int:
        return world_size * ROW_WORDS * 8

    def post(self, state: int) -> None:
        words, base = self._words, self._base
        words[base + _STATE] = state
        words[base + _PROGRESS] += 1

    def beat(self) -> None:
        self._words[self._base + _PROGRESS] += 1

    def event(self, stream: int, code: int, state: int) -> int:
        words, base = self._words, self._base
        counter = base + _EVENTS_AT + stream
        number = words[counter]
        words[base + _STATE] = state
        words[base + _HISTORY_AT + stream * HISTORY + number % HISTORY] = code
        words[counter] = number + 1
        words[base + _PROGRESS] += 1
        return number

    def event_of(self, rank: int, stream: int, number: int) -> int | None:
        words, base = self._words, rank * ROW_WORDS
        if number >= words[base + _EVENTS_AT + stream]:
            return None
        word = words[base + _HISTORY_AT + stream * HISTORY + number % HISTORY]
        # The writer may have come round to this place of the ring while it was read.
        return word if number > words[base + _EVENTS_AT + stream] - HISTORY else None

    def reached(self, rank: int, stream: int, number: int) -> bool:
        return self._words[rank * ROW_WORDS + _EVENTS_AT + stream] > number

    def publish(self) -> None:
        """Nothing to do: the row is memory that all ranks see."""

    def row(self, rank: int) -> RankStatus:
        words, base = self._words, rank * ROW_WORDS
        failure = self.read(rank, RankNote.FAILURE)[1]
        return RankStatus.of(words[base + _PID], words[base + _PROGRESS], words[base + _STATE], failure)

    def progress(self, rank: int) -> int:
        return self._words[rank * ROW_WORDS + _PROGRESS]

    def failed(self, rank: int) -> bool:
        return bool(self._words[rank * ROW_WORDS + _STAMPS_AT + RankNote.FAILURE])

    def fail(self, message: str) -> None:
        if not self.failed(self._rank):
            self.write(RankNote.FAILURE, 1, message)

    def write(self, note: RankNote, stamp: int, text: str = "") -> None:
        at, start = self._base + _STAMPS_AT + note, self._base * 8 + _NOTE_STARTS[note]
        data = text.encode(errors="replace")[: _NOTE_BYTES[note] - 1] + b"\0"
        self._words[at] = 0
        self._bytes[start : start + len(data)] = data
        self._words[at] = stamp

    def read(self, rank: int, note: RankNote) -> tuple[int, str]:
        at, start = rank * ROW_WORDS + _STAMPS_AT + note, rank * ROW_WORDS * 8 + _NOTE_STARTS[note]
        while stamp := self._words[at]:
            data = bytes(self._bytes[start : start + _NOTE_BYTES[note]])
            if self._words[at] == stamp:
                return stamp, data.partition(b"\0")[0].decode("utf-8", "replace")
        return 0, ""

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
        self._notes = [""] * len(RankNote)
        self._publishing = threading.Lock()
        self._seen: dict[int, tuple[int, float]] = {}
        self._rows: dict[int, str] = {}
        self._store_is_gone = False
        self._beat = 0
        self._closed = threading.Event()
        self.publish()
        self._thread = threading.Thread(target=self._run, name="zeromesh-board", daemon=True)
        self._thread.start()

    def post(self, state: int) -> None:
        self._row[_STATE] = state
        self._row[_PROGRESS] += 1

    def beat(self) -> None:
        self._row[_PROGRESS] += 1

    def event(self, stream: int, code: int, state: int) -> int:
        self._row[_STATE] = state
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

    def row(self, rank: int) -> RankStatus:
        numbers, _, notes = self._read(rank)
        return RankStatus.of(numbers[_PID], numbers[_PROGRESS], numbers[_STATE], notes[RankNote.FAILURE])

    def progress(self, rank: int) -> int:
        return self._read(rank)[0][_PROGRESS]

    def failed(self, rank: int) -> bool:
        return bool(self.read(rank, RankNote.FAILURE)[0])

    def fail(self, message: str) -> None:
        if self._row[_STAMPS_AT + RankNote.FAILURE]:
            return
        self.write(RankNote.FAILURE, 1, message)
        try:
            self.publish()
        except RuntimeError:
            self._store_is_gone = True  # Nobody can be told; the failure itself matters more.

    def write(self, note: RankNote, stamp: int, text: str = "") -> None:
        with self._publishing:
            self._row[_STAMPS_AT + note], self._notes[note] = stamp, text[: _NOTE_BYTES[note]]

    def read(self, rank: int, note: RankNote) -> tuple[int, str]:
        numbers, _, notes = self._read(rank)
        stamp = numbers[_STAMPS_AT + note]
        return stamp, notes[note] if stamp else ""

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
        with self._publishing:
            self._beat += 1
            row, history = list(self._row), list(self._history)
            while row[_EVENTS_AT:] != self._row[_EVENTS_AT:]:  # Events go on meanwhile.
                row, history = list(self._row), list(self._history)
            numbers, events = (",".join(map(str, each)) for each in (row, history))
            self._publisher.set(self._key(self._rank), f"{self._beat}|{numbers}|{events}|{json.dumps(self._notes)}")

    def _read(self, rank: int) -> tuple[list[int], list[int], list[str]]:
        if rank == self._rank:
            return self._row, self._history, self._notes
        _, numbers, history, notes = self._text(rank).split("|", 3)
        return [int(n) for n in numbers.split(",")], [int(n) for n in history.split(",")], json.loads(notes)

    def _text(self, rank: int) -> str:
        """What a rank has published; the last that was seen of it when the store cannot be reached."""
        try:
            self._rows[rank] = self._store.get(self._key(rank)).decode()
        except RuntimeError:
            self._store_is_gone = True
        return self._rows.get(rank, _NO_ROW)

    def _key(self, rank: int) -> str:
        return f"zeromesh/board/{rank}"


_NO_ROW = "|".join(
    [
        "0",
        *(",".join(["0"] * length) for length in (_EVENTS_AT + STREAMS, STREAMS * HISTORY)),
        json.dumps([""] * len(RankNote)),
    ]
)
