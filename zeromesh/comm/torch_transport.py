"""Transports over torch.distributed: gloo for CPU ranks, NCCL for CUDA ranks.

gloo's reduce-scatter moves as many bytes as an all-reduce and adds in the gradients' dtype. Here it is an all-to-all,
half the bytes, and a local sum in rank order in `precision.reduce`. NCCL's own reduce-scatter is used as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from zeromesh.comm.shm_transport import sum_in_order
from zeromesh.comm.transport import (
    BufferRequest,
    GatherBuffer,
    Reducer,
    Reduction,
    RingRequest,
)
from zeromesh.intervals import Interval
from zeromesh.mesh.process_mesh import ProcessSet
from zeromesh.offload import DONE, ReleasableBuffer, TieredTensor, Transfer, allocate_lasting
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.telemetry.watchdog import AsyncWork, Watchdog

# torch 2.13 deprecates the names that torch 2.11 has alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Broadcasts:
    """An all-gather over gloo, as one broadcast of each shard from its rank.

    gloo's own gathers into memory of its own, as large as the whole buffer, and copies from there.
    """

    def __init__(self, full: torch.Tensor, group: ProcessSet, process_group: dist.ProcessGroup | None) -> None:
        self._works: list[dist.Work] = [
            dist.broadcast(part, src=rank, group=process_group, async_op=True)
            for rank, part in zip(group.ranks, full.chunk(group.size), strict=True)
        ]

    def is_completed(self) -> bool:
        """Whether all are done, or one has failed."""
        done = [work for work in self._works if work.is_completed()]
        return len(done) == len(self._works) or not all(work.is_success() for work in done)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Returns once all are done. Raises RuntimeError after `timeout`, or when one has failed."""
        for work in self._works:
            work.wait(timeout)
        return True


def _start_gather(
    full: torch.Tensor, own: torch.Tensor, group: ProcessSet, process_group: dist.ProcessGroup | None
) -> AsyncWork:
    if group.on_stream:
        work: AsyncWork = _all_gather(full, own, group=process_group, async_op=True)
        return work
    return _Broadcasts(full, group, process_group)


class CollectiveBuffer:
    """A buffer that an all-gather fills.

    Gathers start once this rank's shard is there, in the order in which they were asked for: `queue` has those that wait for it.
    """

    def __init__(
        self, request: BufferRequest, group: ProcessSet, device: torch.device, queue: deque[CollectiveBuffer]
    ) -> None:
        self.persistent = request.persistent
        self._memory = None if request.persistent else ReleasableBuffer(request.padded, request.dtype, device)
        # Zeros, since gaps between parameters are nobody's and persistent memory may hold the master weights themselves.
        kept = allocate_lasting(request.padded, request.dtype, device) if self._memory is None else self._memory.full
        self.full = kept
        self._group = group
        self._watch = _watch_of(group)
        self._what = f"all-gather of {request.name}"
        self._reading: Transfer | None = None
        self._work: AsyncWork | None = None
        self._current = False
        self._queue = queue
        shard = request.padded // group.size
        self._own = (group.index * shard, (group.index + 1) * shard)
        if self._memory is not None:
            self._memory.give_back()

    def carve(self, places: Sequence[Interval]) -> list[torch.Tensor]:
        if self._memory is not None:
            return self._memory.carve([(place.start, place.end) for place in places])
        return [self.full[place.start : place.end] for place in places]

    def own(self) -> torch.Tensor:
        return self.full[self._own[0] : self._own[1]]

    def begin_write(self) -> None:
        self.wait()

    def end_write(self) -> None:
        self._current = False

    def gather(self, shard: TieredTensor) -> None:
        if self._current or self._work is not None or self._reading is not None:
            return
        if self._memory is not None:
            self._memory.take()
        self._reading = DONE if self.persistent else shard.read(0, self.own())
        self._queue.append(self)
        self.poll()

    def poll(self) -> None:
        while self._queue and self._queue[0].has_shard():
            self._queue.popleft().start()

    def has_shard(self) -> bool:
        """Whether this rank's shard is in place, or cannot be had."""
        return self._reading is not None and self._reading.done()

    def start(self) -> None:
        """Gather, once this rank's shard is in place."""
        reading, self._reading = self._reading, None
        if reading is not None:
            self._group.traffic.count(Collective.ALL_GATHER, self.full.nbytes)
            with reading.ordering():
                self._work = _start_gather(self.full, self.own(), self._group, self._group.data_group)

    def wait(self) -> None:
        if self._reading is None and self._work is None:
            return
        with self._group.traffic.timed(Collective.ALL_GATHER):
            while self._reading is not None:
                self._queue.popleft().start()
            if self._work is not None:
                wait_for(self._work, self._watch, self._group, self._what)
                self._work = None
                self._current = True

    def release(self) -> None:
        if self._memory is not None:
            self.wait()
            self._memory.give_back()
            self._current = False

    def retire(self) -> None:
        """Every rank has its own copy."""


