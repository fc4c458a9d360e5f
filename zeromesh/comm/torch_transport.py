"""Transports over torch.distributed: gloo for CPU ranks, NCCL for CUDA ranks; and `open_transport`, which opens one of any kind.

gloo's reduce-scatter moves as many bytes as an all-reduce and adds in the gradients' dtype. Here it is an all-to-all, half the
bytes, and a local sum in rank order in the dtype of the sum. A device does the same if the dtype of the transfer is narrower than
that of the sum; otherwise NCCL's own reduce-scatter is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch

from zeromesh.comm.shm_transport import SharedTransport
from zeromesh.comm.transport import BufferRequest, GatherBuffer, Reducer, Reduction, RingRequest, Transport
from zeromesh.errors import CollectiveError
from zeromesh.mesh.collectives import CollectiveCall
from zeromesh.mesh.process_set import InFlight, ProcessSet
from zeromesh.offload import DONE, SparePages, TieredTensor, allocate_lasting
from zeromesh.telemetry.step_recorder import Collective


class CollectiveBuffer(GatherBuffer):
    """A gather buffer filled by an all-gather.

    Gathers start once this rank's shard is in place, in the order of the calls; `queue` holds the waiting ones.

    A device runs collectives of all groups in launch order, and blocks in each until all ranks have launched it. So its gathers
    start at fixed places of the program: at once if a stream waits for the shard, else when the next gather is requested or this
    one is needed; the host then waits for the shard.
    """

    def __init__(
        self,
        request: BufferRequest,
        group: ProcessSet,
        device: torch.device,
        spare: SparePages,
        queue: deque[CollectiveBuffer],
    ) -> None:
        super().__init__(request, device, spare)
        self._group = group
        self._what = f"all-gather of {request.name}"
        self._flight: InFlight | None = None
        self._queue = queue
        shard = request.padded // group.size
        self._own = slice(group.index * shard, (group.index + 1) * shard)

    def begin_write(self) -> None:
        self.wait()

    def end_write(self) -> None:
        self._live = False

    def gather(self, shard: TieredTensor) -> None:
        if self._live or self._flight is not None or self._reading is not None:
            return
        if self._memory is not None:
            self._memory.take()
        self._reading = DONE if self.persistent else shard.read(0, self.own())
        while self._group.on_stream and self._queue:
            self._queue.popleft().start()
        self._queue.append(self)
        self.poll()

    def poll(self) -> None:
        while self._queue and (reading := self._queue[0]._reading) is not None:
            # On a device a stream may wait for this rank's shard, else it must be in place or have failed.
            if not (reading is DONE or reading.on_device if self._group.on_stream else reading.done()):
                return
            self._queue.popleft().start()

    def start(self) -> None:
        """Start the all-gather, once this rank's shard is in place."""
        reading, self._reading = self._reading, None
        if reading is not None:
            with reading.ordering():
                call = CollectiveCall(self.full, self.own(), self._what)
                self._flight = self._group.start(Collective.ALL_GATHER, call)

    def wait(self) -> None:
        while self._reading is not None:
            self._queue.popleft().start()
        if self._flight is not None:
            self._flight.wait()
            self._flight, self._live = None, True

    def settle(self) -> None:
        """Make a device's current stream wait for a gather in flight, since memory is freed in the order of that stream."""
        if self._flight is not None and self._group.on_stream:
            self._flight.wait()

    def release(self) -> None:
        if self._memory is not None:
            self.wait()
            self._memory.give_back()
            self._live = False


class CollectiveReducer(Reducer):
    """A reducer with `slots` send buffers and, on gloo, as many receive buffers. Reductions finish in launch order.

    On a device, work on a slot is ordered by streams: `finish` makes the compute stream wait, not the host.
    """

    def __init__(self, ring: RingRequest, group: ProcessSet, device: torch.device) -> None:
        super().__init__(on_stream=group.on_stream)
        self.group = group
        self.finished = 0
        sets = 1 if group.on_stream else 2
        made = [allocate_lasting(ring.nbytes, torch.uint8, device) for _ in range(sets * ring.slots)]
        self._slots, self._receive = made[: ring.slots], made[ring.slots :]

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        # The caller finishes launched reductions before it blocks, so no slot is missing while it blocks.
        return self._slots[sequence % len(self._slots)] if sequence < self.finished + len(self._slots) else None

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        group, kind, sums = self.group, Collective.REDUCE_SCATTER, out
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

        def gather_sums() -> None:
            call = CollectiveCall(out, sums, "all-gather of summed gradients", purpose="reduce")
            group.start(Collective.ALL_GATHER, call).wait()

        return Reduction(
            traffic=group.traffic,
            kind=kind,
            parts=lambda: parts,
            sums=sums,
            add=add,
            arrived=flight.done,
            wait=flight.wait,
            free=self._free,
            complete=gather_sums if sums.numel() != out.numel() else None,
        )

    def _free(self) -> None:
        self.finished += 1


class CollectiveTransport(Transport):
    """A transport whose buffers are filled by all-gathers and whose slots are reduced by collectives."""

    def __init__(
        self, group: ProcessSet, device: torch.device, requests: Sequence[BufferRequest], ring: RingRequest
    ) -> None:
        self.name = "nccl" if group.on_stream else "gloo"
        self._queue: deque[CollectiveBuffer] = deque()
        self._spare = SparePages()
        self._gathered = [CollectiveBuffer(each, group, device, self._spare, self._queue) for each in requests]
        self.buffers = self._gathered
        self.reducer = CollectiveReducer(ring, group, device)

    def poll(self) -> None:
        super().poll()
        if self._queue:
            self._queue[0].poll()

    def close(self) -> None:
        with suppress(CollectiveError):  # The caller has already seen the error of a gather.
            for buffer in self._gathered:
                buffer.settle()


def open_transport(
    name: str, group: ProcessSet, device: torch.device, requests: Sequence[BufferRequest], ring: RingRequest
) -> Transport:
    """Allocate the buffers and slots of a group. Every rank of it calls this with the same requests.

    Raises:
        StorageError: when memory is short.
    """
    if name == "local":
        return Transport(requests, device)
    if name == "shared":
        return SharedTransport(group, requests, ring)
    return CollectiveTransport(group, device, requests, ring)
