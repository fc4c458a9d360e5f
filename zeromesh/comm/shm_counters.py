"""`Counters`: how far every rank of a set is, in memory that all of them see.

A counter only grows and has one writer, so reading it needs no lock. Stores must be seen in order, as on x86-64.

Sleeping until a word of shared memory changes: Linux's futex(2), between processes.

Whoever polls with short sleeps takes processor time from the rank that it waits for, and where more processes than cores want to
run it gets its turn late. A process that waits on a futex is woken when the word has been written, and takes none meanwhile.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from functools import cache, partial
from typing import Any

from zeromesh.mesh.process_mesh import ProcessSet
from zeromesh.telemetry.watchdog import Watchdog

_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1
_LOW_HALF = 0xFFFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """One 64-bit word, little-endian, that grows; a futex is its lower half."""

    def __init__(self, words: memoryview, place: int) -> None:
        """`words` are shared memory, seen as 64-bit words, which stays mapped for as long as this lives."""
        self._half = ctypes.c_uint32.from_buffer(words, place * words.itemsize)
        self._address = ctypes.addressof(self._half)

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep for at most `seconds`, below one, unless the word is not `seen` any more; a signal ends it too."""
        call = _system_call()
        if call is None:
            time.sleep(min(seconds, 2e-4))
            return
        until = _Timespec(0, int(1e9 * seconds))
        call(self._address, _WAIT, seen & _LOW_HALF, ctypes.byref(until), None, 0)

    def wake(self) -> None:
        """Wake all that wait for the word, which has been written."""
        call = _system_call()
        if call is not None:
            call(self._address, _WAKE, _EVERYONE, None, None, 0)


@cache
def _system_call() -> Any:
    """`call(address, operation, value, timeout, None, 0)`; None where there is none."""
    number = _NUMBERS.get(platform.machine())
    if number is None or not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None).syscall
    kinds = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p)
    call.argtypes = (*kinds, ctypes.c_uint32)
    call.restype = ctypes.c_long

    return partial(call, number)


LINE = 8
"""Words in a cache line: counters of different writers never share one."""


_SLEEPERS = 1
"""Place, after the counter in its line, of a word that is not 0 while somebody may sleep until the counter changes."""


class Counters:
    """One growing counter per rank, in shared words, a cache line apart.

    Waking costs a system call, so a rank does it only where another has said in the counter's line that it sleeps. Should that be
    seen too late, the sleep ends by itself: `Watchdog.wait` sleeps for a few milliseconds at a time.
    """

    def __init__(self, words: memoryview, base: int, group: ProcessSet, watch: Watchdog) -> None:
        self._words = words
        self._places = [base + rank * LINE for rank in range(group.size)]
        self._mine = self._places[group.index]
        self._ranks = group.ranks
        self._watch = watch
        self._futexes = [Futex(words, place) for place in self._places]
        self._bell = self._futexes[group.index]

    def set(self, value: int) -> None:
        """Set this rank's counter, and wake those that sleep until it changes."""
        words, place = self._words, self._mine
        words[place] = value
        if words[place + _SLEEPERS]:
            words[place + _SLEEPERS] = 0
            self._bell.wake()

    def own(self) -> int:
        """This rank's counter."""
        return self._words[self._mine]

    def lowest(self) -> int:
        """Where the last of the ranks is."""
        words = self._words
        return min(words[place] for place in self._places)

    def reached(self, value: int) -> bool:
        """Whether all ranks have got to `value`."""
        words = self._words
        for place in self._places:  # noqa: SIM110 - a third of the time of `all`, in the loop of every wait
            if words[place] < value:
                return False
        return True

    def wait(self, value: int, what: str) -> None:
        """Wait until all ranks have got to `value`; the ranks that have not are the ones that an error names."""
        if self.reached(value):
            return
        words = self._words
        behind = [rank for rank, place in zip(self._ranks, self._places, strict=True) if words[place] < value]

        def pause(seconds: float) -> None:
            for place, futex in zip(self._places, self._futexes, strict=True):
                if words[place] < value:
                    words[place + _SLEEPERS] = 1
                    if (seen := words[place]) >= value:
                        continue
                    futex.wait(seen, seconds)
                    return

        self._watch.wait(lambda: self.reached(value), behind, what, pause)
