"""The base of all transports, which own the memory that they move; the one of a group of one rank; and the choice for a group.

A transport allocates the flat buffers that it will gather and the slots that it will reduce, so that it can make moving
unnecessary: on one host, gathered parameters are pages that all ranks see, and a reduction reads the others' slots.

    GatherBuffer   full   |  shard 0  |  shard 1  | ...     begin_write -> write own() -> end_write -> gather -> wait -> retire
    Reducer        slots  |  sequence n  |  sequence n+1    acquire -> fill -> launch -> Reduction.finish

All ranks of the group make the same calls in the same order. Nothing here knows what a parameter is.
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
    """A buffer to gather into: `padded` elements of `dtype`.

    A `persistent` buffer keeps its memory, so what was gathered stays until its owners write again; another one has
    memory only from `gather` to `release`. On a host it begins `lead` bytes after the start of a page.
    """

    name: str
    padded: int
    dtype: torch.dtype
    persistent: bool
    lead: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRequest:
    """`slots` gradient buffers of `nbytes` each, used in turn."""

    slots: int
    nbytes: int


class GatherBuffer:
    """One flat buffer whose shards belong to the ranks of the group.

    This one is that of a group of one rank, or of parameters that every rank updates by itself: private memory that holds
    everything, all the time or around its use.
    """

    full: torch.Tensor
    """`[padded]`. Its address never changes; without memory while released."""
    _own = slice(None)
    """The elements of this rank's shard."""

    def __init__(self, request: BufferRequest, device: torch.device, spare: SparePages) -> None:
        """`spare` has the pages of buffers that are released."""
        count, dtype = request.padded, request.dtype
        self.persistent = request.persistent
        self._memory: ReleasableBuffer | None = None
        self._reading: Transfer | None = None
        self._live = False
        if self.persistent:
            # Zeros, since gaps between parameters are nobody's and persistent memory may hold the master weights themselves.
            self.full = allocate_lasting(count, dtype, device)
        else:
            self._memory = ReleasableBuffer(count, dtype, device, spare=spare, lead=request.lead)
            self.full = self._memory.full

    def carve(self, places: Sequence[Interval]) -> list[torch.Tensor]:
        """Flat views of `full`, which stay valid for the buffer's life; also while it has no memory."""
        ends = [(place.start, place.end) for place in places]
        if self._memory is not None:
            return self._memory.carve(ends)
        return [self.full[start:end] for start, end in ends]

    def own(self) -> torch.Tensor:
        """This rank's shard, a view of `full`; only for a buffer that has memory."""
        return self.full[self._own]

    def begin_write(self) -> None:
        """Wait until no rank reads the present contents any more."""

    def end_write(self) -> None:
        """This rank's shard is new; what others have gathered is out of date."""

    def gather(self, shard: TieredTensor) -> None:
        """Start to complete `full`. `shard` is this rank's part, `[padded / ranks]`, of any floating dtype, wherever it rests."""
        if self._memory is not None and not self._live:
            self._memory.take()
            self._live = True
            self._reading = shard.read(0, self.full)

    def poll(self) -> None:
        """Go on with what `gather` has started, as far as that needs no waiting."""

    def wait(self) -> None:
        """Return when `full` is complete and current."""
        if self._reading is not None:
            self._reading.wait()

    def release(self) -> None:
        """Give the memory back unless the buffer is persistent. This rank will read no more before the next gather."""
        if self._memory is not None and self._live:
            self.wait()
            self._memory.give_back()
            self._live = False

    def retire(self) -> None:
        """This rank will not read the present contents again: their owners may write."""


@dataclass(kw_only=True, eq=False)
class Reduction:
    """A reduction in flight, which this rank's own thread completes when it is asked to finish."""

    traffic: CommAccount
    kind: Collective
    parts: Callable[[], Sequence[torch.Tensor]]
    """Returns the tensors that have arrived, one from each rank."""
    sums: torch.Tensor
    """The elements that this rank sums, of one length with each part."""
    add: bool
    arrived: Callable[[], bool]
    """A query that returns True if `wait` would return at once. On a device nobody asks that: it is a question of time."""
    wait: Callable[[], None]
    free: Callable[[], None]
    """Called once the slot may be filled again."""
    complete: Callable[[], None] | None = None
    """Gathers the other ranks' sums, where this rank wants the whole one."""
    done: bool = False

    def ready(self) -> bool:
        """Return True if `finish` would return without waiting for a peer."""
        return self.done or self.arrived()

    def finish(self) -> None:
        """Wait for the peers and sum what this rank sums; its slot is free afterwards. Moves nothing itself, so ranks may
        finish at different moments."""
        if not self.done:
            with self.traffic.timed(self.kind):
                self.wait()
                sum_in_order(self.sums, self.parts(), add=self.add)
                self.free()
            self.done = True

    def settle(self) -> None:
        """Complete an `out` that wants the whole sum. All ranks settle in the order of launches."""
        if self.complete is not None:
            self.complete()


def sum_in_order(out: torch.Tensor, parts: Sequence[torch.Tensor], *, add: bool) -> None:
    """`out = parts[0] + parts[1] + ...` (after `out` itself when `add`), in this order, in the dtype of `out`."""
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
    """Slots in which gradient buckets wait to be summed over the group; bucket number `sequence` counts up from 0.

    This one is that of a group of one rank, which has nothing to sum and no slot: gradients are accumulated where they stay.
    """

    def __init__(self, *, on_stream: bool = False) -> None:
        """`on_stream`: gradients lie on a device. To finish a reduction there holds up what is launched, not the host."""
        self.on_stream = on_stream

    def acquire(self, sequence: int, *, block: bool = False) -> torch.Tensor | None:
        """The bytes of the slot for `sequence`; None while a peer still reads what it held, unless told to wait."""
        raise LayoutError(f"a group of one rank has no gradient slots (sequence {sequence})")

    def launch(self, sequence: int, filled: torch.Tensor, out: torch.Tensor, *, add: bool) -> Reduction:
        """Start to sum `filled` over the group.

        `filled` is the slot seen in the gradients' dtype, `[padded]`. `out` has the dtype of the sum and receives
        this rank's shard of it, or all of it when `out` is as long as `filled`; `add` adds to what is there. Sums run
        in rank order, one addition after the other in the dtype of `out`, so that every transport gives the same
        bits.
        """
        raise LayoutError(f"a group of one rank has nothing to reduce (sequence {sequence})")


class Transport:
    """Buffers and slots of one group; this one is that of a group of one rank, where nothing moves."""

    name = "local"
    buffers: Sequence[GatherBuffer]
    reducer: Reducer
    share = 1.0
    """Part of the buffers' memory that counts for this process: 1, or 1 / ranks where ranks share pages."""

    def __init__(self, requests: Sequence[BufferRequest], device: torch.device) -> None:
        self._spare = SparePages()
        self.buffers = [GatherBuffer(request, device, self._spare) for request in requests]
        self.reducer = Reducer(on_stream=is_accelerator(device))

    def poll(self) -> None:
        """Do what can be done without waiting, at the end of a pass: no gather follows at once."""
        self._spare.give_back()

    def close(self) -> None:
        """Give back what does not go with the tensors."""


TransportName = Literal["auto", "shared", "gloo", "nccl"]
_STRONG_ORDER = {"x86_64", "AMD64"}


def choose_transport(kind: TransportName, group: ProcessSet, device: torch.device) -> str:
    """The transport that `kind` means for this group: `local`, `shared`, `gloo` or `nccl`.

    Raises:
        ConfigError: when the named one cannot serve the group.
        CollectiveError: when this rank is not in it.
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
