"""A stream of rows through a bounded number of buffers: row i+1 is read and row i-1 written while row i is computed. A row is the
same interval of several tensors, such as master weights, moments and gradients; parts on the compute device are used in place."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import islice, pairwise

import torch

from zeromesh.offload.io.transfer import DONE, PAGE, AllocateBuffer, StagingPool, Transfer, WaitTime, allocate_pages
from zeromesh.offload.tiers import GRAIN, TieredTensor

_DEPTH = 2  # the number of rows that are read ahead of the computed one
_IN_FLIGHT = 2 * _DEPTH + 1
"""The number of rows that have buffers: those read ahead, the computed one, and as many that are being written."""
_LEAST_BYTES = 1 << 16  # of a buffer
_GRAIN_BYTES = GRAIN * 8  # the granularity of buffers in bytes: whole pages, and whole grains of any dtype


class Access(Enum):
    """The access of a computed row to an interval of a tensor: it only reads it, updates it in place, or overwrites all of it."""

    READ = "read"
    UPDATE = "update"
    WRITE = "write"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOperand:
    """A tensor that a stream processes row by row, one interval of elements per row, and the access of the rows to it."""

    tensor: TieredTensor
    mode: Access


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRow:
    """A step of a stream: elements [start, end) of each operand. Rows with equal keys have the same operands."""

    key: tuple[int, int]
    start: int
    end: int
    operands: tuple[StreamOperand, ...] = field(compare=False)


ComputeRow = Callable[[StreamRow, list[torch.Tensor]], None]


@dataclass(kw_only=True, slots=True)
class _RowInFlight:
    """A row being read: a tensor per operand; by operand number, the staging buffer that a tensor views, and the buffer's read."""

    row: StreamRow
    tensors: list[torch.Tensor] = field(default_factory=list)
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    reads: dict[int, Transfer] = field(default_factory=dict)


