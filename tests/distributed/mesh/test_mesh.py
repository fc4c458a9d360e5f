"""What ranks of a host share: boards, watches, segments, and words on which they sleep."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.support.waiting import wait_for
from zeromesh.comm.shm_transport import Counters, Futex
from zeromesh.errors import CollectiveError, StorageError
from zeromesh.offload.memory import allocation
from zeromesh.offload.memory.allocation import PAGE, SharedSegment
from zeromesh.telemetry import state_monitor, watchdog
from zeromesh.telemetry.status_board import (
    DETAIL,
    HISTORY,
    NEW_MICROBATCH,
    PROGRESS,
    ROW_WORDS,
    SINCE,
    STATE,
    STEP_SHIFT,
    TRACE_REQUEST,
    UNIT_BITS,
    WAITED,
    Activity,
    RankNote,
    StatusBoard,
    StoreBoard,
    read_ring,
    shared_rows,
)
from zeromesh.telemetry.watchdog import Watchdog

Boards = tuple[StatusBoard, StatusBoard]
Watches = tuple[Watchdog, Watchdog]


@pytest.fixture
def boards() -> Boards:
    """The boards of two ranks, both in this process."""
    segment = SharedSegment.create("board", 2 * ROW_WORDS * 8)
    mapped = SharedSegment.attach(os.getpid(), segment.descriptor, segment.nbytes, "board")
    segment.close()
    mapped.close()
    return StatusBoard(shared_rows(segment.words()), 0), StatusBoard(shared_rows(mapped.words()), 1)


def watch_of(board: StatusBoard, rank: int, timeout: float = 0.3, *, compare: bool = True) -> Watchdog:
    watch = Watchdog(board, rank, timeout, compare_events=compare)
    watch.unit_names = {each: ["unit root", "unit a", "unit b"] for each in range(8)}
    return watch


@pytest.fixture
def watches(boards: Boards) -> Watches:
    return watch_of(boards[0], 0), watch_of(boards[1], 1)


def gather(watch: Watchdog, units: Sequence[int]) -> None:
    for unit in units:
        watch.event(Activity.GATHER, unit, [0, 1])


def state_word(step: int, activity: int, unit: int) -> int:
    """What a row says of a rank that is in this step, does this, and does it to this unit."""
    return (step << STEP_SHIFT) | (activity << UNIT_BITS) | (unit + 1)


def post(board: StatusBoard, step: int, activity: int, unit: int) -> None:
    board.own[STATE] = state_word(step, activity, unit)
    board.own[PROGRESS] += 1


class TestBoards:
    def test_a_rank_reads_what_another_posts(self, boards: Boards) -> None:
        first, second = boards
        post(first, 7, int(Activity.BACKWARD), 3)
        row = second.row(0)
        assert (row.pid, row.step, row.activity, row.unit, row.failure) == (os.getpid(), 7, 2, 3, "")
        first.own[TRACE_REQUEST] = 5
        assert (first.trace_request(), second.trace_request()) == (5, 5)
        before = second.progress(0)
        post(first, 7, int(Activity.BACKWARD), 4)
        assert second.progress(0) > before

    def test_streams_of_events_are_numbered_and_forgotten_after_a_while(self, boards: Boards) -> None:
        first, second = boards
        assert [first.event(0, 10 + n, 0) for n in range(3)] == [0, 1, 2]
        assert first.event(1, 99, 0) == 0
        assert [second.event_of(0, 0, n) for n in range(4)] == [10, 11, 12, None]
        assert second.reached(0, 0, 2)
        assert not second.reached(0, 0, 3)
        for n in range(HISTORY):
            first.event(0, n, 0)
        assert second.event_of(0, 0, 2) is None
        assert second.event_of(0, 0, HISTORY + 2) == HISTORY - 1

    def test_what_is_read_while_it_is_written_is_whole(self, boards: Boards) -> None:
        """Another process writes all the time: an event is the one of its number, or not known any more, and neither a row nor a
        note is half of one and half of the next."""
        first, second = boards
        writer = os.fork()
        if writer == 0:
            for n in itertools.count():
                first.event(0, 7 * n, 0)
                post(first, n % 1000, n % 9, n % 1000)
                first.write(RankNote.LEFT, n + 1, f"call {n + 1} " * 30)
        seen, deadline = 0, time.monotonic() + 1.5
        try:
            while time.monotonic() < deadline:
                row = second.row(0)
                assert row.step == row.unit or row.unit == -1
                stamp, text = second.read(0, RankNote.LEFT)
                assert text == f"call {stamp} " * 30 if stamp else text == ""
                latest = second.progress(0) // 2
                for number in range(max(0, latest - HISTORY - 2), max(0, latest - HISTORY + 40)):
                    word = second.event_of(0, 0, number)
                    assert word in (None, 7 * number)
                    seen += word is not None
        finally:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
        assert seen

    def test_a_failure_is_told_once(self, boards: Boards) -> None:
        first, second = boards
        assert not second.row(0).failure
        first.fail("ValueError: " + "long " * 1000)
        first.fail("its consequence")
        assert second.row(0).failure.startswith("ValueError: long long")

    def test_a_process_is_alive_until_it_is_reaped_or_a_zombie(self, boards: Boards) -> None:
        first, second = boards
        assert first.own[0] == os.getpid()
        assert second.alive(0)
        first.own[0] = 0
        assert second.alive(0)
        child = subprocess.Popen([sys.executable, "-c", ""])
        first.own[0] = child.pid
        wait_for(lambda: not second.alive(0), 20)
        child.wait()
        assert not second.alive(0)


class DictStore(dict[str, bytes]):
    """A rendezvous store of this process; `gone` makes it unreachable."""

    gone = False

    def set(self, key: str, value: str) -> None:
        self.get(key)
        self[key] = value.encode()

    def get(self, key: str) -> bytes:  # type: ignore[override]
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return super().get(key, b"")


StoreBoards = tuple[StoreBoard, StoreBoard, DictStore]


@pytest.fixture
def store_boards(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreBoards]:
    monkeypatch.setattr(StoreBoard, "PERIOD_SECONDS", 0.05)
    store = DictStore()
    first, second = (StoreBoard(store, store, rank, stale_seconds=0.3) for rank in range(2))
    yield first, second, store
    first.close()
    second.close()


class TestStoreBoards:
    def test_rows_are_published_in_the_background(self, store_boards: StoreBoards) -> None:
        first, second, _ = store_boards
        first.event(1, 55, state_word(3, int(Activity.FORWARD), 1))
        wait_for(lambda: second.row(0).step == 3)
        assert (second.row(0).step, second.row(0).unit, second.event_of(0, 1, 0)) == (3, 1, 55)
        assert second.reached(0, 1, 0)

    def test_a_failure_is_published_at_once(self, store_boards: StoreBoards) -> None:
        first, second, _ = store_boards
        first.fail("ValueError: a|b|c")
        assert second.row(0).failure == "ValueError: a|b|c"

    def test_a_rank_without_heartbeat_is_gone(self, store_boards: StoreBoards) -> None:
        first, second, _ = store_boards
        first.event(0, 1, 0, time.monotonic_ns() - 5 * 10**9)
        first.publish()
        assert second.alive(0)
        first.close()
        wait_for(lambda: not second.alive(0))
        assert second.silent_seconds(0) >= 0.3
        assert 5.3 <= second.row(0).seconds < 60

    def test_rank_0_is_gone_with_its_store(self, store_boards: StoreBoards) -> None:
        first, second, store = store_boards
        post(first, 9, int(Activity.FORWARD), 2)
        first.publish()
        assert second.row(0).step == 9
        store.gone = True
        assert not second.alive(0)
        assert second.row(0).step == 9
        second.fail("its own failure is not replaced by the store's")


class TestWatch:
    def test_a_peer_without_progress_is_named(self, boards: Boards) -> None:
        first, second = boards
        post(second, 4, int(Activity.FORWARD), 2)
        began = time.monotonic()
        with pytest.raises(CollectiveError, match=r"rank 1 \(pid \d+\) was in forward of unit b at step 4") as error:
            (watch := watch_of(first, 0)).wait(lambda: False, [0, 1], "the gather")
        assert "the gather did not end within 0.3 seconds (parallel.timeout_seconds)" in str(error.value)
        assert 0.3 <= time.monotonic() - began < 2
        assert watch.may_hang

    def test_steps_are_said_as_the_console_counts_them(self, watches: Watches) -> None:
        first, second = watches
        second.post(Activity.FORWARD, 1)
        assert first.describe(1).endswith("in forward of unit a before the first step")
        second.post(Activity.FORWARD, 1, step=0)
        assert first.describe(1).endswith("in forward of unit a at step 1")
        second.post(Activity.BACKWARD, 1)
        assert first.describe(1).endswith("in backward of unit a at step 1")

    def test_steps_and_waits_are_counted(self, watches: Watches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        watch, other = watches
        watch.post(Activity.FORWARD, 1, step=4)
        watch.begin_microbatch(2)
        row = other.board.row(0)
        assert (row.step, row.microbatch, row.progress) == (5, 3, other.board.progress(0))
        watch.post(Activity.FORWARD, 1, step=5)
        assert other.board.row(0).microbatch == 0
        watch.waited_seconds = 5.0
        for number, late in enumerate(([1], [1, 2])):
            watch.event(Activity.GATHER, 1, range(2 - number))  # This rank alone begins nothing.
            watch.wait(Mock(side_effect=[False, True]), [0, 1], "a gather", behind=lambda late=late: late, polls=1)
        assert watch.operations_begun == 3
        assert watch.waited_seconds > 5.0
        with pytest.raises(KeyError), watch.call("save", [0]):
            raise KeyError
        assert other.board.read(0, RankNote.LEFT) == (1, "KeyError")
        watch.ring.write(tmp_path / "rank-0.ring", {})
        words = [word for _, word in read_ring(tmp_path / "rank-0.ring")[1]]
        assert [word for word in words if word & ~DETAIL in (WAITED, NEW_MICROBATCH)] == [
            *(NEW_MICROBATCH | 3, WAITED | 2, WAITED),
            WAITED,
        ]
        watch.broken = CollectiveError("cause")
        errors = (RuntimeError(), ValueError(), CollectiveError("other"))
        assert [watch.cause_of(each) is watch.broken for each in errors] == [True, False, False]
        phases = {"data": 1.0, "forward": 2.0, "other": 3.0, "offload_wait": 0.5, "communication": 0.25}
        for now, seconds in ((100.0, phases), (110.0, {"data": 1.0}), (120.0, {}), (123.0, {"data": 1.0})):
            monkeypatch.setattr(time, "monotonic", lambda now=now: now)
            watch.count_step(seconds)
        assert other.board.totals(0) == (3, *(int(each * 1e9) for each in (3.0, 5.0, 0.5, 0.25, 9.0 + 2.0)))

    def test_the_states_of_ranks_have_every_figure_of_their_rows(
        self, watches: Watches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = watches
        clock = [100.0]
        hand = SimpleNamespace(monotonic=lambda: clock[0], monotonic_ns=time.monotonic_ns)
        for module in (state_monitor, watchdog):
            monkeypatch.setattr(module, "time", hand)
        second.close()  # Its heartbeat removes the note of a disk.
        monitor = state_monitor.StateMonitor(first, (0, 1), tmp_path / "ranks.json", clean=str.upper)
        assert [state["recent"] for state in monitor.states()] == [None, None]
        second.begin_microbatch(0)
        for step in range(1, 13):
            clock[0] += 0.01 * step + 0.212
            phases = {"forward": 0.15, "other": 0.05, "offload_wait": 0.003, "communication": 0.004}
            second.count_step({**phases, "data": 0.01 * step})  # 30 to 120 ms in steps 3 to 12.
            (_, state) = monitor.states()
        means = {"data": 0.075, "compute": 0.2, "offload": 0.003, "communication": 0.004, "between": 0.005}
        assert state["recent"] == {"steps": 10} | {name: pytest.approx(mean, abs=2e-6) for name, mean in means.items()}
        second.post(Activity.BACKWARD, 2, step=4)
        assert second.board.row(1).microbatch == 0, "that of the step before"
        second.begin_microbatch(2)
        monitor.states()
        clock[0] += 3
        second.board.fail("an error")
        second.board.write(RankNote.DISK, 1, "a write")
        second.board.write(RankNote.WAIT, time.monotonic_ns() - 70 * 10**9, "0 3|gather of a/0")
        second.board.own[SINCE] = time.monotonic_ns() - 50 * 10**9
        (_, state) = monitor.states()
        assert (state.pop("seconds"), state["waits"].pop("seconds")) == pytest.approx((50, 70), abs=9)
        del state["recent"]
        doing = {"activity": "backward", "doing": "in backward of unit b", "seconds_without_progress": 3.0}
        notes = {"failure": "AN ERROR", "disk": "A WRITE", "waits": {"for": "gather of a/0", "ranks": [0, 3]}}
        assert state == {"rank": 1, "pid": os.getpid(), "step": 5, "microbatch": 3} | doing | notes

    def test_a_peer_with_progress_is_waited_for(self, boards: Boards) -> None:
        first, second = boards
        end = time.monotonic() + 0.8

        def done() -> bool:
            post(second, 0, int(Activity.FORWARD), 1)
            return time.monotonic() > end

        watch_of(first, 0).wait(done, [0, 1], "a slow peer")

    def test_patience_is_longer_for_a_while(self, boards: Boards) -> None:
        watch = watch_of(boards[0], 0, timeout=0.05)
        with watch.patience(10):
            end = time.monotonic() + 0.3
            watch.wait(lambda: time.monotonic() > end, [0, 1], "start-up")
        assert watch.timeout_seconds == 0.05
        watch = watch_of(boards[0], 0, timeout=20)
        with watch.patience(10):
            assert watch.timeout_seconds == 20, "it is a minimum"

    def test_a_peer_that_failed_is_named_with_its_reason(self, boards: Boards) -> None:
        first, second = boards
        watch_of(second, 1).fail(ValueError("bad sample"))
        with pytest.raises(CollectiveError, match="rank 1 failed with ValueError: bad sample"):
            watch_of(first, 0).wait(lambda: False, [0, 1], "a sum")

    def test_a_peer_that_has_done_its_part_and_then_failed_leaves_its_error_to_the_next_wait(
        self, boards: Boards, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What has arrived is there: the rank may find the cause by itself, as its peer did."""
        first, second = boards
        watch_of(second, 1).fail(ValueError("bad sample"))
        watch, read = watch_of(first, 0), Mock(side_effect=first.read)
        monkeypatch.setattr(first, "read", read)
        watch.wait(lambda: bool(read.called), [0, 1], "a sum", polls=0)
        assert not watch.may_hang
        with pytest.raises(CollectiveError, match="rank 1 failed with ValueError: bad sample"):
            watch.wait(lambda: False, [0, 1], "the next sum")

    def test_ranks_that_go_through_other_events_are_named(self, watches: Watches) -> None:
        first, second = watches
        for watch in (first, second):
            watch.event(Activity.GATHER, 1, [0, 1])
        first.event(Activity.GATHER, 2, [0, 1])
        with pytest.raises(CollectiveError, match="rank 1 is gathering unit a where rank 0 was gathering unit b"):
            second.event(Activity.GATHER, 1, [0, 1])
        with pytest.raises(CollectiveError, match="rank 0 is gathering unit b where rank 1 was gathering unit a"):
            first.wait(lambda: False, [0, 1], "a gather")

    def test_gathers_and_reductions_are_two_sequences(self, watches: Watches) -> None:
        first, second = watches
        first.event(Activity.GATHER, 1, [0, 1])
        first.event(Activity.REDUCE, 2, [0, 1])
        second.event(Activity.REDUCE, 2, [0, 1])
        second.event(Activity.GATHER, 1, [0, 1])

    def test_ranks_that_have_parted_are_named_where_they_did(self, boards: Boards) -> None:
        """Across hosts an event is compared only when a wait lasts, and by then both may do the same again."""
        first, second = (watch_of(board, rank, compare=False) for rank, board in enumerate(boards))
        gather(first, [1, 2, 0, 0])
        gather(second, [1, 1, 0, 0])
        with pytest.raises(CollectiveError, match="rank 0 is gathering unit b where rank 1 was gathering unit a"):
            first.wait(lambda: False, [0, 1], "a gather")

    def test_ranks_that_have_parted_too_far_back_to_be_remembered_still_disagree(self, watches: Watches) -> None:
        first, second = watches
        after = [0] * (HISTORY + 20)
        gather(first, [1, *after])
        gather(second, [2])
        with pytest.raises(CollectiveError, match=f"have gone through different units further back .* {HISTORY} events"):
            gather(second, after)

    def test_a_rank_that_is_far_behind_but_does_the_same_is_no_error(self, watches: Watches) -> None:
        for watch in watches:
            gather(watch, [number % 3 for number in range(2 * HISTORY + 20)])

    def test_a_broken_connection_is_explained_by_the_board(self, boards: Boards) -> None:
        first, second = boards
        broken = Mock(wait=Mock(side_effect=RuntimeError("Connection closed by peer")))
        with pytest.raises(CollectiveError, match="a sum failed: Connection closed by peer"):
            watch_of(first, 0).wait_work(broken, [0, 1], "a sum")
        second.fail("KeyError: 'labels'")
        with pytest.raises(CollectiveError, match="rank 1 failed with KeyError: 'labels'"):
            watch_of(first, 0).wait_work(broken, [0, 1], "a sum")

    def test_a_collective_that_ends_just_after_a_wait_has_given_up_is_done(self, boards: Boards) -> None:
        late = Mock(wait=Mock(side_effect=[RuntimeError("Operation timed out!"), True]))
        watch_of(boards[0], 0).wait_work(late, [0, 1], "a sum")
        assert late.wait.call_count == 2


