"""Waits of a test for what another process does."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    except (FileNotFoundError, ProcessLookupError):  # The second where it ends between opening and reading.
        return False


def logged_steps(folder: Path) -> int:
    """Steps that the run `run` in a folder has logged."""
    path = folder / "run" / "metrics.jsonl"
    return max((line["step"] for line in read_metrics(path)), default=0) if path.exists() else 0


def ended(words: Sequence[str], *, seconds: float = 120, folder: Path | None = None, **variables: str) -> Any:
    """A command that has ended, with what it wrote; `variables` are on top of this process's."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment, timeout=seconds, check=False)


@contextmanager
def sessions() -> Iterator[Callable[..., Any]]:
    """Starts commands, each in a session of its own, whose processes are all ended afterwards."""
    processes: list[subprocess.Popen[Any]] = []

    def start(words: Sequence[str], **how: Any) -> Any:
        processes.append(subprocess.Popen(words, start_new_session=True, **how))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
