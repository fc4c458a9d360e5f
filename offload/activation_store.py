"""Offload of the saved inputs of recomputed blocks: in forward an input is copied to the host, or written to a file while the next
blocks compute; in backward the read of a block's input starts when the block after it gets its own."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch
from torch.autograd.graph import saved_tensors_hooks

from zeromesh.errors import StorageError
from zeromesh.intervals import Interval, merged, round_up
from zeromesh.offload import accelerator
from zeromesh.offload.io.direct_io import BLOCK
from zeromesh.offload.io.file_tier import FileSlot
from zeromesh.offload.io.transfer import DONE, CopyStreams, Transfer, copy_streams_of
from zeromesh.offload.memory.allocation import allocate_lasting, tensor_bytes
from zeromesh.offload.memory.ledger import Purpose, Tier
from zeromesh.offload.tiers import TierChoice, Tiers

_LABEL = Purpose.ACTIVATIONS.value
_Finish = Callable[[], torch.Tensor]
_IN_FLIGHT = 2
"""The most tensors that are being offloaded at once, each of which occupies memory until it is copied or written."""


class Reservation:
    """Host `memory`, or space in a file, that is freed after the last reference to this object is dropped. As that may happen in
    any thread, the calls that free it are only queued; the store makes them later."""

    memory: torch.Tensor

    def __init__(self, ended: SimpleQueue[Callable[[], None]], end: Callable[[], None]) -> None:
        self._ended = ended
        self.ends = [end]

    def __del__(self) -> None:
        for end in self.ends:
            self._ended.put(end)


class SavedTensor:
    """The object that autograd saves for backward in place of a tensor: when it drops the object, memory and file space are free.
    `start()` starts to read the tensor, and returns a function that waits for it and returns it; both raise `StorageError`."""

    call: "BlockCall | None" = None

    def __init__(self, start: Callable[[], _Finish]) -> None:
        self._start = start
        self._finish: _Finish | None = None

    def fetch(self) -> None:
        """Start to read the tensor to the compute device, unless that has started."""
        self._finish = self._finish or self._start()

    def get(self) -> torch.Tensor:
        """Wait for the tensor and return it; a later call reads it again."""
        finish, self._finish = self._finish or self._start(), None
        return finish()


@dataclass(eq=False)
class BlockCall:
    """The inputs saved by one call of a block. `before` is the call whose inputs backward needs after this one's."""

    offloaded: bool
    before: "weakref.ref[BlockCall] | None" = None
    saved: list[weakref.ref[SavedTensor]] = field(default_factory=list)
    """Weak references, since a saved input keeps its call alive rather than the other way round."""
    inputs: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """The inputs and their version counters when saved, until the block's forward has ended."""

    def alive_tensors(self) -> list[SavedTensor]:
        return [saved for ref in self.saved if (saved := ref()) is not None]


def _keep_on_device(tensor: torch.Tensor, reservation: Reservation | None = None) -> SavedTensor:
    """Save a tensor without moving it. `reservation` holds the count of its bytes in the ledger, if they are counted there."""
    version = tensor._version

    def finish(_kept: Reservation | None = reservation) -> torch.Tensor:
        require_unchanged(tensor, version, "after the block that it is an input of was computed")
        return tensor

    return SavedTensor(lambda: finish)


def _read_file(reserve: Callable[[], Reservation], write: "PendingWrite", device: torch.device) -> _Finish:
    """Start to read a tensor from its file to memory that `reserve` reserves, or use the memory from which it is still written."""
    unwritten = write.sources[:1]
    reservation = unwritten[0] if unwritten else reserve()
    read = DONE if unwritten else write.read(tensor_bytes(reservation.memory))

    def finish() -> torch.Tensor:
        _wait(read)
        if write.copied is not None:
            accelerator.current_stream(device).wait_event(write.copied)
        return reservation.memory.to(device, non_blocking=True)

    return finish


def _copy_back(streams: CopyStreams, reservation: Reservation, device: torch.device) -> _Finish:
    tensor = torch.empty_like(reservation.memory, device=device)
    copied = streams.start(reservation.memory, tensor)
    tensor.record_stream(streams.inward)  # The tensor may be dropped before any wait.

    def finish() -> torch.Tensor:
        accelerator.current_stream(device).wait_event(copied)
        return tensor

    return finish