class TestSegments:
    def test_two_mappings_are_one_memory(self) -> None:
        with closing(SharedSegment.create("test", 3 * PAGE)) as mine:
            theirs = SharedSegment.attach(os.getpid(), mine.descriptor, 3 * PAGE, "test")
            mine.tensor(64, 10, torch.float32).fill_(2.5)
            assert theirs.tensor(64, 10, torch.float32).tolist() == [2.5] * 10
            assert mine.tensor(0, 0, torch.float64).numel() == 0
            theirs.words()[0] = -5
            assert mine.words()[0] == -5
            theirs.close()

    def test_pages_given_back_read_as_zeros_and_can_be_taken_again(self) -> None:
        with closing(SharedSegment.create("test", 4 * PAGE)) as segment:
            everything = segment.tensor(0, 4 * PAGE, torch.uint8)
            everything.fill_(1)
            assert os.fstat(segment.descriptor).st_blocks * 512 == 4 * PAGE
            segment.give_back(100, 3 * PAGE)
            assert os.fstat(segment.descriptor).st_blocks * 512 == 2 * PAGE
            assert int(everything.sum()) == 2 * PAGE
            segment.reserve(0, 4 * PAGE)
            assert os.fstat(segment.descriptor).st_blocks * 512 == 4 * PAGE

    def test_pages_are_taken_on_an_older_system_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(allocation, "_POPULATE_WRITE", 9999)
        segment = SharedSegment.create("test", 4 * PAGE, reserve=False)
        segment.reserve(0, 3 * PAGE)
        assert os.fstat(segment.descriptor).st_blocks * 512 == 3 * PAGE
        segment.close()
        with pytest.raises(StorageError, match=r"shared memory for test: .* cannot be reserved"):
            segment.reserve(0, 3 * PAGE)

    def test_a_segment_that_is_not_there_is_an_error_with_a_way_out(self) -> None:
        with pytest.raises(StorageError, match="choose the transport gloo"):
            SharedSegment.attach(os.getpid(), 4321, PAGE, "parameters")
        with pytest.raises(StorageError, match="cannot be reserved"):
            SharedSegment.create("gradients", 1 << 50)
        with pytest.raises(StorageError, match="cannot be reserved"):
            SharedSegment.create("gradients", 1 << 62, reserve=False)

    def test_a_tensor_outlives_its_segment(self) -> None:
        segment = SharedSegment.create("test", PAGE)
        tensor = segment.tensor(0, 8, torch.float64).fill_(3)
        segment.close()
        segment.close()
        assert tensor.sum() == 24


