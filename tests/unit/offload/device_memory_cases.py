"""Cases of offload on the simulated device, each of which a worker runs and the judge of races watches."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.simulated import device as sim
from zeromesh.checkpoint.io.file_slices import PlacedValues
from zeromesh.checkpoint.io.format import TensorSpec, plan_files
from zeromesh.checkpoint.io.writer import ShardWriter, plan_pieces
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import FileSettings, Ledger, Purpose, Tier, TierChoice, Tiers, accelerator
from zeromesh.offload.io.file_tier import THREADS
from zeromesh.offload.io.transfer import CopyStreams, Transfer
from zeromesh.offload.memory.allocation import PinnedBudget
from zeromesh.optim.gradients import GradientShards
from zeromesh.options import OffloadOptions, ZeroOptions

LENGTH = 8192


def pinned(values: torch.Tensor) -> torch.Tensor:
    return accelerator.allocate_pinned(values.nbytes).view(values.dtype).copy_(values)


def the_gather_of_a_shard_in_two_memories_comes_after_both(mesh: Mesh, folder: str) -> None:
    """A shard half on the host and half on the device, read in another dtype: what is ordered behind the read has all of it."""
    tiers = Tiers(device=mesh.device, ledger=Ledger())
    half = TierChoice(tier="host", fraction=0.5)
    shard = tiers.allocate(LENGTH, torch.float32, half, Purpose.PARAMETERS, "a shard")
    assert len(shard.parts) == 2
    shard.copy_from(torch.arange(LENGTH, dtype=torch.float32))
    torch.accelerator.synchronize()
    out, full = torch.empty(LENGTH, dtype=torch.bfloat16, device=mesh.device), torch.empty(LENGTH, device=mesh.device)
    reading = shard.read(0, out)
    with reading.ordering():
        full.copy_(out)
        gathered = accelerator.record_event(accelerator.current_stream(mesh.device))
    accelerator.current_stream(mesh.device).wait_event(gathered)
    expected = torch.arange(LENGTH, dtype=torch.float32).bfloat16().float()
    assert torch.equal(full.cpu(), expected)
    reading.wait_for_end()


def copies_in_do_not_wait_for_copies_out(mesh: Mesh, folder: str) -> None:
    """Both ways go on at once, but for the same bytes of the host."""
    torch.ops.sim.set("patience", 10**9)
    try:
        streams = CopyStreams(mesh.device)
        one, other = (pinned(torch.full((LENGTH,), value)) for value in (1.0, 2.0))
        source = torch.full((LENGTH,), 3.0, device=mesh.device)
        first, second = (torch.empty(LENGTH, device=mesh.device) for _ in range(2))
        torch.accelerator.synchronize()
        streams.start(source, one)  # Nobody waits for it yet.
        accelerator.current_stream(mesh.device).wait_event(streams.start(other, first))
        assert first.add(0).cpu()[0] == 2.0
        assert one[0] == 1.0, "a copy in has waited for a copy out of other bytes"
        accelerator.current_stream(mesh.device).wait_event(streams.start(one, second))
        assert second.add(0).cpu()[0] == 3.0, "a copy in did not wait for the copy out of its own bytes"
        torch.accelerator.synchronize()
    finally:
        torch.ops.sim.set("patience", 20)


def gradients_leave_and_come_back_without_the_host(mesh: Mesh, folder: str) -> None:
    """Gradient shards that rest on the host are put away and summed up over microbatches, and the host waits for none."""
    host = TierChoice(tier="host")
    options = ZeroOptions(stage=2, accumulation=3, offload=OffloadOptions(optimizer=host))
    tiers = Tiers(device=mesh.device, ledger=Ledger())
    shards = GradientShards(options, tiers)
    buckets: list[Any] = [
        SimpleNamespace(
            name=str(number), length=LENGTH, held=SimpleNamespace(length=LENGTH), grad=None, partial=None,
            layout=SimpleNamespace(parts=1),
            grad_rest=tiers.allocate(LENGTH, torch.float32, host, Purpose.GRADIENTS, str(number)),
        )
        for number in range(6)
    ]  # fmt: skip
    shards.begin_step()
    sim.clear()
    waited = AssertionError("the host has waited for gradients")
    with patch.object(Transfer, "wait", side_effect=waited):  # For a thread that waits for the device.
        for turn in range(3):
            shards.first_microbatch = turn == 0
            for number, bucket in enumerate(buckets):
                shards.allocate(bucket)
                bucket.grad = bucket.grad.zero_() if turn == 0 else bucket.grad
                bucket.grad.add_(number + 1)
                shards.offload(bucket, last=turn == 2)
            shards.order_offloads()
    assert sim.waits() == []
    assert tiers.ledger.total(Tier.DEVICE) == 0
    shards.wait()
    for number, bucket in enumerate(buckets):
        assert bucket.grad_rest.memory.eq(3 * (number + 1)).all(), number


def a_save_waits_for_nothing_but_its_own_copies_into_pinned_memory(mesh: Mesh, folder: str) -> None:
    """What is launched after a save has begun is not waited for."""
    spec = TensorSpec(kind="master", name="w", dtype=torch.float32, shape=(1 << 20,))
    files = plan_files([spec], 1)
    tiers = Tiers(device=mesh.device, ledger=Ledger())
    shard = tiers.allocate(1 << 20, torch.float32, TierChoice(), Purpose.MASTER, "w")
    memory = shard.parts[0].memory
    assert memory is not None
    memory.fill_(7.0)  # The last update.
    runs = {files[0].path: [PlacedValues.stored(files[0].tensors[0], 0, shard, 0)]}
    directory = CheckpointStore(Path(folder)).create(1, files)
    writer = ShardWriter(directory, plan_pieces(files, runs, [], {0: 0}), 0, mesh.device)
    # The next step begins: its computation waits for something that is long in coming.
    far = torch.empty(LENGTH, device=mesh.device)
    source, side = pinned(torch.ones(LENGTH)), torch.Stream(mesh.device)
    torch.accelerator.synchronize()
    sim.clear()

    def next_step() -> None:
        with accelerator.launching_on(side):
            far.copy_(source, non_blocking=True)
        accelerator.current_stream(mesh.device).wait_stream(side)

    start = writer.start
    writing = threading.Event()
    fill = writer._fill

    def after_the_next_step_has_begun(*arguments: Any) -> None:
        writing.wait(20)
        fill(*arguments)

    writer._fill = after_the_next_step_has_begun  # type: ignore[method-assign]
    start()
    next_step()
    writing.set()
    writer.join(lambda: None)
    assert {text.split(" ", 1)[1] for text in torch.ops.sim.waits()} == {"an event"}
    # The alias shows what is in the device's memory now, without waiting for anything.
    assert torch.ops.sim.alias(far).tolist()[0] != 1.0, "the save has waited for what was launched after it had begun"
    stored = (directory / files[0].path).read_bytes()[files[0].tensors[0].begin :]
    assert torch.frombuffer(bytearray(stored), dtype=torch.float32).eq(7.0).all()
    torch.accelerator.synchronize()


def helper_threads_sleep_and_know_their_device(mesh: Mesh, folder: str) -> None:
    """Whoever waits for copies beside training computes on the process's device, and asks for events that do not spin."""
    second = torch.device(mesh.device.type, 1)
    asked: list[bool] = []
    module: Any = torch.get_device_module(mesh.device)
    event = module.Event

    def noted(**options: Any) -> torch.Event:
        asked.append(options.get("blocking", False))
        return torch.Event(second)

    module.Event = noted
    try:
        streams = CopyStreams(second)
        for lane in (streams._inward, streams._outward):
            assert lane.thread.submit(torch.accelerator.current_device_index).result() == 1
        with torch.device(second):
            torch.accelerator.set_device_index(1)
            tiers = Tiers(device=second, ledger=Ledger(), files=FileSettings(directories=(Path(folder),)))
            values = torch.full((LENGTH,), 2.0, device=second)
            tensor = tiers.allocate(LENGTH, torch.float32, TierChoice(tier="file"), Purpose.MASTER, "w")
            tensor.write(0, values).wait()
            threads = tiers.file()._threads
            all_there = threading.Barrier(THREADS, timeout=20)  # Also those that have copied nothing yet.

            def current() -> int:
                all_there.wait()
                return torch.accelerator.current_device_index()

            found = {each.result() for each in [threads.submit(current) for _ in range(THREADS)]}
            streams.copy(pinned(torch.ones(LENGTH)), torch.empty(LENGTH, device=second)).wait_for_end()
            tiers.close()
    finally:
        module.Event = event
        torch.accelerator.set_device_index(0)
    assert found == {1}
    assert asked
    assert all(asked)


def what_the_driver_does_not_pin_is_ordinary_memory(mesh: Mesh, folder: str) -> None:
    """The driver's refusal is its own affair: nothing that is launched afterwards hears of it, and what is not pinned is known."""
    torch.ops.sim.set("pinnable", 1 << 16)
    try:
        budget = PinnedBudget()
        small = budget.allocate(1 << 10, torch.float32, mesh.device)
        large = budget.allocate(1 << 20, torch.float32, mesh.device)
        assert torch.ones(4, device=mesh.device).sum().item() == 4.0
    finally:
        torch.ops.sim.set("pinnable", 1 << 40)
    assert small.is_pinned()
    assert not large.is_pinned()
    assert not large.any()
    assert (budget.used, budget.pageable) == (small.nbytes, large.nbytes)
