"""A stream of rows through a bounded number of buffers: row i+1 is read and row i-1 written while row i is computed.

A row is the same interval of several tensors: master weights, moments and gradients of an update, say. What of it is in the memory
where it is computed is used there; the rest passes through buffers of a pool, so that memory does not grow with the tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice, pairwise

import torch

from zeromesh.offload.io.transfer import DONE, PAGE, Memory, StagingPool, Transfer, WaitTime, pages
from zeromesh.offload.tiered_tensor import GRAIN, TieredTensor

_DEPTH = 2
"""Rows that are read ahead of the one that is computed."""
_IN_FLIGHT = 2 * _DEPTH + 1
"""Rows that have buffers: those, the one itself, and as many that are being written."""
_LEAST_BYTES = 1 << 16
_GRAIN_BYTES = GRAIN * 8
"""Whole pages, and whole grains of any dtype."""


class Access(Enum):
    """Whether a row reads a tensor, changes it, or replaces it."""

    READ = "read"
    UPDATE = "update"
    WRITE = "write"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOperand:
    """A tensor that rows have elements of, and what they do with them."""

    tensor: TieredTensor
    mode: Access


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRow:
    """Elements [start, end) of each operand. Rows of one key are those of the same tensors."""

    key: int
    start: int
    end: int
    operands: tuple[StreamOperand, ...]

    @property
    def identity(self) -> tuple[int, int, int, int]:
        """Key, interval and number of operands, which tell a row from others."""
        return self.key, self.start, self.end, len(self.operands)


@dataclass(kw_only=True, slots=True)
class _RowInFlight:
    """A row on its way in: for each operand a tensor, the buffer that it views (None: the operand's own memory), and its read."""

    row: StreamRow
    tensors: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor | None] = field(default_factory=list)
    reads: list[Transfer] = field(default_factory=list)


