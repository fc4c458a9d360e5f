"""How long a run takes to begin: from its command to the end of its first step, by what the time goes to."""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
_LEAST_SHOWN = 0.05
"""Seconds. Shorter parts are left out of the sentence."""


def now() -> float:
    """Seconds since the machine was started; all processes of a machine have the same clock."""
    return time.clock_gettime(_CLOCK)


def process_began() -> float:
    """When the operating system started this process, on the clock of `now`; where that is not known, the present."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return min(now(), int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    return now()


class StartTimes:
    """Seconds by part, in the order of the parts, until the first step of a run in this process has been made.

    `began`: when the first part did, on the clock of `now`.
    """

    def __init__(self, began: float | None = None) -> None:
        self._last = now() if began is None else began
        self.parts: dict[str, float] = {}
        self.over = False
        """Whether the first step has been made."""

    def begin(self) -> None:
        """The next part begins now: what the caller of the trainer did since the last one belongs to none."""
        self._last = now()

    def end(self, part: str, at: float | None = None) -> None:
        """Count the seconds since the last part ended, up to `at` (default: the present), as those of `part`."""
        if not self.over:
            at = now() if at is None else at
            self.parts[part] = self.parts.get(part, 0.0) + max(0.0, at - self._last)
            self._last = at


def sentence(parts: Mapping[str, float]) -> str:
    """The total and its parts: `5.8 s (imports 3.6, data 1.1, first step 1.1)`."""
    shown = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items() if seconds >= _LEAST_SHOWN)
    return f"{sum(parts.values()):.1f} s" + (f" ({shown})" if shown else "")
