"""The table of functions that start collectives, on CPUs and on devices.
A codec is a row, too: it wraps another row, launches the encoded bytes of `given`, and its `finish` decodes them into `out`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zeromesh.mesh.process_groups import GroupPurpose
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.telemetry.watchdog import AsyncWork

# torch 2.13 deprecates names that are the only ones in torch 2.11.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class CollectiveCall:
    """The arguments of one collective of flat, contiguous tensors, which must not change until `Launched.wait` has returned.
    `ProcessSet.start` sets `ranks`, `index`, `group`, `timed`, `arrive`, and equal numbers for empty `received` or `sent`."""

    out: torch.Tensor
    """The tensor that is received: the parts of all ranks one after the other, or their sum."""
    given: torch.Tensor
    """The tensor to send, to all ranks or one part to each. It may be this rank's part of `out`, or `out` itself. A broadcast
    leaves that part unchanged, and sends nothing from a rank whose tensor is empty."""
    what: str
    """The operation, for error messages."""
    received: Sequence[int] = ()
    """The number of elements of `out` that come from each rank."""
    sent: Sequence[int] = ()
    """The number of elements of `given` that go to each rank of an all-to-all."""
    purpose: GroupPurpose = "data"
    """The process group to use; `control` is a CPU group."""
    counts_as: Collective | None = None
    """The collective under which the traffic is counted, if not under the one that is started."""
    times: float = 1.0
    """The factor by which the traffic's bytes are multiplied when they are counted; 0: they are not counted."""
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ranks: Sequence[int] = ()
    index: int = 0
    group: dist.ProcessGroup | None = None
    timed: Callable[[], AbstractContextManager[object]] = nullcontext
    """Returns a context manager that counts the seconds spent inside it as time of this collective."""
    arrive: Callable[[AsyncWork], object] = lambda work: work.wait()
    """Waits for one of torch's handles of the collective: the host on CPUs, the current stream on a device."""


@dataclass(slots=True)
class Launched:
    """A collective in flight: `finish` completes `out` after `works`; `nbytes` counts as traffic. `call` keeps tensors alive."""

    call: CollectiveCall
    works: Sequence[AsyncWork]
    nbytes: int
    finish: Callable[[], object] = lambda: None
    over: bool = False

    def done(self) -> bool:
        """Return True if `wait` would return at once. It is never called on a device."""
        return self.over or all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Wait for the collective; on a device the current stream waits, not the host. Only the first call waits. Raises
        `CollectiveError` when a peer is gone, late, or the collective fails."""
        if not self.over:
            with self.call.timed():
                for work in self.works:
                    self.call.arrive(work)
                self.finish()
            self.over, self.works, self.finish = True, (), lambda: None


def _broadcasts(call: CollectiveCall) -> Launched:
    """All-gather by one broadcast per non-empty part: gloo's all-gather allocates memory for the whole and copies from there."""
    parts = list(call.out.split_with_sizes(list(call.received)))
    parts[call.index] = call.given
    pairs = zip(call.ranks, parts, strict=True)
    works = [dist.broadcast(part, src=rank, group=call.group, async_op=True) for rank, part in pairs if part.numel()]
    return Launched(call, works, call.out.nbytes)


def _all_gather(call: CollectiveCall) -> Launched:
    if len(set(call.received)) > 1:
        return _broadcasts(call)
    return Launched(call, [_all_gather_single(call.out, call.given, group=call.group, async_op=True)], call.out.nbytes)


def _all_reduce(call: CollectiveCall) -> Launched:
    return Launched(call, [dist.all_reduce(call.out, op=call.op, group=call.group, async_op=True)], call.out.nbytes)


def _reduce_scatter(call: CollectiveCall) -> Launched:
    return Launched(call, [_reduce_scatter_single(call.out, call.given, group=call.group, async_op=True)], call.given.nbytes)


def _all_to_all(call: CollectiveCall) -> Launched:
    even = len({*call.received, *call.sent}) == 1
    received, sent = (None, None) if even else (list(call.received), list(call.sent))
    work = dist.all_to_all_single(call.out, call.given, received, sent, group=call.group, async_op=True)
    return Launched(call, [work], call.given.nbytes)


Row = Callable[[CollectiveCall], Launched]
_ANYWHERE = {Collective.ALL_REDUCE: _all_reduce, Collective.ALL_TO_ALL: _all_to_all, Collective.BROADCAST: _broadcasts}
COLLECTIVES: Mapping[tuple[Collective, bool], Row] = {
    (Collective.ALL_GATHER, False): _broadcasts,
    (Collective.ALL_GATHER, True): _all_gather,
    (Collective.REDUCE_SCATTER, True): _reduce_scatter,
    (Collective.AGREEMENT, False): _all_gather,
    **{(kind, on_device): row for kind, row in _ANYWHERE.items() for on_device in (False, True)},
}
"""The functions that start collectives, by collective and by whether a device runs it. On CPUs, gloo adds only in `ALL_REDUCE`,
in an order of its own: sums in rank order are computed from what `ALL_TO_ALL` and `ALL_GATHER` deliver."""
