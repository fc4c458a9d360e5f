"""`zeromesh status RUN`: whether a run is going on, and what each of its ranks is doing, from the files that it writes."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zeromesh.errors import StorageError, printable
from zeromesh.files import read_whole
from zeromesh.telemetry.status_file import NAME
from zeromesh.trainer.monitoring.step_metrics import ENDED, LOCK, METRICS, read_metrics

_STALE_SECONDS = 10.0


def show_status(run: Path) -> int:
    """Print it; returns 0 for a run that goes on or has ended in order, 1 for one that has failed, was killed or is silent.

    Raises:
        StorageError: where there is no run, or its files cannot be read.
    """
    console = Console(markup=False, highlight=False, emoji=False)
    metrics = run / METRICS
    if not metrics.exists():
        raise StorageError(f"{str(run)!r} holds no run: there is no metrics.jsonl")
    lines = read_metrics(metrics)
    last = lines[-1] if lines else {}
    console.print(printable(f"{run}: step {last.get('step', 0)}, loss {last.get('loss', 'not yet known')}"))
    path = run / NAME
    written = path.stat().st_mtime if path.exists() else metrics.stat().st_mtime
    if path.exists():
        console.print(_table(path))
    code, verdict = _verdict(_note_in(run), time.time() - written, monitored=path.exists())
    if verdict:
        console.print(printable(verdict))
    return code


def _note_in(run: Path) -> str:
    """What the lock's file says; empty where there is none."""
    try:
        return read_whole(run / LOCK, 4096).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageError(f"{str(run / LOCK)!r} cannot be read: {error.strerror or error}") from error


def _verdict(note: str, silent: float, *, monitored: bool) -> tuple[int, str]:
    """The exit code, and a sentence about a run whose lock says `note`, and which has written last `silent` seconds ago."""
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


def _table(path: Path) -> Table:
    try:
        ranks = json.loads(read_whole(path))["ranks"]
        rows = [(f"{row['rank']}", f"{row['pid']}", f"{row['step']}", row["failure"] or row["doing"]) for row in ranks]
        waits = [f"{row['seconds_without_progress']:.1f}" for row in ranks]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise StorageError(f"{str(path)!r} cannot be read: {error}") from error
    table = Table("rank", "pid", "step", "doing", "seconds without progress")
    for row, wait in zip(rows, waits, strict=True):
        table.add_row(*(Text(printable(str(cell))) for cell in (*row, wait)))
    return table
