"""The disk operations that this process waits for, so that a slow disk can be distinguished from a rank that is stuck.

with disk_call("fsync", path): ...
longest()       Waiting(what="fsync of '/data/run/model.safetensors'", seconds=3.2, since=3.4)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_Call = tuple[str, str | os.PathLike[str], float]

_CALLS: dict[int, list[_Call]] = {}
"""The running calls of each thread, inside each other: what is done, to which path, and since when."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A running call, its seconds so far, and those of the outermost call around it."""

    what: str
    seconds: float
    in_all: float


@contextmanager
def disk_call(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Note for the length of the block that this thread waits for a disk; such blocks may lie inside each other."""
    thread = threading.get_ident()
    calls = _CALLS.setdefault(thread, [])
    calls.append((what, path, time.monotonic()))
    try:
        yield
    finally:
        calls.pop()
        if not calls:
            del _CALLS[thread]


def longest() -> Waiting | None:
    """Of all threads' innermost calls the one that has been going on for longest; None where no disk is waited for."""
    now = time.monotonic()
    found = [(calls[0][2], *calls[-1]) for calls in map(list, list(_CALLS.values())) if calls]
    if not found:
        return None
    outer, what, path, since = min(found, key=lambda call: call[3])
    return Waiting(what=f"{what} of {os.fspath(path)!r}", seconds=now - since, in_all=now - outer)
