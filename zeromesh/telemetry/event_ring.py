"""`EventRing`: the latest events of a rank in memory of a fixed size, from which `zeromesh trace` draws a timeline.

    ring.add(code)                      # stores the time and a word; takes a few hundred nanoseconds
    ring.add(BEGIN | ring.name("data"))
    ring.write(path, {"rank": 0, ...})  # the header, with all names, and the words

A word has the layout of `STATE` in a row of the board (step, kind, detail). The kinds below `BEGIN` are activities, with step and
unit; the others have no step, and mostly a name as detail. Times are nanoseconds of the monotonic clock, which processes of a host
share; the header has both clocks, and all ranks record `MEETING` events together, so that rings of hosts can be aligned.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Self

from zeromesh.files import read_whole, write_whole

UNIT_BITS, ACTIVITY_BITS = 28, 8
STEP_SHIFT = UNIT_BITS + ACTIVITY_BITS
"""The lowest bit of the step in the word of a rank's state. Below it are the activity, and the unit plus 1 (0: no unit)."""
DETAIL = (1 << UNIT_BITS) - 1
BEGIN, END, WAIT, WAITED, MEETING, MICROBATCH = (kind << UNIT_BITS for kind in range(16, 22))
"""The kinds of events besides activities. `BEGIN` and `END` of a span, and `WAIT` for others, have a name as detail; `WAITED` has
the rank that came last plus 1, if known. At a `MEETING` all ranks are at one place. `MICROBATCH` has the number, from 1."""
FOLDER = "trace"
"""The folder in a run's directory with a file `rank-N.ring` of each rank."""
REQUEST = f"{FOLDER}/request"
"""The path in a run's directory of the file whose creation asks all ranks for their rings."""
NO_ACTIVITY = 0xF0
"""The bit mask of an event's kind that is nonzero for events other than activities."""
EVENTS = 1 << 15
_PAIR = struct.Struct("<qq")
_NAMES = 1 << 16
_LONGEST = 1 << 25
"""The most bytes of a ring file, unpacked; a larger file was not written by `EventRing`."""


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

    phrase: str
    """The words for the activity in messages; the name of a unit may follow."""

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


class EventRing:
    """The last `EVENTS` events of this rank."""

    def __init__(self) -> None:
        self._words = bytearray(EVENTS * _PAIR.size)  # Untouched pages use no memory.
        self._at = 0
        self._names: dict[str, int] = {}

    def add(self, code: int, at: int = 0) -> None:
        """Append an event at a time of `time.monotonic_ns`, by default now."""
        place = self._at
        _PAIR.pack_into(self._words, place, at or time.monotonic_ns(), code)
        self._at = (place + _PAIR.size) % (EVENTS * _PAIR.size)

    def name(self, text: str) -> int:
        """Return the number of a name in event words; 0, no name, once there are too many."""
        number = self._names.get(text, 0)
        if not number and len(self._names) < _NAMES:
            number = self._names[text] = len(self._names) + 1
        return number

    def write(self, path: Path, header: Mapping[str, Any]) -> None:
        """Write the events, oldest first, below a header, which gets the names and both clocks. Raises `OSError`."""
        words, at = bytes(self._words), self._at
        events = (words[at:] if words[at : at + 8].strip(b"\0") else b"") + words[:at]
        clocks = {"clock_ns": time.monotonic_ns(), "wall_ns": time.time_ns()}
        first = json.dumps({**header, **clocks, "names": ["", *self._names]})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, zlib.compress(first.encode() + b"\n" + events, 1), sync=False)


def read_ring(path: Path) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Return the header of a ring file, and its events: ascending times in nanoseconds, and words.

    Raises:
        OSError: for a file that cannot be read.
        ValueError: for a file in another format.
    """
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(read_whole(path), _LONGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    first, _, events = content.partition(b"\n")
    header = json.loads(first)
    if not isinstance(header, dict) or unpacking.unconsumed_tail or len(events) % _PAIR.size:
        raise ValueError("it is not as zeromesh writes it")
    return header, sorted(_PAIR.iter_unpack(events))
