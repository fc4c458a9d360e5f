"""What recomputed blocks keep, on the host or on files: it leaves in forward, and is back before backward wants it.

    forward     block 0   block 1   block 2 ...    an input is copied, and written while the next blocks compute
    backward    ... block 2   block 1   block 0    block 1's input is read from when block 2's is asked for on

`ActivationStore.keeping` goes around a call of `torch.utils.checkpoint.checkpoint`. What the call saves, its inputs, becomes
handles that autograd holds; when it drops one, for whatever reason, memory and room in the file are free again.

Free ranges of a file that only grows: taken, given back, and one again where they touch.
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
)
from zeromesh.offload.io.copy_streams import SideStream
from zeromesh.offload.io.direct_io import BLOCK
from zeromesh.offload.io.file_tier import FileSlot
from zeromesh.offload.memory.allocation import allocate_lasting
from zeromesh.offload.memory.ledger import Purpose, Tier
from zeromesh.offload.tiered_tensor import TierChoice
from zeromesh.offload.tiers import Tiers


class FreeRanges:
    """Ranges [begin, end) that are free, in order; no two of them touch."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    @property
    def free(self) -> int:
        """The sum of their lengths."""
        return sum(self._ends) - sum(self._begins)

    def take(self, length: int) -> int | None:
        """Where `length` begin that are free no longer: in the first range that is long enough. None where there is none."""
        for at, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if end - begin >= length:
                self._begins[at] += length
                if self._begins[at] == end:
                    del self._begins[at], self._ends[at]
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        """Make [begin, end) free. Raises `ValueError` where it is so already, in part, or has no length."""
        at = bisect_left(self._begins, begin)
        before = self._ends[at - 1] if at else begin
        after = self._begins[at] if at < len(self._begins) else end
        if not before <= begin < end <= after:
            raise ValueError(f"[{begin}, {end}) is free already, in part, or has no length")
        self._begins.insert(at, begin)
        self._ends.insert(at, end)
        self._join(at + 1)
        self._join(at)

    def reaching(self, end: int) -> int:
        """The length of the free range that ends at `end`; 0 where none does."""
        return end - self._begins[-1] if self._ends and self._ends[-1] == end else 0

    def _join(self, at: int) -> None:
        """Make a range and the one before it one, where they touch."""
        if 0 < at < len(self._begins) and self._ends[at - 1] == self._begins[at]:
            del self._begins[at], self._ends[at - 1]


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
        self._side = SideStream(tiers.device, in_flight) if tiers.device.type == "cuda" else None
        self._extents = FreeRanges()
        self._reserved = 0
        self._leaving: deque[PendingWrite] = deque()
        self._ended: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._latest: weakref.ref[BlockCall] | None = None
        if choice.away and choice.tier == "file":
            tiers.file()  # A directory that cannot be used is told before anything is computed.

    @property
    def room(self) -> int:
        """Bytes of the file that handles hold, or transfers on behalf of handles that are gone."""
        self._settle()
        return self._reserved - self._extents.free

    def away_of(self, blocks: int) -> int:
        """How many of a pass's `blocks` have inputs that leave: the first ones."""
        return max(1, round(blocks * self._choice.fraction)) if self._choice.away else 0

    @contextmanager
    def keeping(self, *, away: bool) -> Iterator[None]:
        """What autograd saves within is kept here, `away` or on the device, and belongs to one block.

        Raises:
            RuntimeError: where the block has changed its input in place, so that it could not be computed again.
        """
        call = BlockCall(away=away)
        try:
            with saved_tensors_hooks(partial(self._pack, call), self.unpack):
                yield
            call.check()
        finally:
            call.forget()

    def moves(self, value: object) -> bool:
        """Whether this keeps copies of a value: of hidden states, and neither of parameters nor of masks."""
        if type(value) is not torch.Tensor or value.layout is not torch.strided or not value.numel():
            return False  # Subclasses and sparse tensors are more than their bytes.
        return value.requires_grad and not value.is_leaf and value.device.type == self._tiers.device.type

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """A handle for `tensor`: one that was computed and needs a gradient leaves the device, any other stays as it is.

        `tensor` may be changed afterwards where it was copied; where it was not, `unpack` finds that out.
        """
        call = BlockCall(away=True)
        try:
            return self._pack(call, tensor)
        finally:
            call.forget()

    def unpack(self, handle: SavedTensor) -> torch.Tensor:
        """The tensor of a handle, contiguous; what backward will want after it is on its way when this returns."""
        self._settle()
        handle.fetch()
        if handle.call is not None:
            for later in _wanted_after(handle, handle.call):
                later.fetch()
        return handle.take()

    def _pack(self, call: BlockCall, tensor: torch.Tensor) -> SavedTensor:
        if not self.moves(tensor):
            return UnmovedTensor(tensor)
        self._settle()
        handle = self._keep(tensor.detach(), call.away)
        if call.empty:
            call.before, self._latest = self._latest, weakref.ref(call)
        call.add(handle, tensor)
        return handle

    def _keep(self, tensor: torch.Tensor, away: bool) -> SavedTensor:
        form = TensorMeta(tensor)
        if away and self._choice.tier == "file":
            return self._write(tensor, form)
        tier = Tier.HOST if away else Tier.DEVICE
        if self._side is None:
            lot = self._count(tier, form.nbytes)
            # On pages of its own, outside of the heap, as without a store: docs/decisions/0009-kept-inputs-outside-the-heap.md
            lot.memory = allocate_lasting(form.nbytes, torch.uint8, tensor.device)
            form.view(lot.memory).copy_(tensor)
            return MemoryCopy(lot, form)
        if not away:
            return UnmovedTensor(tensor, self._count(tier, form.nbytes))
        lot = self._on_host(form.nbytes)
        self._side.copy_out(tensor, form.view(lot.memory))
        return PinnedCopy(self._side, lot, form)

    def _write(self, tensor: torch.Tensor, form: TensorMeta) -> SavedTensor:
        """Copy a tensor and start to write the copy, when no more than the bound are on their way."""
        while len(self._leaving) >= self._in_flight:
            self._leaving.popleft().finish()
        self._recount()
        slot, room = self._take_room(form.nbytes)
        lot = self._on_host(form.nbytes)
        copied = None
        if self._side is None:
            form.view(lot.memory).copy_(tensor)
        else:
            copied = self._side.copy_out(tensor, form.view(lot.memory))
        leaving = PendingWrite(lot, slot, room, copied)
        self._leaving.append(leaving)
        leaving.advance()
        return FileCopy(self._on_host, leaving, form)

    def _on_host(self, nbytes: int) -> Reservation:
        """Memory of the host, `[nbytes]`, counted and pinned where the device copies from it."""
        lot, pinned = self._count(Tier.HOST, nbytes), self._tiers.pinned
        if pinned.take(nbytes, self._tiers.device):
            # torch keeps pinned blocks for the next one: pinning pages anew for each input would take longer than copying it.
            lot.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            lot.ends.append(partial(pinned.give, nbytes))
        else:
            lot.memory = allocate_lasting(nbytes, torch.uint8, torch.device("cpu"))
        return lot

    def _count(self, tier: Tier, nbytes: int) -> Reservation:
        self._tiers.ledger.add(tier, Purpose.ACTIVATIONS, nbytes)
        return Reservation(self._ended, partial(self._tiers.ledger.add, tier, Purpose.ACTIVATIONS, -nbytes))

    def _take_room(self, nbytes: int) -> tuple[FileSlot, Reservation]:
        """A range of the file, and what ends when it may be used again."""
        length = -(-nbytes // BLOCK) * BLOCK
        begin = self._extents.take(length)
        if begin is None:
            begin = self._grow(length)
        slot = FileSlot(self._tiers.file(), begin, nbytes, _LABEL, checksums=self._tiers.files.checksums)
        return slot, Reservation(self._ended, partial(self._extents.give, begin, begin + length))

    def _grow(self, length: int) -> int:
        """Have `length` more at the end of the file, together with what is free there; returns where they begin."""
        tier = self._tiers.file()
        missing = length - self._extents.reaching(tier.nbytes)
        tier.allocate(missing, _LABEL)
        self._tiers.ledger.add(Tier.FILE, Purpose.ACTIVATIONS, missing)
        self._reserved += missing
        self._extents.give(tier.nbytes - missing, tier.nbytes)
        begin = self._extents.take(length)
        if begin is None:
            raise RuntimeError(f"{length} bytes were reserved in the file and cannot be found")
        return begin

    def _settle(self) -> None:
        """Count what has ended, and look after what is on its way. Raises `StorageError` where a write went wrong."""
        if self._side is not None:
            self._side.settle()
        for leaving in self._leaving:
            leaving.advance()
        while self._leaving and self._leaving[0].over():
            self._leaving.popleft().finish()
        self._recount()

    def _recount(self) -> None:
        """Do what was put down when lots have ended."""
        while not self._ended.empty():
            self._ended.get_nowait()()


def _wanted_after(handle: SavedTensor, call: BlockCall) -> Iterator[SavedTensor]:
    """What backward will ask for after `handle`: the rest of its call's inputs, then those of the call before."""
    handles = call.alive()
    yield from handles[handles.index(handle) + 1 :]
    before = call.before() if call.before is not None else None
    if before is not None:
        yield from before.alive()
