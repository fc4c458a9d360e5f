"""A stream of rows through a bounded number of buffers: row i+1 is read and row i-1 written while row i is computed.

A row is the same interval of several tensors: master weights, moments and gradients of an update, say. What of it is in the memory
where it is computed is used there; the rest passes through buffers of a pool, so that memory does not grow with the tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
    """What a row does with a tensor."""

    READ = "read"
    UPDATE = "update"
    WRITE = "write"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOperand:
    """A tensor in a row."""

    tensor: TieredTensor
    mode: Access


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRow:
    """Elements [start, end) of each tensor. Rows of one key are those of the same tensors."""

    key: int
    start: int
    end: int
    uses: tuple[StreamOperand, ...]

    @property
    def place(self) -> tuple[int, int, int, int]:
        """What tells a row from others."""
        return self.key, self.start, self.end, len(self.uses)


@dataclass(kw_only=True, slots=True)
class _RowInFlight:
    """A row on its way in. `buffers[i]` is what `tensors[i]` looks at, if that is none of the tensor's own memory."""

    row: StreamRow
    tensors: list[torch.Tensor]
    buffers: list[torch.Tensor | None]
    reads: list[Transfer]


def buffer_bytes(width: int, longest: int, nbytes: int) -> int:
    """Bytes of each of a stream's buffers, see `UpdateStream`."""
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
        self._pool = StagingPool(width * _IN_FLIGHT, self._buffer_bytes, memory) if width else None
        self._flights: deque[_RowInFlight] = deque()
        self._crossing: list[Transfer] = []

    @property
    def device(self) -> torch.device:
        """Where rows are computed."""
        return self._device

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._pool.total if self._pool is not None else 0

    def rows(self, key: int, length: int, uses: Sequence[StreamOperand]) -> Iterator[StreamRow]:
        """[0, length) in rows: as long as buffers allow, and each of a tensor's elements on one tier."""
        away = [use.tensor for use in uses if use.tensor.whole(self._device) is None]
        widest = max((tensor.dtype.itemsize for tensor in away), default=0)
        step = self._buffer_bytes // widest // GRAIN * GRAIN if away else length
        cuts = sorted({0, length, *(cut for tensor in away for cut in tensor.cuts() if cut < length)})
        for first, last in pairwise(cuts):
            for start in range(first, last, max(1, step)):
                yield StreamRow(key=key, start=start, end=min(start + step, last), uses=tuple(uses))

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
            StorageError: when something cannot be read; what cannot be written, whoever reads it next is told.
        """
        planned = [*rows, *islice(ahead, _DEPTH)]
        if any(flight.row.place != row.place for flight, row in zip(self._flights, planned, strict=False)):
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
        """Rows that were read ahead will not be computed."""
        while self._flights:
            flight = self._flights.popleft()
            for buffer, read in zip(flight.buffers, flight.reads, strict=True):
                if buffer is not None:
                    read.on_end(partial(self._give, buffer))

    def _read_ahead(self, coming: deque[StreamRow]) -> None:
        """Start to read what comes after the row at hand, while buffers are free: those of writes in flight are not waited for."""
        while coming and len(self._flights) <= _DEPTH and self._missing(coming[0]) <= self._free():
            self._start(coming.popleft())

    def _missing(self, row: StreamRow) -> int:
        """How many buffers a row needs."""
        return sum(use.tensor.view(row.start, row.end, self._device) is None for use in row.uses)

    def _free(self) -> int:
        return self._pool.free if self._pool is not None else 0

    def _start(self, row: StreamRow) -> None:
        if self._missing(row) > self._width:  # It would wait for buffers that there are not.
            raise ValueError(f"a row of {self._missing(row)} tensors out of reach, in a stream of width {self._width}")
        flight = _RowInFlight(row=row, tensors=[], buffers=[], reads=[])
        self._flights.append(flight)
        for use in row.uses:
            tensor = use.tensor.view(row.start, row.end, self._device)
            buffer = None
            if tensor is None:
                buffer = self._take()
                length = row.end - row.start
                tensor = buffer[: length * use.tensor.dtype.itemsize].view(use.tensor.dtype)
            flight.tensors.append(tensor)
            flight.buffers.append(buffer)
            flight.reads.append(DONE)
            if buffer is not None and use.mode is not Access.WRITE:
                flight.reads[-1] = use.tensor.read(row.start, tensor)

    def _take(self) -> torch.Tensor:
        if self._pool is None:
            raise ValueError("a stream of width 0 has no buffers")
        began = time.perf_counter()
        buffer = self._pool.take()
        self._waits.add(began)
        return buffer

    def _give(self, buffer: torch.Tensor) -> None:
        if self._pool is not None:
            self._pool.give(buffer)

    def _write(self, flight: _RowInFlight) -> None:
        for number, (use, tensor) in enumerate(zip(flight.row.uses, flight.tensors, strict=True)):
            buffer = flight.buffers[number]
            if buffer is None:
                continue
            write = DONE if use.mode is Access.READ else use.tensor.write(flight.row.start, tensor)
            flight.buffers[number] = None
            if write.crosses:
                self._crossing.append(write)
            write.on_end(partial(self._give, buffer))
