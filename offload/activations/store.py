"""What recomputed blocks keep, on the host or on files: it leaves in forward, and is back before backward wants it.

    forward     block 0   block 1   block 2 ...    an input is copied, and written while the next blocks compute
    backward    ... block 2   block 1   block 0    block 1's input is read from when block 2's is asked for on

`ActivationStore.keeping` goes around a call of `torch.utils.checkpoint.checkpoint`. What the call saves, its inputs, becomes saved
tensors that autograd holds; when it drops one, for whatever reason, memory and room in the file are free again.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

import torch
from torch.autograd.graph import saved_tensors_hooks

from zeromesh.offload.activations.saved_tensor import (
    BlockCall,
    FileCopy,
    MemoryCopy,
    PendingWrite,
    PinnedCopy,
    Reservation,
    SavedTensor,
    TensorMeta,
    UnmovedTensor,
    require_unchanged,
)
from zeromesh.offload.io.direct_io import whole_blocks
from zeromesh.offload.io.file_tier import FileSlot
from zeromesh.offload.io.transfer import copy_streams_of
from zeromesh.offload.memory.allocation import allocate_lasting
from zeromesh.offload.memory.ledger import Purpose, Tier
from zeromesh.offload.tiers import TierChoice, Tiers


class FreeRanges:
    """Free ranges [begin, end) of a file that only grows, in order; no two of them touch."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []

    @property
    def free(self) -> int:
        """The sum of their lengths."""
        return sum(end - begin for begin, end in self._ranges)

    def take(self, length: int) -> int | None:
        """The begin of `length` bytes that are free no longer, from the first range that is long enough; None without one."""
        for at, (begin, end) in enumerate(self._ranges):
            if end - begin >= length:
                self._ranges[at : at + 1] = [(begin + length, end)] if end - begin > length else []
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        """Make [begin, end) free. Raises `ValueError` where it is so already, in part, or has no length."""
        at = bisect_left(self._ranges, (begin, begin))
        before = self._ranges[at - 1][1] if at else -1
        after = self._ranges[at][0] if at < len(self._ranges) else end + 1
        if not before <= begin < end <= after:
            raise ValueError(f"[{begin}, {end}) is free already, in part, or has no length")
        first, last = at - (before == begin), at + (after == end)
        joined = [*self._ranges[first:at], (begin, end), *self._ranges[at:last]]
        self._ranges[first:last] = [(joined[0][0], joined[-1][1])]

    def reaching(self, end: int) -> int:
        """The length of the free range that ends at `end`; 0 where none does."""
        return end - self._ranges[-1][0] if self._ranges and self._ranges[-1][1] == end else 0


_LABEL = Purpose.ACTIVATIONS.value
_IN_FLIGHT = 2
"""Tensors that are on their way out: one is written while the next one waits for its turn."""