@pytest.fixture
def words() -> memoryview:
    return memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")


def test_a_sleeper_is_woken_by_the_write(words: memoryview) -> None:
    words[3] = 2**32 + 7  # The upper half is not looked at.
    here, there = Futex(words, 3), Futex(words, 3)

    def write() -> None:
        time.sleep(0.05)
        words[3] = 2**32 + 8
        there.wake()

    thread = threading.Thread(target=write)
    began = time.perf_counter()
    thread.start()
    while words[3] == 2**32 + 7:
        here.wait(2**32 + 7, 0.9)
    seconds = time.perf_counter() - began
    thread.join()
    assert 0.04 < seconds < 0.85, "it slept to the end of its time"


def test_nobody_sleeps_for_what_has_been_written(words: memoryview) -> None:
    words[0] = 5
    began = time.perf_counter()
    Futex(words, 0).wait(4, 0.9)
    assert time.perf_counter() - began < 0.8


@pytest.mark.parametrize(("looks", "begun"), [([3], 0), ([2, 3], 1)])
def test_a_wait_without_sleep_counts_too(words: memoryview, looks: list[int], begun: int) -> None:
    """An evaluation that fails after one has had others in it, who are told."""
    group: Any = SimpleNamespace(size=1, index=0, ranks=(0,), watch=SimpleNamespace(operations_begun=0))
    counters: Any = Counters(words, 0, group)
    counters._words = type("Words", (), {"__getitem__": lambda _self, _place: looks.pop(0)})()
    counters.wait(3, "a gather")
    assert group.watch.operations_begun == begun


def test_sleep_ends_without_a_write(words: memoryview) -> None:
    began = time.perf_counter()
    Futex(words, 0).wait(0, 0.02)
    assert time.perf_counter() - began > 0.01
