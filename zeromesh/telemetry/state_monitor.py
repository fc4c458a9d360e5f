"""`StateMonitor` writes the state of every rank to one file, so that a lost, hung or slow rank shows while the run goes on."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from zeromesh.files import write_whole
from zeromesh.telemetry.status_board import REQUEST, TOTALS, TRACE_REQUEST, Activity, RankNote
from zeromesh.telemetry.watchdog import Watchdog

_WINDOW = 10  # The least number of latest steps over which seconds are averaged, once a rank has done so many.


class StateMonitor:
    """Writes `path` every second, atomically, in a thread, and passes on requests for traces, from `trace/request` beside it.

        {"time": 1790000000.0, "ranks": [{"rank": 0, "pid": 17, "step": 12, "microbatch": 1, "activity": "forward",
          "doing": "in forward of unit layers.3", "seconds": 0.2, "seconds_without_progress": 0.1, "failure": "", "disk": "",
          "waits": {"for": "gather of layers.3/0", "ranks": [1], "seconds": 0.2},
          "recent": {"steps": 10, "data": 0.01, "compute": 0.3, "offload": 0.0, "communication": 0.02, "between": 0.01}}, ...]}

    `seconds` is the duration of the activity. `waits` is null for a rank that does not wait; its `ranks` are the late ones.
    `recent` has the mean seconds of the latest `steps` by category; null before the second step. `failure` is passed through
    `clean`. Errors of writing are ignored: nothing depends on the file."""

    PERIOD_SECONDS = 1.0

    def __init__(self, watch: Watchdog, ranks: Sequence[int], path: Path, *, clean: Callable[[str], str]) -> None:
        self._watch, self._path, self._clean = watch, path, clean
        self._progress = dict.fromkeys(ranks, (-1, time.monotonic()))
        self._totals = {rank: deque[tuple[int, ...]](maxlen=64) for rank in ranks}
        self._seen_request = self._request()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeromesh-monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def states(self) -> list[dict[str, Any]]:
        now, watch = time.monotonic(), self._watch
        found = []
        for rank, (before, since) in self._progress.items():
            row, doing = watch.state(rank)
            if row.progress != before:
                since = now
                self._progress[rank] = (row.progress, now)
            (waiting, text), (_, disk) = (watch.board.read(rank, note) for note in (RankNote.WAIT, RankNote.DISK))
            late, _, what = text.partition("|")
            waits = {"for": what, "ranks": [int(each) for each in late.split()]}
            waited = round(watch.board.seconds_since(rank, waiting), 2)
            found.append(
                {"rank": rank, "pid": row.pid, "step": row.step, "microbatch": row.microbatch}
                | {"activity": Activity(row.activity).name.lower(), "doing": doing, "seconds": round(row.seconds, 2)}
                | {"seconds_without_progress": round(now - since, 1), "failure": self._clean(row.failure)}
                | {"disk": self._clean(disk), "recent": self._mean_step_seconds(rank)}
                | {"waits": {**waits, "seconds": waited} if waiting else None}
            )
        return found

    def _mean_step_seconds(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's mean seconds per recent step, from its totals now and some steps ago; None before its first step ends."""
        now, earlier = self._watch.board.totals(rank), self._totals[rank]
        if now[0] and (not earlier or now[0] != earlier[-1][0]):
            earlier.append(now)
        first = earlier[0] if earlier else now
        early = next((each for each in reversed(earlier) if each[0] <= now[0] - _WINDOW), first)
        steps = now[0] - early[0]
        if steps <= 0:
            return None
        means = [round((end - begin) / steps / 1e9, 6) for begin, end in zip(early[1:], now[1:], strict=True)]
        return {"steps": steps, **dict(zip(TOTALS, means, strict=True))}

    def _request(self) -> int:
        """Return the time of the latest request for traces; 0: never."""
        try:
            return (self._path.parent / REQUEST).stat().st_mtime_ns
        except OSError:
            return 0

    def _run(self) -> None:
        last = False
        while True:
            if (request := self._request()) != self._seen_request:
                self._seen_request = request
                self._watch.board.own[TRACE_REQUEST] = request
            content = json.dumps({"time": time.time(), "ranks": self.states()})
            with suppress(OSError):  # A full disk is reported by other writers.
                write_whole(self._path, content.encode(), sync=False)
            if last:
                return
            last = self._ended.wait(self.PERIOD_SECONDS)
