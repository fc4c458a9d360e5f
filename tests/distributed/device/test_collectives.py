"""Collectives on a device: connected from the start, launched in one order, and no wait for them is without an end."""

import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.simulated.device import compiler
from tests.support.tables import row, tried
from tests.support.workers import PoolOptions, Workers
from zeromesh.comm.activation_collectives import open_exchange
from zeromesh.comm.shm_transport import open_transport
from zeromesh.comm.transport import BufferRequest
from zeromesh.environment import kept_environment, setting
from zeromesh.errors import CollectiveError
from zeromesh.flat.redistribute import one_after_another, redistribute, replicated
from zeromesh.mesh import device_works
from zeromesh.mesh.device_works import DeviceWorks, record_collectives
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import TieredTensor, Transfer
from zeromesh.pipeline.schedule import make_schedule, message_of, message_order
from zeromesh.telemetry.status_board import Activity, StatusBoard, new_row
from zeromesh.telemetry.watchdog import Watchdog

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler for the simulated device")
_LENGTH = 96


test_launches = tried(
    "test_collectives",
    [
        row(2, "waits_for_a_late_rank", seconds=0.4),
        row(2, "exchanges"),
        row(2, "launches_without_others", seconds=0.5),
        row(2, "gathers_from_files", seconds=0.2),
    ],
    folder=False,
    device="sim",
)


