"""The transport of a group of one rank, and of parameters that every rank updates by itself: nothing moves between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeromesh.errors import LayoutError
from zeromesh.flat.split import Interval
from zeromesh.mesh.transport import BufferRequest, GatherBuffer, Reducer, Reduction
from zeromesh.offload import DONE, PassingMemory, TieredTensor, Transfer, allocate_lasting


class LocalBuffer:
    """Private memory that holds everything, all the time or around its use."""

    def __init__(self, request: BufferRequest, device: torch.device) -> None:
        self.persistent = request.persistent
        self._memory = None if request.persistent else PassingMemory(request.padded, request.dtype, device)
        kept = allocate_lasting(request.padded, request.dtype, device) if self._memory is None else self._memory.full
        self.full = kept
        self._live = False
        self._reading: Transfer = DONE
        if self._memory is not None:
            self._memory.give_back()

    def carve(self, places: Sequence[Interval]) -> list[torch.Tensor]:
        if self._memory is not None:
            return self._memory.carve([(place.start, place.end) for place in places])
        return [self.full[place.start : place.end] for place in places]

    def own(self) -> torch.Tensor:
        return self.full

    def begin_write(self) -> None:
        """Nobody else reads."""

    def end_write(self) -> None:
        """Nobody else reads."""

    def gather(self, shard: TieredTensor) -> None:
        if self._memory is not None and not self._live:
            self._memory.take()
            self._live = True
            self._reading = shard.read(0, self.full)

    def poll(self) -> None:
        """Reading goes on by itself."""

    def wait(self) -> None:
        self._reading.wait()

    def release(self) -> None:
        if self._memory is not None and self._live:
            self._reading.wait()
            self._memory.give_back()
            self._live = False

    def retire(self) -> None:
        """Nobody waits for it."""


class LocalReducer:
    """A group of one has nothing to sum: gradients are accumulated where they stay, and no slot exists."""

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        raise LayoutError(f"a group of one rank has no gradient slots (sequence {sequence})")

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        raise LayoutError(f"a group of one rank has nothing to reduce (sequence {sequence})")


class LocalTransport:
    """See the module."""

    name = "local"
    share = 1.0

    def __init__(self, requests: Sequence[BufferRequest], device: torch.device) -> None:
        self.buffers: Sequence[GatherBuffer] = [LocalBuffer(request, device) for request in requests]
        self.reducer: Reducer = LocalReducer()

    def poll(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """Nothing to give back."""
