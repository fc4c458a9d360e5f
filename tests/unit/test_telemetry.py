"""What ranks tell of themselves: rows and notes of a board, who is late in a wait, waits for a disk, and requests for traces."""

import json
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import wait_for
from zeromesh.files import disk_call
from zeromesh.telemetry import status_board
from zeromesh.telemetry.state_monitor import StateMonitor
from zeromesh.telemetry.status_board import (
    REQUEST,
    TRACE_REQUEST,
    WITHOUT_UNIT,
    Activity,
    EventRing,
    RankNote,
    StatusBoard,
    new_row,
    phrase_of,
    read_ring,
)
from zeromesh.telemetry.step_recorder import Collective, StepRecorder, added
from zeromesh.telemetry.watchdog import Watchdog

Watches = tuple[Watchdog, Watchdog]


@pytest.fixture
def watches() -> Iterator[Watches]:
    """Those of two ranks of this process, whose heartbeats beat a hundred times a second."""
    rows = {rank: new_row() for rank in range(2)}
    found = tuple(Watchdog(StatusBoard(rows, rank), rank, 0.04, compare_events=True) for rank in range(2))
    yield found[0], found[1]
    for each in found:
        each.close()


def test_an_activity_has_the_name_of_a_unit_where_it_concerns_one() -> None:
    names = ["root", "a"]
    alone = (Activity.IDLE, Activity.SAVE, Activity.LOAD, Activity.CALL, Activity.DATA, Activity.AGREE)
    assert alone == WITHOUT_UNIT
    assert {phrase_of(each, 1, names) for each in alone} == {each.phrase for each in alone}
    said = [phrase_of(Activity.FORWARD, unit, names).removeprefix("in forward of ") for unit in (-1, 0, 1, 2)]
    assert said == ["the run's counters", "root", "a", "the run's counters"]


def test_a_note_is_cut_to_its_room_and_removed(watches: Watches) -> None:
    board, other = (each.board for each in watches)
    for note, size in zip(RankNote, (1024, 256, 512, 512, 512), strict=True):
        if note is RankNote.DISK:
            continue  # The heartbeat removes it.
        board.write(note, 3, "x" * 2000)
        assert other.read(0, note) == (3, "x" * (size - 1))
        board.write(note, 4, "short")
        assert other.read(0, note) == (4, "short")
    assert [other.read(0, note)[0] for note in RankNote if note is not RankNote.DISK] == [4] * 4
    board.write(RankNote.CALL, 0)
    assert other.read(0, RankNote.CALL) == (0, "")
    assert other.seconds_since(0, 0) == 0.0
    assert 1.0 <= other.seconds_since(0, time.monotonic_ns() - 10**9) < 60
    board.fail("the cause")
    board.fail("a consequence")
    assert other.row(0).failure == "short", "the first one stays"


def test_late_ranks_of_a_wait_are_those_that_neither_wait_nor_have_announced_it(watches: Watches) -> None:
    first, second = watches

    def late(what: str) -> str:
        """The ranks that a wait of the first one tells on the board."""
        seen: list[str] = []

        def done() -> bool:
            stamp, text = second.board.read(0, RankNote.WAIT)
            seen.extend([text] if stamp else [])
            return bool(seen)

        first.timeout_seconds = 20
        first.wait(done, [0, 1], what, polls=0)
        assert second.board.read(0, RankNote.WAIT) == (0, "")
        return seen[0]

    assert late("a sum") == "1|a sum"
    second.board.write(RankNote.WAIT, 1, "0|a sum")
    assert late("a sum") == "|a sum"
    assert late("a barrier") == "1|a barrier"
    assert late("gather of b") == "1|gather of b"
    first.event(Activity.GATHER, 1, [0, 1])
    assert late("gather of b") == "1|gather of b"
    second.event(Activity.GATHER, 1, [0, 1])
    assert late("gather of b") == "|gather of b"
    assert late("a barrier") == "1|a barrier"
    first.event(Activity.REDUCE, 1, [0, 1])
    assert late("all-gather of b") == "1|all-gather of b"
    second.event(Activity.REDUCE, 1, [0, 1])
    for what in ("all-gather of b", "reduction of gradients of b"):
        assert late(what) == f"|{what}"