def buffer_bytes(width: int, longest: int, nbytes: int) -> int:
    """Bytes of each of a stream's buffers, for the arguments of `UpdateStream`."""
    share = nbytes // max(1, width * _IN_FLIGHT) // PAGE * PAGE
    return max(_LEAST_BYTES, min(share, -(-longest // _GRAIN_BYTES) * _GRAIN_BYTES))


def stream_bytes(width: int, longest: int, nbytes: int) -> int:
    """Bytes that all buffers of a stream take."""
    return width * _IN_FLIGHT * buffer_bytes(width, longest, nbytes)


class UpdateStream:
    """Computes on `device`; `width` is the most tensors of a row that are not in its memory, and the longest tensor has `longest`
    bytes.

    `nbytes` is what all buffers take together at most; they are no longer than they have to be, and no shorter than is useful.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        width: int,
        longest: int,
        nbytes: int,
        waits: WaitTime,
        memory: Memory = pages,
    ) -> None:
        """`memory` makes buffers on `device`."""
        self._device = device
        self._waits = waits
        self._width = width
        self._buffer_bytes = buffer_bytes(width, longest, nbytes)
        self._pool = StagingPool(width * _IN_FLIGHT, self._buffer_bytes, memory)
        self._flights: deque[_RowInFlight] = deque()
        self._crossing: list[Transfer] = []

    @property
    def device(self) -> torch.device:
        """Where rows are computed."""
        return self._device

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._pool.total

    def rows(self, key: int, length: int, operands: Sequence[StreamOperand]) -> Iterator[StreamRow]:
        """Cut [0, length) into rows as long as buffers allow, each of which has a tensor's elements on one tier."""
        away = [operand.tensor for operand in operands if operand.tensor.whole(self._device) is None]
        widest = max((tensor.dtype.itemsize for tensor in away), default=0)
        step = self._buffer_bytes // widest // GRAIN * GRAIN if away else length
        cuts = sorted({0, length, *(part.end for tensor in away for part in tensor.parts if part.end < length)})
        for first, last in pairwise(cuts):
            for start in range(first, last, max(1, step)):
                yield StreamRow(key=key, start=start, end=min(start + step, last), operands=tuple(operands))

    def run(
        self,
        rows: Sequence[StreamRow],
        compute: Callable[[StreamRow, list[torch.Tensor]], None],
        ahead: Iterable[StreamRow] = (),
    ) -> None:
        """`compute(row, tensors)` for each row, in order, with `[end - start]` of each tensor, to be changed in place.

        `ahead` are the rows that come after them, as far as that is known: the first ones are read already, so whoever changes them
        by other means before their turn calls `forget`. Writes may go on after this returns: whoever reads a file waits for them,
        what is launched on a device comes after them, and `settle` is for who reads the host's memory. After an error nothing is
        read ahead, and all buffers come back.

        Raises:
            StorageError: when something cannot be read; for what cannot be written, whoever reads it next gets the error.
        """
        planned = [*rows, *islice(ahead, _DEPTH)]
        if any(flight.row.identity != row.identity for flight, row in zip(self._flights, planned, strict=False)):
            self.forget()
        coming = deque(planned[len(self._flights) :])
        try:
            for row in rows:
                if not self._flights:
                    self._start(coming.popleft())
                flight = self._flights[0]
                for read in flight.reads:
                    read.wait()
                self._read_ahead(coming)
                compute(row, [*flight.tensors])
                self._write(flight)
                self._flights.popleft()
            self._order_writes()
        except BaseException:
            self.forget()
            raise

    def settle(self) -> None:
        """Return when what `run` has computed is where it rests. Raises `StorageError` where it is not."""
        crossing, self._crossing = self._crossing, []
        for write in crossing:
            write.wait()

    def _order_writes(self) -> None:
        """Have the device do what comes next after what is on its way there; `settle` waits for what is on its way to the host."""
        for write in self._crossing:
            if write.on_device:
                write.wait()
        self._crossing = [write for write in self._crossing if not write.on_device and not write.done()]

    def forget(self) -> None:
        """Give back the buffers of rows that were read ahead and will not be computed."""
        while self._flights:
            flight = self._flights.popleft()
            for buffer, read in zip(flight.buffers, flight.reads, strict=True):
                if buffer is not None:
                    read.on_end(partial(self._pool.give, buffer))

    def _read_ahead(self, coming: deque[StreamRow]) -> None:
        """Start to read what comes after the row at hand, while buffers are free: those of writes in flight are not waited for."""
        while coming and len(self._flights) <= _DEPTH and self._missing(coming[0]) <= self._pool.free:
            self._start(coming.popleft())

    def _missing(self, row: StreamRow) -> int:
        """How many buffers a row needs."""
        return sum(operand.tensor.view(row.start, row.end, self._device) is None for operand in row.operands)

    def _start(self, row: StreamRow) -> None:
        if self._missing(row) > self._width:  # It would wait for buffers that there are not.
            raise ValueError(f"a row of {self._missing(row)} tensors out of reach, in a stream of width {self._width}")
        flight = _RowInFlight(row=row)
        self._flights.append(flight)
        for operand in row.operands:
            rest = operand.tensor
            tensor, buffer = rest.view(row.start, row.end, self._device), None
            if tensor is None:
                began = time.perf_counter()
                buffer = self._pool.take()
                self._waits.add(began)
                tensor = buffer[: (row.end - row.start) * rest.dtype.itemsize].view(rest.dtype)
            # All three lists are as long as each other even where the read fails to start.
            flight.tensors.append(tensor)
            flight.buffers.append(buffer)
            flight.reads.append(DONE)
            if buffer is not None and operand.mode is not Access.WRITE:
                flight.reads[-1] = rest.read(row.start, tensor)

    def _write(self, flight: _RowInFlight) -> None:
        for number, (operand, tensor) in enumerate(zip(flight.row.operands, flight.tensors, strict=True)):
            buffer = flight.buffers[number]
            if buffer is None:
                continue
            write = DONE if operand.mode is Access.READ else operand.tensor.write(flight.row.start, tensor)
            flight.buffers[number] = None
            if write.crosses:
                self._crossing.append(write)
            write.on_end(partial(self._pool.give, buffer))
