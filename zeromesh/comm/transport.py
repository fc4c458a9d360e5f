"""Transports own the memory that they move, so that they can avoid transfers (`shm_transport`). Those here use torch.distributed.

    GatherBuffer   full   |  shard 0  |  shard 1  | ...     begin_write -> write own() -> end_write -> gather -> wait -> end_read
    Reducer        slots  |  sequence n  |  sequence n+1    acquire -> fill -> launch -> Reduction.finish

All ranks of the group make the same calls in the same order. gloo's reduce-scatter moves as many bytes as an all-reduce and adds in
the gradients' dtype. Here it is an all-to-all, half the bytes, and a local sum in rank order in the dtype of the sum. A device does
the same if the dtype of the transfer is narrower than that of the sum; otherwise NCCL's own reduce-scatter is used."""

import platform
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zeromesh.errors import CollectiveError, ConfigError, LayoutError
from zeromesh.flat.encoded_shard import EncodedShard, EncodedTensor
from zeromesh.intervals import Interval
from zeromesh.mesh.collectives import CollectiveCall, Launched
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import DONE, ReleasableBuffer, SparePages, TieredTensor, Transfer, allocate_lasting
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.settings.keys import TransportName
from zeromesh.telemetry.step_recorder import Collective

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferRequest:
    """A request for a gather buffer of `padded` elements of `dtype`. A `persistent` one keeps its memory, and values until their
    owners write again; others have memory only from `gather` to `release`. On a host it begins `lead` bytes into a page."""

    name: str
    padded: int
    dtype: torch.dtype
    persistent: bool
    lead: int = 0


