"""The time before the first step ends, by its parts."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from zeromesh.trainer.monitoring import start_times
from zeromesh.trainer.monitoring.start_times import StartTimes, process_began, sentence


def test_parts_follow_each_other_and_end_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((13.0, 100.0, 102.5, 104.0))
    monkeypatch.setattr(start_times, "now", lambda: next(clock))
    times = StartTimes(10.0)
    times.end("launch", at=11.0)
    times.end("imports")
    times.begin()  # What a script did since then is no part of it.
    times.end("data")
    times.end("first step")
    times.over = True
    times.end("a later call")
    assert times.parts == {"launch": 1.0, "imports": 2.0, "data": 2.5, "first step": 1.5}
    assert sentence(times.parts) == "7.0 s (launch 1.0, imports 2.0, data 2.5, first step 1.5)"


def test_parts_too_short_to_matter_are_counted_and_not_shown() -> None:
    assert sentence({"data": 0.04, "first step": 1.06}) == "1.1 s (first step 1.1)"
    assert sentence({"data": 0.01}) == "0.0 s"


def test_the_clock_is_that_of_all_processes() -> None:
    """The launcher's time is compared with that of its workers."""
    assert 0 <= start_times.now() - process_began() < 86400
    assert re.fullmatch(r"0\.0 s", sentence({}))


def test_no_garbage_is_looked_for_while_the_command_imports() -> None:
    """There is next to none, and Python would go through all that was imported again and again."""
    code = """
import gc, sys
from zeromesh.trainer.cli import main as cli
rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(phase))
with cli.without_collection():
    lists = [[] for _ in range(100_000)]
assert not rounds and gc.isenabled() and gc.get_freeze_count() > 100_000
sys.modules["torch"] = cli  # Once it is loaded there is nothing to save.
with cli.without_collection():
    lists += [[] for _ in range(100_000)]
assert rounds
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
