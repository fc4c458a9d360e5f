"""Transports own the memory that they move: their base class, for a group of one rank, and the choice of a transport for a group.

A transport allocates the flat buffers to gather and the slots to reduce, so that it can avoid transfers: on one host, gathered
parameters are shared pages, and a reduction reads the other ranks' slots.

    GatherBuffer   full   |  shard 0  |  shard 1  | ...     begin_write -> write own() -> end_write -> gather -> wait -> retire
    Reducer        slots  |  sequence n  |  sequence n+1    acquire -> fill -> launch -> Reduction.finish

All ranks of the group make the same calls in the same order. No transport knows about parameters.
"""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from zeromesh.errors import ConfigError, LayoutError
from zeromesh.intervals import Interval
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.offload import ReleasableBuffer, SparePages, TieredTensor, Transfer, allocate_lasting
from zeromesh.offload.accelerator import is_accelerator
from zeromesh.telemetry.step_recorder import Collective, CommAccount


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferRequest:
    """A request for a gather buffer of `padded` elements of `dtype`.

    A `persistent` buffer keeps its memory, so gathered values stay until their owners write again; others have memory only from
    `gather` to `release`. On a host it begins `lead` bytes after the start of a page.
    """

    name: str
    padded: int
    dtype: torch.dtype
    persistent: bool
    lead: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRequest:
    """A request for `slots` gradient buffers of `nbytes` each, used in turn."""

    slots: int
    nbytes: int


class GatherBuffer:
    """A flat buffer whose shards belong to the ranks of the group.

    This base class serves a group of one rank, and parameters that every rank updates itself: private memory that always holds
    everything while it is allocated.
    """

    full: torch.Tensor
    """The whole buffer, `[padded]`. Its address never changes; it has no memory while released."""
    _own = slice(None)
    """The slice of this rank's shard."""

    def __init__(self, request: BufferRequest, device: torch.device, spare: SparePages) -> None:
        """Allocate the buffer; released buffers give their pages to `spare`."""
        count, dtype = request.padded, request.dtype
        self.persistent = request.persistent
        self._memory: ReleasableBuffer | None = None
        self._reading: Transfer | None = None
        self._live = False
        if self.persistent:
            # Zeros: padding belongs to no rank, and persistent memory may hold the master weights themselves.
            self.full = allocate_lasting(count, dtype, device)
        else:
            self._memory = ReleasableBuffer(count, dtype, device, spare=spare, lead=request.lead)
            self.full = self._memory.full

    def carve(self, places: Sequence[Interval]) -> list[torch.Tensor]:
        """Return flat views of `full`, valid for the buffer's life even while the buffer has no memory."""
        if self._memory is not None:
            return self._memory.carve([(place.start, place.end) for place in places])
        return [self.full[place.start : place.end] for place in places]

    def own(self) -> torch.Tensor:
        """Return this rank's shard, a view of `full`, which must have memory."""
        return self.full[self._own]

    def begin_write(self) -> None:
        """Wait until no rank reads the current contents."""

    def end_write(self) -> None:
        """Mark this rank's shard as new; gathered copies on other ranks are then out of date."""

    def gather(self, shard: TieredTensor) -> None:
        """Start to fill `full`. `shard` is this rank's part, `[padded / ranks]`, of any floating dtype on any tier."""
        if self._memory is not None and not self._live:
            self._memory.take()
            self._live = True
            self._reading = shard.read(0, self.full)

    def poll(self) -> None:
        """Advance a started gather as far as possible without waiting."""

    def wait(self) -> None:
        """Wait until `full` is complete and current."""
        if self._reading is not None:
            self._reading.wait()

    def release(self) -> None:
        """Free the memory unless the buffer is persistent. This rank reads no more before the next gather."""
        if self._memory is not None and self._live:
            self.wait()
            self._memory.give_back()
            self._live = False

    def retire(self) -> None:
        """Mark the current contents as no longer read by this rank, so that their owners may write."""


