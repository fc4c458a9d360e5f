"""The transport of CPU ranks on one host: gathered parameters and gradient slots are memory that all of them see.

    arena   one segment      | bucket 0: shard 0 | shard 1 | bucket 1: ... |     each rank writes its shards, all read all
    rings   one per rank     | slot 0 | slot 1 | ... |                           each rank fills its own, all read all
    words   one segment      per rank: published, consumed; then per bucket: written, done

Counters only grow, and each has one writer. `written[bucket][rank]` is the generation that the rank's shard holds and
`done[bucket][rank]` the last generation that the rank has finished reading; a shard is rewritten when all are done
with it. `published[rank]` and `consumed[rank]` count gradient buckets: slot n % slots is refilled when all have
consumed bucket n - slots.

The counters order memory as x86 does (stores are seen in order); `open_transport` uses gloo on other processors.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence

import torch

from zeromesh.comm.transport import BufferRequest, GatherBuffer, Reducer, Reduction, RingRequest, Transport
from zeromesh.errors import CollectiveError
from zeromesh.mesh.process_mesh import ProcessSet
from zeromesh.offload import TieredTensor, Transfer
from zeromesh.offload.memory.allocation import PAGE, SharedSegment, require_memory
from zeromesh.telemetry.step_recorder import Collective

_FUTEX = 202
"""The number of futex(2) on x86-64, the one kind of processor that has this transport."""
_WAIT, _WAKE = 0, 1
_EVERYONE = 2**31 - 1
_LOW_HALF = 0xFFFFFFFF


_TIME = struct.Struct("ll")
"""struct timespec: seconds and nanoseconds."""
_system_call = ctypes.CDLL(None).syscall
"""`_system_call(_FUTEX, address, operation, value, timeout)`, with which these operations end."""
_system_call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
_system_call.restype = ctypes.c_long


class Futex:
    """One 64-bit word, little-endian, that grows; a futex is its lower half.

    Whoever polls with short sleeps takes processor time from the rank that it waits for, and gets its turn late where more
    processes than cores want to run. A process that waits on a futex is woken when the word has been written.
    """

    def __init__(self, words: memoryview, place: int) -> None:
        """`words` are shared memory, seen as 64-bit words, which stays mapped for as long as this lives."""
        self._half = ctypes.c_uint32.from_buffer(words, place * words.itemsize)
        self._address = ctypes.addressof(self._half)

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep for at most `seconds`, below one, unless the word is not `seen` any more; a signal ends it too."""
        _system_call(_FUTEX, self._address, _WAIT, seen & _LOW_HALF, _TIME.pack(0, int(1e9 * seconds)))

    def wake(self) -> None:
        """Wake all that wait for the word, which has been written."""
        _system_call(_FUTEX, self._address, _WAKE, _EVERYONE, None)


LINE = 8
"""Words in a cache line: counters of different writers never share one."""


class Counters:
    """One growing counter per rank, in shared words, a cache line apart."""

    def __init__(self, words: memoryview, base: int, group: ProcessSet) -> None:
        self._words = words
        self._places = [base + rank * LINE for rank in range(group.size)]
        self._index = group.index
        self._ranks = group.ranks
        self._watch = group.watch
        self._futexes = [Futex(words, place) for place in self._places]

    def set(self, value: int) -> None:
        """Set this rank's counter, and wake those that sleep until it changes."""
        self._words[self._places[self._index]] = value
        self._futexes[self._index].wake()

    def own(self) -> int:
        """This rank's counter."""
        return self._words[self._places[self._index]]

    def lowest(self) -> int:
        """Return the counter of the last of the ranks."""
        words = self._words
        return min(words[place] for place in self._places)

    def reached(self, value: int) -> bool:
        """Return True if all ranks have got to `value`."""
        words = self._words
        for place in self._places:  # noqa: SIM110 - a third of the time of `all`, in the loop of every wait
            if words[place] < value:
                return False
        return True

    def wait(self, value: int, what: str) -> None:
        """Wait until all ranks have got to `value`; the ranks that have not are the ones that an error names."""
        if self.reached(value):
            return
        words = self._words

        def behind() -> list[int]:
            return [rank for rank, place in zip(self._ranks, self._places, strict=True) if words[place] < value]

        def pause(seconds: float) -> None:
            for place, futex in zip(self._places, self._futexes, strict=True):
                if (seen := words[place]) < value:
                    futex.wait(seen, seconds)
                    return

        self._watch.wait(lambda: self.reached(value), behind(), what, pause, behind)


