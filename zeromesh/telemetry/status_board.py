"""The present activity of every rank, on a board that all ranks read, and the latest events of this rank, in a ring.

A rank has a row of 64-bit words on the board, and notes, short texts such as its error. Ranks of one host share the rows as memory
(`shared_rows`); those of several hosts publish theirs in the rendezvous store (`StoreBoard`). Reads are consistent: step, activity
and unit are one word, a note has a stamp that is 0 while it is written, and an event is checked again after it was read. This
relies on the store order of x86.

A word of the ring has the layout of `STATE` in a row (step, kind, detail). The kinds below `BEGIN` are activities, with step and
unit; the others have no step, and mostly a name as detail, as in `ring.add(BEGIN | ring.name("data"))`. Times are nanoseconds of
the monotonic clock, which processes of a host share; the header of a ring's file has both clocks, and all ranks record `MEETING`
events together, so that `zeromesh trace` can align rings of hosts."""

import base64
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from zeromesh.environment import process_state
from zeromesh.errors import errors_as
from zeromesh.files import read_whole, write_whole

UNIT_BITS, ACTIVITY_BITS = 28, 8
STEP_SHIFT = UNIT_BITS + ACTIVITY_BITS
"""The lowest bit of the step in the word of a rank's state. Below it are the activity, and the unit plus 1 (0: no unit)."""
DETAIL = (1 << UNIT_BITS) - 1
BEGIN, END, WAIT, WAITED, MEETING, NEW_MICROBATCH = (kind << UNIT_BITS for kind in range(16, 22))
"""The kinds of events besides activities. `BEGIN` and `END` of a span, and `WAIT` for others, have a name as detail; `WAITED` has
the rank that came last plus 1, if known. At a `MEETING` all ranks are at one place. `NEW_MICROBATCH` has the number, from 1."""
TRACE_FOLDER = "trace"  # in a run's directory, with a file `rank-N.ring` of each rank
REQUEST = f"{TRACE_FOLDER}/request"  # in a run's directory: a file whose creation asks all ranks for their rings
NO_ACTIVITY = 0xF0  # bits of an event's kind, of which some are set for events other than activities
EVENTS = 1 << 15
_PAIR = struct.Struct("<qq")
_NAMES = 1 << 16  # that a ring can number
_LONGEST = 1 << 25  # The most bytes of a ring file, unpacked; a larger file was not written by `EventRing`.
HISTORY = 256
STREAMS = 3  # of events, each in the same order on all ranks: gathers, reductions, and method calls
_PID, PROGRESS, STATE, _PUBLISHED, SINCE, MICROBATCH, TRACE_REQUEST, _PUBLISHED_AT = range(8)
"""The words of a row. `SINCE` is the time of the last change of `STATE` and `_PUBLISHED_AT` that of publishing, both of the rank's
own monotonic clock in nanoseconds. `MICROBATCH` counts from 1. `TRACE_REQUEST`, on rank 0 only, is the number of the latest one."""
_STAMPS_AT = 8
_EVENTS_AT = 13
_TOTALS_AT = 16
_HISTORY_AT = 24
_NOTES_AT = _HISTORY_AT + STREAMS * HISTORY
TOTALS = ("data", "compute", "offload", "communication", "between")
"""The categories of the nanoseconds of steps; `between` is the time between steps."""


class Activity(IntEnum):
    """The activity of a rank, as its row on the board states it."""

    IDLE = 0, "between steps"
    FORWARD = 1, "in forward of"
    BACKWARD = 2, "in backward of"
    GATHER = 3, "gathering"
    REDUCE = 4, "reducing gradients of"
    OPTIMIZER = 5, "updating"
    SAVE = 6, "saving the model"
    LOAD = 7, "loading a checkpoint"
    CALL = 8, "waiting for all ranks to make the same call"
    DATA = 9, "waiting for data"
    AGREE = 10, "agreeing with the other ranks on the step"

    phrase: str  # the words for the activity in messages; the name of a unit may follow

    def __new__(cls, number: int, phrase: str = "") -> Self:
        made = int.__new__(cls, number)
        made._value_, made.phrase = number, phrase
        return made