@dataclass(eq=False, slots=True)
class PendingWrite:
    """A write of host memory (`sources`, released when it ends) to a file slot, which begins after the device event `copied`.
    `room` reserves the file space until neither this object nor a read from the slot exists."""

    sources: list[Reservation]
    slot: FileSlot
    room: Reservation
    copied: torch.Event | None
    _transfer: Transfer | None = None

    def advance(self) -> bool:
        """Begin the write once the bytes have been copied; returns True once it has ended. Raises `StorageError`."""
        if self._transfer is None and (self.copied is None or self.copied.query()):
            self._transfer = self.slot.write(0, tensor_bytes(self.sources[0].memory))
            self._transfer.on_end(self.sources.clear)  # A bound method of this object would keep the object alive.
        return self._transfer is not None and self._transfer.done()

    def finish(self) -> None:
        """Wait until the bytes are in the file and their memory was released. Raises `StorageError`."""
        if self._transfer is None and self.copied is not None:
            self.copied.synchronize()
        self.advance()
        if self._transfer is not None:
            _wait(self._transfer)
        self.sources.clear()

    def read(self, out: torch.Tensor) -> Transfer:
        """Start to fill `out` from the file. Raises `StorageError` if the write has failed."""
        self.finish()
        read = self.slot.read(0, out)
        read.on_end([self.room].clear)  # The list holds the space until the read ends.
        return read


def require_unchanged(tensor: torch.Tensor, version: int, when: str) -> None:
    """Raise `RuntimeError` if a tensor's version counter is not `version`; `when` is the message's words for the time of change."""
    if tensor._version != version:
        why = f"a tensor {list(tensor.shape)} of {tensor.dtype} that recomputation needs was changed in place {when}"
        raise RuntimeError(f"{why}; have whatever changed it make a new tensor")


def _wait(transfer: Transfer) -> None:
    try:
        transfer.wait()
    except StorageError as error:
        # A saved tensor keeps its transfer, and that its error. A traceback would keep frames alive, and so the graph that holds
        # the saved tensor, for good: Python's garbage collector does not see through autograd.
        error.__traceback__ = None
        raise StorageError(str(error)) from None


class FreeRanges:
    """Free ranges of a growing file, in bytes, in order; no two of them touch."""

    def __init__(self) -> None:
        self.ranges: list[Interval] = []

    def take(self, length: int) -> int | None:
        """Take `length` bytes from the first range that is long enough, and return their begin; None without one."""
        for at, each in enumerate(self.ranges):
            if each.length >= length:
                self.ranges[at : at + 1] = merged([Interval(start=each.start + length, end=each.end)])
                return each.start
        return None

    def free(self, begin: int, end: int) -> None:
        """Add [begin, end), which was taken, to the free ranges, and join it with its neighbours."""
        self.ranges = merged([*self.ranges, Interval(start=begin, end=end)])