class SharedBuffer(GatherBuffer):
    """A buffer whose shards are written by their ranks straight into the pages that all ranks read."""

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
        self._arena = arena
        self._written = written
        self._done = done
        self._traffic = group.traffic
        self._counted = 0
        self._generation = 0
        self._reading: Transfer | None = None
        self._live = False
        self._pages_out = True
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
        """Wait until all ranks have got to this generation, and count the time; there is none where they have."""
        if not counters.reached(self._generation):
            with self._traffic.timed(Collective.ALL_GATHER):
                counters.wait(self._generation, f"{purpose} ({self._what})" if purpose else self._what)

    def _finish_reading(self) -> None:
        """This rank's shard is in place: others may read it."""
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
        """Let others have this rank's shard once it is there; give its pages back once nobody reads them."""
        if self._reading is not None and self._reading.done():
            self._finish_reading()
        if not self.persistent and not self._live and not self._pages_out and self._done.reached(self._generation):
            self._arena.give_back(*self._own_bytes)
            self._pages_out = True

    def _reserve_own(self) -> None:
        if self._pages_out and self._own_bytes[1]:
            if self.persistent:  # Once; others come and go too often to ask each time.
                require_memory(self._what, self._own_bytes[1])
            self._arena.reserve(*self._own_bytes)
            self._pages_out = False


class SharedReducer(Reducer):
    """Gradient slots in shared memory."""

    def __init__(
        self,
        ring: RingRequest,
        group: ProcessSet,
        rings: Sequence[SharedSegment],
        published: Counters,
        consumed: Counters,
    ) -> None:
        super().__init__()
        self._group = group
        self.traffic = group.traffic
        self._ring = ring
        self.published = published
        self.consumed = consumed
        self._slots = [
            [segment.tensor(slot * ring.nbytes, ring.nbytes, torch.uint8) for slot in range(ring.slots)]
            for segment in rings
        ]
        self._next = 0

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        free_at = sequence - self._ring.slots + 1
        if free_at > 0 and not self.consumed.reached(free_at):
            if not block:
                return None
            with self.traffic.timed(Collective.REDUCE_SCATTER):
                self.consumed.wait(free_at, "a free gradient slot")
        return self._slots[self._group.index][sequence % self._ring.slots]

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        if sequence != self._next:
            raise CollectiveError(f"gradient bucket {sequence} was launched out of order; {self._next} is next")
        self._next += 1
        self.published.set(self._next)
        kind, number = Collective.ALL_REDUCE, sequence % self._ring.slots
        parts = [slots[number][: filled.nbytes].view(filled.dtype) for slots in self._slots]
        if out.numel() != filled.numel():
            kind, length = Collective.REDUCE_SCATTER, filled.numel() // len(parts)
            parts = [part[self._group.index * length :][:length] for part in parts]
        self.traffic.count(kind, filled.nbytes)
        return Reduction(
            traffic=self.traffic,
            kind=kind,
            parts=parts,
            sums=out,
            add=add,
            arrived=lambda: self.published.reached(sequence + 1),
            wait=lambda: self.published.wait(sequence + 1, "reduction of gradients"),
            free=lambda: self.consumed.set(sequence + 1),  # This rank has read the bucket of all ranks.
        )


class SharedTransport(Transport):
    """Buffers and slots in memory that all ranks of a host see.

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
        ring_bytes, words_bytes = ring.slots * ring.nbytes, (2 + 2 * len(requests)) * group.size * LINE * 8
        rings = shared_segments(group, "gradients", ring_bytes)
        (arena,) = shared_segments(group, "parameters", end, of_first=True, reserve=False)
        (words,) = shared_segments(group, "counters", words_bytes, of_first=True)
        self._segments = (arena, words, *rings)
        table = words.words()

        def counters(row: int) -> Counters:
            return Counters(table, row * group.size * LINE, group)

        buffers = []
        for number, (request, offset) in enumerate(zip(requests, offsets, strict=True)):
            written, done = counters(2 + 2 * number), counters(3 + 2 * number)
            buffers.append(SharedBuffer(request, group, arena, offset, written, done))
        self._released = [buffer for buffer in buffers if not buffer.persistent]
        self.buffers = buffers
        self.reducer = SharedReducer(ring, group, rings, counters(0), counters(1))

    def poll(self) -> None:
        for buffer in self._released:
            buffer.poll()

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


def shared_segments(
    group: ProcessSet, label: str, nbytes: int, *, of_first: bool = False, reserve: bool = True
) -> list[SharedSegment]:
    """Segments of `nbytes` that all ranks map, in the order of the ranks that make them: each one, or `of_first` the first alone.

    Raises:
        StorageError: when memory is short, or a peer's segment cannot be mapped.
    """
    own = SharedSegment.create(label, nbytes, reserve=reserve) if group.index == 0 or not of_first else None
    rows = group.gather_integers([os.getpid(), own.descriptor if own else -1])
    found = [
        own if own is not None and index == group.index else SharedSegment.attach(pid, descriptor, nbytes, label)
        for index, (pid, descriptor) in enumerate(rows[:1] if of_first else rows)
    ]
    group.barrier("mapping of shared memory")
    return found
