"""A stream of rows through a bounded number of buffers: row i+1 is read and row i-1 written while row i is computed.

A row is the same interval of several tensors: master weights, moments and gradients of an update, say. What of it is in the memory
where it is computed is used there; the rest passes through buffers of a pool, so that memory does not grow with the tensors.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import islice, pairwise

import torch

from zeromesh.offload.io.transfer import DONE, PAGE, Memory, StagingPool, Transfer, WaitTime, pages
from zeromesh.offload.tiers import GRAIN, TieredTensor

_DEPTH = 2
"""Rows that are read ahead of the one that is computed."""
_IN_FLIGHT = 2 * _DEPTH + 1
"""Rows that have buffers: those, the one itself, and as many that are being written."""
_LEAST_BYTES = 1 << 16
_GRAIN_BYTES = GRAIN * 8
"""Whole pages, and whole grains of any dtype."""


class Access(Enum):
    """The access of a row to a tensor: the row reads it, changes it, or replaces it."""

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
    """A row on its way in: a tensor for each operand, and by the operand's number the buffer that it views, and its read."""

    row: StreamRow
    tensors: list[torch.Tensor] = field(default_factory=list)
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    reads: dict[int, Transfer] = field(default_factory=dict)


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
        """`memory` makes buffers on `device`, and `waits` counts what is waited for them."""
        self.device = device
        self._waits = waits
        self._width = width
        self._buffer_bytes = buffer_bytes(width, longest, nbytes)
        self._pool = StagingPool(width * _IN_FLIGHT, self._buffer_bytes, memory)
        self.nbytes = self._pool.total
        """Bytes of all buffers."""
        self._flights: deque[_RowInFlight] = deque()
        self._crossing: list[Transfer] = []

    def rows(self, key: int, length: int, operands: Sequence[StreamOperand]) -> Iterator[StreamRow]:
        """Cut [0, length) into rows as long as buffers allow, each of which has a tensor's elements on one tier."""
        away = [each.tensor for each in operands if each.tensor.whole(self.device) is None] if self._width else []
        widest = max([tensor.dtype.itemsize for tensor in away], default=0)
        step = self._buffer_bytes // widest // GRAIN * GRAIN if away else length
        cuts = sorted({0, length, *[part.end for tensor in away for part in tensor.parts if part.end < length]})
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
                for read in flight.reads.values():
                    read.wait()
                # While buffers are free; those of writes in flight are not waited for.
                while coming and len(self._flights) <= _DEPTH and _missing(self._views(coming[0])) <= self._pool.free:
                    self._start(coming.popleft())
                compute(row, [*flight.tensors])
                self._write(flight)
                self._flights.popleft()
            # What the device does next comes after what is on its way there; `settle` waits for what is on its way to the host.
            for write in self._crossing:
                if write.on_device:
                    write.wait()
            self._crossing = [write for write in self._crossing if not write.on_device and not write.done()]
        except BaseException:
            self.forget()
            raise

    def settle(self) -> None:
        """Return when what `run` has computed is where it rests. Raises `StorageError` where it is not."""
        crossing, self._crossing = self._crossing, []
        for write in crossing:
            write.wait()

    def forget(self) -> None:
        """Give back the buffers of rows that were read ahead and will not be computed."""
        while self._flights:
            flight = self._flights.popleft()
            for number, buffer in flight.buffers.items():
                flight.reads.get(number, DONE).on_end(partial(self._pool.give, buffer))

    def _views(self, row: StreamRow) -> list[torch.Tensor | None]:
        return [each.tensor.view(row.start, row.end, self.device) for each in row.operands]

    def _start(self, row: StreamRow) -> None:
        flight, views = _RowInFlight(row=row), self._views(row)
        if (missing := _missing(views)) > self._width:  # It would wait for buffers that there are not.
            raise ValueError(f"a row of {missing} tensors out of reach, in a stream of width {self._width}")
        self._flights.append(flight)
        for number, (operand, tensor) in enumerate(zip(row.operands, views, strict=True)):
            rest = operand.tensor
            if tensor is None:
                began = time.perf_counter()
                buffer = flight.buffers[number] = self._pool.take()
                self._waits.add(began)
                tensor = buffer[: (row.end - row.start) * rest.dtype.itemsize].view(rest.dtype)
                if operand.mode is not Access.WRITE:
                    flight.reads[number] = rest.read(row.start, tensor)
            flight.tensors.append(tensor)

    def _write(self, flight: _RowInFlight) -> None:
        """Start to write what was computed; each buffer comes back when it has arrived."""
        for number in list(flight.buffers):
            operand, tensor = flight.row.operands[number], flight.tensors[number]
            write = DONE if operand.mode is Access.READ else operand.tensor.write(flight.row.start, tensor)
            if write.crosses:
                self._crossing.append(write)
            write.on_end(partial(self._pool.give, flight.buffers.pop(number)))


def _missing(views: Sequence[torch.Tensor | None]) -> int:
    return sum(view is None for view in views)
