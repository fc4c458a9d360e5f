"""Commands that inspect the ranks of a run by the files that it writes, without torch: `zeromesh status` and `zeromesh trace`."""

import argparse
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from zeromesh.environment import process_state
from zeromesh.errors import ConfigError, StorageError, counted, printable, ranks_text
from zeromesh.files import read_whole, refusals, write_whole
from zeromesh.telemetry.status_board import REQUEST, TRACE_FOLDER
from zeromesh.trainer.cli import train
from zeromesh.trainer.formatting import print_lines, table_lines, wrapped
from zeromesh.trainer.monitoring import rank_records
from zeromesh.trainer.monitoring.step_metrics import ENDED, LOCK, METRICS, RANKS, RECOVERIES, read_metrics, strict

_STALE_SECONDS = 10.0  # without a new `ranks.json`, after which a run counts as silent
_ANSWER_SECONDS, _LEAST_STOPPED_SECONDS = 10.0, 1.0
_MOST_ROWS, _MOST_HINTS = 64, 8
"""The most ranks in a table, first those that others wait for and those without progress for longest; the most runs in a hint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSnapshot:
    step: Any
    loss: Any
    ranks: list[dict[str, Any]]
    recoveries: list[dict[str, Any]]
    traffic: Mapping[str, Any]  # The figures of rank 0's traffic in the last step, by axis and collective.
    code: int
    verdict: str  # The outcome of the run, or the fact that it is silent; empty while it runs.


def run_status(options: argparse.Namespace) -> int:
    """Show the state of a run, its ranks and their waits. Returns 1 for a run that has failed, was killed or is silent, else 0."""
    console = RichConsole(highlight=False, markup=False, emoji=False)
    with ExitStack() as stack:
        show: Callable[[list[str]], None] = print_lines
        if options.watch and not options.json and console.is_terminal and not console.is_dumb_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False, vertical_overflow="ellipsis"))
            show = lambda lines: live.update(Text("\n".join(map(printable, lines))), refresh=True)  # noqa: E731
        try:
            while True:
                now, width = _snapshot(options.run), console.width if console.is_terminal else None
                if options.json:
                    state = now.verdict or "goes on"
                    values = {"time": time.time(), "step": now.step, "loss": now.loss, "state": state}
                    waited_for = [asdict(each) for each in rank_records.blames(now.ranks)]
                    values |= {"recoveries": now.recoveries, "ranks": now.ranks, "waited_for": waited_for}
                    slow = {"recent": rank_records.recent(now.ranks), "verdicts": rank_records.verdicts(now.ranks, now.traffic)}
                    show([json.dumps(strict(values | slow))])
                else:
                    show(_lines(options.run, now, width))
                if now.verdict or not options.watch:
                    return now.code
                time.sleep(options.interval)
        except KeyboardInterrupt:
            if not options.watch:
                raise
            return 0


def _snapshot(run: Path) -> RunSnapshot:
    metrics, path, lock = run / METRICS, run / RANKS, run / LOCK
    if not metrics.exists() and not lock.exists():
        others = sorted(run.glob(f"*/{METRICS}"), key=lambda path: -path.stat().st_mtime)[:_MOST_HINTS]
        there = "; runs in it are " + ", ".join(str(each.parent) for each in others) if others else ""
        raise StorageError(f"{str(run)!r} holds no run: there is no metrics.jsonl{there}")
    last = (read_metrics(metrics) or [{}])[-1]
    recoveries = read_metrics(run / RECOVERIES)
    with refusals(path, "read"):
        ranks = rank_records.read_ranks(path) if path.exists() else []
    with refusals(lock, "read"):
        note = read_whole(lock, 4096).decode(errors="replace").partition("\n")[0] if lock.exists() else ""
    if not note.startswith(ENDED) and note.endswith(f" on {socket.gethostname()}"):
        for row in ranks:  # A signal or a debugger may have stopped them.
            if row["seconds_without_progress"] >= _LEAST_STOPPED_SECONDS and process_state(row["pid"]) in ("T", "t"):
                row["stopped"] = True
    written = next((each for each in (path, metrics) if each.exists()), lock)
    code, verdict = _verdict(note, time.time() - written.stat().st_mtime, monitored=path.exists())
    step, loss, traffic = last.get("step", 0), last.get("loss", "not yet known"), last.get("communication")
    traffic = traffic if isinstance(traffic, dict) else {}
    return RunSnapshot(step=step, loss=loss, ranks=ranks, recoveries=recoveries, traffic=traffic, code=code, verdict=verdict)


def _lines(run: Path, now: RunSnapshot, width: int | None) -> list[str]:
    lines = [f"{run}: step {now.step}, loss {now.loss}"]
    if now.recoveries:
        last, number = now.recoveries[-1], counted(len(now.recoveries), "recovery")
        how = f"{last['seconds']:.1f} s, from its {last['source']}, {counted(last['lost_steps'], 'step')} done again"
        lines += wrapped([f"{number}; the last after step {last['step']} took {how}: {last['cause']}"], width)
    blamed = rank_records.blames(now.ranks)
    guilty = {each.rank for each in blamed}
    order = sorted(now.ranks, key=lambda row: (row["rank"] not in guilty, not row["failure"], -row["seconds"]))
    rows = sorted(order[:_MOST_ROWS], key=lambda row: row["rank"])
    if rows:
        columns = ("rank", "pid", "step", "doing", "for seconds", "waits for", "seconds without progress")
        lines += table_lines(columns, list(map(_table_cells, rows)), columns[4::2], width=width)
    if len(rows) < len(order):
        lines.append(f"and {counted(len(order) - len(rows), 'more rank')}")
    failures = [f"rank {row['rank']} failed: {row['failure']}" for row in rows if row["failure"]]
    lines += wrapped([*failures, *([] if now.verdict else rank_records.sentences(blamed))], width)
    parts = rank_records.recent(rows)
    if len(parts) > 1:
        shown = (*rank_records.BUSY, "waiting", "link")
        cells = [(rank, *(f"{1e3 * each[part]:,.1f}" for part in shown)) for rank, each in parts.items()]
        lines += ["milliseconds of a step, lately:", *table_lines(("rank", *shown), cells, shown)]
        lines += wrapped(rank_records.verdicts(now.ranks, now.traffic), width)
    return [*lines, now.verdict] if now.verdict else lines


def _table_cells(row: Mapping[str, Any]) -> tuple[object, ...]:
    step = f"{row['step']}, micro {row['microbatch']}" if row.get("microbatch") else row["step"]
    waits, doing = row.get("waits"), f"{row['doing']}" + (f", {row['disk']}" if row.get("disk") else "")
    doing = "failed" if row["failure"] else f"stopped {doing}" if row.get("stopped") else doing
    awaited = f"{waits['for']}: {ranks_text(waits['ranks']) if waits['ranks'] else 'the link'}" if waits else ""
    return row["rank"], row["pid"], step, doing, f"{row['seconds']:.1f}", awaited, f"{row['seconds_without_progress']:.1f}"


def _verdict(note: str, silent: float, *, monitored: bool) -> tuple[int, str]:
    """Return the exit code and a sentence for a run whose lock says `note`, and whose last write was `silent` seconds ago."""
    if note == ENDED:
        return 0, "the run has ended"
    if note.startswith(ENDED):
        return 1, f"the run has {note}"
    process = re.fullmatch(r"pid (\d{1,9}) on (.*)", note)
    here = process is not None and process[2] == socket.gethostname()
    if process is not None and here and not os.path.exists(f"/proc/{process[1]}"):
        return 1, f"the run was killed: its process ({note}) is gone"
    if silent <= _STALE_SECONDS:
        return 0, ""
    if here and not monitored:
        return 0, f"its last line is {silent:,.0f} seconds old, and its process ({note}) is there"
    return 1, f"not heard of for {silent:,.0f} seconds: the run was killed, or its host is lost or hangs"


def run_trace(options: argparse.Namespace) -> int:
    """Write the latest steps of all ranks of a run as a file for Perfetto; a running one is asked to write them first."""
    now = _snapshot(options.run)
    if not now.verdict:
        _request_rings(options.run, [row["rank"] for row in now.ranks])
    rings, remarks = rank_records.read_rings(options.run / TRACE_FOLDER)
    out = options.out or options.run / TRACE_FOLDER / "trace.json.gz"
    steps = options.steps and range(options.steps[0], options.steps[1] + 1)
    trace = rank_records.trace_of(rings, read_metrics(options.run / METRICS), steps)
    if steps is not None and all(event["ph"] == "M" for event in trace["traceEvents"]):
        raise ConfigError(f"--steps {steps[0]}:{steps[-1]}: the ranks remember none of these steps")
    with refusals(out, "written", "; give --out FILE"):
        write_whole(out, rank_records.trace_content(trace, packed=out.suffix == ".gz"), sync=False)
    for remark in remarks:
        train.say(remark)
    print_lines([f"{out}: open it at https://ui.perfetto.dev"])
    if profiled := sorted((options.run / "profile").glob("steps-*.json.gz")):
        print_lines([f"torch's profiler has recorded operators too: {', '.join(map(str, profiled))}"])
    return 0


def _request_rings(run: Path, ranks: list[int]) -> None:
    """Ask the ranks of a running run to write their latest events, and wait for the files."""
    request = run / REQUEST
    try:
        request.parent.mkdir(exist_ok=True)
        write_whole(request, b"", sync=False)
        asked = request.stat().st_mtime_ns
    except OSError as error:
        train.say(f"the ranks cannot be asked: {error.strerror or error}")
        return
    deadline, late = time.monotonic() + _ANSWER_SECONDS, ranks
    while late and time.monotonic() < deadline:
        time.sleep(0.1)
        rings = {rank: run / TRACE_FOLDER / f"rank-{rank}.ring" for rank in late}
        late = [rank for rank, ring in rings.items() if not ring.exists() or ring.stat().st_mtime_ns < asked]
    if late:
        train.say(f"{ranks_text(late)} did not answer within {_ANSWER_SECONDS:g} seconds")
