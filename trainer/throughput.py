"""How far a long transfer is, and how fast it goes."""

from __future__ import annotations

import time

from zeromesh.trainer.console import RunConsole, human_bytes, human_seconds


class Throughput:
    """Called with the bytes of each transfer that is done, shows how far all are; as text, what they took."""

    def __init__(self, console: RunConsole, what: str, total: int) -> None:
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