@dataclass(kw_only=True, eq=False)
class Reduction:
    """A reduction in flight, which the thread that calls `finish` completes."""

    traffic: CommAccount
    kind: Collective
    parts: Callable[[], Sequence[torch.Tensor]]
    """Returns the received tensors, one from each rank."""
    sums: torch.Tensor
    """The accumulator of the elements that this rank sums, of the same length as each part."""
    add: bool
    arrived: Callable[[], bool]
    """Returns True if `wait` would return at once. It is never called on a device."""
    wait: Callable[[], None]
    free: Callable[[], None]
    """Called once the slot may be refilled."""
    complete: Callable[[], None] | None = None
    """Gathers the other ranks' sums, if this rank needs the whole sum."""
    done: bool = False

    def ready(self) -> bool:
        """Return True if `finish` would return without waiting for a peer."""
        return self.done or self.arrived()

    def finish(self) -> None:
        """Wait for the peers, sum this rank's shard and free the slot. Sends nothing, so ranks may finish at different times."""
        if not self.done:
            with self.traffic.timed(self.kind):
                self.wait()
                sum_in_order(self.sums, self.parts(), add=self.add)
                self.free()
            self.done = True

    def settle(self) -> None:
        """Complete an `out` that takes the whole sum. All ranks settle in the order of launches."""
        if self.complete is not None:
            self.complete()


def sum_in_order(out: torch.Tensor, parts: Sequence[torch.Tensor], *, add: bool) -> None:
    """Compute `out = parts[0] + parts[1] + ...` (plus `out` when `add`), in this order, in the dtype of `out`."""
    remaining = list(parts)
    if not add:
        first = remaining.pop(0)
        if remaining and first.dtype == out.dtype and remaining[0].dtype == out.dtype:
            torch.add(first, remaining.pop(0), out=out)
        else:
            out.copy_(first)
    for part in remaining:
        out.add_(part)


class Reducer:
    """The slots in which gradient buckets wait for their reduction over the group; `sequence` numbers the buckets from 0.

    This base class serves a group of one rank, which needs no sums and no slots: gradients are accumulated in place.
    """

    def __init__(self, *, on_stream: bool = False) -> None:
        """Take `on_stream`: gradients lie on a device, where finishing a reduction makes the stream wait, not the host."""
        self.on_stream = on_stream

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        """Return the bytes of the slot for `sequence`; None while a peer still reads its old contents, unless `block`."""
        raise LayoutError(f"a group of one rank has no gradient slots (sequence {sequence})")

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        """Start to sum `filled` over the group.

        `filled` is the slot as gradients, `[padded]`. `out` has the dtype of the sum and receives this rank's shard of it, or all
        of it if `out` is as long as `filled`; `add` adds to `out`. Sums run in rank order, one addition after the other in the
        dtype of `out`, so that every transport gives the same bits.
        """
        raise LayoutError(f"a group of one rank has nothing to reduce (sequence {sequence})")


class Transport:
    """The buffers and slots of one group; this base class serves a group of one rank, which communicates nothing."""

    name = "local"
    buffers: Sequence[GatherBuffer]
    reducer: Reducer
    share = 1.0
    """The fraction of the buffers' memory that counts for this process: 1, or 1 / ranks where ranks share pages."""

    def __init__(self, requests: Sequence[BufferRequest], device: torch.device) -> None:
        self._spare = SparePages()
        self.buffers = [GatherBuffer(request, device, self._spare) for request in requests]
        self.reducer = Reducer(on_stream=is_accelerator(device))

    def poll(self) -> None:
        """Advance started work without waiting, at the end of a pass, when no gather follows at once."""
        self._spare.give_back()

    def close(self) -> None:
        """Free the resources that are not freed with the tensors."""


TransportName = Literal["auto", "shared", "gloo", "nccl"]
_STRONG_ORDER = {"x86_64", "AMD64"}


def choose_transport(kind: TransportName, group: ProcessSet, device: torch.device) -> str:
    """Resolve `kind` for this group to `local`, `shared`, `gloo` or `nccl`.

    Raises:
        ConfigError: when the named transport cannot serve the group.
        CollectiveError: when this rank is not in the group.
    """
    group.require_member()
    if is_accelerator(device):
        if kind in ("shared", "gloo"):
            raise ConfigError(
                f"parallel.transport is {kind}, which moves CPU memory, but the ranks compute on {device.type.upper()}; "
                "use auto or nccl"
            )
        return "local" if group.size == 1 else "nccl"
    if kind == "nccl":
        raise ConfigError("parallel.transport is nccl, but no accelerator is here; use auto, shared or gloo")
    if group.size == 1:
        return "local"
    obstacle, machine = "", platform.machine()
    if not group.one_host:
        obstacle = "the ranks of the group do not share one host and one process namespace"
    elif machine not in _STRONG_ORDER:
        obstacle = f"{machine} orders memory more weakly than x86-64, which its counters rely on"
    if kind == "shared" and obstacle:
        raise ConfigError(f"parallel.transport is shared, but {obstacle}; use auto or gloo")
    return "gloo" if kind == "gloo" or obstacle else "shared"
