"""Bytes that cross between a device and the host: transfers that end later, and on a CUDA device where there is one."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.devices import DEVICE, accelerated
from tests.unit.offload.file_cases import CPU, check_refused
from zeromesh.errors import StorageError
from zeromesh.offload import FileSettings, Ledger, Purpose, Tier, TierChoice, TieredTensor, Tiers, WaitTime
from zeromesh.offload import tiers as moving
from zeromesh.offload.io.transfer import DONE, CopyStreams, Transfer, copy_streams_of
from zeromesh.offload.tiers import TieredPart
from zeromesh.offload.update_stream import Access, StreamOperand, StreamRow, UpdateStream

GATE = 5.0


class Crossing(Transfer):
    """A copy that a test lets through. `orders`: as into a device."""

    crosses_devices = True

    def __init__(self, source: torch.Tensor, target: torch.Tensor, *, orders: bool, log: list[str]) -> None:
        self._future: Future[None] = Future()
        super().__init__([self._future])
        self.on_device, self._log = orders, log
        self._source, self._target = source, target
        if orders:
            self.arrive()

    def arrive(self) -> None:
        self._target.copy_(self._source)
        self._future.set_result(None)

    def wait(self) -> None:
        self._log.append("ordered" if self.on_device else "waited")
        if not self.on_device:
            self._future.result(GATE)


class Apart(TieredTensor):
    """A tensor in memory that the stream's device does not reach."""

    def __init__(self, memory: torch.Tensor, log: list[str]) -> None:
        super().__init__(memory.dtype, TieredTensor.of(memory).parts)
        self.held, self.log = memory, log
        self.leaving: list[Crossing] = []
        self.orders = False
        """Whether writes go into a device."""

    def view(self, start: int, end: int, device: torch.device) -> torch.Tensor | None:
        return None

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        self.log.append(f"read {start}")
        found = Crossing(self.held[start : start + out.numel()].clone(), out, orders=not self.orders, log=self.log)
        if self.orders:
            found.arrive()
        return found

    def write(self, start: int, data: torch.Tensor) -> Transfer:
        self.log.append(f"write {start}")
        found = Crossing(data, self.held[start : start + data.numel()], orders=self.orders, log=self.log)
        if not self.orders:
            self.leaving.append(found)
        return found


def stream() -> UpdateStream:
    return UpdateStream(CPU, width=1, longest=1 << 30, nbytes=0, waits=WaitTime())


def add(_row: StreamRow, tensors: list[torch.Tensor]) -> None:
    tensors[0].add_(1)


def rows_of(found: UpdateStream, tensor: TieredTensor) -> list[StreamRow]:
    return list(found.rows(1, tensor.numel, [StreamOperand(tensor=tensor, mode=Access.UPDATE)]))


def test_what_leaves_a_device_is_waited_for_by_settle_alone() -> None:
    log: list[str] = []
    tensor, found = Apart(torch.zeros(50_000), log), stream()
    rows = rows_of(found, tensor)
    assert len(rows) > 2
    running = threading.Thread(target=found.run, args=(rows, add), daemon=True)
    running.start()
    running.join(GATE)
    assert not running.is_alive(), "run has waited for bytes on their way to the host"
    assert "waited" not in log
    assert not tensor.held.any()
    settling = threading.Thread(target=found.wait_for_writes, daemon=True)
    settling.start()
    settling.join(0.1)
    assert settling.is_alive()
    for each in tensor.leaving:
        each.arrive()
    settling.join(GATE)
    assert not settling.is_alive()
    assert bool((tensor.held == 1).all())


def test_what_goes_into_a_device_is_ordered_before_what_comes_next() -> None:
    log: list[str] = []
    tensor, found = Apart(torch.zeros(50_000), log), stream()
    tensor.orders = True
    rows = rows_of(found, tensor)
    found.run(rows, add)
    assert log[-len(rows) :] == ["ordered"] * len(rows)
    assert bool((tensor.held == 1).all())