class ActivationStore:
    """Keeps the inputs of recomputed blocks on a tier: of the first blocks of a pass, as many as `choice.fraction` says.

    Those of the last ones, which backward needs first, stay on the device. On a CPU the host's memory is the device's: there
    `host` keeps them as they would be without a store. It has nothing to close: its files are those of `tiers`.

    Raises:
        StorageError: when there is no directory for files that can be used; from forward or backward, where the disk is full or
            something cannot be written or read.
    """

    def __init__(self, tiers: Tiers, choice: TierChoice, *, in_flight: int = _IN_FLIGHT) -> None:
        """`in_flight` bounds how many tensors are on their way out at a time; each has memory of its own until it has arrived."""
        if in_flight < 1:
            raise ValueError(f"in_flight: {in_flight} is not 1 or more")
        self._tiers, self._choice, self._in_flight = tiers, choice, in_flight
        self._streams = copy_streams_of(tiers.device) if tiers.device.type == "cuda" else None
        self._copying: deque[tuple[torch.Tensor, int, torch.cuda.Event]] = deque()
        self._free = FreeRanges()
        self._reserved = 0
        self._writes: deque[PendingWrite] = deque()
        self._ended: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._latest: weakref.ref[BlockCall] | None = None
        if choice.away and choice.tier == "file":
            tiers.file()  # A directory that cannot be used is an error before anything is computed.

    @property
    def room(self) -> int:
        """Bytes of the file that saved tensors hold, or transfers on behalf of saved tensors that are gone."""
        self._settle()
        return self._reserved - self._free.free

    def away_of(self, blocks: int) -> int:
        """Return how many of a pass's `blocks` have inputs that leave: the first ones."""
        return max(1, round(blocks * self._choice.fraction)) if self._choice.away else 0

    @contextmanager
    def keeping(self, *, away: bool) -> Iterator[None]:
        """Keep what autograd saves within the block here, `away` or on the device, as the inputs of one call.

        Raises:
            RuntimeError: where the block has changed its input in place, so that it could not be computed again.
        """
        call = BlockCall(away=away)
        try:
            with saved_tensors_hooks(partial(self._pack, call), self.unpack):
                yield
            call.check()
        finally:
            call.end()

    def moves(self, value: object) -> bool:
        """Tell whether the store keeps copies of a value: of hidden states, and neither of parameters nor of masks."""
        if type(value) is not torch.Tensor or value.layout is not torch.strided or not value.numel():
            return False  # Subclasses and sparse tensors are more than their bytes.
        return value.requires_grad and not value.is_leaf and value.device.type == self._tiers.device.type

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Save `tensor`: one that was computed and needs a gradient leaves the device, any other stays as it is.

        `tensor` may be changed afterwards where it was copied; where it was not, `unpack` finds that out.
        """
        call = BlockCall(away=True)
        try:
            return self._pack(call, tensor)
        finally:
            call.end()

    def unpack(self, saved: SavedTensor) -> torch.Tensor:
        """The saved tensor, contiguous; what backward will want after it is on its way when this returns."""
        self._settle()
        saved.fetch()
        if saved.call is not None:
            for later in _wanted_after(saved, saved.call):
                later.fetch()
        return saved.get()

    def _pack(self, call: BlockCall, tensor: torch.Tensor) -> SavedTensor:
        if not self.moves(tensor):
            return UnmovedTensor(tensor)
        self._settle()
        saved = self._save(tensor.detach(), call.away)
        if call.empty:
            call.before, self._latest = self._latest, weakref.ref(call)
        call.add(saved, tensor)
        return saved

    def _save(self, tensor: torch.Tensor, away: bool) -> SavedTensor:
        meta = TensorMeta(tensor)
        if away and self._choice.tier == "file":
            return self._write(tensor, meta)
        tier = Tier.HOST if away else Tier.DEVICE
        if self._streams is None:
            reservation = self._count(tier, meta.nbytes)
            # On pages of its own, outside of the heap, as without a store: docs/decisions/0009-kept-inputs-outside-the-heap.md
            reservation.memory = allocate_lasting(meta.nbytes, torch.uint8, tensor.device)
            meta.view(reservation.memory).copy_(tensor)
            return MemoryCopy(reservation, meta)
        if not away:
            return UnmovedTensor(tensor, self._count(tier, meta.nbytes))
        reservation = self._on_host(meta.nbytes)
        self._copy_out(tensor, meta.view(reservation.memory))
        return PinnedCopy(self._streams, reservation, meta)

    def _write(self, tensor: torch.Tensor, meta: TensorMeta) -> SavedTensor:
        """Copy a tensor and start to write the copy, when no more than the bound are on their way."""
        while len(self._writes) >= self._in_flight:
            self._writes.popleft().finish()
        self._recount()
        slot, room = self._take_room(meta.nbytes)
        source = self._on_host(meta.nbytes)
        copied = self._copy_out(tensor, meta.view(source.memory))
        write = PendingWrite([source], slot, room, copied)
        self._writes.append(write)
        write.advance()
        return FileCopy(self._on_host, write, meta)

    def _copy_out(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.cuda.Event | None:
        """Copy a tensor to `out` in the host's memory: at once on a CPU, else beside what is computed, until the event."""
        if self._streams is None:
            out.copy_(tensor)
            return None
        while len(self._copying) >= self._in_flight:
            self._end_copy()
        event = self._streams.start(tensor, out)
        # Its memory belongs to the stream that computes, which could use it again: it is held until the copy has been made.
        self._copying.append((tensor, tensor._version, event))
        return event

    def _end_copy(self) -> None:
        """Let go of the oldest tensor that is copied out. Raises `RuntimeError` where it was changed meanwhile."""
        tensor, version, event = self._copying.popleft()
        torch.cuda.current_stream(self._tiers.device).wait_event(event)
        require_unchanged(tensor, version, "while it was copied to the host")

    def _on_host(self, nbytes: int) -> Reservation:
        """Memory of the host, `[nbytes]`, counted and pinned where the device copies from it."""
        reservation, pinned = self._count(Tier.HOST, nbytes), self._tiers.pinned
        if pinned.take(nbytes, self._tiers.device):
            # torch keeps pinned blocks for the next one: pinning pages anew for each input would take longer than copying it.
            reservation.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            reservation.ends.append(partial(pinned.give, nbytes))
        else:
            reservation.memory = allocate_lasting(nbytes, torch.uint8, torch.device("cpu"))
        return reservation

    def _count(self, tier: Tier, nbytes: int) -> Reservation:
        self._tiers.ledger.add(tier, Purpose.ACTIVATIONS, nbytes)
        return Reservation(self._ended, partial(self._tiers.ledger.add, tier, Purpose.ACTIVATIONS, -nbytes))

    def _take_room(self, nbytes: int) -> tuple[FileSlot, Reservation]:
        """A slot of the file, and the reservation after whose end it may be used again."""
        tier, length = self._tiers.file(), whole_blocks(nbytes)
        begin = self._free.take(length)
        if begin is None:
            missing = length - self._free.reaching(tier.nbytes)
            tier.allocate(missing, _LABEL)
            self._tiers.ledger.add(Tier.FILE, Purpose.ACTIVATIONS, missing)
            self._reserved += missing
            self._free.give(tier.nbytes - missing, tier.nbytes)
            begin = self._free.take(length)
        if begin is None:
            raise RuntimeError(f"{length} bytes were reserved in the file and cannot be found")
        slot = FileSlot(tier, begin, nbytes, _LABEL)
        return slot, Reservation(self._ended, partial(self._free.give, begin, begin + length))

    def _settle(self) -> None:
        """Count what has ended, and look after what is on its way. Raises `StorageError` where a write went wrong."""
        while self._copying and self._copying[0][2].query():  # type: ignore[no-untyped-call]
            self._end_copy()
        for write in self._writes:
            write.advance()
        while self._writes and self._writes[0].over():
            self._writes.popleft().finish()
        self._recount()

    def _recount(self) -> None:
        """Do what ended reservations have queued."""
        while not self._ended.empty():
            self._ended.get_nowait()()


def _wanted_after(saved: SavedTensor, call: BlockCall) -> Iterator[SavedTensor]:
    """What backward will ask for after `saved`: the rest of its call's inputs, then those of the call before."""
    alive = call.alive()
    yield from alive[alive.index(saved) + 1 :]
    before = call.before() if call.before is not None else None
    if before is not None:
        yield from before.alive()
