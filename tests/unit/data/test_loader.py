"""Batches that worker processes make are those of the training process, and whatever happens to a worker has a name."""

import faulthandler
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zeromesh.errors import ConfigError, DataError, StorageError
from zeromesh.offload.memory.allocation import allocate_lasting
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data import loader as module
from zeromesh.trainer.data.collate import BatchRules
from zeromesh.trainer.data.loader import BatchLoader, Feed, Workers
from zeromesh.trainer.data.sampler import BatchPlan, SampleOrder
from zeromesh.trainer.data.streaming import StreamedDataset

LENGTH, STEPS = 11, 4


class Drawing:
    """Samples with numbers that are drawn from all three global generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"x": torch.tensor(drawn, dtype=torch.float64), "who": torch.tensor(os.getpid())}


class DrawingStream:
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (Drawing()[index] for index in range(LENGTH))


def masked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    rows = torch.stack([each["x"] for each in samples])
    return {"x": rows * (torch.rand(rows.shape) > 0.2), "who": torch.stack([each["who"] for each in samples])}


def loader_of(dataset: Any, count: int, timeout: float = 60.0, collate: Any = masked, **options: Any) -> BatchLoader:
    streams = isinstance(dataset, StreamedDataset)
    order = SampleOrder(length=dataset.block if streams else len(dataset), seed=5, endless=streams)
    plan = BatchPlan(global_size=8, micro_size=2, data_ranks=2)
    feed = Feed(dataset=dataset, order=order, plan=plan, rules=BatchRules(collate=collate))
    return BatchLoader(feed, 1, Workers(count=count, timeout_seconds=timeout), last=STEPS, **options)


@pytest.mark.parametrize("make", [Drawing, lambda: StreamedDataset(DrawingStream(), block=8)])
def test_workers_make_the_batches_of_this_process(make: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    with loader_of(make(), 0) as plain:
        wanted = [batch for step in range(STEPS) for batch in plain.step(step)]
    for count in (1, 3):
        before = torch.get_rng_state()
        with loader_of(make(), count) as loader:
            found = [batch for step in range(STEPS) for batch in loader.step(step)]
        assert torch.equal(torch.get_rng_state(), before)
        assert all(torch.equal(one["x"], other["x"]) for one, other in zip(wanted, found, strict=True))
        others = {int(who) for batch in found for who in batch["who"]}
        assert os.getpid() not in others
        assert len(others) == (count if make is Drawing else 1)


def test_an_epoch_that_ends_early_is_passed_over() -> None:
    with loader_of(Drawing(), 0) as plain, loader_of(Drawing(), 2) as loader:
        for step in (0, 1, 3):
            for one, other in zip(plain.step(step), loader.step(step), strict=True):
                assert torch.equal(one["x"], other["x"])


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("step", [0, 1, 2, STEPS])
def test_a_stream_is_found_again(count: int, step: int) -> None:
    """By its own state, taken before a step, and none is lost by asking."""
    numbers = StreamedDataset([{"x": [float(each)] * 4} for each in range(LENGTH)], block=16)
    with loader_of(numbers, 0, collate=None) as plain:
        wanted = [batch["x"] for each in range(STEPS) for batch in plain.step(each)]
    with loader_of(numbers, count, collate=None) as loader:
        found = [batch["x"] for each in range(step) for batch in loader.step(each)]
        state = loader.state(step)
        assert state == loader.state(step)
        found += [batch["x"] for each in range(step, STEPS) for batch in loader.step(each)]
    assert state["position"] == step * 8 // 16 * 16
    with loader_of(numbers, count, collate=None, state=state) as again:
        rest = [batch["x"] for each in range(step, STEPS) for batch in again.step(each)]
    assert torch.equal(torch.stack(found), torch.stack(wanted))
    assert len(rest) == 2 * (STEPS - step)
    assert all(torch.equal(one, other) for one, other in zip(rest, found[2 * step :], strict=True))


@pytest.mark.parametrize("count", [0, 1])
def test_a_stream_that_breaks_off_leaves_its_last_place(count: int) -> None:
    """The checkpoint before the step that cannot be made is written."""

    class Breaks:
        def __iter__(self) -> Iterator[dict[str, float]]:
            yield from ({"x": float(each)} for each in range(8))
            raise OSError("the line is dead")

    with loader_of(StreamedDataset(Breaks(), block=8), count, collate=None) as loader:
        loader.step(0)
        assert loader.state(1)["position"] == 8
        for _ in range(2):
            with pytest.raises((OSError, DataError), match="the line is dead"):
                loader.step(1)


class Broken(Drawing):
    """Does something at one sample."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) if index != 4 else self.act()


