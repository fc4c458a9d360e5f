"""Collectives on activations: `Exchange`, and the one over process groups.

    exchange = open_exchange(mesh.tensor, mesh.device, "auto")     # zeromesh/comm/select.py
    pending = exchange.sum(partial)                                # starts; compute meanwhile
    whole = pending.wait()                                         # a new tensor

gloo's all-reduce adds in the tensors' dtype and in an order of its own. Here the summands are gathered and added locally in
rank order, 16-bit ones in fp32, so that all ranks and every kind of exchange give the same bits. NCCL's collectives are used as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
import torch.distributed as dist

from zeromesh.errors import CollectiveError, LayoutError
from zeromesh.mesh.process_mesh import ProcessSet
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.telemetry.watchdog import AsyncWork

_CHUNK = 1 << 15
"""Elements that are summed at a time over more than two ranks, so that the sum stays in a core's cache."""


class ExchangeKind(IntEnum):
    """What ranks do with their tensors."""

    SUM = 0
    MAXIMUM = 1
    GATHER = 2
    SCATTER_SUM = 3

    @property
    def phrase(self) -> str:
        """What messages call it."""
        return ("sum", "maximum", "gather", "scattered sum")[self]

    @property
    def collective(self) -> Collective:
        """What its traffic counts as."""
        both = Collective.ALL_REDUCE
        return (both, both, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)[self]