def test_what_is_partly_on_a_file_and_partly_on_another_device_is_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    made: list[Transfer] = []

    def crossing(source: torch.Tensor, target: torch.Tensor) -> Transfer:
        made.append(Crossing(source, target, orders=True, log=log))
        return made[-1]

    monkeypatch.setattr(moving, "_copy", crossing)
    halves = [TieredPart(start=at, end=at + 2, tier=Tier.DEVICE, memory=torch.full((2,), float(at))) for at in (0, 2)]
    out = torch.zeros(4)
    assert TieredTensor(torch.float32, halves).read(0, out) is DONE
    assert out.tolist() == [0.0, 0.0, 2.0, 2.0]
    assert log == ["ordered", "ordered"]
    gone = Transfer.with_error(StorageError("gone"))
    monkeypatch.setattr(moving, "_copy", lambda source, target: gone)
    together = TieredTensor(torch.float32, halves).read(0, out)  # Two files, whose reader waits when it needs them.
    check_refused("gone", together.wait)
    gone.crosses_devices = True
    with pytest.raises(StorageError, match="gone"):
        TieredTensor(torch.float32, halves).read(0, out)


def test_time_that_training_has_not_waited_is_not_counted() -> None:
    waits = WaitTime()
    for counted in (False, True):
        late: Future[None] = Future()
        threading.Timer(0.02, late.set_result, [None]).start()
        Transfer([late], waits).wait_for_end(counted=counted)
        assert (waits.seconds > 0) is counted
    taken = waits.take()
    assert (waits.seconds, waits.total) == (0.0, taken)


# On an accelerator


@pytest.fixture
def device_tiers(tmp_path: Path) -> Iterator[Tiers]:
    files = FileSettings(directories=(tmp_path / "swap",), checksums=True)
    found = Tiers(device=DEVICE, ledger=Ledger(), files=files)
    yield found
    found.close()


@accelerated
@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_come_back_as_they_went(device_tiers: Tiers, tier: Any, fraction: float, dtype: torch.dtype) -> None:
    choice = TierChoice(tier=tier, fraction=fraction)
    tensor = device_tiers.allocate(3_000_001, torch.float32, choice, Purpose.MOMENTS, "moments")
    for turn in range(3):
        values = torch.rand(tensor.numel, device=DEVICE).to(dtype)
        for _ in range(20):
            values = values + 1  # Still being computed when the copy is asked for.
        tensor.write(0, values).wait()
        out = torch.empty_like(values)
        read = tensor.read(0, out)
        read.wait()
        assert torch.equal(out, values), turn
        on_host = torch.empty(tensor.numel, dtype=dtype)
        tensor.wait_for_writes()
        torch.accelerator.synchronize()
        tensor.read(0, on_host).wait()
        assert torch.equal(on_host, values.cpu()), turn


@accelerated
def test_pinned_pages_are_pinned_and_no_longer_than_asked_for(device_tiers: Tiers) -> None:
    tensor = device_tiers.allocate(1_500_000, torch.float32, TierChoice(tier="host"), Purpose.MOMENTS, "moments")
    memory = tensor.parts[0].memory
    assert memory is not None
    assert memory.is_pinned()
    assert device_tiers.pinned.used == memory.nbytes
    assert tensor.parts[0].tier is Tier.HOST


@pytest.mark.skipif(DEVICE.type in ("cpu", "sim"), reason="needs a device that computes beside its host")
def test_copies_go_on_beside_what_is_computed() -> None:
    streams = copy_streams_of(DEVICE)
    assert isinstance(streams, CopyStreams)
    source = torch.rand(1 << 26, pin_memory=True)
    target = torch.empty(1 << 26, device=DEVICE)
    torch.accelerator.synchronize()
    matrix = torch.rand(8192, 8192, device=DEVICE)
    copied = streams.copy(source, target)
    for _ in range(20):
        matrix = matrix @ matrix
        matrix /= matrix.amax()
    computed = torch.accelerator.current_stream().record_event()
    copied.wait_for_end()
    assert not computed.query(), "the copy waited for what was launched after it"
    copied.wait()
    assert torch.equal(target.cpu(), source)