def test_a_wait_for_a_disk_is_progress_for_a_while(watches: Watches) -> None:
    watch, other = watches
    beats: list[int] = []
    watch.on_beat = lambda: beats.append(1)

    def read() -> str:
        return other.board.read(0, RankNote.DISK)[1]

    with disk_call("write", "/a"):
        wait_for(lambda: "write of '/a' for 0 seconds" in read() and other.board.progress(0) > 2)
        assert "longer" not in read()
        watch.disk_patience = 0.0
        wait_for(lambda: read().endswith("seconds, longer than checkpoint.timeout_seconds (0)"))
        assert ", and waited for a disk: write of '/a'" in other.describe(0)
        before = other.board.progress(0)
        time.sleep(0.05)
        assert other.board.progress(0) == before
    wait_for(lambda: not read())
    assert len(beats) > 3


def test_each_request_for_traces_is_answered_once(watches: Watches, tmp_path: Path) -> None:
    watch, other = watches
    answered: list[int] = []
    other.on_request = lambda: answered.append(other.board.trace_request())
    (tmp_path / REQUEST).parent.mkdir()
    (tmp_path / REQUEST).touch()  # That of an earlier process.
    monitor = StateMonitor(watch, (0, 1), tmp_path / "ranks.json", clean=str)
    monitor.PERIOD_SECONDS = 0.01
    with monitor:
        wait_for((tmp_path / "ranks.json").exists)
        assert watch.board.own[TRACE_REQUEST] == 0
        os.utime(tmp_path / REQUEST, ns=(5, 5))
        wait_for(lambda: answered)
        time.sleep(0.05)
        watch.post(Activity.FORWARD, 1, step=6)
    assert answered == [5]
    written = json.loads((tmp_path / "ranks.json").read_text())
    assert [row["step"] for row in written["ranks"]] == [7, 0], "the state at the end is written"


def test_a_ring_numbers_only_so_many_names_and_reads_only_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, path = EventRing(), tmp_path / "rank-0.ring"
    monkeypatch.setattr(status_board, "_NAMES", 2)
    assert [ring.name(each) for each in "abcab"] == [1, 2, 0, 1, 2]
    for content in (b"[]\n", b"{}\n" + bytes(8), b"{\n"):
        path.write_bytes(zlib.compress(content))
        with pytest.raises(ValueError):
            read_ring(path)
    path.write_bytes(zlib.compress(b"{}\n" + bytes(16)))
    assert read_ring(path) == ({}, [(0, 0)])
    monkeypatch.setattr(status_board, "_LONGEST", 3)
    with pytest.raises(ValueError, match="not as zeromesh writes it"):
        read_ring(path)


@pytest.mark.parametrize(
    ("collective", "sent"),
    [
        *((each, 750) for each in Collective if each not in (Collective.ALL_REDUCE, Collective.POINT_TO_POINT)),
        (Collective.ALL_REDUCE, 1500),
        (Collective.POINT_TO_POINT, 1000),
    ],
)
def test_a_rank_of_four_sends_its_part_of_a_collective(collective: Collective, sent: int) -> None:
    recorder = StepRecorder()
    account = recorder.account("shard", 4)
    recorder.account("tensor", 2)
    recorder.enabled = False
    account.count(collective, 9000)
    recorder.enabled = True
    for _ in range(2):
        account.count(collective, 1000)
    assert recorder.take_traffic() == {"shard": {collective.value: {"calls": 2, "bytes": 2 * sent, "seconds": 0.0}}}
    recorder.close_account("shard")
    recorder.close_account("shard")
    account.count(collective, 1000)
    assert recorder.take_traffic() == {}


def test_the_time_of_a_collective_is_that_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    account = StepRecorder().account("shard", 2)
    for seconds in (1.5, 2.25):
        with account.timed(Collective.BROADCAST):
            clock[0] += seconds
        clock[0] += 10
    found = {"shard": account.take()}
    assert found == {"shard": {"broadcast": {"calls": 0, "bytes": 0, "seconds": 3.75}}}
    assert account.take() == {}
    other: Any = {"shard": {"all-gather": {"calls": 1, "bytes": 2, "seconds": 0.5}}, "data": {"broadcast": {"calls": 3}}}
    both = added(found, other)
    assert both["shard"] == found["shard"] | other["shard"]
    assert added(both, other)["data"]["broadcast"] == {"calls": 6}
    assert both["data"] == other["data"]
