"""Bandwidth of the file tier: raw, and through the stream of updates, on the same swap file with the same threads.

raw       every piece of a slot is read, and every piece of another one written, at once, through buffers
stream    rows of master weights, two moments and gradients are read, three of four written, nothing is computed
busy      the same with computing that takes about as long as reading and writing do
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zeromesh.offload import (
    Access,
    FileSettings,
    Ledger,
    Purpose,
    StreamOperand,
    StreamRow,
    TierChoice,
    TieredTensor,
    Tiers,
    Transfer,
    UpdateStream,
    WaitTime,
)
from zeromesh.offload.io.transfer import StagingPool
from zeromesh.optim.fused_optimizer import fused_update, hyperparameters
from zeromesh.options import OptimizerSettings

_CPU = torch.device("cpu")
_FILE = TierChoice(tier="file")
_STAGING = 64 << 20
_READS, _WRITES = 4, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Bandwidth:
    """Medians over rounds; bytes a second, read and written together."""

    raw: float
    stream: float
    update: float
    """With the optimizer's own computing."""
    compute_seconds: float
    """The seconds that the computation of one pass of the busy stream takes, alone."""
    io_seconds: float
    """The seconds of one pass of the stream without computing."""
    busy_seconds: float
    """The seconds of one pass of the busy stream."""


class Bench:
    """Slots of `numel` elements each: master weights, two moments, gradients."""

    def __init__(self, folder: Path, numel: int) -> None:
        self._tiers = Tiers(device=_CPU, ledger=Ledger(), files=FileSettings(directories=(folder,), label="bench"))
        self._numel = numel
        names = ("master", "exp_avg", "exp_avg_sq", "gradients")
        self._tensors = [self._make(name) for name in names]
        uses = [StreamOperand(tensor=tensor, mode=Access.UPDATE) for tensor in self._tensors[:_WRITES]]
        uses.append(StreamOperand(tensor=self._tensors[-1], mode=Access.READ))
        self._stream = UpdateStream(_CPU, width=_READS, longest=4 * numel, nbytes=_STAGING, waits=WaitTime())
        self._rows = list(self._stream.rows(0, numel, uses))
        self._nbytes = (_READS + _WRITES) * 4 * numel

    def _make(self, name: str) -> TieredTensor:
        tensor = self._tiers.allocate(self._numel, torch.float32, _FILE, Purpose.MOMENTS, name)
        step = 1 << 20
        for start in range(0, self._numel, step):
            count = min(step, self._numel - start)
            tensor.slice(start, start + count).copy_from(torch.rand(count))
        return tensor

    def measure(self, rounds: int) -> Bandwidth:
        """Raw and stream in turn."""
        raw, idle, update, busy = [], [], [], []
        compute = self._compute_seconds(1)
        for _ in range(rounds):
            raw.append(_seconds(self._raw))
            idle.append(_seconds(lambda: self._pass(lambda row, tensors: None)))
            update.append(_seconds(lambda: self._pass(_update)))
        times = max(1, round(statistics.median(idle) / compute))
        compute = self._compute_seconds(times)
        for _ in range(rounds):
            busy.append(_seconds(lambda: self._pass(lambda row, tensors: _repeat(tensors, times))))
        return Bandwidth(
            raw=self._nbytes / statistics.median(raw),
            stream=self._nbytes / statistics.median(idle),
            update=self._nbytes / statistics.median(update),
            compute_seconds=compute,
            io_seconds=statistics.median(idle),
            busy_seconds=statistics.median(busy),
        )

    def _pass(self, compute: Callable[[StreamRow, list[torch.Tensor]], None]) -> None:
        self._stream.run(self._rows, compute)
        for tensor in self._tensors:
            tensor.wait_for_writes()

    def _compute_seconds(self, times: int) -> float:
        length = self._rows[0].end - self._rows[0].start
        rows = [[torch.rand(length) for _ in range(_READS)] for _ in range(min(8, len(self._rows)))]
        for tensors in rows:
            _repeat(tensors, 1)
        return _seconds(lambda: [_repeat(tensors, times) for tensors in rows]) * len(self._rows) / len(rows)

    def _raw(self) -> None:
        """The bytes of a pass, in as many pieces, with nothing between reading and writing them."""
        step = self._rows[0].end - self._rows[0].start
        pool = StagingPool(5 * _READS, -(-4 * step // 4096) * 4096)
        flying: deque[Transfer] = deque()
        for start in range(0, self._numel, step):
            for number, tensor in enumerate(self._tensors):
                count = min(step, self._numel - start)
                self._start(pool, tensor.read, start, count, flying)
                if number < _WRITES:
                    self._start(pool, tensor.write, start, count, flying)
        while flying:
            flying.popleft().wait()

    @staticmethod
    def _start(
        pool: StagingPool, move: Callable[[int, torch.Tensor], Transfer], start: int, count: int, flying: deque[Transfer]
    ) -> None:
        buffer = pool.get()
        transfer = move(start, buffer[: 4 * count].view(torch.float32))
        transfer.on_end(lambda: pool.put(buffer))
        flying.append(transfer)

    def close(self) -> None:
        """Remove the swap file."""
        self._tiers.close()


def _update(row: StreamRow, tensors: list[torch.Tensor]) -> None:
    _repeat(tensors, 1)


def _repeat(tensors: Sequence[torch.Tensor], times: int) -> None:
    """The optimizer's computing, so many times."""
    master, first, second, grad = tensors
    group = hyperparameters(OptimizerSettings(lr=1e-4, weight_decay=0.1))[0]
    for _ in range(times):
        fused_update("adamw", group, master, grad, [first, second], 3)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
