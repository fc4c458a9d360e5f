"""The time before the first step ends, by its parts."""

import re

import pytest

from zeromesh.trainer.monitoring import step_metrics
from zeromesh.trainer.monitoring.step_metrics import StartTimes, now, process_began, sentence


def test_parts_follow_each_other_and_end_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((13.0, 100.0, 102.5, 104.0))
    monkeypatch.setattr(step_metrics, "now", lambda: next(clock))
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
    assert 0 <= now() - process_began() < 86400
    assert re.fullmatch(r"0\.0 s", sentence({}))
