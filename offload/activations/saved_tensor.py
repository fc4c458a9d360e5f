"""Handles of tensors that autograd keeps: where each of them rests, and how it is had again.

    AsItIs      the tensor itself                       InMemory    a copy in the memory of the CPU that computes
    OnFile      a copy in a slot of a file              OnHost      a copy in pinned memory, beside a CUDA device

Whatever a handle holds is free again when nobody holds the handle.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch

from zeromesh.errors import StorageError
from zeromesh.offload.io.copy_streams import SideStream, changed
from zeromesh.offload.io.file_tier import FileSlot
from zeromesh.offload.io.transfer import DONE, Transfer

_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Reservation:
    """Memory, or room in a file, that ends with the last reference to it.

    That may be in any thread and in the middle of anything, so what there is to do then is only put down for the store.
    """

    def __init__(self, ended: SimpleQueue[Callable[[], None]], end: Callable[[], None]) -> None:
        self._ended = ended
        self.ends = [end]
        self.memory = _NO_BYTES

    def __del__(self) -> None:
        for end in self.ends:
            self._ended.put(end)


class TensorMeta:
    """What makes a tensor of bytes again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device, self.nbytes = tensor.shape, tensor.dtype, tensor.device, tensor.nbytes

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """`memory`, 1-D uint8, as the tensor."""
        return memory.view(self.dtype).view(self.shape)

    def empty(self) -> torch.Tensor:
        """New memory for it, where it came from."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class SavedTensor(ABC):
    """A tensor that autograd keeps."""

    call: BlockCall | None = None

    def fetch(self) -> None:  # noqa: B027 - most have nothing to bring
        """Start to bring it, if it has to be brought. Raises `StorageError`."""

    @abstractmethod
    def take(self) -> torch.Tensor:
        """It; may be taken again later. Raises `StorageError` where it cannot be had."""


class BlockCall:
    """What one call of a block keeps. `before` is the call whose inputs backward will want after this one's."""

    def __init__(self, *, away: bool) -> None:
        self.away = away
        self.before: weakref.ref[BlockCall] | None = None
        self._handles: list[weakref.ref[SavedTensor]] = []
        self._given: list[tuple[torch.Tensor, int]] = []

    @property
    def empty(self) -> bool:
        return not self._handles

    def add(self, handle: SavedTensor, tensor: torch.Tensor) -> None:
        """Take a handle of `tensor` in; it keeps this call alive, and not the other way round."""
        handle.call = self
        self._handles.append(weakref.ref(handle))
        self._given.append((tensor, tensor._version))

    def alive(self) -> list[SavedTensor]:
        """Handles that somebody holds, in the order in which backward will ask for them."""
        return [handle for ref in self._handles if (handle := ref()) is not None]

    def check(self) -> None:
        """Raise `RuntimeError` where the block has changed what it was given."""
        for tensor, version in self._given:
            if tensor._version != version:
                raise changed(tensor, "by the block that it is the input of")

    def forget(self) -> None:
        """The call is over: what it was given may go."""
        self._given.clear()


class UnmovedTensor(SavedTensor):
    """A tensor that stays where it is. `lot` counts its bytes, where they are counted."""

    def __init__(self, tensor: torch.Tensor, lot: Reservation | None = None) -> None:
        self._tensor, self._version, self._lot = tensor, tensor._version, lot

    def take(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise changed(self._tensor, "after the block that it is an input of was computed")
        return self._tensor


class MemoryCopy(SavedTensor):
    """A copy in the memory that backward computes in."""

    def __init__(self, lot: Reservation, form: TensorMeta) -> None:
        self._lot, self._form = lot, form

    def take(self) -> torch.Tensor:
        return self._form.view(self._lot.memory)


class FileCopy(SavedTensor):
    """A copy in a file; while it is being written it is still in memory, and taken from there."""

    def __init__(self, on_host: Callable[[int], Reservation], leaving: PendingWrite, form: TensorMeta) -> None:
        self._on_host, self._leaving, self._form = on_host, leaving, form
        self._coming: tuple[Reservation, Transfer] | None = None

    def fetch(self) -> None:
        self._coming = self._coming or self._start()

    def take(self) -> torch.Tensor:
        lot, read = self._coming or self._start()
        self._coming = None
        _wait(read)
        if self._form.device.type == "cpu":
            return self._form.view(lot.memory)
        if self._leaving.copied is not None:
            torch.cuda.current_stream(self._form.device).wait_event(self._leaving.copied)
        return self._form.empty().copy_(self._form.view(lot.memory), non_blocking=True)

    def _start(self) -> tuple[Reservation, Transfer]:
        still_here = self._leaving.lots[:1]
        if still_here:
            return still_here[0], DONE
        lot = self._on_host(self._form.nbytes)
        return lot, self._leaving.read(lot.memory)


class PinnedCopy(SavedTensor):
    """A copy in pinned memory of the host."""

    def __init__(self, side: SideStream, lot: Reservation, form: TensorMeta) -> None:
        self._side, self._lot, self._form = side, lot, form
        self._coming: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def fetch(self) -> None:
        self._coming = self._coming or self._start()

    def take(self) -> torch.Tensor:
        tensor, copied = self._coming or self._start()
        self._coming = None
        torch.cuda.current_stream(tensor.device).wait_event(copied)
        return tensor

    def _start(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        tensor = self._form.empty()
        return tensor, self._side.copy_in(self._form.view(self._lot.memory), tensor)


class PendingWrite:
    """A write from memory to a slot, which begins when `copied` has happened. `lots` has the memory until it has ended.

    The room lasts as long as this, and as whatever reads from it. Whoever writes keeps this until that is over.
    """

    def __init__(self, lot: Reservation, slot: FileSlot, room: Reservation, copied: torch.cuda.Event | None) -> None:
        self.lots = [lot]
        self.copied = copied
        self._slot, self._room = slot, room
        self._transfer: Transfer | None = None

    def advance(self) -> None:
        """Begin, if that has not been done and the bytes are there. Raises `StorageError`."""
        copied = self.copied is None or self.copied.query()  # type: ignore[no-untyped-call]
        if copied and self._transfer is None:
            self._transfer = self._slot.write(0, self.lots[0].memory)
            self._transfer.on_end(self.lots.clear)  # of the list, not of this: it would hold itself

    def over(self) -> bool:
        """Whether `finish` would return at once."""
        return self._transfer is not None and self._transfer.done()

    def finish(self) -> None:
        """Return when the bytes are in the file and their memory has been let go. Raises `StorageError`."""
        if self._transfer is None and self.copied is not None:
            self.copied.synchronize()
        self.advance()
        if self._transfer is not None:
            _wait(self._transfer)
        self.lots.clear()

    def read(self, out: torch.Tensor) -> Transfer:
        """Start to fill `out` from the file. Raises `StorageError` where that has not got the bytes."""
        self.finish()
        read = self._slot.read(0, out)
        read.on_end(partial(_let_go, self._room))
        return read


def _wait(transfer: Transfer) -> None:
    """Wait for a transfer; its error is raised as a new one.

    A transfer keeps its error, and a handle its transfer. If the error knew the frames that it came through, it would keep the
    graph that keeps the handle, for good: Python's garbage collector does not see through autograd.
    """
    try:
        transfer.wait()
    except StorageError as error:
        error.__traceback__ = None
        raise StorageError(str(error)) from None


def _let_go(_lot: Reservation) -> None:
    """Called at a transfer's end, which holds the argument until then."""
