"""Tensors that autograd keeps: where each of them is, and how it is had again.

    UnmovedTensor   the tensor itself              MemoryCopy   a copy in the memory of the CPU that computes
    FileCopy        a copy in a slot of a file     PinnedCopy   a copy in pinned memory, beside a CUDA device

Whatever a saved tensor holds is free again when nobody holds the saved tensor.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

from zeromesh.errors import StorageError
from zeromesh.offload.io.file_tier import FileSlot
from zeromesh.offload.io.transfer import DONE, CopyStreams, Transfer

_NO_BYTES = torch.empty(0, dtype=torch.uint8)


class Reservation:
    """Memory, or room in a file, that ends with the last reference to it.

    That may be in any thread and in the middle of anything, so what there is to do then is only queued for the store.
    """

    def __init__(self, ended: SimpleQueue[Callable[[], None]], end: Callable[[], None]) -> None:
        self._ended = ended
        self.ends = [end]
        self.memory = _NO_BYTES

    def __del__(self) -> None:
        for end in self.ends:
            self._ended.put(end)


class TensorMeta:
    """Shape, dtype and device of a tensor, which make a tensor of its bytes again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device, self.nbytes = tensor.shape, tensor.dtype, tensor.device, tensor.nbytes

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """`memory`, 1-D uint8, as the tensor."""
        return memory.view(self.dtype).view(self.shape)

    def empty(self) -> torch.Tensor:
        """New memory for the tensor, on the device that it came from."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class SavedTensor(ABC):
    """A tensor that autograd keeps for backward."""

    call: BlockCall | None = None

    def fetch(self) -> None:  # noqa: B027 - most have nothing to bring
        """Start to bring the tensor back, if that is needed. Raises `StorageError`."""

    @abstractmethod
    def get(self) -> torch.Tensor:
        """The tensor, which may be asked for again later. Raises `StorageError` where it cannot be had."""


class BlockCall:
    """What one call of a block keeps. `before` is the call whose inputs backward will want after this one's."""

    def __init__(self, *, away: bool) -> None:
        self.away = away
        self.before: weakref.ref[BlockCall] | None = None
        self._saved: list[weakref.ref[SavedTensor]] = []
        self._inputs: list[tuple[torch.Tensor, int]] = []

    @property
    def empty(self) -> bool:
        return not self._saved

    def add(self, saved: SavedTensor, tensor: torch.Tensor) -> None:
        """Add an input; its saved form keeps this call alive, and not the other way round."""
        saved.call = self
        self._saved.append(weakref.ref(saved))
        self._inputs.append((tensor, tensor._version))

    def alive(self) -> list[SavedTensor]:
        """Saved tensors that somebody holds, in the order in which backward will ask for them."""
        return [saved for ref in self._saved if (saved := ref()) is not None]

    def check(self) -> None:
        """Raise `RuntimeError` where the block has changed one of its inputs in place."""
        for tensor, version in self._inputs:
            require_unchanged(tensor, version, "by the block that it is the input of")

    def end(self) -> None:
        """Let go of the inputs: the call is over."""
        self._inputs.clear()


class UnmovedTensor(SavedTensor):
    """A tensor that stays where it is. `reservation` counts its bytes, where they are counted."""

    def __init__(self, tensor: torch.Tensor, reservation: Reservation | None = None) -> None:
        self._tensor, self._version, self._reservation = tensor, tensor._version, reservation

    def get(self) -> torch.Tensor:
        require_unchanged(self._tensor, self._version, "after the block that it is an input of was computed")
        return self._tensor


class MemoryCopy(SavedTensor):
    """A copy in the memory that backward computes in."""

    def __init__(self, reservation: Reservation, meta: TensorMeta) -> None:
        self._reservation, self._meta = reservation, meta

    def get(self) -> torch.Tensor:
        return self._meta.view(self._reservation.memory)


