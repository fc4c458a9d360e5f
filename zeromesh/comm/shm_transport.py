"""The transport of CPU ranks on one host, whose parameters and gradient slots lie in memory shared by all of them.

`open_transport` opens a transport of any kind.

    arena   one segment      | bucket 0: shard 0 | shard 1 | bucket 1: ... |     each rank writes its shards, all read all
    words   one segment      per bucket and rank: written, done
    ring    see `shared_ring.py`

`written[bucket][rank]` is the generation of the rank's shard, and `done[bucket][rank]` the last generation that the rank has
finished reading; a shard is rewritten when all ranks are done with it. Slot n % slots of the ring is refilled when all have
consumed gradient bucket n - slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeromesh.comm.shared_ring import LINE, Counters, SharedRing, shared_segments
from zeromesh.comm.transport import BufferRequest, GatherBuffer, Reducer, Reduction, RingRequest, Transport
from zeromesh.errors import CollectiveError
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import TieredTensor, Transfer
from zeromesh.offload.memory.allocation import PAGE, SharedSegment, require_memory
from zeromesh.telemetry.step_recorder import Collective


class SharedBuffer(GatherBuffer):
    """A gather buffer in shared memory: each rank writes its shard straight into the pages that all ranks read."""

    def __init__(
        self,
        request: BufferRequest,
        group: ProcessSet,
        arena: SharedSegment,
        offset: int,
        written: Counters,
        done: Counters,
    ) -> None:
        self.full = arena.tensor(offset, request.padded, request.dtype)
        self.persistent = request.persistent
        self._arena, self._written, self._done, self._traffic = arena, written, done, group.traffic
        self._counted = self._generation = 0
        self._reading: Transfer | None = None
        self._live, self._pages_out = False, True
        self._memory = None
        length, itemsize = request.padded // group.size, request.dtype.itemsize
        self._own = slice(group.index * length, (group.index + 1) * length)
        self._own_bytes = (offset + self._own.start * itemsize, length * itemsize)
        self._what = f"gather of {request.name}"

    def begin_write(self) -> None:
        if self.persistent:
            self._reserve_own()
            self._await(self._done, "end of reading before the update")

    def end_write(self) -> None:
        if self.persistent:
            self._generation += 1
            self._written.set(self._generation)

    def gather(self, shard: TieredTensor) -> None:
        if self.persistent or self._live:
            return
        self._await(self._done, "end of reading before the refill")
        self._reserve_own()
        self._live = True
        self._generation += 1
        self._reading = shard.read(0, self.own())
        self.poll()

    def wait(self) -> None:
        if self._counted != self._generation:
            self._counted = self._generation
            self._traffic.count(Collective.ALL_GATHER, self.full.nbytes)
        self._finish_reading()
        self._await(self._written, "")

    def _await(self, counters: Counters, purpose: str) -> None:
        """Wait until all ranks' counters reach the current generation, and record the waiting time."""
        if not counters.reached(self._generation):
            with self._traffic.timed(Collective.ALL_GATHER):
                counters.wait(self._generation, f"{purpose} ({self._what})" if purpose else self._what)

    def _finish_reading(self) -> None:
        """Publish this rank's shard, which has arrived from its tier."""
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
            self._written.set(self._generation)

    def release(self) -> None:
        if self.persistent or not self._live:
            return
        self._finish_reading()
        self._live = False
        self._done.set(self._generation)
        self.poll()

    def retire(self) -> None:
        if self.persistent:
            self._done.set(self._generation)

    def poll(self) -> None:
        """Publish this rank's shard once it is in place; free its pages once no rank reads them."""
        if self._reading is not None and self._reading.done():
            self._finish_reading()
        if not self.persistent and not self._live and not self._pages_out and self._done.reached(self._generation):
            self._arena.give_back(*self._own_bytes)
            self._pages_out = True

    def _reserve_own(self) -> None:
        if self._pages_out and self._own_bytes[1]:
            if self.persistent:  # Asked once: other buffers are reserved too often to ask each time.
                require_memory(self._what, self._own_bytes[1])
            self._arena.reserve(*self._own_bytes)
            self._pages_out = False


class SharedReducer(Reducer):
    """A reducer whose gradient slots lie in a shared ring."""

    def __init__(self, request: RingRequest, group: ProcessSet) -> None:
        super().__init__()
        self._group = group
        self._slots = request.slots
        self.ring = SharedRing(group, "gradients", slots=request.slots, nbytes=request.nbytes)

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        consumed, free_at = self.ring.consumed, sequence - self._slots + 1
        if free_at > 0 and not consumed.reached(free_at):
            if not block:
                return None
            with self._group.traffic.timed(Collective.REDUCE_SCATTER):
                consumed.wait(free_at, "a free gradient slot")
        return self.ring.own[sequence % self._slots].raw

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        group, ring = self._group, self.ring
        if sequence != ring.next:
            raise CollectiveError(f"gradient bucket {sequence} was launched out of order; {ring.next} is next")
        ring.publish(sequence % self._slots)
        whole, length = out.numel() == filled.numel(), filled.numel() // group.size
        kind = Collective.ALL_REDUCE if whole else Collective.REDUCE_SCATTER
        start, end = (0, len(filled)) if whole else (group.index * length, (group.index + 1) * length)

        def parts() -> list[torch.Tensor]:
            slots = (ring.read(rank, sequence)[0] for rank in range(group.size))
            return [slot.seen(tuple(filled.shape), filled.dtype)[start:end] for slot in slots]

        group.traffic.count(kind, filled.nbytes)
        return Reduction(
            traffic=group.traffic,
            kind=kind,
            parts=parts,
            sums=out,
            add=add,
            arrived=lambda: ring.published.reached(sequence + 1),
            wait=lambda: ring.published.wait(sequence + 1, "reduction of gradients"),
            free=lambda: ring.consume(sequence),  # This rank has read the bucket of all ranks.
        )


class SharedTransport(Transport):
    """A transport whose buffers and slots lie in memory shared by all ranks of a host.

    Raises:
        StorageError: when memory is short, or a peer's segment cannot be mapped.
    """

    name = "shared"

    def __init__(self, group: ProcessSet, requests: Sequence[BufferRequest], ring: RingRequest) -> None:
        self.share = 1.0 / group.size
        offsets, end = [], 0
        for request in requests:
            offsets.append(end + request.lead)
            end += -(-(request.lead + request.padded * request.dtype.itemsize) // PAGE) * PAGE
        self.reducer = self._reducer = SharedReducer(ring, group)
        (arena,) = shared_segments(group, "parameters", end, of_first=True, reserve=False)
        (words,) = shared_segments(group, "counters", 2 * len(requests) * group.size * LINE * 8, of_first=True)
        self._segments = (arena, words)
        table = words.words()
        buffers = []
        for number, (request, offset) in enumerate(zip(requests, offsets, strict=True)):
            written, done = (Counters(table, (2 * number + row) * group.size * LINE, group) for row in range(2))
            buffers.append(SharedBuffer(request, group, arena, offset, written, done))
        self._released = [buffer for buffer in buffers if not buffer.persistent]
        self.buffers = buffers

    def poll(self) -> None:
        for buffer in self._released:
            buffer.poll()

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._reducer.ring.close()


def open_transport(
    name: str, group: ProcessSet, device: torch.device, requests: Sequence[BufferRequest], ring: RingRequest
) -> Transport:
    """Allocate the buffers and slots of a group. Every rank of it calls this with the same requests.

    Raises:
        StorageError: when memory is short.
    """
    if name == "shared":
        return SharedTransport(group, requests, ring)
    return Transport(name, group, device, requests, ring)
