"""Processes that a dataset or a callback forks while a run goes on."""

import signal
from pathlib import Path

import pytest

from tests.support.workers import Workers


@pytest.mark.parametrize("transport", ["shared", pytest.param("gloo", marks=pytest.mark.full)])
def test_processes_that_are_forked_in_a_run_end_when_they_are_told_and_change_nothing(
    workers: Workers, tmp_path: Path, transport: str
) -> None:
    for found in workers.run(2, "fork_cases:forking", folder=str(tmp_path), transport=transport):
        assert found["forked"] == found["plain"]
        assert found["lines"] == 2
        terminated, interrupted = found["codes"][:2]
        assert terminated == -signal.SIGTERM
        assert interrupted in (1, -signal.SIGINT)  # A process of multiprocessing ends with KeyboardInterrupt.
