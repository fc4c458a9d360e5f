"""Collectives on activations: the protocol `Exchange`, and the one over process groups.

    exchange = open_exchange(mesh.tensor, mesh.device, "auto")     # zeromesh/comm/select.py
    pending = exchange.sum(partial)                                # starts; compute meanwhile
    whole = pending.wait()                                         # a new tensor

gloo's all-reduce adds in the tensors' dtype and in an order of its own. Here the summands are gathered and added locally in
rank order, 16-bit ones in fp32, so that all ranks and every kind of exchange give the same bits. NCCL's collectives are used as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from zeromesh.errors import CollectiveError, LayoutError
from zeromesh.mesh.process_mesh import ProcessSet
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.telemetry.watchdog import AsyncWork, Watchdog

_CHUNK = 1 << 15
"""Elements that are summed at a time over more than two ranks, so that the sum stays in a core's cache."""


class Pending(Protocol):
    """An exchange in flight."""

    def wait(self) -> torch.Tensor:
        """The result; once. On CUDA the compute stream waits, not the host.

        Raises:
            CollectiveError: when a peer is gone, late, or exchanges something else; or when asked twice.
        """
        ...


class Exchange(Protocol):
    """Collectives on activations of any dtype and any shape over the ranks of a process set.

    All ranks call the same ones in the same order, with the same dtypes and shapes (but along `dim`, where `sizes` says what each
    rank has); results may be waited for in any order, or never. A tensor must stay as it is until its result has been waited for.
    Sums run in rank order and are bitwise the same on all ranks; 16-bit tensors are summed in fp32 and rounded once (NCCL: its own
    order and arithmetic). Nothing is recorded for autograd.
    """

    size: int
    """Ranks of the set."""
    index: int
    """This rank's position among them."""

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Memory for a tensor that the very next exchange is given, contiguous and not initialised.

        What is computed into it (`out=`) need not be copied, where ranks share memory. It is the exchange's again afterwards.
        """
        ...

    def sum(self, tensor: torch.Tensor) -> Pending:
        """The sum over the ranks: a new tensor of the same shape and dtype."""
        ...

    def gather(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        """The ranks' tensors concatenated along `dim`. `sizes`: what each rank has along it, when they differ.

        Raises:
            LayoutError: when `sizes` do not fit the tensor or the ranks.
        """
        ...

    def scatter_sum(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        """The sum, of which each rank has its share of `dim`: equal ones, or those that `sizes` says.

        Raises:
            LayoutError: when `dim` cannot be shared out so.
        """
        ...

    def maximum(self, tensor: torch.Tensor) -> Pending:
        """The element-wise maximum over the ranks: a new tensor of the same shape and dtype."""
        ...


class Arriving:
    """A `Pending` that calls `finish` once."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish

    def wait(self) -> torch.Tensor:
        finish, self._finish = self._finish, None
        if finish is None:
            raise CollectiveError("the result of an exchange was asked for twice; keep what `wait` gave")
        return finish()