def fails() -> None:
    raise LookupError("no such picture")


def test_an_error_of_the_dataset_names_its_sample() -> None:
    with loader_of(Broken(fails), 2) as loader, pytest.raises(DataError) as raised:
        [loader.step(step) for step in range(STEPS)]
    assert "LookupError: no such picture, in sample 4 of the dataset" in str(raised.value)
    assert "in fails\n" in str(raised.value)
    with loader_of(Broken(fails), 0) as loader, pytest.raises(LookupError) as plain:
        [loader.step(step) for step in range(STEPS)]
    assert plain.value.__notes__ == ["in sample 4 of the dataset"]


def test_a_worker_that_ends_while_it_hands_over_a_tensor_has_a_name() -> None:
    def reset() -> Iterator[Any]:
        raise ConnectionResetError(104, "Connection reset by peer")
        yield

    with loader_of(Drawing(), 1) as loader:
        loader.batch(0, 0)
        torchs, loader._results = loader._results, reset()  # torch would end the worker of an iterator that is dropped.
        loader._processes[0].kill()
        loader._processes[0].join()
        with pytest.raises(StorageError, match=r"a data worker is gone: process \d+ "):
            loader.batch(0, 1)
    del torchs


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            r"StorageError: .*process \d+ was ended by SIGKILL, as where memory runs out",
        ),
        (lambda: os._exit(3), r"DataError: .*process \d+ ended with status 3"),
        (lambda: sys.exit(4), r"a data worker is gone: process \d+ ended with status"),
        (lambda: time.sleep(60), r"took more than 1.5 seconds for one microbatch(.|\n)*in <lambda>"),
    ],
    ids=["killed", "ended", "exits", "hangs"],
)
def test_a_worker_that_is_gone_or_hangs_has_a_name(act: Callable[[], Any], message: str) -> None:
    began, handler = time.monotonic(), signal.getsignal(signal.SIGCHLD)
    waits: list[int] = []
    with (
        loader_of(Broken(act), 2, timeout=1.5, waiting=lambda: waits.append(1)) as loader,
        pytest.raises((DataError, StorageError)) as raised,
    ):
        [loader.step(step) for step in range(STEPS)]
    assert re.search(message, f"{raised.typename}: {raised.value}")
    assert time.monotonic() - began < 8
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGCHLD) == handler


def test_a_process_with_a_timer_of_faulthandler_has_workers() -> None:
    faulthandler.dump_traceback_later(300)
    try:
        with loader_of(Drawing(), 1, timeout=5.0) as loader:
            assert len(loader.step(0)) == 2
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: torch.empty(2, device="meta"), "lies on meta"),
        (lambda: torch.ones(2, requires_grad=True) * 2, "needs gradients"),
        (lambda: lambda: 1, "is a function, which a data worker cannot hand over"),
    ],
)
def test_what_cannot_be_handed_over_is_refused(value: Callable[[], Any], message: str) -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"x": value()}

    with loader_of(Drawing(), 1, collate=collate) as loader, pytest.raises(DataError, match=message):
        loader.step(0)


def test_signals_for_all_processes_leave_workers_alone() -> None:
    """A terminal and a scheduler signal a run's workers too; the step in which that happens still has its data."""
    torch.ones(1 << 20).exp()  # Torch has threads now, and a forked process makes its own before ours of the worker.
    with loader_of(Drawing(), 2) as loader:
        first = loader.step(0)
        for who in {int(who) for batch in first for who in batch["who"]}:
            os.kill(who, signal.SIGINT)
            subprocess.run(["kill", "-TERM", str(who)], check=True)
        assert len(loader.step(1)) == 2
        assert len(loader.step(2)) == 2
    assert not multiprocessing.active_children()


