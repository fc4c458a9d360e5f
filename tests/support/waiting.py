"""Waits of a test for what another process does."""

import time
from collections.abc import Callable
from pathlib import Path

from zeromesh.trainer.monitoring.step_metrics import read_metrics


def wait_for(
    condition: Callable[[], object],
    seconds: float = 30.0,
    said: Callable[[], str] = lambda: "the condition did not come true in time",
) -> None:
    """Wait until something is so; `said` tells what a process has said where it never is."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process exists and is more than an entry that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def logged_steps(folder: Path) -> int:
    """Steps that the run `run` in a folder has logged."""
    path = folder / "run" / "metrics.jsonl"
    return max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0
