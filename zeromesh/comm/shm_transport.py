"""Memory shared by all CPU ranks of a host: the ring of their messages, and the transport of parameters and gradients.

    arena   one segment                     | bucket 0: shard 0 | shard 1 | bucket 1: ... |   each rank writes its shards, all read
    words   one segment                     per bucket and rank: written, done
    ring    a segment for each rank's slot  | a tensor |                                      filled by their rank, read by all
            words, one segment              per rank: published, consumed, and entries, a ring of them

`written[bucket][rank]` is the generation of the rank's shard, and `done[bucket][rank]` the last generation that the rank has
finished reading; a shard is rewritten when all ranks are done with it. Message n of a rank has an entry with its slot and a
description by the caller. `published` counts the messages that a rank has written, `consumed` those that it has finished reading,
in order. A slot is free once all ranks have consumed its message. If no free slot is large enough, a rank creates one, and the
others map it when they read an entry that names it: so writing never waits for a peer, and messages may be read in any order.

Counters only grow, and each has one writer. They rely on the memory order of x86 (stores become visible in order)."""

import ctypes
import math
import os
import struct
import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch

from zeromesh.comm.transport import BufferRequest, GatherBuffer, Reducer, Reduction, Transport, sum_in_order
from zeromesh.errors import CollectiveError
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import SparePages, TieredTensor
from zeromesh.offload.memory.allocation import PAGE, SharedSegment, require_memory
from zeromesh.telemetry.step_recorder import Collective

_FUTEX = 202  # the system call futex(2) on x86-64, the only processor type that has this transport
_WAIT, _WAKE = 0, 1
_WAKE_ALL = 2**31 - 1
_LOW_HALF = 0xFFFFFFFF
_TIME = struct.Struct("ll")  # struct timespec: seconds and nanoseconds
_system_call = ctypes.CDLL(None).syscall
"""The C function `syscall(_FUTEX, address, operation, value, timeout)`, which wakes and waits."""
_system_call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
_system_call.restype = ctypes.c_long


class Futex:
    """A growing 64-bit little-endian word in shared memory; its lower half is the futex, on which a process sleeps until the word
    is written. Polling would take processor time from the rank waited for, and react late with more processes than cores."""

    def __init__(self, words: memoryview, place: int) -> None:
        """Take 64-bit words of shared memory, which must stay mapped for the lifetime of this object."""
        self._half = ctypes.c_uint32.from_buffer(words, place * words.itemsize)
        self._address = ctypes.addressof(self._half)
        self.wake: Callable[[], object] = partial(_system_call, _FUTEX, self._address, _WAKE, _WAKE_ALL, None)
        """Wakes all processes that wait for the word; the caller has written the word before."""

    def wait(self, seen: int, seconds: float) -> None:
        """Sleep for at most `seconds` (below 1) while the word equals `seen`; a signal ends the sleep, too."""
        _system_call(_FUTEX, self._address, _WAIT, seen & _LOW_HALF, _TIME.pack(0, int(1e9 * seconds)))


_SPINS = 500  # reads of counters before a rank sleeps: mostly the others arrive within some microseconds
LINE = 8  # words in a cache line: counters of different writers never share one


class Counters:
    """One growing counter per rank in shared words, each on its own cache line."""

    def __init__(self, words: memoryview, base: int, group: ProcessSet) -> None:
        self._words, self._group = words, group
        self._places = [base + rank * LINE for rank in range(group.size)]
        self._futexes = [Futex(words, place) for place in self._places]
        self._own, self._wake = self._places[group.index], self._futexes[group.index].wake

    def set(self, value: int) -> None:
        self._words[self._own] = value
        self._wake()

    def own(self) -> int:
        return self._words[self._own]

    def lowest(self) -> int:
        return min(self._words[place] for place in self._places)

    def reached(self, value: int) -> bool:
        words = self._words
        for place in self._places:  # noqa: SIM110 - three times as fast as `all`, in the loop of every wait
            if words[place] < value:
                return False
        return True

    def wait(self, value: int, what: str) -> None:
        """Wait until the counters of all ranks are at least `value`; an error names the ranks that lag."""
        words, watch = self._words, self._group.watch
        if self.reached(value):
            return
        watch.operations_begun += 1  # Short waits count too: the others have to hear of an error after one.
        for _ in range(_SPINS):  # The watchdog would look as often, but 2 us later, an eighth of a small sum.
            if self.reached(value):
                return

        def behind() -> list[int]:
            return [rank for rank, place in zip(self._group.ranks, self._places, strict=True) if words[place] < value]

        def pause(seconds: float) -> None:
            for place, futex in zip(self._places, self._futexes, strict=True):
                if (seen := words[place]) < value:
                    futex.wait(seen, seconds)
                    return

        watch.wait(lambda: self.reached(value), behind(), what, pause, behind, polls=0)