def test_an_open_file_is_read_at_a_place_of_ones_own(tmp_path: Path) -> None:
    class Lines(Drawing):
        def __init__(self) -> None:
            self.file = (tmp_path / "lines").open("rb", buffering=0)

        def __getitem__(self, index: int) -> dict[str, float]:
            self.file.seek(8 * index)
            time.sleep(0.02)
            return {"x": float(self.file.read(8))}

    (tmp_path / "lines").write_text("".join(f"{index:8}" for index in range(LENGTH)))
    lines = Lines()
    with loader_of(lines, 3, collate=None) as loader:
        found = [batch["x"] for step in range(STEPS) for batch in loader.step(step)]
        plan, order = loader.feed.plan, loader.feed.order
    wanted = [map(order.dataset_index, each.samples) for step in range(STEPS) for each in plan.microbatches(step, 1)]
    assert [batch.tolist() for batch in found] == [list(map(float, indices)) for indices in wanted]
    lines.file.close()


def test_workers_do_not_hold_the_pages_of_states() -> None:
    """Which this process writes: a child would keep a copy of each page as it was."""
    state = allocate_lasting(1 << 20, torch.float32, torch.device("cpu"))

    def mapped(samples: list[Any]) -> dict[str, Tensor]:
        ranges = [line.split(" ")[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        return {"x": torch.tensor(any(int(low, 16) <= state.data_ptr() < int(high, 16) for low, high in ranges))}

    assert mapped([])["x"]
    with loader_of(Drawing(), 1, collate=mapped) as loader:
        assert not loader.step(0)[0]["x"]
    if (child := os.fork()) == 0:  # any other child has them
        os._exit(int(state[0].item() != 0))
    assert os.waitpid(child, 0)[1] == 0


def test_workers_end_with_their_parent() -> None:
    reader, writer = os.pipe()
    if (parent := os.fork()) == 0:
        try:
            with loader_of(Drawing(), 2) as loader:
                who = {int(who) for batch in loader.step(0) for who in batch["who"]}
                os.write(writer, " ".join(map(str, who)).encode())
                time.sleep(60)
        finally:
            os._exit(1)
    workers = [int(each) for each in os.read(reader, 100).split()]
    assert workers
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    until = time.monotonic() + 10
    while (left := [each for each in workers if Path(f"/proc/{each}").exists()]) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left


def test_auto_leaves_the_cores_of_a_cpu_to_its_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    def count(wanted: Any, device: str, ranks: int = 1) -> int:
        return Workers.choose(DataSection(workers=wanted), torch.device(device), ranks).count

    monkeypatch.setattr(module, "available_cores", lambda: 12)
    assert count("auto", "cpu") == 0
    assert [count("auto", "cuda", ranks) for ranks in (1, 4, 12, 16)] == [4, 3, 1, 0]
    assert count(7, "cpu", 12) == 7
    monkeypatch.setattr(module.multiprocessing.current_process(), "_config", {"daemon": True})
    assert count("auto", "cuda") == count(0, "cpu") == 0
    with pytest.raises(ConfigError, match="may have no children; set it to 0"):
        count(1, "cpu")


def test_the_end_of_a_loader_leaves_other_processes_alone() -> None:
    """Processes of the user, and workers of another loader."""
    foreign = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    foreign.start()
    try:
        with loader_of(Drawing(), 1) as other:
            first = other.step(0)
            with loader_of(Drawing(), 2) as loader:
                loader.step(0)
                assert len(multiprocessing.active_children()) == 4
            assert foreign.is_alive()
            assert len(multiprocessing.active_children()) == 2
            assert {int(batch["who"][0]) for batch in other.step(1)} == {int(first[0]["who"][0])}
        assert multiprocessing.active_children() == [foreign]
    finally:
        foreign.kill()
        foreign.join()


def test_no_more_workers_are_started_than_there_are_microbatches() -> None:
    plan = loader_of(Drawing(), 0).feed
    with BatchLoader(plan, 1, Workers(count=9, timeout_seconds=60.0), last=1) as loader:
        found = loader.step(0)
        assert len(multiprocessing.active_children()) == plan.plan.accumulation == 2
    assert not any(batch["x"].is_shared() for batch in found)  # Else each keeps a file descriptor open.


def test_nothing_is_read_beyond_the_last_step(tmp_path: Path) -> None:
    with (tmp_path / "read").open("ab", buffering=0) as file:

        class Noting(Drawing):
            def __getitem__(self, index: int) -> dict[str, Tensor]:
                file.write(b"x")
                return super().__getitem__(index)

        feed = loader_of(Noting(), 0).feed
        with BatchLoader(feed, 1, Workers(count=1, timeout_seconds=60.0), last=1) as loader:
            read = sum(len(batch["x"]) for batch in loader.step(0))
            time.sleep(0.2)
    assert (tmp_path / "read").stat().st_size == read == 4


def test_each_microbatch_draws_numbers_of_its_own_and_none_of_the_process() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with loader_of(Drawing(), 0) as loader:
        drawn = torch.cat([batch["x"][:1, 1:] for step in range(STEPS) for batch in loader.step(step)])
        wanted = loader.step(1)[0]["x"]
        rng = replace(loader.feed.order, seed=6)
        other = replace(loader.feed, order=rng).fetch(loader.feed.plan.microbatch(1, 1, 0))["x"]
    assert len(set(map(tuple, drawn[:, 1:].tolist()))) == len(drawn)
    assert not torch.equal(wanted[:, 1:], other[:, 1:])
    assert torch.equal(torch.get_rng_state(), before)


def first_of(labels: list[int], plan: BatchPlan, **options: Any) -> dict[str, Any]:
    """The first batch with a target of samples with these labels, one each, in their order."""
    rows = [{"x": float(number), "labels": label} for number, label in enumerate(labels)]
    dataset: Any = StreamedDataset(rows, block=4) if plan.epoch_size is None else rows
    order = SampleOrder(length=len(rows), seed=0, shuffle=False, endless=plan.epoch_size is None)
    return Feed(dataset=dataset, order=order, plan=plan, rules=BatchRules(**options)).first_batch()


@pytest.mark.parametrize("epoch", [None, 10], ids=["a stream", "an epoch"])
def test_the_first_target_may_be_in_a_later_global_batch(epoch: int | None) -> None:
    plan = BatchPlan(global_size=4, micro_size=2, data_ranks=2, epoch_size=epoch)
    assert first_of([-100] * 8 + [5] * 2, plan)["x"].tolist() == [8.0, 9.0]


@pytest.mark.parametrize(("epoch", "said"), [(10, 12), (1000, 400), (None, 400)])
def test_the_search_for_a_target_has_an_end(epoch: int | None, said: int) -> None:
    plan = BatchPlan(global_size=4, micro_size=4, data_ranks=1, epoch_size=epoch)
    with pytest.raises(DataError, match=f"every label of the first {said} samples is -100"):
        first_of([-100] * 1000, plan)


def test_what_is_said_of_workers() -> None:
    stream = StreamedDataset([{}], block=1)
    for count, dataset, said in (
        (0, [], []),
        (1, [], ["data: 1 worker process of each rank"]),
        (2, [], ["data: 2 worker processes of each rank"]),
        (0, stream, []),
        (1, stream, ["data: a worker process of each rank reads the stream"]),
        (2, stream, ["data: a worker process of each rank reads the stream, one alone"]),
    ):
        assert Workers(count=count, timeout_seconds=1.0).notes(dataset) == said
    for device in ("cpu", "cuda"):
        chosen = Workers.choose(DataSection(workers=2, timeout_seconds=7.0), torch.device(device), 1)
        assert chosen == Workers(count=2, timeout_seconds=7.0, pinned=device == "cuda")


def test_the_loader_works_beside_the_main_thread() -> None:
    found: list[int] = []

    def run() -> None:
        with loader_of(Drawing(), 1) as loader:
            found.append(len(loader.step(0)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert found == [2]
