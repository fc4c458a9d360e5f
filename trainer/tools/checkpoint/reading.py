"""What the tools for checkpoints share: what a path on the command line means, counters, and reading elements."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from zeromesh.checkpoint.format import manifest
from zeromesh.checkpoint.format.safetensors_layout import StoredTensor
from zeromesh.checkpoint.io.file_slices import PlacedValues
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import ConfigError
from zeromesh.offload import TieredTensor
from zeromesh.trainer.checkpoints.manager import FOLDER
from zeromesh.trainer.formatting import human_bytes, human_seconds
from zeromesh.trainer.monitoring.console import Console

WINDOW_BYTES = 32 << 20
"""Bytes of elements that are in memory at once."""
_Item = TypeVar("_Item")


def store_at(path: Path) -> CheckpointStore:
    """Return the checkpoints of a run's directory, or in a directory of checkpoints. Raises `ConfigError` where there is none."""
    path = path.expanduser()
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory")
    for root in (path / FOLDER, path):
        store = CheckpointStore(root)
        if store.steps() or store.leftovers():
            return store
    hint = "; it is one: `inspect` shows it" if (path / manifest.NAME).exists() else ""
    raise ConfigError(f"{path} holds no checkpoints: neither step-* nor {FOLDER}/step-*{hint}")


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint that a path is, or all of a run, newest first. Raises `ConfigError` where there is none."""
    path = path.expanduser()
    if (path / manifest.NAME).exists() or (CheckpointStore.step_of(path) is not None and path.is_dir()):
        return [path]
    store = store_at(path)
    steps = store.steps()
    if not steps:
        left = ", ".join(store.leftovers())
        raise ConfigError(
            f"{store.root} holds no checkpoint, but {left}, which a kill has left behind or a run is writing"
        )
    return [store.path(step) for step in steps]


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint that a path is, or the newest of a run. Raises `ConfigError` where there is none."""
    return checkpoints_at(path)[0]


def part_text(reader: CheckpointReader) -> str:
    """Return which part of a checkpoint this is, such as ` (part 1 of 2)`; empty for a whole one."""
    index, count = reader.manifest.part
    return f" (part {index + 1} of {count})" if count > 1 else ""


def windows(items: Iterable[_Item], size_of: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    """Yield items in order, as many at a time as fit into the memory that is used at once by their bytes, or one."""
    batch: list[_Item] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if batch and filled + size > WINDOW_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(item)
        filled += size
    if batch:
        yield batch


def read_elements(
    reader: CheckpointReader, parts: Sequence[tuple[StoredTensor, int, int]], moved: Callable[[int], object]
) -> list[torch.Tensor]:
    """Read `count` elements from `first` on of each `(tensor, first, count)`, 1-D in the stored dtype. `moved` gets their bytes.

    Raises:
        CheckpointError: where the checkpoint is damaged.
    """
    found = [torch.empty(count, dtype=tensor.spec.dtype) for tensor, _, count in parts]
    targets = [
        PlacedValues.stored(tensor, first, TieredTensor.of(memory))
        for (tensor, first, _), memory in zip(parts, found, strict=True)
    ]
    reader.read(targets, lambda: None)
    moved(sum(each.nbytes for each in found))
    return found


class Throughput:
    """Called with the bytes of each transfer that is done, shows how far all are; as text, what they took."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console, self._what, self._total = console, what, total
        self._done = 0
        self._began = time.monotonic()

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        of_total = f"{human_bytes(self._done)} of {human_bytes(self._total)}"
        self._console.status(f"{self._what}: {of_total}, {self._rate()}")

    def _rate(self) -> str:
        return f"{human_bytes(self._done / max(time.monotonic() - self._began, 1e-6))}/s"

    def __str__(self) -> str:
        return f"{human_bytes(self._done)} in {human_seconds(time.monotonic() - self._began)} ({self._rate()})"