class Pending:
    """An exchange in flight."""

    __slots__ = ("__weakref__", "_read", "_release", "_result")

    def __init__(self, read: Callable[[], torch.Tensor], release: Callable[[], None] | None = None) -> None:
        """`read` waits and returns the result; `release` is called after it, also for an exchange that nobody waits for."""
        self._read: Callable[[], torch.Tensor] | None = read
        self._release = release
        self._result: torch.Tensor | None = None

    def settle(self) -> None:
        """Wait, and keep the result until it is asked for."""
        read, self._read = self._read, None
        if read is not None:
            self._result = read()
            self._let_go()

    def _let_go(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def wait(self) -> torch.Tensor:
        """The result; once. On CUDA the compute stream waits, not the host.

        Raises:
            CollectiveError: when a peer is gone, late, or exchanges something else; or when asked twice.
        """
        self.settle()
        result, self._result = self._result, None
        if result is None:
            raise CollectiveError("the result of an exchange was asked for twice; keep what `wait` gave")
        return result

    def __del__(self) -> None:
        if self._read is not None:
            self._let_go()


class Exchange:
    """Collectives on activations of any dtype and any shape over the ranks of a process set; this one is that of a set of one rank.

    All ranks call the same ones in the same order, with the same dtypes and shapes (but along `dim`, where `sizes` says what each
    rank has); results may be waited for in any order, or never. A tensor must stay as it is until its result has been waited for.
    Sums run in rank order and are bitwise the same on all ranks; 16-bit tensors are summed in fp32 and rounded once (NCCL: its own
    order and arithmetic). Nothing is recorded for autograd.
    """

    size = 1
    """Ranks of the set."""
    index = 0
    """This rank's position among them."""

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
        """Memory for a tensor that the very next exchange is given, contiguous and not initialised.

        What is computed into it (`out=`) need not be copied, where ranks share memory. It is the exchange's again afterwards.
        """
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def sum(self, tensor: torch.Tensor) -> Pending:
        """The sum over the ranks: a new tensor of the same shape and dtype."""
        return self._start(ExchangeKind.SUM, tensor)

    def maximum(self, tensor: torch.Tensor) -> Pending:
        """The element-wise maximum over the ranks: a new tensor of the same shape and dtype."""
        return self._start(ExchangeKind.MAXIMUM, tensor)

    def gather(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        """The ranks' tensors concatenated along `dim`. `sizes`: what each rank has along it, when they differ.

        Raises:
            LayoutError: when `sizes` do not fit the tensor or the ranks.
        """
        dim = _dim(tensor, dim)
        length = tensor.shape[dim]
        lengths = (length,) * self.size if sizes is None else tuple(sizes)
        if len(lengths) != self.size or lengths[self.index] != length or min(lengths) < 0:
            raise LayoutError(
                f"gather of {list(tensor.shape)} along dim {dim}: sizes are {list(lengths)}; allowed are {self.size} of them, "
                f"of which number {self.index} is {length}, as this rank's tensor has it"
            )
        return self._start(ExchangeKind.GATHER, tensor, dim, lengths)

    def scatter_sum(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        """The sum, of which each rank has its share of `dim`: equal ones, or those that `sizes` says.

        Raises:
            LayoutError: when `dim` cannot be shared out so.
        """
        dim = _dim(tensor, dim)
        length, size = tensor.shape[dim], self.size
        where = f"scattered sum of {list(tensor.shape)} along dim {dim}"
        if sizes is None and length % size:
            raise LayoutError(f"{where}: {length} is no multiple of {size} ranks; give `sizes`")
        lengths = (length // size,) * size if sizes is None else tuple(sizes)
        if len(lengths) != size or sum(lengths) != length or min(lengths) < 0:
            raise LayoutError(f"{where}: sizes are {list(lengths)}; allowed are {size} that add up to {length}")
        return self._start(ExchangeKind.SCATTER_SUM, tensor, dim, lengths)

    def _start(self, kind: ExchangeKind, tensor: torch.Tensor, dim: int = -1, lengths: tuple[int, ...] = ()) -> Pending:
        """Begin an exchange; `lengths` are what each rank gives or gets along `dim`, where it has one."""
        return Pending(lambda: self._combine(kind, [tensor.detach()], dim, lengths))

    def _shapes(
        self, kind: ExchangeKind, tensor: torch.Tensor, dim: int, lengths: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """The shapes of the ranks' tensors."""
        shape = tuple(tensor.shape)
        if kind is not ExchangeKind.GATHER:
            return [shape] * self.size
        return [(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]

    def _combine(self, kind: ExchangeKind, parts: list[torch.Tensor], dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """The result of the ranks' whole tensors."""
        if kind is ExchangeKind.GATHER:
            return torch.cat(parts, dim)
        if kind is ExchangeKind.MAXIMUM:
            return maximum_in_ranks(parts)
        if kind is ExchangeKind.SCATTER_SUM:
            start = sum(lengths[: self.index])
            parts = [part.narrow(dim, start, lengths[self.index]) for part in parts]
        return sum_in_ranks(parts)


class GroupExchange(Exchange):
    """The exchange over a process group: gloo on CPU, NCCL on CUDA."""

    def __init__(self, group: ProcessSet) -> None:
        self.size = group.size
        self.index = group.index
        self._group = group

    def _start(self, kind: ExchangeKind, tensor: torch.Tensor, dim: int = -1, lengths: tuple[int, ...] = ()) -> Pending:
        group, traffic = self._group, self._group.traffic
        group.require_member()
        with traffic.timed(kind.collective):
            launched = self._launch(kind, tensor, dim, lengths)
        moved, finish = launched[1:]
        traffic.count(
            kind.collective, sum(each.nbytes for each in moved) if kind is ExchangeKind.GATHER else tensor.nbytes
        )

        def read() -> torch.Tensor:
            with traffic.timed(kind.collective):
                for work in launched[0]:  # What goes round is kept with it.
                    group.wait(work, f"{kind.phrase} of activations over axis {group.name}")
                return finish()

        return Pending(read)

    def _launch(
        self, kind: ExchangeKind, tensor: torch.Tensor, dim: int, lengths: tuple[int, ...]
    ) -> tuple[list[AsyncWork], list[torch.Tensor], Callable[[], torch.Tensor]]:
        """The collectives, the tensors that go round, and what makes the result of them."""
        group, tensor, on_stream = self._group.data_group, tensor.detach(), self._group.on_stream
        if kind is ExchangeKind.SCATTER_SUM:
            pieces = [piece.contiguous() for piece in torch.split(tensor, list(lengths), dim)]
            own = pieces[self.index]
            if on_stream:
                out = torch.empty_like(own)
                return [dist.reduce_scatter(out, pieces, group=group, async_op=True)], pieces, lambda: out
            sent = torch.cat([piece.view(-1) for piece in pieces])
            received = sent.new_empty(self.size, own.numel())
            sizes = [own.numel()] * self.size, [piece.numel() for piece in pieces]
            work = dist.all_to_all_single(received.view(-1), sent, *sizes, group=group, async_op=True)
            return [work], [sent], lambda: sum_in_ranks([part.view(own.shape) for part in received])
        if on_stream and kind is not ExchangeKind.GATHER:
            whole, op = _copy(tensor), dist.ReduceOp.SUM if kind is ExchangeKind.SUM else dist.ReduceOp.MAX
            return [dist.all_reduce(whole, op=op, group=group, async_op=True)], [whole], lambda: whole
        parts = [tensor.new_empty(shape) for shape in self._shapes(kind, tensor, dim, lengths)]
        parts[self.index] = tensor.contiguous()
        if on_stream:
            works = [dist.all_gather(parts, parts[self.index], group=group, async_op=True)]
        else:  # gloo's all-gather copies.
            pairs = zip(self._group.ranks, parts, strict=True)
            works = [dist.broadcast(part, src=rank, group=group, async_op=True) for rank, part in pairs if part.numel()]
        return works, parts, lambda: self._combine(kind, parts, dim, lengths)


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