class ActivationStore:
    """Stores the inputs of recomputed blocks on a tier; of the blocks of a pass, the fraction `choice.fraction` is offloaded.
    These are the first blocks, since backward needs the inputs of the last ones first. Other inputs, and on a CPU those of the
    tier `host`, stay in the same memory as without a store. The store needs no closing: its files are those of `tiers`. Raises
    `StorageError` when no directory for files can be used, and in forward or backward when the disk is full or fails."""

    def __init__(self, tiers: Tiers, choice: TierChoice) -> None:
        self._tiers, self._choice = tiers, choice
        self._streams = copy_streams_of(tiers.device) if accelerator.is_accelerator(tiers.device) else None
        self._copying: deque[tuple[torch.Tensor, int, torch.Event]] = deque()
        self._free = FreeRanges()
        self._writes: deque[PendingWrite] = deque()
        self._ended: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._latest: weakref.ref[BlockCall] | None = None
        if choice.uses_tier and choice.tier == "file":
            tiers.file()  # A directory that cannot be used is an error before anything is computed.

    def offloaded_count(self, blocks: int) -> int:
        """Return the number of blocks, the first ones of the `blocks` recomputed blocks of a pass, whose inputs are offloaded."""
        return max(1, round(blocks * self._choice.fraction)) if self._choice.uses_tier else 0

    @contextmanager
    def saving_inputs(self, *, offloaded: bool) -> Iterator[None]:
        """Save the tensors that autograd saves inside the `with` block in this store, as the inputs of one call; `offloaded`: to
        the tier rather than the device. Raises `RuntimeError` where the call has changed its input in place."""
        call = BlockCall(offloaded=offloaded)
        try:
            with saved_tensors_hooks(partial(self._pack, call), self.unpack):
                yield
            for tensor, version in call.inputs:
                require_unchanged(tensor, version, "by the block that it is the input of")
        finally:
            call.inputs.clear()

    def copies(self, value: object) -> bool:
        """Return True if the store copies `value` when it is saved: for hidden states, but neither for parameters nor for masks."""
        if type(value) is not torch.Tensor or value.layout is not torch.strided or not value.numel():
            return False  # Subclasses and sparse tensors cannot be restored from their bytes alone.
        return value.requires_grad and not value.is_leaf and value.device.type == self._tiers.device.type

    def unpack(self, saved: SavedTensor) -> torch.Tensor:
        """Return the saved tensor, contiguous, and start to fetch the tensors that backward needs next."""
        self._advance_transfers()
        saved.fetch()
        if saved.call is not None:
            # Next are the remaining inputs of the same call, then those of the call before it.
            alive, before = saved.call.alive_tensors(), saved.call.before and saved.call.before()
            for later in (*alive[alive.index(saved) + 1 :], *(before.alive_tensors() if before else ())):
                later.fetch()
        return saved.get()

    def _pack(self, call: BlockCall, tensor: torch.Tensor) -> SavedTensor:
        if not self.copies(tensor):
            return _keep_on_device(tensor)
        self._advance_transfers()
        saved = self._save(tensor.detach(), call.offloaded)
        if not call.saved:
            call.before, self._latest = self._latest, weakref.ref(call)
        saved.call = call
        call.saved.append(weakref.ref(saved))
        call.inputs.append((tensor, tensor._version))
        return saved

    def _save(self, tensor: torch.Tensor, offloaded: bool) -> SavedTensor:
        if offloaded and self._choice.tier == "file":
            return self._write(tensor)
        if offloaded and self._streams is not None:
            reservation = self._reserve_host_memory(tensor.shape, tensor.dtype)
            self._copy_out(tensor, reservation.memory)
            return SavedTensor(partial(_copy_back, self._streams, reservation, tensor.device))
        reservation = self._reserve(Tier.HOST if offloaded else Tier.DEVICE, tensor.nbytes)
        if self._streams is None:
            # Kept on separate pages outside the heap, as without a store: docs/decisions/0009-kept-inputs-outside-the-heap.md
            tensor = allocate_lasting(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
        return _keep_on_device(tensor, reservation)

    def _write(self, tensor: torch.Tensor) -> SavedTensor:
        while len(self._writes) >= _IN_FLIGHT:
            self._writes.popleft().finish()
        self._advance_transfers()
        tier, length = self._tiers.file(), round_up(tensor.nbytes, BLOCK)
        while (begin := self._free.take(length)) is None:
            last = next((each.start for each in self._free.ranges[-1:] if each.end == tier.nbytes), tier.nbytes)
            missing = length - (tier.nbytes - last)
            tier.allocate(missing, _LABEL)
            self._tiers.ledger.add(Tier.FILE, Purpose.ACTIVATIONS, missing)
            self._free.free(tier.nbytes - missing, tier.nbytes)
        slot = FileSlot(tier, begin, tensor.nbytes, _LABEL)
        room = Reservation(self._ended, partial(self._free.free, begin, begin + length))
        reserve = partial(self._reserve_host_memory, tensor.shape, tensor.dtype)
        source = reserve()
        write = PendingWrite([source], slot, room, self._copy_out(tensor, source.memory))
        self._writes.append(write)
        write.advance()
        return SavedTensor(partial(_read_file, reserve, write, tensor.device))

    def _copy_out(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Event | None:
        """Copy a tensor to `out` in host memory: at once on a CPU, else asynchronously until the returned event."""
        if self._streams is None:
            out.copy_(tensor)
            return None
        while len(self._copying) >= _IN_FLIGHT:
            self._end_copy()
        event = self._streams.start(tensor, out)
        # The compute stream could reuse the tensor's memory, so the tensor is held until the copy has ended.
        self._copying.append((tensor, tensor._version, event))
        return event

    def _end_copy(self) -> None:
        """Release the oldest tensor that is being copied out. Raises `RuntimeError` if it was changed meanwhile."""
        tensor, version, event = self._copying.popleft()
        accelerator.current_stream(self._tiers.device).wait_event(event)
        require_unchanged(tensor, version, "while it was copied to the host")

    def _reserve_host_memory(self, shape: torch.Size, dtype: torch.dtype) -> Reservation:
        nbytes, pinned = shape.numel() * dtype.itemsize, self._tiers.pinned
        reservation = self._reserve(Tier.HOST, nbytes)
        if pinned.reserve(nbytes, self._tiers.device):
            # torch caches pinned blocks: pinning new pages for each input would take longer than the copy.
            reservation.memory = accelerator.allocate_pinned(nbytes).view(dtype).view(shape)
            reservation.ends.append(partial(pinned.release, nbytes))
        else:
            reservation.memory = allocate_lasting(shape, dtype, torch.device("cpu"))
        return reservation

    def _reserve(self, tier: Tier, nbytes: int) -> Reservation:
        self._tiers.ledger.add(tier, Purpose.ACTIVATIONS, nbytes)
        return Reservation(self._ended, partial(self._tiers.ledger.add, tier, Purpose.ACTIVATIONS, -nbytes))

    def _advance_transfers(self) -> None:
        """Begin and finish copies and writes without waiting, and run queued frees. Raises `StorageError` if a write failed."""
        while self._copying and self._copying[0][2].query():
            self._end_copy()
        for write in self._writes:
            write.advance()
        while self._writes and self._writes[0].advance():
            self._writes.popleft().finish()
        while not self._ended.empty():
            self._ended.get_nowait()()
