"""What this process waits for disks to do, so that a rank whose disk is slow can be told from one that is stuck.

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
"""The calls that go on in each thread, inside each other: what is done, to which path, and since when."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A call that goes on: for how many seconds, and for how many the outermost call around it."""

    what: str
    seconds: float
    in_all: float


@contextmanager
def disk_call(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside the block this thread asks a disk for something that may take long; such blocks may lie inside each other."""
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
