"""The exchange of CPU ranks on one host: each rank writes its tensor once, into memory that all of them read.

    slots   of each rank, one segment each:   | a tensor |        filled by their rank, read by all
    words   one segment, per rank:            published | consumed | entries, a ring of them

Exchange number n of a rank is described by an entry: in which slot the tensor lies, and what it is. `published` counts the
exchanges that a rank has written, `consumed` those that it will read no more. A slot is free once all have consumed what it held.
A rank that finds none that is free and large enough makes one, and the others map it when they meet it in an entry: so starting
an exchange never waits for a peer's results, and results can be had in any order.

The sum happens in each rank's own thread, when it asks for its result.
"""

from __future__ import annotations

import math
import os
import weakref
import zlib
from array import array
from collections.abc import Sequence
from functools import lru_cache

import torch

from zeromesh.comm.activation_collectives import Exchange, ExchangeKind, Pending
from zeromesh.comm.shm_transport import LINE, Counters, exchange_segments
from zeromesh.errors import CollectiveError
from zeromesh.mesh.process_mesh import ProcessSet
from zeromesh.offload.memory.shared_segment import PAGE, SharedSegment

IN_FLIGHT = 64
"""Exchanges that may be under way at once. With more, starting one waits for the result of the oldest."""
_ENTRY = 16
"""Words of an entry: number of the slot, its serial number, descriptor and bytes; from word `_ABOUT` on what the tensor is."""
_ABOUT = 4
_DIMS = 8
_SMALLEST = 16 * PAGE
_VIEWS = 32