class FileCopy(SavedTensor):
    """A copy in a file; while it is being written it is still in memory, and had from there."""

    def __init__(self, on_host: Callable[[int], Reservation], write: PendingWrite, meta: TensorMeta) -> None:
        self._on_host, self._write, self._meta = on_host, write, meta
        self._fetched: tuple[Reservation, Transfer] | None = None

    def fetch(self) -> None:
        self._fetched = self._fetched or self._start()

    def get(self) -> torch.Tensor:
        reservation, read = self._fetched or self._start()
        self._fetched = None
        _wait(read)
        if self._meta.device.type == "cpu":
            return self._meta.view(reservation.memory)
        if self._write.copied is not None:
            torch.cuda.current_stream(self._meta.device).wait_event(self._write.copied)
        return self._meta.empty().copy_(self._meta.view(reservation.memory), non_blocking=True)

    def _start(self) -> tuple[Reservation, Transfer]:
        still_here = self._write.sources[:1]
        if still_here:
            return still_here[0], DONE
        reservation = self._on_host(self._meta.nbytes)
        return reservation, self._write.read(reservation.memory)


class PinnedCopy(SavedTensor):
    """A copy in pinned memory of the host."""

    def __init__(self, streams: CopyStreams, reservation: Reservation, meta: TensorMeta) -> None:
        self._streams, self._reservation, self._meta = streams, reservation, meta
        self._fetched: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def fetch(self) -> None:
        self._fetched = self._fetched or self._start()

    def get(self) -> torch.Tensor:
        tensor, copied = self._fetched or self._start()
        self._fetched = None
        torch.cuda.current_stream(tensor.device).wait_event(copied)
        return tensor

    def _start(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        tensor = self._meta.empty()
        copied = self._streams.start(self._meta.view(self._reservation.memory), tensor)
        tensor.record_stream(self._streams.inward)  # It may be dropped before anybody has waited.
        return tensor, copied


@dataclass(eq=False, slots=True)
class PendingWrite:
    """A write from memory to a slot, which begins when `copied` has happened. `sources` has the memory until it has ended.

    The room in the file lasts as long as this, and as whatever reads from it. The writer keeps this until that is over.
    """

    sources: list[Reservation]
    slot: FileSlot
    room: Reservation
    copied: torch.cuda.Event | None
    _transfer: Transfer | None = None

    def advance(self) -> None:
        """Begin, if that has not been done and the bytes are there. Raises `StorageError`."""
        copied = self.copied is None or self.copied.query()  # type: ignore[no-untyped-call]
        if copied and self._transfer is None:
            self._transfer = self.slot.write(0, self.sources[0].memory)
            self._transfer.on_end(self.sources.clear)  # Of the list: a method of this object would keep itself alive.

    def over(self) -> bool:
        """Tell whether `finish` would return at once."""
        return self._transfer is not None and self._transfer.done()

    def finish(self) -> None:
        """Return when the bytes are in the file and their memory has been let go. Raises `StorageError`."""
        if self._transfer is None and self.copied is not None:
            self.copied.synchronize()
        self.advance()
        if self._transfer is not None:
            _wait(self._transfer)
        self.sources.clear()

    def read(self, out: torch.Tensor) -> Transfer:
        """Start to fill `out` from the file. Raises `StorageError` where the file has not got the bytes."""
        self.finish()
        read = self.slot.read(0, out)
        read.on_end(partial(_let_go, self.room))
        return read


def require_unchanged(tensor: torch.Tensor, version: int, when: str) -> None:
    """Raise `RuntimeError` where a tensor has another version than it had; `when` says in the message who has changed it."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor {list(tensor.shape)} of {tensor.dtype} that recomputation needs was changed in place {when}; "
            "have whatever changed it make a new tensor"
        )


def _wait(transfer: Transfer) -> None:
    """Wait for a transfer; its error is raised as a new one.

    A transfer keeps its error, and a saved tensor its transfer. If the error knew the frames that it came through, it would keep
    the graph that keeps the saved tensor, for good: Python's garbage collector does not see through autograd.
    """
    try:
        transfer.wait()
    except StorageError as error:
        error.__traceback__ = None
        raise StorageError(str(error)) from None


def _let_go(_reservation: Reservation) -> None:
    """A transfer calls this at its end, and holds the argument until then."""