class GatherBuffer:
    """A flat buffer whose shards belong to the ranks of a group, filled by an all-gather. Without a group, as for a single rank
    and for parameters that every rank updates itself, it is private memory that always holds everything while it is allocated.
    Gathers start once this rank's shard is in place, in the order of the calls; `queue` holds the waiting ones. A device blocks in
    each collective until all ranks have launched it. So its gathers start at fixed places of the program: at once if a stream
    waits for the shard, else when the next gather is requested or this one is needed."""

    full: torch.Tensor  # The whole buffer, `[padded]`. Its address never changes; it has no memory while released.
    decoded_nbytes = 0
    """The bytes that the buffer has, beside `transient_nbytes`, from `wait` to `release`, for values that it has decoded."""
    _own = slice(None)
    _memory: ReleasableBuffer | None = None
    _reading: Transfer | None = None
    launched: Launched | None = None
    is_valid = False  # True if `full` is gathered, and no owner has written since then

    def __init__(
        self,
        request: BufferRequest,
        device: torch.device,
        spare: SparePages,
        group: ProcessSet | None = None,
        queue: "deque[GatherBuffer] | None" = None,
    ) -> None:
        """Allocate the buffer; released buffers give their pages to `spare`."""
        count, dtype = request.padded, request.dtype
        self.persistent = request.persistent
        self._what, self._group = f"all-gather of {request.name}", group
        self._queue = deque[GatherBuffer]() if queue is None else queue
        if group is not None:
            self._own = slice(group.index * count // group.size, (group.index + 1) * count // group.size)
        if self.persistent:
            # Zeros, as no rank writes the padding. The memory lasts as a run does: it may hold the master weights themselves.
            self.full = allocate_lasting(count, dtype, device)
        else:
            self._memory = ReleasableBuffer(count, dtype, device, spare=spare, lead=request.lead)
            self.full = self._memory.full

    def transient_nbytes(self, share: float) -> int:
        """Return the bytes that this process has only between `gather` and `release`, where it counts `share` of shared pages."""
        return 0 if self.persistent else int(share * self.full.nbytes)

    def make_views(self, places: Sequence[Interval]) -> list[torch.Tensor]:
        """Return flat views of `full`, valid for the buffer's life even while the buffer has no memory."""
        if self._memory is not None:
            return self._memory.make_views([(place.start, place.end) for place in places])
        return [self.full[place.start : place.end] for place in places]

    def own(self) -> torch.Tensor:
        """Return this rank's shard, a view of `full`, which must have memory."""
        return self.full[self._own]

    def begin_write(self) -> None:
        """Wait until no rank reads the current contents of the buffer, so that this rank may overwrite its shard."""
        if self._group is not None:
            self.wait()

    def end_write(self) -> None:
        """Mark this rank's shard as new; gathered copies on other ranks are then out of date."""
        self.is_valid = self.is_valid and self._group is None

    def gather(self, shard: TieredTensor) -> None:
        """Start to fill `full`. `shard` is this rank's part, `[padded / ranks]`, of any floating dtype on any tier."""
        if self.is_valid or self.launched is not None or (self._group is not None and self._reading is not None):
            return
        if self._memory is not None:
            self._memory.take()
        self._reading = DONE if self._memory is None else shard.read(0, self.own())
        if self._group is None:
            self.is_valid = True
            return
        while self._group.on_stream and self._queue:
            self._queue.popleft().start()
        self._queue.append(self)
        self.poll()

    def poll(self) -> None:
        """Start the queued all-gathers whose shards are in place, without waiting."""
        while self._queue and (reading := self._queue[0]._reading) is not None:
            # On a device a stream may wait for this rank's shard, else it must be in place or have failed.
            on_stream = self._group is not None and self._group.on_stream
            if not (reading is DONE or reading.on_device if on_stream else reading.done()):
                return
            self._queue.popleft().start()

    def start(self) -> None:
        """Start the all-gather, once this rank's shard is in place."""
        reading, self._reading = self._reading, None
        if reading is not None and self._group is not None:
            with reading.ordering():
                self.launched = self._group.start(Collective.ALL_GATHER, CollectiveCall(self.full, self.own(), self._what))

    def wait(self) -> None:
        if self._group is None and self._reading is not None:
            self._reading.wait()
        while self._group is not None and self._reading is not None:
            self._queue.popleft().start()
        if self.launched is not None:
            self.launched.wait()
            self.launched, self.is_valid = None, True

    def release(self) -> None:
        """Free the memory unless the buffer is persistent. This rank reads no more before the next gather."""
        if self._memory is not None and (self.is_valid or self._group is not None):
            self.wait()
            self._memory.give_back()
            self.is_valid = False

    def end_read(self) -> None:
        """Mark the current contents as no longer read by this rank, so that their owners may write."""


class Reduction(NamedTuple):
    """A reduction in flight, which the thread that calls `finish` completes."""

    ready: Callable[[], bool]
    """Returns True if `finish` would return without waiting for a peer. It is never called on a device."""
    finish: Callable[[], None]
    """Waits for the peers, sums this rank's shard and frees the slot. Sends nothing, so ranks may finish at different times."""
    gather_sums: Callable[[], None] = lambda: None
    """Gathers the other ranks' sums if this rank needs the whole sum. All ranks call it in the order of launches."""


def sum_in_order(out: torch.Tensor, parts: Sequence[torch.Tensor], *, add: bool) -> None:
    """Compute `out = parts[0] + parts[1] + ...` (plus `out` when `add`), in this order, in the dtype of `out`."""
    remaining = list(parts)
    if not add:
        first = remaining.pop(0)
        if remaining and first.dtype == out.dtype and remaining[0].dtype == out.dtype:
            torch.add(first, remaining.pop(0), out=out)
        else:
            out.copy_(first)
    for part in remaining:
        out.add_(part)


class Reducer:
    """The slots in which gradient buckets wait for their reduction over the group; `sequence` numbers the buckets from 0. A group
    has send buffers and, on gloo, as many receive buffers; a single rank has neither. Reductions finish in launch order. On a
    device, work on a slot is ordered by streams: `finish` makes the compute stream wait, not the host."""

    def __init__(self, device: torch.device = _CPU, group: ProcessSet | None = None, slots: int = 0, nbytes: int = 0) -> None:
        """Allocate `slots` slots of `nbytes` each on `device` for a group."""
        self.on_stream = is_accelerator(device)
        self.finished = 0
        self._members = group
        self._send, self._receive = (
            [allocate_lasting(nbytes, torch.uint8, device) for _ in range(count if group is not None else 0)]
            for count in (slots, 0 if self.on_stream else slots)
        )

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        """Return the bytes of the slot for `sequence`; None while a peer still reads its old contents, unless `block`."""
        # The caller finishes launched reductions before it blocks, so a slot is free by then.
        return self._send[sequence % len(self._send)] if sequence < self.finished + len(self._send) else None

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        """Start to sum `filled`, the slot as gradients, `[padded]`, over the group. `out` has the dtype of the sum and receives
        this rank's shard of it, or all of it if `out` is as long as `filled`; `add` adds to `out`. Sums run in rank order, one
        addition after the other in the dtype of `out`, so that every transport gives the same bits."""
        group, kind, sums = self._members, Collective.REDUCE_SCATTER, out
        if group is None:
            raise LayoutError(f"a group of one rank has nothing to reduce (sequence {sequence})")
        whole = out.numel() == filled.numel()
        row, received = kind, filled
        if group.on_stream and filled.dtype == out.dtype:
            if whole:
                row = kind = Collective.ALL_REDUCE
            else:
                received = torch.empty_like(out) if add else out
            parts: Sequence[torch.Tensor] = [received]
        else:
            row = Collective.ALL_TO_ALL
            if group.on_stream:
                received = torch.empty_like(filled)
            else:
                received = self._receive[sequence % len(self._receive)][: filled.nbytes].view(filled.dtype)
            parts = received.chunk(group.size)
            length = filled.numel() // group.size
            sums = out[group.index * length : (group.index + 1) * length] if whole else out
        call = CollectiveCall(received, filled, "reduction of gradients", purpose="reduce", counts_as=kind)
        flight = group.start(row, call)

        def finish() -> None:
            flight.wait()
            with group.traffic.timed(kind):
                sum_in_order(sums, parts, add=add)
            self.finished += 1

        def gather_sums() -> None:
            if sums.numel() != out.numel():
                call = CollectiveCall(out, sums, "all-gather of summed gradients", purpose="reduce")
                group.start(Collective.ALL_GATHER, call).wait()

        return Reduction(flight.done, finish, gather_sums)


class Transport:
    """The buffers and slots of one group, which move by collectives, or not at all if it is `local`. It knows no parameters."""

    buffers: Sequence[GatherBuffer]
    share = 1.0
    """The fraction of the buffers' memory that counts for this process: 1, or 1 / ranks where ranks share pages."""

    def __init__(
        self, name: str, group: ProcessSet, device: torch.device, requests: list[BufferRequest], slots: int, nbytes: int
    ) -> None:
        self.name = name
        self.spare_pages, queue = SparePages(), deque[GatherBuffer]()
        members = None if name == "local" else group
        self.buffers = [GatherBuffer(each, device, self.spare_pages, members, queue) for each in requests]
        self.reducer = Reducer(device, members, slots, nbytes)

    def poll(self) -> None:
        """Free spare pages and start queued all-gathers, without waiting; called at the end of a pass."""
        self.spare_pages.give_back()
        for buffer in self.buffers:
            buffer.poll()

    def close(self) -> None:
        """Free the resources that are not freed with the tensors."""
        with suppress(CollectiveError):  # The caller has already seen the error of a gather.
            for buffer in self.buffers if self.reducer.on_stream else ():
                if buffer.launched is not None:
                    buffer.launched.wait()  # Memory is freed in the order of the device's current stream.


def choose_transport(kind: TransportName, group: ProcessSet, device: torch.device) -> str:
    """Resolve `kind` for this group to `local`, `shared`, `gloo` or `nccl`. Raises `ConfigError` when the named transport cannot
    serve the group, and `CollectiveError` when this rank is not in it."""
    group.require_member()
    if is_accelerator(device):
        if kind in ("shared", "gloo"):
            why = f"parallel.transport is {kind}, which moves CPU memory"
            raise ConfigError(f"{why}, but the ranks compute on {device.type.upper()}; use auto or nccl")
        return "local" if group.size == 1 else "nccl"
    if kind == "nccl":
        raise ConfigError("parallel.transport is nccl, but no accelerator is here; use auto, shared or gloo")
    if group.size == 1:
        return "local"
    obstacle, machine = "", platform.machine()
    if not group.one_host:
        obstacle = "the ranks of the group do not share one host and one process namespace"
    elif machine not in ("x86_64", "AMD64"):
        obstacle = f"{machine} orders memory more weakly than x86-64, which its counters rely on"
    if kind == "shared" and obstacle:
        raise ConfigError(f"parallel.transport is shared, but {obstacle}; use auto or gloo")
    return "gloo" if kind == "gloo" or obstacle else "shared"


class DecodingBuffer(GatherBuffer):
    """A buffer for a frozen bucket of `dtype` whose `shards`, those of all ranks, `source` gathers as bytes, ahead of their use.
    They are decoded where the unit is used, one at a time: values take four times the memory of bytes, and decoding little time."""

    def __init__(self, source: GatherBuffer, shards: list[EncodedShard], dtype: torch.dtype, spare: SparePages) -> None:
        self._gathered, self._shards = source, shards
        self._decoded = self._memory = ReleasableBuffer(sum(each.length for each in shards), dtype, source.full.device, spare=spare)
        self.full = self._decoded.full
        self.decoded_nbytes = self.full.nbytes
        # Bytes are due from `gather` to `wait`, values are there from `wait` to `release`.
        self.persistent = self._is_due = self._is_decoded = False

    def transient_nbytes(self, share: float) -> int:
        return self._gathered.transient_nbytes(share)

    def end_write(self) -> None:
        self._gathered.end_write()

    def begin_write(self) -> None:
        self._gathered.begin_write()

    def gather(self, shard: TieredTensor) -> None:
        if isinstance(shard, EncodedTensor) and not self._is_decoded:
            self._gathered.gather(shard.encoded)
            self._is_due = True

    def wait(self) -> None:
        """Wait for the bytes, decode those asked for since the last release, and release them. Raises `StorageError`."""
        self._gathered.wait()
        if not self._is_due:
            return
        self._decoded.take()
        values = torch.split(self.full, [each.length for each in self._shards])
        encoded = torch.split(self._gathered.full, [each.nbytes for each in self._shards])
        for shard, data, out in zip(self._shards, encoded, values, strict=True):
            shard.decode(data, out)
        self._is_due, self._is_decoded = False, True
        self._gathered.end_read()
        self._gathered.release()

    def release(self) -> None:
        if self._is_decoded:
            self._decoded.give_back()
            self._is_decoded = False

    def end_read(self) -> None:
        self._gathered.end_read()
