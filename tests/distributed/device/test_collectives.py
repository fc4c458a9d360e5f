"""Collectives on a device: connected from the start, launched in one order, and no wait for them is without an end."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.simulated.device import compiler
from tests.support.workers import PoolOptions, Workers
from zeromesh.environment import kept_environment, setting
from zeromesh.errors import CollectiveError
from zeromesh.mesh import device_works
from zeromesh.mesh.device_works import DeviceWorks, record_collectives
from zeromesh.pipeline.schedule import make_schedule, message_order, received_by, sent_by
from zeromesh.telemetry.event_ring import Activity
from zeromesh.telemetry.status_board import StatusBoard, new_row
from zeromesh.telemetry.watchdog import Watchdog

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler for the simulated device")


def test_a_rank_that_comes_late_is_waited_for(workers: Workers) -> None:
    """A wait in slices would abort the communicator."""
    for found in workers.run(2, "device_cases:waits_for_a_late_rank", device="sim", seconds=0.4):
        assert len(found) == 4
        assert all(found.values()), found


def test_exchanges_give_what_one_process_computes_and_leave_what_they_are_given(workers: Workers) -> None:
    for found in workers.run(2, "device_cases:exchanges", device="sim"):
        assert len(found) == 18
        assert [name for name, good in found.items() if not good] == []


def test_groups_are_connected_before_they_are_used(workers: Workers) -> None:
    """Also those of sets that are made later: a launch waits for nobody."""
    first, _ = workers.run(2, "device_cases:launches_without_others", device="sim", seconds=0.5)
    assert len(first) == 3
    assert max(first) < 0.25


def test_gathers_are_launched_in_one_order_whenever_their_shards_are_read(workers: Workers) -> None:
    """`run` compares what ranks have launched."""
    for equal in workers.run(2, "device_cases:gathers_from_files", device="sim", seconds=0.2):
        assert all(equal)


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES[1:])
def test_pipelines_launch_their_messages_in_one_order(workers: Workers, schedule: str, chunks: int) -> None:
    arguments = {"model": "llama", "schedule": schedule, "microbatches": 4, "chunks": chunks}
    for found in workers.run(2, "pipeline_cases:trains", device="sim", **arguments):
        assert found["difference"] <= 1e-9


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_message_is_made_before_later_ones_and_launched_before_it_is_needed(
    schedule: str, chunks: int, ranks: int
) -> None:
    """Each rank can launch all of its messages in the order of `message_order`: what it sends is made by then."""
    for microbatches in (1, ranks, 3 * ranks + 1):
        plan = make_schedule(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks)  # type: ignore[arg-type]
        for rank, actions in enumerate(plan.actions):
            due, ends = message_order(plan, rank)
            for action in actions:
                wanted, made = received_by(plan, rank, action), sent_by(plan, rank, action)
                before, end = [message for _, message in due], ends[action]
                if wanted is not None and wanted.source != rank and wanted in before:
                    launched, due = before[: before.index(wanted) + 1], due[before.index(wanted) + 1 :]
                    assert all(message.source != rank for message in launched), "a receive would overtake a send"
                if made is not None and made.target != rank:
                    messages = [message for _, message in due]
                    launched, due = messages[: messages.index(made) + 1], due[messages.index(made) + 1 :]
                    assert [message for message in launched if message.source == rank] == [made]
                ready = [message for moment, message in due if moment <= end]
                assert all(message.source != rank for message in ready)
                due = due[len(ready) :]
            assert not due


def test_a_hang_ends_with_an_error_that_names_the_rank(workers: Workers) -> None:
    with workers.fresh(PoolOptions(size=2, timeout_seconds=1.0, device="sim")) as pool:
        first = pool.outcomes("device_cases:hangs", stuck=[1])[0]
    error = first.result["error"]
    assert error.startswith("CollectiveError: rank 0: all-gather of unit layers.3 did not end within 1 seconds")
    assert "rank 1 (pid" in error
    assert "in a step" in error
    assert 1 < first.result["seconds"] < 4


@pytest.fixture
def watch() -> Watchdog:
    """The watch of rank 0, whose peer makes no progress, and which nobody but a test looks after."""
    rows = {rank: new_row() for rank in range(2)}
    made = Watchdog(StatusBoard(rows, 0), 0, 0.05, compare_events=True)
    made.close()
    made.closed.clear()
    StatusBoard(rows, 1)
    return made


def _late(works: DeviceWorks, watch: Watchdog) -> None:
    """Have something in flight that never ends, and look after it until it is late."""
    works._flying.append(device_works._Flight(done=lambda: False, peers=[0, 1], what="all-gather of layers.3"))
    for _ in range(3):
        works._look()
        threading.Event().wait(0.06)


def test_a_host_that_does_not_come_back_is_ended(watch: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(DeviceWorks, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(device_works.os, "_exit", ended.append)
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: ended.append(str(error)))
    works, aborted = DeviceWorks(torch.device("cpu"), watch, traces=None), threading.Event()
    works._groups.append(SimpleNamespace(abort=aborted.set))  # type: ignore[arg-type]
    _late(works, watch)
    assert "all-gather of layers.3 did not end within 0.05 seconds" in str(ended[0])
    assert ended[1:] == [1]
    assert aborted.wait(5)


def test_the_latest_collectives_are_written_and_their_file_is_named(
    watch: Watchdog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"trace", raising=False)
    monkeypatch.setattr(device_works.dist, "get_rank", lambda: 0)
    works = DeviceWorks(torch.device("cpu"), watch, traces=tmp_path / "run")
    watch.told.set()
    _late(works, watch)
    path = tmp_path / "run" / "collectives_rank_0"
    assert path.read_bytes() == b"trace"
    with pytest.raises(CollectiveError, match=f"did not end.*The latest collectives of this rank are in {path}"):
        watch.post(Activity.FORWARD, 0)
    aborted = RuntimeError("NCCL communicator was aborted on rank 0")
    assert watch.cause_of(aborted) is watch.broken
    assert isinstance(watch.cause_of(KeyboardInterrupt()), KeyboardInterrupt)


def test_the_flight_recorder_is_on_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    with kept_environment({"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}):
        record_collectives(tmp_path)
        assert setting("TORCH_FR_BUFFER_SIZE") is None, "torch would warn of the older name, and take the newer one"
        assert setting("TORCH_NCCL_DUMP_ON_TIMEOUT") == "0"
        assert setting("TORCH_FR_DUMP_TEMP_FILE") == str(tmp_path / "collectives_rank_")
    with kept_environment():
        record_collectives(None)
        assert setting("TORCH_FR_BUFFER_SIZE") == "2000"
        assert setting("TORCH_FR_DUMP_TEMP_FILE") is None


def test_what_a_device_computes_is_progress_that_peers_see(watch: Watchdog) -> None:
    """The host is far ahead, and stands still; what the device is through with shows that it is not stuck."""
    works, done = DeviceWorks(torch.device("cpu"), watch, traces=None), threading.Event()
    works._computing += [lambda: True, done.is_set]
    before = watch.board.progress(0)
    works._look()
    assert watch.board.progress(0) > before
    works._flying.append(device_works._Flight(done=lambda: False, peers=[0, 1], what="a gather"))
    for number in range(6):
        done.set()
        works._look()
        works._computing.append(done.is_set)
        threading.Event().wait(0.02)
        assert watch.broken is None, number


def test_on_a_device_gathers_and_reductions_have_one_order() -> None:
    for one_order in (False, True):
        rows = {rank: new_row() for rank in range(2)}
        watches = [
            Watchdog(StatusBoard(rows, rank), rank, 0.3, compare_events=True, one_order=one_order) for rank in range(2)
        ]
        for watch in watches:
            watch.unit_names = {rank: ["root", "a", "b"] for rank in range(2)}
        watches[0].event(Activity.GATHER, 1, [0, 1])
        watches[0].event(Activity.REDUCE, 2, [0, 1])
        watches[1].event(Activity.REDUCE, 2, [0, 1]) if not one_order else None
        if one_order:
            with pytest.raises(CollectiveError, match="rank 1 is reducing gradients of b where rank 0 was gathering a"):
                watches[1].event(Activity.REDUCE, 2, [0, 1])
        watches[1].event(Activity.GATHER, 1, [0, 1]) if not one_order else None
        for watch in watches:
            watch.close()
