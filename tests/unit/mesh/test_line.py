"""A rank's end of the line to its launcher: what it tells, and what it is told."""

import json
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue

import pytest

from zeromesh.environment import LINE
from zeromesh.launch.line import LauncherLine, line_to_launcher


@pytest.fixture
def ends() -> Iterator[tuple[LauncherLine, Connection]]:
    ours, theirs = Pipe()
    yield LauncherLine(ours), theirs
    theirs.close()


def said(launcher: Connection) -> list[object]:
    found = []
    while launcher.poll():
        found.append(json.loads(launcher.recv_bytes()))
    return found


def test_a_rank_rests_until_it_has_a_place(ends: tuple[LauncherLine, Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    line, launcher = ends
    monkeypatch.setenv("RANK", "3")
    lost: SimpleQueue[str] = SimpleQueue()
    line.on_lost = lost.put
    for what in ({"asked": "others have come"}, {"lost": "rank 1"}):
        launcher.send_bytes(json.dumps(what).encode())
    assert lost.get(timeout=10) == "rank 1"
    assert line.asked
    line.leave()
    for what in ({"lost": "rank 1, again"}, {"place": {"RANK": "2"}}, {"lost": "rank 0"}):
        launcher.send_bytes(json.dumps(what).encode())
    assert line.rest("rank 1 is gone")
    assert (line.asked, os.environ["RANK"]) == ("", "2")
    assert said(launcher) == [{"rests": "rank 1 is gone"}]
    assert lost.get(timeout=10) == "rank 0"


def test_without_a_launcher_there_is_no_next_start(ends: tuple[LauncherLine, Connection]) -> None:
    line, launcher = ends
    launcher.close()
    assert not line.rest("rank 1 is gone")
    line.tell(step=3)


def test_the_line_is_that_of_the_process_it_was_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that a rank starts has its variables, but not its descriptors."""
    ours, launcher = Pipe()
    for pid, found in ((os.getpid(), True), (os.getppid(), False)):
        line_to_launcher.cache_clear()
        monkeypatch.setenv(LINE, f"{pid}:{ours.fileno()}")
        line = line_to_launcher()
        assert (line is not None) is found
        if line is not None:
            line.tell(step=1)
            assert said(launcher) == [{"step": 1}]
    line_to_launcher.cache_clear()
