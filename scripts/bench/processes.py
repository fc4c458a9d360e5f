"""Starts a command as fresh processes on this host, one per rank, and ends them. Imports nothing that is slow."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
"""Variables for ranks that compute on a CPU, each with one thread."""
_LAST_LINES = 25
_POLL_SECONDS = 0.05
_LATE_SECONDS = 60.0

Process = subprocess.Popen[bytes]


def start_ranks(command: Sequence[str], logs: Sequence[Path], variables: Mapping[str, str]) -> list[Process]:
    """Start `command` once per log, which gets all that the rank writes; with torchrun's variables beside `variables`."""
    port = str(free_port())
    processes = []
    for rank, log in enumerate(logs):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(logs), "LOCAL_WORLD_SIZE": len(logs)}
        own = {name: str(number) for name, number in numbers.items()}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        own |= {"PYTHONPATH": python_path(), "TORCHELASTIC_USE_AGENT_STORE": "False", **variables}
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    list(command),
                    env={**os.environ, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return processes


def wait_for(processes: Sequence[Process], timeout: float) -> bool:
    """Wait until all have ended, or one of them badly; whether that was within `timeout` seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def end_all(processes: Sequence[Process]) -> bool:
    """End what still runs a while after the others; returns whether any failed."""
    failed = any(process.poll() for process in processes)
    ended = any(process.poll() is not None for process in processes)
    for process in processes:
        if ended and not failed and process.poll() is None:
            try:
                process.wait(timeout=_LATE_SECONDS)
            except subprocess.TimeoutExpired:
                failed = True
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return failed or any(process.returncode for process in processes)


def tails(logs: Sequence[Path]) -> str:
    """The last lines of each."""
    parts = []
    for log in logs:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        parts.append(f"--- {log.name}\n" + "\n".join(lines[-_LAST_LINES:]))
    return "\n".join(parts)


def python_path() -> str:
    """Return the `PYTHONPATH` of processes, with scripts' modules and the package: this checkout's, unless there is another."""
    return os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH", ""), str(SCRIPTS.parent)]))


def free_port() -> int:
    """Return a TCP port of this host that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