def stream_bytes(width: int, longest: int, nbytes: int) -> int:
    """Return the bytes of all buffers of an `UpdateStream` with these arguments."""
    share = nbytes // max(1, width * _IN_FLIGHT) // PAGE * PAGE
    return width * _IN_FLIGHT * max(_LEAST_BYTES, min(share, -(-longest // _GRAIN_BYTES) * _GRAIN_BYTES))


class UpdateStream:
    """Reads tensors row by row, computes each row on `device`, and writes it back. A row has at most `width` tensors outside the
    memory of `device`, and the longest of these has `longest` bytes. All buffers together have about `nbytes` bytes at most."""

    def __init__(
        self,
        device: torch.device,
        *,
        width: int,
        longest: int,
        nbytes: int,
        waits: WaitTime,
        memory: AllocateBuffer = allocate_pages,
    ) -> None:
        """`memory` allocates buffers on `device`, and `waits` counts the time spent waiting for them."""
        self.device = device
        self._waits = waits
        self._width = width
        self.nbytes, count = stream_bytes(width, longest, nbytes), width * _IN_FLIGHT
        self._buffer_bytes = self.nbytes // count if count else _LEAST_BYTES
        self._pool = StagingPool(count, self._buffer_bytes, memory)
        self._flights: deque[_RowInFlight] = deque()
        self._crossing: list[Transfer] = []

    def rows(self, key: int, length: int, operands: Sequence[StreamOperand]) -> Iterator[StreamRow]:
        """Cut elements [0, length) of the operands into rows that fit the buffers; each operand's part of a row is on one tier."""
        offloaded = [each.tensor for each in operands if each.tensor.whole(self.device) is None] if self._width else []
        widest = max([tensor.dtype.itemsize for tensor in offloaded], default=0)
        step = self._buffer_bytes // widest // GRAIN * GRAIN if offloaded else length
        cuts = sorted({0, length, *[part.end for tensor in offloaded for part in tensor.parts if part.end < length]})
        whole = StreamRow(key=(key, len(operands)), start=0, end=length, operands=tuple(operands))
        for first, last in pairwise(cuts):
            for start in range(first, last, max(1, step)):
                yield replace(whole, start=start, end=min(start + step, last))

    def run(self, rows: Sequence[StreamRow], compute: ComputeRow, ahead: Iterable[StreamRow] = ()) -> None:
        """Call `compute(row, tensors)` for each row, in order, with `[end - start]` of each tensor, to be changed in place.
        `ahead` are the rows of the next calls, as far as known, whose first ones are read already: call `drop_read_ahead`
        before anything else changes their tensors. Writes may go on afterwards: later reads of a file and device work come
        after them; before reading host memory, call `wait_for_writes`. After an error nothing is read ahead and all buffers are
        free. Raises `StorageError` when something cannot be read; a failed write is raised for the next reader."""
        planned = [*rows, *islice(ahead, _DEPTH)]
        if any(flight.row != row for flight, row in zip(self._flights, planned, strict=False)):
            self.drop_read_ahead()
        coming = deque(planned[len(self._flights) :])
        try:
            for row in rows:
                if not self._flights:
                    self._start(coming.popleft())
                flight = self._flights[0]
                for read in flight.reads.values():
                    read.wait()
                # Reading ahead takes only buffers that are free now, so that computing does not wait for writes in flight.
                while coming and len(self._flights) <= _DEPTH and self._missing(coming[0]) <= self._pool.qsize():
                    self._start(coming.popleft())
                compute(row, [*flight.tensors])
                self._write(flight)
                self._flights.popleft()
            # Later device work comes after the transfers to the device; `wait_for_writes` waits for those to the host.
            for write in self._crossing:
                if write.on_device:
                    write.wait()
            self._crossing = [write for write in self._crossing if not write.on_device and not write.done()]
        except BaseException:
            self.drop_read_ahead()
            raise

    def wait_for_writes(self) -> None:
        """Wait until all results of `run` have been written. Raises `StorageError` if a write has failed."""
        crossing, self._crossing = self._crossing, []
        for write in crossing:
            write.wait()

    def drop_read_ahead(self) -> None:
        """Give back the buffers of rows that were read ahead and not computed."""
        while self._flights:
            flight = self._flights.popleft()
            for number, buffer in flight.buffers.items():
                flight.reads.get(number, DONE).on_end(partial(self._pool.put, buffer))

    def _missing(self, row: StreamRow) -> int:
        return sum(each.tensor.view(row.start, row.end, self.device) is None for each in row.operands)

    def _start(self, row: StreamRow) -> None:
        flight = _RowInFlight(row=row)
        if (missing := self._missing(row)) > self._width:  # The row would wait for buffers that do not exist.
            raise ValueError(f"a row of {missing} tensors out of reach, in a stream of width {self._width}")
        self._flights.append(flight)
        for number, operand in enumerate(row.operands):
            rest = operand.tensor
            if (tensor := rest.view(row.start, row.end, self.device)) is None:
                began = time.perf_counter()
                buffer = flight.buffers[number] = self._pool.get()
                self._waits.add(began)
                tensor = buffer[: (row.end - row.start) * rest.dtype.itemsize].view(rest.dtype)
                if operand.mode is not Access.WRITE:
                    flight.reads[number] = rest.read(row.start, tensor)
            flight.tensors.append(tensor)

    def _write(self, flight: _RowInFlight) -> None:
        for number in list(flight.buffers):
            operand, tensor = flight.row.operands[number], flight.tensors[number]
            write = DONE if operand.mode is Access.READ else operand.tensor.write(flight.row.start, tensor)
            if write.crosses_devices:
                self._crossing.append(write)
            write.on_end(partial(self._pool.put, flight.buffers.pop(number)))


def run_whole(operands: Sequence[StreamOperand], compute: ComputeRow, device: torch.device) -> None:
    """Call `compute` as `UpdateStream.run` does, but once, with all elements of all operands in the memory of `device`."""
    tensors = []
    for each in operands:  # An operand that is only written need not be read.
        found = each.tensor.whole(device) if each.mode is Access.WRITE else each.tensor.load(device)
        length, dtype = each.tensor.numel, each.tensor.dtype
        tensors.append(torch.empty(length, dtype=dtype, device=device) if found is None else found)
    compute(StreamRow(key=(0, 0), start=0, end=operands[0].tensor.numel, operands=tuple(operands)), [*tensors])
    for operand, tensor in zip(operands, tensors, strict=True):
        if operand.mode is not Access.READ:
            operand.tensor.write(0, tensor).wait()
