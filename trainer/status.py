"""`zeromesh status RUN`: where a run that goes on is, rank by rank, from the files that it writes."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zeromesh.errors import StorageError
from zeromesh.mesh.monitor import NAME
from zeromesh.trainer.metrics import METRICS, read_metrics

_STALE_SECONDS = 10.0


def show_status(run: Path) -> int:
    """Print it; returns 0 while the run goes on, 1 when it has not been heard of for a while.

    Raises:
        StorageError: where there is no run, or its files cannot be read.
    """
    console = Console()
    metrics = run / METRICS
    if not metrics.exists():
        raise StorageError(f"{str(run)!r} holds no run: there is no metrics.jsonl")
    lines = read_metrics(metrics)
    last = lines[-1] if lines else {}
    console.print(f"{run}: step {last.get('step', 0)}, loss {last.get('loss', 'not yet known')}")
    path = run / NAME
    written = path.stat().st_mtime if path.exists() else metrics.stat().st_mtime
    if path.exists():
        console.print(_table(path))
    silent = time.time() - written
    if silent > _STALE_SECONDS:
        console.print(f"not heard of for {silent:,.0f} seconds: the run has ended, or the host of rank 0 is gone")
        return 1
    return 0


def _table(path: Path) -> Table:
    try:
        ranks = json.loads(path.read_bytes())["ranks"]
        rows = [(f"{row['rank']}", f"{row['pid']}", f"{row['step']}", row["failure"] or row["doing"]) for row in ranks]
        waits = [f"{row['seconds_without_progress']:.1f}" for row in ranks]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{str(path)!r} cannot be read: {error}") from error
    table = Table("rank", "pid", "step", "doing", "seconds without progress")
    for row, wait in zip(rows, waits, strict=True):
        table.add_row(*row, wait)
    return table