WITHOUT_UNIT = (Activity.IDLE, Activity.SAVE, Activity.LOAD, Activity.CALL, Activity.DATA, Activity.AGREE)


def phrase_of(activity: Activity, unit: int, names: Sequence[str]) -> str:
    """Return the activity in words, with the unit's name from `names` if it concerns a unit."""
    if activity in WITHOUT_UNIT:
        return activity.phrase
    name = names[unit] if 0 <= unit < len(names) else "the run's counters"
    return f"{activity.phrase} {name}"


class RankNote(IntEnum):
    """The notes of a rank. Each has a stamp, 0 where the note is absent, which identifies it."""

    FAILURE = 0
    CALL = 1  # the innermost collective method that the rank is in; the stamp is the number of the call, from 1
    LEFT = 2  # the error with which the rank left a call, whose number is the stamp
    DISK = 3  # the disk operation that the rank waits for
    WAIT = 4
    """The wait that the rank is in: numbers of the late ranks, `|`, and the operation. The stamp is its start, as in `SINCE`."""


_NOTE_BYTES = (1024, 256, 512, 512, 512)
_NOTE_STARTS = tuple(_NOTES_AT * 8 + sum(_NOTE_BYTES[:note]) for note in RankNote)
ROW_WORDS = _NOTES_AT + sum(_NOTE_BYTES) // 8


class RankStatus(NamedTuple):
    """The last status that a rank published; `progress` moves while it works, and `failure` is its error, empty if none."""

    pid: int
    progress: int
    step: int
    activity: int
    unit: int
    microbatch: int
    seconds: float
    failure: str


def new_row() -> memoryview:
    return memoryview(bytearray(ROW_WORDS * 8)).cast("q")


