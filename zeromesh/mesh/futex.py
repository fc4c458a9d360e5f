"""Sleeping until a word of shared memory changes: Linux's futex(2), between processes.

Whoever polls with short sleeps takes processor time from the rank that it waits for, and where more processes than cores want to
run it gets its turn late. A process that waits on a futex is woken when the word has been written, and takes none meanwhile.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from functools import cache
from typing import Any

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
        """The word has been written: wake all that wait for it."""
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

    def futex(*arguments: Any) -> Any:
        return call(number, *arguments)

    return futex
