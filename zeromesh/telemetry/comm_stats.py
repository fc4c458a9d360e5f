"""How much ranks tell each other: bytes and seconds, by axis and collective. No torch and no processes.

    traffic.take()      {"tensor": {"all-reduce": {"calls": 96, "bytes": 25165824, "seconds": 0.031}}, "shard": {...}}

Bytes are what a rank has to send at least: of `whole` bytes on n ranks, (n - 1) / n in an all-gather and in a reduce-scatter, and
twice that in an all-reduce. In memory that ranks share nothing is sent; the number is then what a network would have had to carry.
Seconds are those that this rank's own thread has spent in starting a collective and in waiting for it; what runs beside the
computation costs none. On CUDA they are the host's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import StrEnum
from types import TracebackType

from zeromesh.telemetry.step_timer import StepPhase, StepTimer

Figures = Mapping[str, Mapping[str, Mapping[str, float]]]
"""By axis and collective: `calls`, `bytes` and `seconds`."""


class Collective(StrEnum):
    """What ranks do together. An agreement is a small exchange between hosts' memories: sums of the loss, the norm, barriers."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point to point"
    AGREEMENT = "agreement"


class Account:
    """What the ranks of one axis, `ranks` of them, have told each other. Counting costs well under a microsecond.

    What is timed is communication of `clock`'s step too, and a range of torch's profiler.
    """

    __slots__ = ("_clock", "_factors", "_figures", "_labels")

    def __init__(self, ranks: int, axis: str = "", clock: StepTimer | None = None) -> None:
        share = (ranks - 1) / ranks
        self._clock = clock or StepTimer()
        self._labels = {each: f"{each.value} over {axis}" for each in Collective}
        self._factors = dict.fromkeys(Collective, share)
        self._factors |= {Collective.ALL_REDUCE: 2 * share, Collective.POINT_TO_POINT: 1.0}
        self._figures: dict[Collective, list[float]] = {each: [0, 0.0, 0.0] for each in Collective}

    def count(self, collective: Collective, whole: int) -> None:
        """One more `collective`, in which every rank has given or got `whole` bytes in all; of a message, its length."""
        figures = self._figures[collective]
        figures[0] += 1
        figures[1] += whole * self._factors[collective]

    def timed(self, collective: Collective) -> _Timed:
        """A block whose duration counts for `collective`."""
        return _Timed(self._figures[collective], self._clock.span(StepPhase.COMMUNICATION, self._labels[collective]))

    def figures(self) -> dict[str, tuple[int, int, float]]:
        """Calls, bytes and seconds so far, of the collectives that there were."""
        return {
            collective.value: (int(calls), round(nbytes), seconds)
            for collective, (calls, nbytes, seconds) in self._figures.items()
            if calls
        }


class _Timed:
    __slots__ = ("_began", "_figures", "_span")

    def __init__(self, figures: list[float], span: AbstractContextManager[None]) -> None:
        self._figures = figures
        self._span = span
        self._began = 0.0

    def __enter__(self) -> None:
        self._span.__enter__()
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._figures[2] += time.perf_counter() - self._began
        self._span.__exit__(kind, error, trace)


class CommStats:
    """The accounts of all axes and process sets of a mesh, by name."""

    def __init__(self, clock: StepTimer | None = None) -> None:
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._taken: dict[tuple[str, str], tuple[int, int, float]] = {}

    def open(self, axis: str, ranks: int) -> Account:
        """The account of an axis, from now on."""
        account = self._accounts[axis] = Account(ranks, axis, self._clock)
        self._taken = {key: taken for key, taken in self._taken.items() if key[0] != axis}
        return account

    def close(self, axis: str) -> None:
        """Forget an axis, with what it has told since the last `take`."""
        self._accounts.pop(axis, None)
        self._taken = {key: taken for key, taken in self._taken.items() if key[0] != axis}

    def take(self) -> dict[str, dict[str, dict[str, float]]]:
        """What was told since this was last called. Axes and collectives that moved nothing are left out."""
        found: dict[str, dict[str, dict[str, float]]] = {}
        for axis, account in list(self._accounts.items()):
            for collective, now in account.figures().items():
                before = self._taken.get((axis, collective), (0, 0, 0.0))
                if now != before:
                    self._taken[axis, collective] = now
                    calls, nbytes, seconds = (new - old for new, old in zip(now, before, strict=True))
                    found.setdefault(axis, {})[collective] = {
                        "calls": calls,
                        "bytes": nbytes,
                        "seconds": round(seconds, 6),
                    }
        return found


def added(total: Figures, more: Figures) -> dict[str, dict[str, dict[str, float]]]:
    """The sum of two results of `take`."""
    out = {axis: {name: dict(row) for name, row in rows.items()} for axis, rows in total.items()}
    for axis, rows in more.items():
        for name, row in rows.items():
            sums = out.setdefault(axis, {}).setdefault(name, {})
            for key, value in row.items():
                sums[key] = sums.get(key, 0) + value
    return out


def traffic_table(figures: Figures, *, steps: int = 1) -> str:
    """A table of `figures`, which `steps` steps have added up to: what one of them tells, on average."""
    rows = [("axis", "collective", "calls", "MiB", "ms")]
    for axis, collectives in figures.items():
        for name, row in collectives.items():
            calls, nbytes, seconds = (row[key] / max(1, steps) for key in ("calls", "bytes", "seconds"))
            rows.append((axis, name, f"{calls:,.1f}", f"{nbytes / 2**20:,.2f}", f"{seconds * 1e3:,.2f}"))
    if len(rows) == 1:
        return "no communication"
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = []
    for cells in rows:
        words = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
        lines.append("  ".join(words + numbers))
    return "\n".join(lines)
