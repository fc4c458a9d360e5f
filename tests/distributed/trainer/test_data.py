"""Data workers of ranks: bitwise the run without them, also after a kill; faults with names on every rank; batches on a device."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support.plain import after_steps, fitted
from tests.support.trainer_cases import digest, llama, seeded, sentences, settings
from tests.support.workers import PoolOptions, Workers
from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.loop.train_step import DeviceBatch, Stepper


class Samples:
    """Sentences; each process that reads one leaves its number in a folder."""

    def __init__(self, folder: str, fault: str = "") -> None:
        self.rows, self.folder, self.fault = sentences(), folder, fault

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        Path(self.folder, f"reader-{os.getpid()}").touch()
        if index == 20 and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 20 and self.fault == "hangs":
            time.sleep(60)
        return self.rows[index]


class Stream:
    """The same as a stream."""

    def __init__(self, folder: str) -> None:
        self.samples = Samples(folder)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from (self.samples[index] for index in range(len(self.samples)))


def noisy(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A collator that exchanges words at random."""
    rows = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
    ids = rows["input_ids"] + torch.randint(3, rows["input_ids"].shape) + random.randrange(3)
    return {**rows, "input_ids": ids % 64}


def trains(
    mesh: Mesh, folder: str, workers: int, kind: str = "map", after: int = 0, steps: int = 6, **sections: Any
) -> dict[str, Any]:
    """Train some steps, of which rank 1 makes `after`, going on from the checkpoint after each other step."""
    config = settings(
        folder,
        data={"workers": workers, "shuffle": kind == "stream", "shuffle_window": 12},
        run={"max_steps": steps},
        checkpoint={"every_steps": 2, "asynchronous": False},
        **sections,
    )
    dataset: Any = Samples(folder) if kind == "map" else Stream(folder)
    kill = after_steps(lambda _, step: (mesh.rank, step) == (1, after) and os.kill(os.getpid(), signal.SIGKILL))
    with Trainer(seeded(llama), config, dataset, data_collator=noisy, callbacks=[kill]) as trainer:
        return {"losses": list(trainer.fit().losses), "parameters": digest({n: each.clone() for n, each in trainer.state_dict()})}


def fails(mesh: Mesh, folder: str, fault: str) -> None:
    """The data of rank 1 fails."""
    config = settings(
        folder,
        data={"workers": 2, "timeout_seconds": 2.0, "shuffle": False},
        parallel={"timeout_seconds": 1.0},
        run={"max_steps": 6},
        checkpoint={"every_steps": 1, "asynchronous": False},
    )
    fitted(seeded(llama), config, Samples(folder, fault if mesh.rank == 1 else ""), data_collator=noisy)


def sent_ahead(mesh: Mesh, folder: str, workers: int) -> dict[str, Any]:
    """Batches of a device: the order in which they are sent and computed, what the host has waited for, and losses."""
    from tests.simulated import device

    seen: list[str] = []
    send, present, loss_of = DeviceBatch.send, DeviceBatch.present, Stepper._loss_of

    def noted_send(self: DeviceBatch) -> None:
        seen.extend(["sent"] * (self._copied is None))
        send(self)

    @contextmanager
    def noted_present(self: DeviceBatch, *loads: Any) -> Iterator[None]:
        with ExitStack() as inside:
            with device.no_waits("a batch is used, and the next one sent"):
                inside.enter_context(present(self, *loads))
            yield

    def noted_loss(self: Stepper, batch: Any, seed: float) -> Any:
        seen.append("computed")
        assert batch["input_ids"].device == mesh.device
        return loss_of(self, batch, seed)

    with (
        patch.object(DeviceBatch, "send", noted_send),
        patch.object(DeviceBatch, "present", noted_present),
        patch.object(Stepper, "_loss_of", noted_loss),
    ):
        precision = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
        losses = trains(mesh, folder, workers, steps=2, precision=precision)["losses"]
    return {"seen": seen[:8], "losses": losses}


def readers_left(folder: Path) -> list[str]:
    """Processes that have read samples and are still there, after a moment."""
    readers = [path.name.partition("-")[2] for path in folder.glob("reader-*")]
    assert readers
    until = time.monotonic() + 2
    while (left := [each for each in readers if Path("/proc", each).exists()]) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def folders(tmp_path: Path) -> tuple[Path, Path]:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    return whole, cut


def check_the_rest(workers: Workers, whole: Path, cut: Path, kind: str) -> None:
    """What goes on in `cut`, with another number of workers, ends bitwise like a run without workers that nothing has ended."""
    wanted = workers.run(2, "test_data:trains", folder=str(whole), workers=0, kind=kind)[0]
    rest = workers.run(2, "test_data:trains", folder=str(cut), workers=3, kind=kind)[0]
    assert 0 < len(rest["losses"]) < 6
    assert rest["losses"] == wanted["losses"][-len(rest["losses"]) :]
    assert rest["parameters"] == wanted["parameters"]


def test_a_run_that_was_killed_goes_on_bitwise(workers: Workers, tmp_path: Path) -> None:
    whole, cut = folders(tmp_path)
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5.0)) as pool:
        survivor, killed = pool.outcomes("test_data:trains", folder=str(cut), workers=2, kind="stream", after=3)
        assert (survivor.error, killed.error) == ("CollectiveError", "died")
        assert not set(readers_left(cut)) - {str(pid) for pid in pool.pids}
    check_the_rest(workers, whole, cut, "stream")


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("killed", "StorageError", "was ended by SIGKILL"),
        pytest.param("hangs", "DataError", "a data worker took more than 2 seconds for one microbatch", marks=pytest.mark.full),
    ],
)
def test_data_that_fails_on_one_rank_ends_all(workers: Workers, tmp_path: Path, fault: str, error: str, message: str) -> None:
    """The other rank is patient with one that waits for its data, and learns why it has failed. Samples are not lost."""
    whole, cut = folders(tmp_path)
    with workers.fresh(PoolOptions(size=2, timeout_seconds=5.0)) as pool:
        other, own = pool.outcomes("test_data:fails", folder=str(cut), fault=fault, timeout=20)
    assert own.error == error
    assert message in own.message
    assert other.error == "CollectiveError"
    assert "rank 1" in other.message
    assert error in other.message
    assert other.at - own.at < 2
    if fault == "killed":
        check_the_rest(workers, whole, cut, "map")


def test_batches_are_sent_to_a_device_ahead_of_use(workers: Workers, tmp_path: Path) -> None:
    """From pinned memory, for which nothing waits, and each before the one before it is computed."""
    found = []
    for count, folder in enumerate(folders(tmp_path)):
        found += workers.run(1, "test_data:sent_ahead", device="sim", folder=str(folder), workers=count)
    assert found[0] == found[1]
    assert found[0]["seen"] == ["sent", "sent", "computed", "sent", "computed", "sent", "computed", "computed"]
