"""The sizes at which a machine is measured, the time that this takes, and the clock that does it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator

Shape = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSizes:
    """The sizes that are measured, and for how long."""

    dtypes: tuple[str, ...]
    products: tuple[Shape, ...]
    """`(rows, inner, columns)`."""
    attention: tuple[Shape, ...]
    """`(batch x heads, sequence, size of a head)`."""
    moved: tuple[int, ...]
    """Elements of the tensors that other operations read and write."""
    exchanged: tuple[int, ...]
    """Bytes."""
    elements: int
    """The number of elements of an update, and of a copy between device and host."""
    round_seconds: float = 0.006
    rounds: int = 5
    disk: bool = True
    model: Mapping[str, int] = field(default_factory=lambda: {"hidden": 512, "layers": 4, "length": 256})
    """A Llama that is trained for a moment, to see what libraries take."""


def _grid(rows: Sequence[int], matrices: Sequence[tuple[int, int]]) -> tuple[Shape, ...]:
    return tuple((count, *matrix) for count in rows for matrix in matrices)


_SMALL = ((64, 64), (64, 256), (128, 512), (256, 256), (512, 128), (1024, 1024), (512, 2048), (2048, 512), (256, 8192))
CPU_SIZES = MeasureSizes(
    dtypes=("float32", "bfloat16", "float64"),
    products=_grid((64, 256, 1024), _SMALL),
    attention=((16, 64, 32), (16, 256, 64), (8, 1024, 64)),
    moved=(1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22),
    exchanged=(1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24),
    elements=1 << 22,
)
_LARGE = (
    (512, 512),
    (1024, 1024),
    (1024, 4096),
    (4096, 1024),
    (4096, 4096),
    (4096, 16384),
    (8192, 8192),
    (2048, 32768),
)
ACCELERATOR_SIZES = MeasureSizes(
    dtypes=("bfloat16", "float16", "float32"),
    products=_grid((256, 1024, 4096, 16384), _LARGE),
    attention=((64, 512, 64), (32, 2048, 128), (16, 8192, 128)),
    moved=(1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26),
    exchanged=(1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
    elements=1 << 25,
    round_seconds=0.004,
)
TINY_SIZES = MeasureSizes(
    dtypes=("float32",),
    products=((16, 16, 16), (64, 64, 64)),
    attention=((2, 16, 8),),
    moved=(1 << 8, 1 << 12),
    exchanged=(1 << 10, 1 << 14),
    elements=1 << 10,
    round_seconds=1e-4,
    rounds=3,
    disk=False,
    model={"hidden": 16, "layers": 1, "length": 8},
)
"""For tests, and to see that it works at all."""


def sizes_for(device: torch.device, *, tiny: bool = False) -> MeasureSizes:
    """Return the sizes that are measured on a device."""
    return TINY_SIZES if tiny else ACCELERATOR_SIZES if is_accelerator(device) else CPU_SIZES


@dataclass(frozen=True, kw_only=True, eq=False)
class Clock:
    """Times calls on one device."""

    device: torch.device
    round_seconds: float
    rounds: int

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call: the median of rounds, each of as many calls as fill it."""
        call()
        count = 1
        while (taken := self.take(call, count)) < self.round_seconds / 2 and count < 1 << 20:
            count = max(count + 1, min(16 * count, math.ceil(count * self.round_seconds / max(taken, 1e-7))))
        return statistics.median([self.take(call, count) / count for _ in range(self.rounds)])

    def take(self, call: Callable[[], object], count: int) -> float:
        """Seconds of `count` calls in a row, until the device has done them."""
        self.wait()
        began = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait until the device has done all that was launched."""
        if is_accelerator(self.device):
            accelerator.synchronize(self.device)