def shared_rows(words: memoryview) -> dict[int, memoryview]:
    """Return views of all ranks' rows in the words of a segment of shared memory, which may be closed already."""
    return {rank: words[rank * ROW_WORDS : (rank + 1) * ROW_WORDS] for rank in range(len(words) // ROW_WORDS)}


class StatusBoard:
    """The rows of all ranks, of which this rank writes `own`."""

    def __init__(self, rows: Mapping[int, memoryview], rank: int) -> None:
        self.own = rows[rank]  # this rank's row: its activity as one word in `STATE`, a counter in `PROGRESS`, and more
        self._rank = rank
        self._row: Callable[[int], memoryview] = rows.__getitem__
        self.own[_PID] = os.getpid()

    def beat(self) -> None:
        self.own[PROGRESS] += 1

    def event(self, stream: int, code: int, state: int, at: int = 0) -> int:
        """Append an event to a stream that has one order on all ranks, and post `state` as of `at`; returns the event's number."""
        own = self.own
        number = own[_EVENTS_AT + stream]
        own[STATE], own[SINCE] = state, at
        own[_HISTORY_AT + stream * HISTORY + number % HISTORY] = code
        own[_EVENTS_AT + stream] = number + 1
        own[PROGRESS] += 1
        return number

    def event_of(self, rank: int, stream: int, number: int) -> int | None:
        """Return event `number` of a rank; None if it has not come yet, or the row no longer holds it."""
        row = self._row(rank)
        if number >= row[_EVENTS_AT + stream]:
            return None
        word: int = row[_HISTORY_AT + stream * HISTORY + number % HISTORY]
        # The writer may have overwritten this place of the ring while it was read.
        return word if number > row[_EVENTS_AT + stream] - HISTORY else None

    def reached(self, rank: int, stream: int, number: int) -> bool:
        return bool(self._row(rank)[_EVENTS_AT + stream] > number)

    def row(self, rank: int) -> RankStatus:
        row = self._row(rank)
        rest, unit = divmod(row[STATE], 1 << UNIT_BITS)
        step, activity = divmod(rest, 1 << ACTIVITY_BITS)
        return RankStatus(
            pid=row[_PID],
            progress=row[PROGRESS],
            step=step,
            activity=activity,
            unit=unit - 1,
            microbatch=row[MICROBATCH],
            seconds=self.seconds_since(rank, row[SINCE]),
            failure=self.read(rank, RankNote.FAILURE)[1],
        )

    def seconds_since(self, rank: int, moment: int) -> float:
        """Return the seconds since `moment`, in nanoseconds of the clock of `rank`'s host; 0 if `moment` is 0."""
        published_at = self._row(rank)[_PUBLISHED_AT]  # It is 0 on boards in shared memory.
        elapsed = (published_at or time.monotonic_ns()) - moment
        return (elapsed / 1e9 + (self.silent_seconds(rank) if published_at else 0.0)) if moment else 0.0

    def count_step(self, nanoseconds: Sequence[int]) -> None:
        """Add a step and its nanoseconds, in the order of `TOTALS`."""
        for place, value in enumerate((1, *nanoseconds), start=_TOTALS_AT):
            self.own[place] += value

    def totals(self, rank: int) -> tuple[int, ...]:
        """Return a rank's number of steps and their nanoseconds, in the order of `TOTALS`."""
        return tuple(self._row(rank)[_TOTALS_AT : _TOTALS_AT + 1 + len(TOTALS)])

    def trace_request(self) -> int:
        return int(self._row(0)[TRACE_REQUEST])

    def progress(self, rank: int) -> int:
        return int(self._row(rank)[PROGRESS])

    def fail(self, message: str) -> None:
        """Publish the error that stops this rank; the first one stays."""
        if not self.own[_STAMPS_AT + RankNote.FAILURE]:
            self.write(RankNote.FAILURE, 1, message)
            self.publish()

    def write(self, note: RankNote, stamp: int, text: str = "") -> None:
        """Replace a note of this rank; stamp 0 removes it. Only one thread writes each kind of note."""
        start = _NOTE_STARTS[note]
        data = text.encode(errors="replace")[: _NOTE_BYTES[note] - 1] + b"\0"
        self.own[_STAMPS_AT + note] = 0
        self.own.cast("B")[start : start + len(data)] = data
        self.own[_STAMPS_AT + note] = stamp

    def read(self, rank: int, note: RankNote) -> tuple[int, str]:
        """Return the stamp and the text of a rank's note; (0, "") if there is none."""
        row, start = self._row(rank), _NOTE_STARTS[note]
        while stamp := row[_STAMPS_AT + note]:
            data = bytes(row.cast("B")[start : start + _NOTE_BYTES[note]])
            if row[_STAMPS_AT + note] == stamp:
                return stamp, data.partition(b"\0")[0].decode("utf-8", "replace")
        return 0, ""

    def publish(self) -> None:
        """Publish this rank's row now. Shared memory needs no publishing."""

    def alive(self, rank: int) -> bool:
        """Return False if the rank's process is known to be gone, a zombie too. One that has not published has the number 0."""
        pid = self._row(rank)[_PID]
        return pid == 0 or process_state(pid) not in ("", "Z", "X")

    def stopped(self, rank: int) -> bool:
        """Return True if the rank's process is known to be stopped, as by SIGSTOP."""
        return process_state(self._row(rank)[_PID]) == "T"

    def silent_seconds(self, rank: int) -> float:
        """Return the seconds since this rank last read a new row of `rank`; 0 or infinity in shared memory, by `alive`."""
        return 0.0 if self.alive(rank) else float("inf")

    def close(self) -> None:
        """Stop publishing."""


class Store(Protocol):
    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class StoreBoard(StatusBoard):
    """The board of ranks on several hosts, over the rendezvous store. A thread publishes this rank's row twice a second, so steps
    never wait for the store; only a rank that has waited for a while reads rows from it. Rank 0 usually keeps the store: when it
    cannot be reached, rank 0 counts as gone, and the last rows read stay valid."""

    PERIOD_SECONDS = 0.5

    def __init__(self, store: Store, publisher: Store, rank: int, stale_seconds: float) -> None:
        super().__init__({rank: new_row()}, rank)
        self._row, self._store, self._publisher = self._published, store, publisher
        self._stale_seconds = stale_seconds
        self._publishing = threading.Lock()
        self._last_changes: dict[int, tuple[int, float]] = {}
        self._last_rows: dict[int, bytes] = {}
        self._store_is_gone = False
        self._closed = threading.Event()
        self.publish()
        self._thread = threading.Thread(target=self._run, name="zeromesh-board", daemon=True)
        self._thread.start()

    def _published(self, rank: int) -> memoryview:
        """Return the row that a rank has published; the last one seen if the store cannot be reached."""
        if rank == self._rank:
            return self.own
        try:
            self._last_rows[rank] = self._store.get(f"zeromesh/board/{rank}")
        except RuntimeError:
            self._store_is_gone = True
        return self._decoded(rank)

    def _decoded(self, rank: int) -> memoryview:
        return memoryview(base64.b64decode(self._last_rows.get(rank, b"")) or bytes(ROW_WORDS * 8)).cast("q")

    def trace_request(self) -> int:
        return int(self._decoded(0)[TRACE_REQUEST] if self._rank else self.own[TRACE_REQUEST])

    def alive(self, rank: int) -> bool:
        return self.silent_seconds(rank) < self._stale_seconds and not (rank == 0 and self._store_is_gone)

    def stopped(self, rank: int) -> bool:
        return False  # Its host knows.

    def silent_seconds(self, rank: int) -> float:
        published, now = self._row(rank)[_PUBLISHED], time.monotonic()
        last, since = self._last_changes.get(rank, (-1, now))
        if published != last:
            self._last_changes[rank] = (published, now)
            return 0.0
        return now - since

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=2 * self.PERIOD_SECONDS)

    def publish(self) -> None:
        with self._publishing:
            self.own[_PUBLISHED] += 1
            self.own[_PUBLISHED_AT] = time.monotonic_ns()
            # Other threads change the row: one call copies it, and none of them runs meanwhile.
            row = base64.b64encode(self.own.tobytes()).decode()
            try:
                self._publisher.set(f"zeromesh/board/{self._rank}", row)
            except RuntimeError:
                self._store_is_gone = True

    def _run(self) -> None:
        while not (self._closed.wait(self.PERIOD_SECONDS) or self._store_is_gone):
            self.publish()
            with suppress(RuntimeError):  # The next `publish` notices the error.
                self._last_rows[0] = self._publisher.get("zeromesh/board/0")


class EventRing:
    """The last `EVENTS` events of this rank."""

    def __init__(self) -> None:
        self._words = bytearray(EVENTS * _PAIR.size)  # Untouched pages use no memory.
        self._next_place = 0
        self._names: dict[str, int] = {}

    def add(self, code: int, at: int = 0) -> None:
        """Append an event at a time of `time.monotonic_ns`, by default now."""
        place = self._next_place
        _PAIR.pack_into(self._words, place, at or time.monotonic_ns(), code)
        self._next_place = (place + _PAIR.size) % (EVENTS * _PAIR.size)

    def name(self, text: str) -> int:
        """Return the number of a name in event words; 0, no name, once there are too many."""
        number = self._names.get(text, 0)
        if not number and len(self._names) < _NAMES:
            number = self._names[text] = len(self._names) + 1
        return number

    def write(self, path: Path, header: Mapping[str, Any]) -> None:
        """Write the events, oldest first, below a header, which gets the names and both clocks. Raises `OSError`."""
        words, at = bytes(self._words), self._next_place
        events = (words[at:] if words[at : at + 8].strip(b"\0") else b"") + words[:at]
        first = json.dumps({**header, "clock_ns": time.monotonic_ns(), "wall_ns": time.time_ns(), "names": ["", *self._names]})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, zlib.compress(first.encode() + b"\n" + events, 1), sync=False)


def read_ring(path: Path) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Return a ring file's header and events: ascending times in ns, and words. Raises `OSError`; `ValueError` if not a ring."""
    unpacking = zlib.decompressobj()
    with errors_as(ValueError, "", zlib.error):
        content = unpacking.decompress(read_whole(path), _LONGEST)
    first, _, events = content.partition(b"\n")
    header = json.loads(first)
    if not isinstance(header, dict) or unpacking.unconsumed_tail or len(events) % _PAIR.size:
        raise ValueError("it is not as zeromesh writes it")
    return header, sorted(_PAIR.iter_unpack(events))