def shared_segments(
    group: ProcessSet, label: str, nbytes: int, *, of_first: bool = False, reserve: bool = True
) -> list[SharedSegment]:
    """Map segments of `nbytes` on all ranks, in rank order: one created by each rank, or with `of_first` only the first rank's.
    Raises `StorageError` when memory is short, or a peer's segment cannot be mapped."""
    own = SharedSegment.create(label, nbytes, reserve=reserve) if group.index == 0 or not of_first else None
    rows = group.gather_integers([os.getpid(), own.descriptor if own else -1])[: 1 if of_first else None]
    found = [SharedSegment.attach(pid, descriptor, nbytes, label) for pid, descriptor in rows]
    group.barrier("mapping of shared memory")
    return found


IN_FLIGHT = 64
"""The minimum number of entries of a ring. With more in flight, a writer waits until the oldest is consumed."""
_ENTRY_WORDS = 16
"""The number of words of an entry: slot number, serial number, file descriptor, bytes, then `ABOUT_WORDS` words of the caller."""
ABOUT_WORDS = _ENTRY_WORDS - 4
_LEAST_BYTES = 16 * PAGE  # of a slot
_CACHED_VIEWS = 32  # of a slot, by shape and dtype


class RingSlot:
    """A mapped segment of one slot, which holds message `sequence` of its rank, viewed as tensors."""

    def __init__(self, segment: SharedSegment, serial: int) -> None:
        self.segment, self.serial = segment, serial
        self.sequence = -1
        self.raw = raw = segment.tensor(0, segment.nbytes, torch.uint8)

        @lru_cache(_CACHED_VIEWS)
        def view(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            """Return the first bytes as a contiguous tensor; cached, since a view costs as much as summing a small tensor."""
            return raw[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        self.view = view


class SharedRing:
    """The ring of messages of a process set on one host. Every rank of `group` creates one, in the same order. Its memory is freed
    by `close`, or once no rank refers to it. Raises `StorageError` when memory is short, also for a larger slot later."""

    def __init__(self, group: ProcessSet, label: str, *, slots: int = 0, nbytes: int = 0) -> None:
        """Create the ring for the purpose `label`. `slots` slots of `nbytes` each exist from the start, mapped by all ranks."""
        self._label, self._index = label, group.index
        self.room = max(IN_FLIGHT, slots)
        """The number of entries: message n overwrites the entry of message n - room, which all ranks must have consumed."""
        size = group.size * (2 * LINE + self.room * _ENTRY_WORDS) * 8
        (segment,) = shared_segments(group, f"entries of {label}", size, of_first=True)
        self._pids = [pid for (pid,) in group.gather_integers([os.getpid()])]
        self._words = segment.words()
        self.published, self.consumed = (Counters(self._words, row * group.size * LINE, group) for row in range(2))
        first = 2 * group.size * LINE
        self._entries = range(first, first + group.size * self.room * _ENTRY_WORDS, self.room * _ENTRY_WORDS)
        """The place of the first entry of each rank."""
        self.next = 0  # the sequence number of the next message that this rank writes
        self._finished: set[int] = set()
        self._behind = 0  # the first sequence number that this rank has not consumed
        self.own: list[RingSlot] = []
        self._mapped: dict[tuple[int, int], RingSlot] = {}  # slots of other ranks, by rank and number of the slot
        for number in range(slots):
            for rank, found in enumerate(shared_segments(group, label, nbytes)):
                self._mapped[rank, number] = RingSlot(found, number)
            self.own.append(self._mapped[group.index, number])
        self._serial = slots
        _close_unused()
        self._to_close: _RingMemory = (segment, self.own, self.published, self.consumed)
        self._finalizer = weakref.finalize(self, _close_unused, self._to_close)

    def free_slot(self, nbytes: int) -> int:
        """Return the number of the smallest free slot of at least `nbytes`, else replace a smaller free slot or add one."""
        low = self.consumed.lowest()
        free = [(slot.segment.nbytes, number) for number, slot in enumerate(self.own) if slot.sequence < low]
        fitting = [each for each in free if each[0] >= nbytes]
        if fitting:
            return min(fitting)[1]
        slot = RingSlot(SharedSegment.create(self._label, max(_LEAST_BYTES, -(-nbytes // PAGE) * PAGE)), self._serial)
        self._serial += 1
        number = max(free)[1] if free else len(self.own)
        for old in self.own[number : number + 1]:
            old.segment.close()
        self.own[number : number + 1] = [slot]
        return number

    def publish(self, number: int, about: Sequence[int] = (0,) * ABOUT_WORDS) -> None:
        """Publish the contents of slot `number` to all ranks, with `ABOUT_WORDS` words that describe it."""
        slot = self.own[number]
        slot.sequence = self.next
        where = [number, slot.serial, slot.segment.descriptor, slot.segment.nbytes]
        place = self._entries[self._index] + self.next % self.room * _ENTRY_WORDS
        self._words[place : place + _ENTRY_WORDS] = memoryview(array("q", [*where, *about]))
        self.next += 1
        self.published.set(self.next)

    def read(self, rank: int, sequence: int) -> tuple[RingSlot, list[int]]:
        """Return the slot that the rank at position `rank` published as message `sequence`, and the words that describe it. Raises
        `StorageError` when the slot's memory cannot be mapped any more."""
        place = self._entries[rank] + sequence % self.room * _ENTRY_WORDS
        number, serial, descriptor, capacity, *about = self._words[place : place + _ENTRY_WORDS].tolist()
        if rank == self._index:
            return self.own[number], about
        slot = self._mapped.get((rank, number))
        if slot is None or slot.serial != serial:
            segment = SharedSegment.attach(self._pids[rank], descriptor, capacity, self._label)
            slot = self._mapped[rank, number] = RingSlot(segment, serial)
            segment.close()  # The mapping lives as long as its tensor.
        return slot, about

    def consume(self, sequence: int) -> None:
        """Record that this rank has finished reading message `sequence`, so that its slot may be refilled."""
        self._finished.add(sequence)
        while self._behind in self._finished:
            self._finished.discard(self._behind)
            self._behind += 1
        self.consumed.set(self._behind)

    def close(self) -> None:
        """Close the file descriptors of all slots, when no other rank will map one of this rank's for the first time."""
        self._finalizer.detach()
        for segment in (self._to_close[0], *(slot.segment for slot in (*self.own, *self._mapped.values()))):
            segment.close()


_RingMemory = tuple[SharedSegment, list[RingSlot], Counters, Counters]
_UNCLOSED: list[_RingMemory] = []  # of rings that are garbage; their tensors stay until all peers have read them


def _close_unused(*more: _RingMemory) -> None:
    """Close unused segments. Garbage collection may call this at any time, so the list is never iterated while it changes."""
    _UNCLOSED.extend(more)
    for left in list(_UNCLOSED):
        words, slots, published, consumed = left
        if consumed.lowest() >= published.own() and left in _UNCLOSED:
            _UNCLOSED.remove(left)
            for segment in (words, *(slot.segment for slot in slots)):
                segment.close()


class SharedBuffer(GatherBuffer):
    """A gather buffer in shared memory: each rank writes its shard straight into the pages that all ranks read."""

    def __init__(
        self, request: BufferRequest, group: ProcessSet, arena: SharedSegment, offset: int, counters: Sequence[Counters]
    ) -> None:
        """`counters` are those of the generations that ranks have written, and have finished reading."""
        self.full = arena.tensor(offset, request.padded, request.dtype)
        self.persistent = self.is_valid = request.persistent
        self._arena, self._traffic, (self._written, self._done) = arena, group.traffic, counters
        self._counted_generation = self._generation = 0
        self._pages_freed = True
        length, itemsize = request.padded // group.size, request.dtype.itemsize
        self._own = slice(group.index * length, (group.index + 1) * length)
        self._own_bytes = (offset + self._own.start * itemsize, length * itemsize)
        self._shard = self.own()
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
        if self.is_valid:
            return
        self._await(self._done, "end of reading before the refill")
        self._reserve_own()
        self.is_valid = True
        self._generation += 1
        self._reading = shard.read(0, self._shard)
        self.poll()

    def wait(self) -> None:
        if self._counted_generation != self._generation:
            self._counted_generation = self._generation
            self._traffic.count(Collective.ALL_GATHER, self.full.nbytes)
        self._finish_reading()
        self._await(self._written)

    def _await(self, counters: Counters, purpose: str = "") -> None:
        """Wait until all ranks' counters reach the current generation, and record the waiting time."""
        if not counters.reached(self._generation):
            with self._traffic.timed(Collective.ALL_GATHER):
                counters.wait(self._generation, f"{purpose} ({self._what})" if purpose else self._what)

    def _finish_reading(self) -> None:
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
            self._written.set(self._generation)

    def release(self) -> None:
        if self.persistent or not self.is_valid:
            return
        self._finish_reading()
        self.is_valid = False
        self._done.set(self._generation)
        self.poll()

    def end_read(self) -> None:
        if self.persistent:
            self._done.set(self._generation)

    def poll(self) -> None:
        """Publish this rank's shard once it is in place; free its pages once no rank reads them."""
        if self._reading is not None and self._reading.done():
            self._finish_reading()
        if not self.is_valid and not self._pages_freed and self._done.reached(self._generation):
            self._arena.give_back(*self._own_bytes)
            self._pages_freed = True

    def _reserve_own(self) -> None:
        if self._pages_freed and self._own_bytes[1]:
            if self.persistent:  # Other buffers are reserved too often to be checked.
                require_memory(self._what, self._own_bytes[1])
            self._arena.reserve(*self._own_bytes)
            self._pages_freed = False


class SharedReducer(Reducer):
    def __init__(self, group: ProcessSet, slots: int, nbytes: int) -> None:
        super().__init__()
        self._group, self._slots, self._size = group, slots, group.size
        self.ring = SharedRing(group, "gradients", slots=slots, nbytes=nbytes)

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        consumed, free_at = self.ring.consumed, sequence - self._slots + 1
        if free_at > 0 and not consumed.reached(free_at):
            if not block:
                return None
            with self._group.traffic.timed(Collective.REDUCE_SCATTER):
                consumed.wait(free_at, "a free gradient slot")
        return self.ring.own[sequence % self._slots].raw

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        group, ring, size = self._group, self.ring, self._size
        if sequence != ring.next:
            raise CollectiveError(f"gradient bucket {sequence} was launched out of order; {ring.next} is next")
        ring.publish(sequence % self._slots)
        whole, length = out.numel() == filled.numel(), filled.numel() // size
        kind = Collective.ALL_REDUCE if whole else Collective.REDUCE_SCATTER
        start, end = (0, len(filled)) if whole else (group.index * length, (group.index + 1) * length)

        def finish() -> None:
            shape = tuple(filled.shape)
            with group.traffic.timed(kind):
                ring.published.wait(sequence + 1, "reduction of gradients")
                slots = [ring.read(rank, sequence)[0] for rank in range(size)]
                sum_in_order(out, [slot.view(shape, filled.dtype)[start:end] for slot in slots], add=add)
                ring.consume(sequence)  # This rank has read that bucket of every rank.

        group.traffic.count(kind, filled.nbytes)
        return Reduction(lambda: ring.published.reached(sequence + 1), finish)


class SharedTransport(Transport):
    name = "shared"

    def __init__(self, group: ProcessSet, requests: list[BufferRequest], slots: int, nbytes: int) -> None:
        self.share = 1.0 / group.size
        offsets, end = [], 0
        for request in requests:
            offsets.append(end + request.lead)
            end += -(-(request.lead + request.padded * request.dtype.itemsize) // PAGE) * PAGE
        self.reducer = reducer = SharedReducer(group, slots, nbytes)
        (arena,) = shared_segments(group, "parameters", end, of_first=True, reserve=False)
        (words,) = shared_segments(group, "counters", 2 * len(requests) * group.size * LINE * 8, of_first=True)
        self._parts = (arena, words, reducer.ring)
        buffers = []
        for number, (request, offset) in enumerate(zip(requests, offsets, strict=True)):
            counters = [Counters(words.words(), (2 * number + row) * group.size * LINE, group) for row in range(2)]
            buffers.append(SharedBuffer(request, group, arena, offset, counters))
        self.buffers, self.spare_pages = buffers, SparePages()

    def close(self) -> None:
        for each in self._parts:
            each.close()


def open_transport(
    name: str, group: ProcessSet, device: torch.device, requests: list[BufferRequest], slots: int, nbytes: int
) -> Transport:
    """Allocate the buffers of a group, and `slots` gradient buffers of `nbytes` each, used in turn. Every rank of the group calls
    this with the same requests. Raises `StorageError` when memory is short."""
    if name == "shared":
        return SharedTransport(group, requests, slots, nbytes)
    return Transport(name, group, device, requests, slots, nbytes)