class _Exchange:
    """A reduction over gloo: an all-to-all in flight, then a sum in rank order."""

    def __init__(
        self, reducer: GlooReducer, filled: torch.Tensor, received: torch.Tensor, out: torch.Tensor, add: bool
    ) -> None:
        self._reducer = reducer
        self._received = received
        self._out = out
        self._add = add
        reducer.group.traffic.count(Collective.REDUCE_SCATTER, filled.nbytes)
        self._work: AsyncWork = dist.all_to_all_single(
            received, filled, group=reducer.group.reduce_group, async_op=True
        )
        self._done = False

    def ready(self) -> bool:
        return self._done or self._work.is_completed()

    def finish(self) -> None:
        if self._done:
            return
        group = self._reducer.group
        with group.traffic.timed(Collective.REDUCE_SCATTER):
            wait_for(self._work, self._reducer.watch, group, "reduction of gradients")
            sum_in_order(self._own_part(), self._received.chunk(group.size), add=self._add)
        self._reducer.finished += 1
        self._done = True

    def settle(self) -> None:
        group, own = self._reducer.group, self._own_part()
        if own.numel() != self._out.numel():
            with group.traffic.timed(Collective.ALL_GATHER, self._out.nbytes):
                work = _start_gather(self._out, own, group, group.reduce_group)
                wait_for(work, self._reducer.watch, group, "all-gather of summed gradients")

    def _own_part(self) -> torch.Tensor:
        group = self._reducer.group
        length = self._received.numel() // group.size
        if self._out.numel() == length:
            return self._out
        return self._out[group.index * length : (group.index + 1) * length]


class GlooReducer:
    """`slots` send buffers, and as many to receive into. Reductions finish in the order in which they were launched."""

    def __init__(self, ring: RingRequest, group: ProcessSet) -> None:
        self.group = group
        self.watch = _watch_of(group)
        self.finished = 0
        cpu = torch.device("cpu")
        self._send = [allocate_lasting(ring.nbytes, torch.uint8, cpu) for _ in range(ring.slots)]
        self._receive = [allocate_lasting(ring.nbytes, torch.uint8, cpu) for _ in range(ring.slots)]

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        # The caller finishes what it launched before it blocks, so a slot can only be missing while it does not.
        if sequence >= self.finished + len(self._send):
            return None
        return self._send[sequence % len(self._send)]

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        nbytes = filled.numel() * filled.element_size()
        received = self._receive[sequence % len(self._receive)][:nbytes].view(filled.dtype)
        return _Exchange(self, filled, received, out, add)


class _Scatter:
    """A reduction over NCCL."""

    def __init__(self, reducer: NcclReducer, filled: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        group = reducer.group
        self._reducer = reducer
        self._out = out
        self._add = add
        # Both tensors are kept until finish(): NCCL reads and writes them on a stream of its own.
        self._sent = filled if filled.dtype == out.dtype else filled.to(out.dtype)
        self._kind = Collective.ALL_REDUCE if out.numel() == filled.numel() else Collective.REDUCE_SCATTER
        group.traffic.count(self._kind, self._sent.nbytes)
        if self._kind is Collective.ALL_REDUCE:
            self._received = self._sent if self._sent is not filled else filled.clone()
            self._work: AsyncWork = dist.all_reduce(self._received, group=group.reduce_group, async_op=True)
        else:
            self._received = torch.empty_like(out)
            self._work = _reduce_scatter(self._received, self._sent, group=group.reduce_group, async_op=True)
        self._done = False

    def ready(self) -> bool:
        return self._done or self._work.is_completed()

    def finish(self) -> None:
        if not self._done:
            with self._reducer.group.traffic.timed(self._kind):
                self._work.wait()
            if self._add:
                self._out.add_(self._received)
            else:
                self._out.copy_(self._received)
            self._reducer.finished += 1
            self._done = True

    def settle(self) -> None:
        """An all-reduce has given every rank the whole sum."""


class NcclReducer:
    """Slots on the device. Work on a slot is ordered by streams: `finish` makes the compute stream wait, not the host."""

    def __init__(self, ring: RingRequest, group: ProcessSet, device: torch.device) -> None:
        self.group = group
        self.finished = 0
        self._slots = [torch.empty(ring.nbytes, dtype=torch.uint8, device=device) for _ in range(ring.slots)]

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        if sequence >= self.finished + len(self._slots):
            return None
        return self._slots[sequence % len(self._slots)]

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        return _Scatter(self, filled, out, add)


class CollectiveTransport:
    """Buffers filled by all-gathers and slots emptied by reductions."""

    share = 1.0

    def __init__(
        self, group: ProcessSet, device: torch.device, requests: Sequence[BufferRequest], ring: RingRequest
    ) -> None:
        self._queue: deque[CollectiveBuffer] = deque()
        self.buffers: Sequence[GatherBuffer] = [CollectiveBuffer(each, group, device, self._queue) for each in requests]
        self.reducer: Reducer
        if device.type == "cuda":
            self.name = "nccl"
            self.reducer = NcclReducer(ring, group, device)
        else:
            self.name = "gloo"
            self.reducer = GlooReducer(ring, group)

    def poll(self) -> None:
        if self._queue:
            self._queue[0].poll()

    def close(self) -> None:
        """Private memory goes with its tensors."""


def _watch_of(group: ProcessSet) -> Watchdog:
    if group.watch is None:
        raise ValueError(f"axis {group.name} has one rank and needs no transport")
    return group.watch


def wait_for(work: AsyncWork, watch: Watchdog, group: ProcessSet, what: str) -> None:
    """Wait for a collective: for gloo until it is done, watched; for NCCL by ordering the compute stream behind it."""
    if group.on_stream:
        work.wait()
    else:
        watch.wait_work(work, group.ranks, what)