def _parts(shape: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    seeds = [torch.Generator().manual_seed(rank) for rank in range(2)]
    return [torch.randn(shape, generator=seed, dtype=torch.float64).to(device) for seed in seeds]


def waits_for_a_late_rank(mesh: Mesh, seconds: float) -> None:
    """Rank 1 comes `seconds` late to each kind of collective that others wait for, more than a slice of a wait on a CPU, which
    would abort the communicator."""
    world, parts = mesh.shard, _parts((8,), mesh.device)
    own, halves = parts[mesh.rank], one_after_another([4] * 4)
    crosswise = tuple(tuple(span for half in halves[index::2] for span in half) for index in range(2))
    total = own.clone()

    def summed() -> torch.Tensor:
        world.all_reduce_async(total, "a sum").wait()
        return total

    def placed(wanted: Any, what: str) -> torch.Tensor:
        return redistribute(own, one_after_another([8] * 2), wanted, world, what)

    for collective, wanted in (
        (lambda: placed(replicated(16, 2), "a gather"), torch.cat(parts)),
        (lambda: world.broadcast(own.clone(), 1, "a broadcast"), parts[1]),
        (lambda: placed(crosswise, "an exchange"), torch.cat([part.chunk(2)[mesh.rank] for part in parts])),
        (summed, parts[0] + parts[1]),
    ):
        time.sleep(seconds * mesh.rank)
        assert torch.equal(collective(), wanted)


def exchanges(mesh: Mesh) -> None:
    """Every exchange of activations against what one process computes; none changes, or returns, what it was given."""
    exchange = open_exchange(mesh.shard, mesh.device)
    size, index = exchange.size, exchange.index
    for shape in ((2, 4, 6), (0, 4, 6)):
        parts = _parts(shape, mesh.device)
        total = parts[0] + parts[1]
        mine = parts[index].clone()
        version, given = mine._version, mine.clone()
        made = {"sum": (exchange.all_reduce_async(mine), total)}
        for dim in range(3):
            made[f"gather {dim}"] = exchange.all_gather_async(mine, dim), torch.cat(parts, dim)
        for dim in (1, 2):
            made[f"scatter {dim}"] = exchange.reduce_scatter_async(mine, dim), total.chunk(size, dim)[index]
        uneven = [1, 3]
        ragged = [part.narrow(1, 0, length) for part, length in zip(parts, uneven, strict=True)]
        made["gather uneven"] = exchange.all_gather_async(ragged[index], 1, sizes=uneven), torch.cat(ragged, 1)
        made["scatter uneven"] = exchange.reduce_scatter_async(mine, 1, sizes=uneven), total.split(uneven, 1)[index]
        for name, (pending, wanted) in made.items():
            result = pending.wait()
            assert torch.equal(result, wanted), (name, shape)
            assert not result.numel() or result.untyped_storage().data_ptr() != mine.untyped_storage().data_ptr(), name
        assert mine._version == version
        assert torch.equal(mine, given)


def launches_without_others(mesh: Mesh, seconds: float) -> None:
    """Rank 0 launches the first collective of each group at once, though rank 1 comes `seconds` later: also of sets that are made
    later."""
    later = mesh.process_sets.declare({"first": [0, 1], "second": [1, 0]})
    for group in (mesh.shard, *later.values()):
        tensor = torch.ones(3, device=mesh.device)
        mesh.world.barrier("a moment")
        time.sleep(seconds * mesh.rank)
        began = time.monotonic()
        finish = group.all_reduce_async(tensor, "a sum").wait
        assert mesh.rank or time.monotonic() - began < seconds / 2
        finish()
        assert tensor.tolist() == [2.0] * 3
    for each in later.values():
        mesh.process_sets.remove(each)


class _Slow(TieredTensor):
    """A shard that a thread reads within `seconds`."""

    def __init__(self, shard: torch.Tensor, seconds: float) -> None:
        self._shard, self._seconds = shard, seconds

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        piece: Future[None] = Future()
        out.copy_(self._shard)
        threading.Timer(self._seconds, piece.set_result, [None]).start()
        return Transfer([piece])


def gathers_from_files(mesh: Mesh, seconds: float) -> None:
    """Gathers whose shards are read at once on rank 0, and within `seconds` on rank 1, with a reduction amid them. What ranks have
    launched is compared after the case."""
    requests = [BufferRequest(name=name, padded=_LENGTH, dtype=torch.float64, persistent=False) for name in "abc"]
    transport = open_transport("nccl", mesh.shard, mesh.device, requests, 2, _LENGTH * 8)
    parts = _parts((_LENGTH // 2,), mesh.device)
    out = torch.zeros(_LENGTH // 2, dtype=torch.float64, device=mesh.device)
    shard = _Slow(parts[mesh.rank], mesh.rank * seconds)
    first, *others = transport.buffers
    first.gather(shard)
    time.sleep(seconds / 2)
    transport.poll()
    slot = transport.reducer.acquire(0)
    assert slot is not None
    reduction = transport.reducer.launch(0, slot[: _LENGTH * 8].view(torch.float64).fill_(1.0), out, add=False)
    for buffer in others:
        buffer.gather(shard)
        transport.poll()
    for buffer in transport.buffers:
        buffer.wait()
        assert torch.equal(buffer.full, torch.cat(parts))
        buffer.release()
    reduction.finish()
    assert out.tolist() == [2.0] * len(out)
    transport.close()


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES[1:])
def test_pipelines_launch_their_messages_in_one_order(workers: Workers, schedule: str, chunks: int) -> None:
    arguments = {"model": "llama", "schedule": schedule, "microbatches": 4, "chunks": chunks}
    for found in workers.run(2, "pipeline_cases:trains", device="sim", **arguments):
        assert found["difference"] <= 1e-9


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_message_is_made_before_later_ones_and_launched_before_it_is_needed(schedule: str, chunks: int, ranks: int) -> None:
    """Each rank can launch all of its messages in the order of `message_order`: what it sends is made by then."""
    for microbatches in (1, ranks, 3 * ranks + 1):
        plan = make_schedule(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks)  # type: ignore[arg-type]
        for rank, actions in enumerate(plan.actions):
            due, ends = message_order(plan, rank)
            for action in actions:
                wanted, made = message_of(plan, rank, action, received=True), message_of(plan, rank, action)
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
        first = pool.outcomes("test_collectives:hangs", stuck=[1])[0]
    error = first.result["error"]
    assert error.startswith("CollectiveError: rank 0: all-gather of unit layers.3 did not end within 1 seconds")
    assert "rank 1 (pid" in error
    assert "in a step" in error
    assert 1 < first.result["seconds"] < 4


def hangs(mesh: Mesh) -> dict[str, Any]:
    """Rank 1 does not come to a gather; rank 0 reads what is computed after it."""
    began, found = time.monotonic(), ""
    own = torch.ones(4, device=mesh.device)
    try:
        with mesh.call("a step"):
            if mesh.rank == 1:
                time.sleep(5)
                return {}
            full = redistribute(own, one_after_another([4, 4]), replicated(8, 2), mesh.shard, "all-gather of unit layers.3")
            float(full.sum())
    except RuntimeError as error:
        found = f"{type(error).__name__}: {error}"
    return {"error": found, "seconds": time.monotonic() - began}


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
    works._pending.append(device_works._Pending(done=lambda: False, peers=[0, 1], what="all-gather of layers.3"))
    for _ in range(3):
        works._check_pending()
        threading.Event().wait(0.06)


def test_a_host_that_does_not_come_back_is_ended(watch: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(DeviceWorks, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr(device_works.os, "_exit", ended.append)
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: ended.append(str(error)))
    works, aborted = DeviceWorks(torch.device("cpu"), watch, traces=None), threading.Event()
    works.groups.append(SimpleNamespace(abort=aborted.set))  # type: ignore[arg-type]
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
    watch.error_raised.set()
    _late(works, watch)
    path = tmp_path / "run" / "collectives_rank_0"
    assert path.read_bytes() == b"trace"
    with pytest.raises(CollectiveError, match=f"did not end.*The latest collectives of this rank are in {path}"):
        watch.post(Activity.FORWARD, 0)
    assert watch.cause_of(RuntimeError("NCCL communicator was aborted on rank 0")) is watch.broken
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
    works._check_pending()
    assert watch.board.progress(0) > before
    works._pending.append(device_works._Pending(done=lambda: False, peers=[0, 1], what="a gather"))
    for number in range(6):
        done.set()
        works._check_pending()
        works._computing.append(done.is_set)
        threading.Event().wait(0.02)
        assert watch.broken is None, number


def test_on_a_device_gathers_and_reductions_have_one_order() -> None:
    rows = {rank: new_row() for rank in range(2)}
    watches = [Watchdog(StatusBoard(rows, rank), rank, 0.3, compare_events=True, one_order=True) for rank in range(2)]
    for watch in watches:
        watch.unit_names = {rank: ["root", "a", "b"] for rank in range(2)}
    watches[0].event(Activity.GATHER, 1, [0, 1])
    watches[0].event(Activity.REDUCE, 2, [0, 1])
    with pytest.raises(CollectiveError, match="rank 1 is reducing gradients of b where rank 0 was gathering a"):
        watches[1].event(Activity.REDUCE, 2, [0, 1])
    for watch in watches:
        watch.close()
