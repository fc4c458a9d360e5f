"""Long transfers: how far they are, and what keeps them fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeromesh.trainer.formatting import human_bytes, human_seconds
from zeromesh.trainer.monitoring.console import Console


class Throughput:
    """Called with the bytes of each transfer that is done, shows how far all are; as text, what they took."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total = console, what, total
        self._done = 0
        self._began = time.monotonic()

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        of_total = f"{human_bytes(self._done)} of {human_bytes(self._total)}"
        self._console.status(f"{self._what}: {of_total}, {self._rate()}")

    def _rate(self) -> str:
        return f"{human_bytes(self._done / max(time.monotonic() - self._began, 1e-6))}/s"

    def __str__(self) -> str:
        return f"{human_bytes(self._done)} in {human_seconds(time.monotonic() - self._began)} ({self._rate()})"


@contextmanager
def one_core() -> Iterator[None]:
    """Inside the block torch computes in one thread.

    What passes from files to files is bound by memory and disk, and threads that wait for each other on a machine that does other
    things as well took five times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