class LocalExchange:
    """The exchange of a set of one rank: every result is a copy."""

    size = 1
    index = 0

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def sum(self, tensor: torch.Tensor) -> Pending:
        return _copied(tensor)

    def gather(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        gathered_along(tensor, dim, sizes, 1, 0)
        return _copied(tensor)

    def scatter_sum(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        shared_along(tensor, dim, sizes, 1)
        return _copied(tensor)

    def maximum(self, tensor: torch.Tensor) -> Pending:
        return _copied(tensor)


class GroupExchange:
    """The exchange over a process group: gloo on CPU, NCCL on CUDA."""

    def __init__(self, group: ProcessSet) -> None:
        if group.watch is None or group.data_group is None:
            raise ValueError(f"axis {group.name} has one rank and needs no exchange over process groups")
        self.size = group.size
        self.index = group.index
        self._group = group
        self._watch: Watchdog = group.watch

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def sum(self, tensor: torch.Tensor) -> Pending:
        if self._group.on_stream:
            return self._reduced(tensor, dist.ReduceOp.SUM, "sum of activations")
        parts, start = self._everyones(tensor, [tensor.shape] * self.size)
        return self._begin(Collective.ALL_REDUCE, "sum of activations", tensor, start, lambda: sum_in_ranks(parts))

    def maximum(self, tensor: torch.Tensor) -> Pending:
        if self._group.on_stream:
            return self._reduced(tensor, dist.ReduceOp.MAX, "maximum of activations")
        parts, start = self._everyones(tensor, [tensor.shape] * self.size)
        what = "maximum of activations"
        return self._begin(Collective.ALL_REDUCE, what, tensor, start, lambda: maximum_in_ranks(parts))

    def gather(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        dim, lengths = gathered_along(tensor, dim, sizes, self.size, self.index)
        shapes = [(*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]) for length in lengths]
        parts, start = self._everyones(tensor, shapes)
        return self._begin(Collective.ALL_GATHER, "gather of activations", parts, start, lambda: torch.cat(parts, dim))

    def scatter_sum(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        dim, lengths = shared_along(tensor, dim, sizes, self.size)
        pieces = [piece.contiguous() for piece in torch.split(tensor.detach(), lengths, dim)]
        own, group = pieces[self.index], self._group.data_group
        what = "scattered sum of activations"
        if self._group.on_stream:
            out = torch.empty_like(own)

            def reduce() -> list[AsyncWork]:
                return [dist.reduce_scatter(out, pieces, group=group, async_op=True)]

            return self._begin(Collective.REDUCE_SCATTER, what, pieces, reduce, lambda: out)
        sent = torch.cat([piece.view(-1) for piece in pieces])
        received = sent.new_empty(self.size, own.numel())
        sent_sizes, received_sizes = [piece.numel() for piece in pieces], [own.numel()] * self.size

        def send() -> list[AsyncWork]:
            return [
                dist.all_to_all_single(received.view(-1), sent, received_sizes, sent_sizes, group=group, async_op=True)
            ]

        def summed() -> torch.Tensor:
            return sum_in_ranks([part.view(own.shape) for part in received])

        return self._begin(Collective.REDUCE_SCATTER, what, sent, send, summed)

    def _reduced(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, what: str) -> Pending:
        out, group = _copy(tensor), self._group.data_group

        def reduce() -> list[AsyncWork]:
            return [dist.all_reduce(out, op=op, group=group, async_op=True)]

        return self._begin(Collective.ALL_REDUCE, what, out, reduce, lambda: out)

    def _everyones(
        self, tensor: torch.Tensor, shapes: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], Callable[[], list[AsyncWork]]]:
        """Every rank's tensor, and what starts to fill them. On gloo one broadcast each: its all-gather copies."""
        parts = [tensor.new_empty(tuple(shape)) for shape in shapes]
        parts[self.index] = tensor.detach().contiguous()
        group = self._group.data_group

        def start() -> list[AsyncWork]:
            if self._group.on_stream:
                return [dist.all_gather(parts, parts[self.index], group=group, async_op=True)]
            pairs = zip(self._group.ranks, parts, strict=True)
            return [dist.broadcast(part, src=rank, group=group, async_op=True) for rank, part in pairs if part.numel()]

        return parts, start

    def _begin(
        self,
        collective: Collective,
        what: str,
        moved: torch.Tensor | Sequence[torch.Tensor],
        start: Callable[[], list[AsyncWork]],
        finish: Callable[[], torch.Tensor],
    ) -> Arriving:
        """Start, and count it. `moved`: the tensors that go round, kept until they have."""
        kept = [moved] if isinstance(moved, torch.Tensor) else list(moved)
        group, traffic = self._group, self._group.traffic
        group.require_member()
        with traffic.timed(collective, sum(each.nbytes for each in kept)):
            works = start()

        def arrive() -> torch.Tensor:
            with traffic.timed(collective):
                for work in works:
                    if group.on_stream:
                        work.wait()
                    else:
                        self._watch.wait_work(work, group.ranks, f"{what} over axis {group.name}")
                kept.clear()
                return finish()

        return Arriving(arrive)


def gathered_along(
    tensor: torch.Tensor, dim: int, sizes: Sequence[int] | None, size: int, index: int
) -> tuple[int, list[int]]:
    """The dim from 0, and what each rank has along it. Raises `LayoutError` when `sizes` do not fit."""
    dim = _dim(tensor, dim)
    length = tensor.shape[dim]
    lengths = [length] * size if sizes is None else list(sizes)
    if len(lengths) != size or lengths[index] != length or min(lengths) < 0:
        raise LayoutError(
            f"gather of {list(tensor.shape)} along dim {dim}: sizes are {lengths}; allowed are {size} of them, "
            f"of which number {index} is {length}, as this rank's tensor has it"
        )
    return dim, lengths


def shared_along(tensor: torch.Tensor, dim: int, sizes: Sequence[int] | None, size: int) -> tuple[int, list[int]]:
    """The dim from 0, and each rank's share of it. Raises `LayoutError` when it cannot be shared out so."""
    dim = _dim(tensor, dim)
    length = tensor.shape[dim]
    if sizes is None and length % size:
        raise LayoutError(
            f"scattered sum of {list(tensor.shape)}: {length} along dim {dim} is no multiple of {size} ranks; give `sizes`"
        )
    lengths = [length // size] * size if sizes is None else list(sizes)
    if len(lengths) != size or sum(lengths) != length or min(lengths) < 0:
        raise LayoutError(
            f"scattered sum of {list(tensor.shape)} along dim {dim}: sizes are {lengths}; "
            f"allowed are {size} that add up to {length}"
        )
    return dim, lengths


def sum_in_ranks(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """`parts[0] + parts[1] + ...` in this order, in a new contiguous tensor; 16-bit ones are added in fp32 and rounded once."""
    first = parts[0]
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    if len(parts) == 2:
        # One addition is rounded once, whatever it computes in.
        return torch.add(parts[0].detach(), parts[1].detach(), out=out)
    narrow = first.dtype.is_floating_point and first.dtype.itemsize < 4
    if not all(part.is_contiguous() for part in parts):
        _add_up(out, parts, narrow)
        return out
    flat = [part.detach().view(-1) for part in parts]
    total = out.view(-1)
    for start in range(0, total.numel(), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        _add_up(total[chunk], [part[chunk] for part in flat], narrow)
    return out


def maximum_in_ranks(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The element-wise maximum, in a new contiguous tensor; NaN wherever one part has it."""
    out = _copy(parts[0])
    for part in parts[1:]:
        torch.maximum(out, part.detach(), out=out)
    return out


def _add_up(out: torch.Tensor, parts: Sequence[torch.Tensor], narrow: bool) -> None:
    total = parts[0].to(torch.float32) if narrow else out.copy_(parts[0])
    for part in parts[1:]:
        total.add_(part)
    if narrow:
        out.copy_(total)


def _dim(tensor: torch.Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise LayoutError(f"a tensor of shape {list(tensor.shape)} has no dim {dim}")
    return dim % tensor.dim()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _copied(tensor: torch.Tensor) -> Arriving:
    return Arriving(lambda: _copy(tensor))