_DTYPES = sorted((each for each in vars(torch).values() if isinstance(each, torch.dtype)), key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class _Slot:
    """A mapped segment that holds the tensor of exchange `sequence`, seen as tensors.

    What was seen lately is kept: making a view costs as much as summing a small tensor.
    """

    __slots__ = ("_seen", "raw", "segment", "sequence", "serial")

    def __init__(self, segment: SharedSegment, serial: int) -> None:
        self.segment = segment
        self.serial = serial
        self.sequence = -1
        self.raw = segment.tensor(0, segment.nbytes, torch.uint8)
        self._seen: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def seen(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first bytes as a contiguous tensor."""
        found = self._seen.get((shape, dtype))
        if found is None:
            if len(self._seen) >= _VIEWS:
                self._seen.clear()
            found = self.raw[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            self._seen[shape, dtype] = found
        return found


class SharedExchange(Exchange):
    """Collectives over memory that all ranks of a host see. Every rank of `group` makes one, in the same order.

    Its memory goes once nobody refers to it on any rank.

    Raises:
        StorageError: when memory is short or a peer's segment cannot be mapped; also when a larger slot is needed later.
    """

    def __init__(self, group: ProcessSet) -> None:
        if group.watch is None:
            raise ValueError(f"axis {group.name} has one rank and needs no exchange")
        self.size = group.size
        self.index = group.index
        self._group = group
        nbytes = group.size * (2 * LINE + IN_FLIGHT * _ENTRY) * 8
        made = SharedSegment.create("exchanges", nbytes) if group.index == 0 else None
        segment = exchange_segments(group, made, "exchanges", nbytes)[0]
        self._pids = [row[0] for row in group.gather_integers([os.getpid()])]
        self._words = segment.words()
        counters = [Counters(self._words, row * group.size * LINE, group, group.watch) for row in range(2)]
        self._published, self._consumed = counters
        self._entries = 2 * group.size * LINE
        self._next = 0
        self._finished: set[int] = set()
        self._behind = 0
        """The number of the first of this rank's exchanges that is not consumed."""
        self._flying: dict[int, weakref.ref[Pending]] = {}
        self._slots: list[_Slot] = []
        self._serial = 0
        self._room: int | None = None
        """The slot that the next exchange may have been computed into."""
        self._attached: dict[tuple[int, int], _Slot] = {}
        """The slots of other ranks that this one has met, by rank and number."""
        _sweep()
        weakref.finalize(self, _leave, segment, self._slots, self._published, self._consumed)

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        self._await_entry(self._next, "activation")
        shape = tuple(shape)
        slot, self._room = self._free_slot(math.prod(shape) * dtype.itemsize)
        return slot.seen(shape, dtype)

    def _start(self, kind: ExchangeKind, tensor: torch.Tensor, dim: int = -1, lengths: tuple[int, ...] = ()) -> Pending:
        """Write `tensor` and publish it."""
        sequence, dtype, traffic = self._next, tensor.dtype, self._group.traffic
        shapes = self._shapes(kind, tensor, dim, lengths)
        what = f"{kind.phrase} of activations over axis {self._group.name}"
        about = [_about(kind, dtype, shape, dim, lengths) for shape in shapes]
        self._group.require_member()
        with traffic.timed(kind.collective):
            self._await_entry(sequence, what)
            self._publish(tensor, shapes[self.index], about[self.index])
        whole = sum(map(math.prod, shapes)) * dtype.itemsize if kind is ExchangeKind.GATHER else tensor.nbytes
        traffic.count(kind.collective, whole)

        def read() -> torch.Tensor:
            with traffic.timed(kind.collective):
                self._published.wait(sequence + 1, what)
                parts = [self._part(rank, sequence, about[rank], shape, dtype) for rank, shape in enumerate(shapes)]
                return self._combine(kind, parts, dim, lengths)

        pending = Pending(read, lambda: self._consume(sequence))
        self._flying[sequence] = weakref.ref(pending)
        return pending

    def _publish(self, tensor: torch.Tensor, shape: tuple[int, ...], about: list[int]) -> None:
        """Write the next exchange's tensor into a slot, and say so."""
        room, self._room = self._room, None
        if room is not None and tensor.is_contiguous() and tensor.data_ptr() == self._slots[room].raw.data_ptr():
            slot, number = self._slots[room], room
        else:
            slot, number = self._free_slot(tensor.nbytes)
            slot.seen(shape, tensor.dtype).copy_(tensor.detach())
        slot.sequence = self._next
        where = [number, slot.serial, slot.segment.descriptor, slot.segment.nbytes]
        place = self._entry(self.index, self._next)
        self._words[place : place + _ENTRY] = memoryview(array("q", where + about))
        self._next += 1
        self._published.set(self._next)

    def _consume(self, sequence: int) -> None:
        """This rank will not read exchange `sequence` any more."""
        self._flying.pop(sequence, None)
        self._finished.add(sequence)
        while self._behind in self._finished:
            self._finished.discard(self._behind)
            self._behind += 1
        self._consumed.set(self._behind)

    def _await_entry(self, sequence: int, what: str) -> None:
        """Wait until no rank needs the entry that is about to be written again."""
        oldest = sequence - IN_FLIGHT
        if oldest < 0:
            return
        found = self._flying.get(oldest)
        arriving = found() if found is not None else None
        if arriving is not None:
            arriving.settle()
        self._consumed.wait(oldest + 1, f"room for one more {what}")

    def _free_slot(self, nbytes: int) -> tuple[_Slot, int]:
        """The smallest slot that is free and large enough, made if there is none; in place of a free one that is too small."""
        low = self._consumed.lowest()
        free = [(slot.segment.nbytes, number) for number, slot in enumerate(self._slots) if slot.sequence < low]
        fitting = [each for each in free if each[0] >= nbytes]
        if fitting:
            number = min(fitting)[1]
            return self._slots[number], number
        self._serial += 1
        capacity = max(_SMALLEST, -(-nbytes // PAGE) * PAGE)
        slot = _Slot(SharedSegment.create("activations", capacity), self._serial)
        if free:
            number = max(free)[1]
            self._slots[number].segment.close()
            self._slots[number] = slot
        else:
            number = len(self._slots)
            self._slots.append(slot)
        return slot, number

    def _part(
        self, rank: int, sequence: int, about: list[int], shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """The tensor that the rank at position `rank` has published as exchange `sequence`."""
        place = self._entry(rank, sequence)
        number, serial, descriptor, capacity, *other = self._words[place : place + _ENTRY].tolist()
        if other != about:
            wanted = self._words[(own := self._entry(self.index, sequence)) : own + _ENTRY].tolist()[_ABOUT:]
            raise self._parted(rank, other, wanted)
        if rank == self.index:
            return self._slots[number].seen(shape, dtype)
        slot = self._attached.get((rank, number))
        if slot is None or slot.serial != serial:
            segment = SharedSegment.attach(self._pids[rank], descriptor, capacity, "activations")
            slot = self._attached[rank, number] = _Slot(segment, serial)
            segment.close()  # The mapping stays for as long as the tensor.
        return slot.seen(shape, dtype)

    def _parted(self, rank: int, other: list[int], wanted: list[int]) -> CollectiveError:
        ranks = self._group.ranks
        return CollectiveError(
            f"ranks disagree on an exchange over axis {self._group.name}: rank {ranks[rank]} asked for a {_phrase(other)}, "
            f"rank {ranks[self.index]} for a {_phrase(wanted)}. Every rank must run the same modules on tensors of the same shape"
        )

    def _entry(self, rank: int, sequence: int) -> int:
        """The first word of an entry."""
        return self._entries + (rank * IN_FLIGHT + sequence % IN_FLIGHT) * _ENTRY


_LEFT: list[tuple[SharedSegment, list[_Slot], Counters, Counters]] = []
"""What forgotten exchanges have left: their last tensors stay until the peers, too, have read them."""


def _leave(words: SharedSegment, slots: list[_Slot], published: Counters, consumed: Counters) -> None:
    _LEFT.append((words, slots, published, consumed))
    _sweep()


def _sweep() -> None:
    """Close what nobody needs. Collection of garbage may call this amid itself, so the list is never walked while it changes."""
    for left in list(_LEFT):
        words, slots, published, consumed = left
        if consumed.lowest() >= published.own() and left in _LEFT:
            _LEFT.remove(left)
            for segment in (words, *(slot.segment for slot in slots)):
                segment.close()


@lru_cache(maxsize=256)
def _about(
    kind: ExchangeKind, dtype: torch.dtype, shape: tuple[int, ...], dim: int, lengths: tuple[int, ...]
) -> list[int]:
    """What the exchange is, as the words of an entry that all ranks compare. Not to be changed."""
    shares = zlib.crc32(array("q", lengths).tobytes())
    dims = [*shape, *([0] * _DIMS)][:_DIMS]
    return [int(kind) | (dim + 1) << 8, shares, _CODES[dtype], len(shape), *dims]


def _phrase(about: list[int]) -> str:
    kind, dim, dtype = ExchangeKind(about[0] & 0xFF), (about[0] >> 8) - 1, str(_DTYPES[about[2]]).removeprefix("torch.")
    along = f" along dim {dim}" if dim >= 0 else ""
    return f"{kind.phrase}{along} of {dtype} {about[4 : 4 + min(about[3], _DIMS)]}"
