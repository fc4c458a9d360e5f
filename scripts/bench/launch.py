"""Starts a system as fresh processes on this host, one per rank, and collects what they measured."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import activations
from bench.activations import Activations
from bench.processes import ONE_THREAD, end_all, python_path, start_ranks, tails, wait_for
from bench.worker import RESULT
from bench.workload import Workload

_LAST_CHARACTERS = 4000


class RunError(RuntimeError):
    """A system did not end well; the text is the end of what its ranks wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The figures of one run of a system, over its ranks."""

    system: str
    step_seconds: tuple[float, ...]
    """The seconds of each timed step; ranks begin and end it together."""
    cpu_seconds: tuple[float, ...]
    """The CPU seconds of each timed step, mean over ranks."""
    peak_bytes: int
    """The peak of the rank that needed most."""
    losses: tuple[float, ...]
    ranks: tuple[dict[str, Any], ...]
    """Everything that the ranks said."""


def installed(system: str) -> bool:
    """Return True if a system can run here."""
    return not system.startswith("deepspeed-") or importlib.util.find_spec("deepspeed") is not None


def measure_activations(workload: Workload, *, timeout: float = 900.0, part: tuple[str, int] | None = None) -> Activations:
    """Measure the memory that forward and backward of `workload` allocate by themselves, in one fresh process. `part`: a system
    that divides the model, and the rank whose part alone runs.

    Raises:
        RunError: when it fails, or does not end within `timeout` seconds.
    """
    arguments = ["bench.activations", workload.to_json()]
    if part is not None:
        arguments = ["bench.divided_activations", part[0], workload.to_json(), str(part[1])]
    command = [sys.executable, "-m", *arguments]
    variables = {**os.environ, **ONE_THREAD, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"activations did not end within {timeout:g} seconds") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith(activations.RESULT)]
    if done.returncode or not lines:
        raise RunError(f"activations failed\n{done.stderr[-_LAST_CHARACTERS:]}")
    return Activations(**json.loads(lines[-1].removeprefix(activations.RESULT)))


def run_system(system: str, workload: Workload, *, timeout: float = 900.0, module: str = "bench.worker") -> Run:
    """Run `system` on `workload` in fresh processes, each of which runs `module`.

    Raises:
        RunError: when a rank fails, or does not end within `timeout` seconds.
    """
    return _collect(system, run_ranks(module, workload, [system, workload.to_json()], timeout=timeout))


def run_ranks(module: str, workload: Workload, arguments: list[str], *, timeout: float = 900.0) -> list[Any]:
    """Run a module as the workload's ranks, each a fresh process; what each printed as its result.

    Raises:
        RunError: when a rank fails, or does not end within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="zeromesh-bench-") as folder:
        logs = [Path(folder, f"rank{rank}") for rank in range(workload.ranks)]
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if workload.device == "cpu" else {}
        processes = start_ranks([sys.executable, "-m", module, *arguments], logs, {**ONE_THREAD, **hidden})
        try:
            in_time = wait_for(processes, timeout)
        finally:
            failed = end_all(processes)
        if not in_time:
            raise RunError(f"{arguments[0]} did not end within {timeout:g} seconds\n{tails(logs)}")
        if failed:
            raise RunError(f"{arguments[0]} failed\n{tails(logs)}")
        return [_result(log) for log in logs]


def _result(log: Path) -> Any:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(RESULT)]
    if not lines:
        raise RunError(f"a rank ended without a result\n{tails([log])}")
    return json.loads(lines[-1].removeprefix(RESULT))


def _collect(system: str, ranks: list[dict[str, Any]]) -> Run:
    seconds = zip(*(rank["step_seconds"] for rank in ranks), strict=True)
    cpu = zip(*(rank["cpu_seconds"] for rank in ranks), strict=True)
    return Run(
        system=system,
        step_seconds=tuple(max(step) for step in seconds),
        cpu_seconds=tuple(sum(step) / len(step) for step in cpu),
        peak_bytes=max(rank["peak_bytes"] for rank in ranks),
        losses=tuple(ranks[0]["losses"]),
        ranks=tuple(ranks),
    )
