"""Collectives on activations: `Exchange` over process groups, and `SharedExchange` over memory shared by CPU ranks of a host.

gloo's all-reduce adds in the tensors' dtype and in an unspecified order. Here the summands are gathered and added locally in rank
order, 16-bit ones in fp32, so that all ranks and all kinds of exchange compute equal bits. NCCL's are used unchanged."""

import math
import weakref
import zlib
from array import array
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from zeromesh.comm.shm_transport import ABOUT_WORDS, SharedRing
from zeromesh.comm.transport import choose_transport, sum_in_order
from zeromesh.errors import CollectiveError, LayoutError, PhaseError, StorageError
from zeromesh.mesh.collectives import CollectiveCall
from zeromesh.mesh.process_set import ProcessSet
from zeromesh.settings.keys import TransportName
from zeromesh.telemetry.step_recorder import Collective

_SUM, _GATHER, _SCATTERED_SUM = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
_SWAP = Collective.ALL_TO_ALL
_Lengths = tuple[Any, ...]  # integers, or rows of integers
_PHRASES = {_SUM: "sum", _GATHER: "gather", _SCATTERED_SUM: "scattered sum", _SWAP: "swap"}  # as messages name them
_CHUNK_ELEMENTS = 1 << 15  # summed at a time over more than two ranks, so that the partial sum stays in a core's cache


@dataclass(eq=False)
class Pending:
    """An exchange in flight: `read` waits and returns the result; `release` is called after it, even for an unused result."""

    read: Callable[[], Tensor] | None
    release: Callable[[], None] = lambda: None
    result: Tensor | None = None

    def read_result(self) -> None:
        """Wait for the result and keep it until `wait` returns it."""
        read, self.read = self.read, None
        if read is not None:
            self.result = read()
            self.release()

    def wait(self) -> Tensor:
        """Return the result; may be called once. On CUDA the compute stream waits, not the host. Raises `CollectiveError` when a
        peer is gone, late, or exchanges another tensor; and for a second call."""
        self.read_result()
        result, self.result = self.result, None
        if result is None:
            raise CollectiveError("the result of an exchange was asked for twice; keep what `wait` gave")
        return result

    def __del__(self) -> None:
        if self.read is not None:
            self.release()


class Exchange:
    """Collectives on activations of any dtype and shape over a process set. All ranks call the same methods in the same order,
    with equal dtypes and shapes (except along `dim`, where `sizes` gives each rank's length); results may be waited for in any
    order, or never. A tensor must not change until its result has been waited for. Sums run in rank order and are bitwise equal on
    all ranks; 16-bit tensors are summed in fp32 and rounded once (except by NCCL). Nothing is recorded for autograd."""

    def __init__(self, group: ProcessSet | None = None) -> None:
        """Take a process set, whose collectives are gloo's on CPUs and NCCL's on CUDA; None: a set of one rank."""
        self.size, self.index = (group.size, group.index) if group is not None else (1, 0)
        """The number of ranks, and this rank's position in the set."""
        self._members = group

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Raise `PhaseError`, for `copy.copy`, `copy.deepcopy` and `pickle` of a module that exchanges."""
        what = "a model of which each rank has a part (parallel.tensor, parallel.expert) cannot be copied or pickled"
        raise PhaseError(f"{what}; read it by zeromesh.state_dict(model), average it by the section `ema`, or unshard it before")

    def all_reduce_async(self, tensor: Tensor) -> Pending:
        """Return the sum over the ranks as a new tensor of the same shape and dtype."""
        return self._start(_SUM, tensor)

    def all_gather_async(self, tensor: Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        """Concatenate the ranks' tensors along `dim`. `sizes` gives each rank's length along `dim` when these differ. Raises
        `LayoutError` when `sizes` do not fit the tensor or the ranks."""
        dim = _checked_dim(tensor, dim)
        length = tensor.shape[dim]
        lengths = (length,) * self.size if sizes is None else tuple(sizes)
        if len(lengths) != self.size or lengths[self.index] != length or min(lengths) < 0:
            why = f"gather of {list(tensor.shape)} along dim {dim}: sizes are {list(lengths)}; allowed are {self.size} of them"
            raise LayoutError(f"{why}, of which number {self.index} is {length}, as this rank's tensor has it")
        return self._start(_GATHER, tensor, dim, lengths)

    def reduce_scatter_async(self, tensor: Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        """Sum over the ranks and give each rank its slice along `dim`: equal slices, or slices of the lengths in `sizes`. Raises
        `LayoutError` when `dim` cannot be divided into these slices."""
        dim = _checked_dim(tensor, dim)
        length, size = tensor.shape[dim], self.size
        where = f"scattered sum of {list(tensor.shape)} along dim {dim}"
        if sizes is None and length % size:
            raise LayoutError(f"{where}: {length} is no multiple of {size} ranks; give `sizes`")
        lengths = (length // size,) * size if sizes is None else tuple(sizes)
        if len(lengths) != size or sum(lengths) != length or min(lengths) < 0:
            raise LayoutError(f"{where}: sizes are {list(lengths)}; allowed are {size} that add up to {length}")
        return self._start(_SCATTERED_SUM, tensor, dim, lengths)

    def all_to_all_async(self, tensor: Tensor, dim: int) -> Pending:
        """Give each rank its one of equal slices along `dim`; returns the slices of all ranks for this one, stacked along a new dim
        0. Raises `LayoutError` when `dim` cannot be divided into equal slices."""
        dim = _checked_dim(tensor, dim)
        each, rest = divmod(tensor.shape[dim], self.size)
        if rest:
            raise LayoutError(f"swap of {list(tensor.shape)} along dim {dim}: no multiple of {self.size} ranks")
        return self._start(_SWAP, tensor, dim, (each,) * self.size)

    def swap_rows_async(self, rows: Tensor, counts: Sequence[Sequence[int]]) -> Pending:
        """Give each rank its rows of a tensor; `counts[i][j]`, equal on all ranks, is how many rank i gives to rank j, one after
        the other. Returns those of all ranks for this one, in rank order. Raises `LayoutError` where this rank has others."""
        if len(rows) != sum(counts[self.index]):
            raise LayoutError(f"swap of {len(rows)} rows, of which {sum(counts[self.index])} are to go to ranks")
        return self._start(_SWAP, rows, -1, tuple(map(tuple, counts)))

    def _sent_part(self, counts: _Lengths) -> float:
        """Return the part of this rank's rows that others get, as a multiple of that of even swaps."""
        own: Sequence[int] = counts[self.index]
        return (1 - own[self.index] / max(1, sum(own))) * self.size / (self.size - 1)

    def _shapes(self, kind: Collective, tensor: Tensor, dim: int, lengths: _Lengths) -> list[tuple[int, ...]]:
        shape = tuple(tensor.shape)
        if kind is _SWAP and dim < 0:
            return [(sum(row), *shape[1:]) for row in lengths]
        if kind is not _GATHER:
            return [shape] * self.size
        return [(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]

    def _combine(self, kind: Collective, parts: list[Tensor], dim: int, lengths: _Lengths) -> Tensor:
        if kind is _GATHER:
            return torch.cat(parts, dim)
        if kind is _SWAP and dim < 0:
            own = [(sum(row[: self.index]), row[self.index]) for row in lengths]
            return torch.cat([part.narrow(0, *where) for part, where in zip(parts, own, strict=True)])
        if kind is not _SUM:
            start = sum(lengths[: self.index])
            parts = [part.narrow(dim, start, lengths[self.index]) for part in parts]
        return torch.stack(parts) if kind is _SWAP else sum_in_ranks(parts)

    def _start(self, kind: Collective, tensor: Tensor, dim: int = -1, lengths: _Lengths = ()) -> Pending:
        """Begin an exchange; `lengths` are those that each rank sends or receives along `dim`, if the kind has one; of rows, those
        that each rank sends to each. On a device it never writes into the caller's tensor, which autograd may have saved."""
        tensor, group = tensor.detach(), self._members
        if group is None:
            return Pending(lambda: self._combine(kind, [tensor], dim, lengths))
        on_device, shapes = group.on_stream, self._shapes(kind, tensor, dim, lengths)
        how: dict[str, Any] = {}
        result: Callable[[], Tensor]
        if kind is _SWAP and dim < 0:
            width, sent = math.prod(tensor.shape[1:]), lengths[self.index]
            received = [row[self.index] for row in lengths]
            row, given, out = kind, tensor.contiguous(), tensor.new_empty(sum(received), *tensor.shape[1:])
            how |= {"sent": [width * each for each in sent], "received": [width * each for each in received]}
            how["times"] = self._sent_part(lengths)
            result = lambda: out  # noqa: E731
        elif kind is _SWAP or (kind is _SCATTERED_SUM and on_device and len(set(lengths)) == 1):
            given = torch.stack(torch.split(tensor, lengths[0], dim))
            row, out = kind, torch.empty_like(given if kind is _SWAP else given[0])
            result = lambda: out  # noqa: E731
        elif kind is _SCATTERED_SUM and not on_device:
            parts = list(torch.split(tensor, list(lengths), dim))
            own, given = parts[self.index], torch.cat([part.reshape(-1) for part in parts])
            row, out = Collective.ALL_TO_ALL, given.new_empty(self.size, own.numel())
            how["sent"] = [part.numel() for part in parts]
            result = lambda: sum_in_ranks([part.view(own.shape) for part in out])  # noqa: E731
        elif kind is not _GATHER and on_device:
            row, out = Collective.ALL_REDUCE, tensor.clone(memory_format=torch.contiguous_format)
            given, cut = out, (dim, sum(lengths[: self.index]), lengths[self.index]) if lengths else None
            result = lambda: out if cut is None else out.narrow(*cut).contiguous()  # noqa: E731
        else:
            given = tensor.clone(memory_format=torch.contiguous_format) if on_device else tensor.contiguous()
            sizes = list(map(math.prod, shapes))
            how |= {"received": sizes, "times": 1.0 if kind is _GATHER else 1 / self.size}
            row, out = Collective.ALL_GATHER, tensor.new_empty(sum(sizes))
            parts = [part.view(shape) for part, shape in zip(torch.split(out, sizes), shapes, strict=True)]
            # Parts along the outermost dim lie in `out` as the result needs them.
            result = lambda: self._combine(kind, parts, dim, lengths) if dim else out.view(-1, *tensor.shape[1:])  # noqa: E731
        what = f"{_PHRASES[kind]} of activations over axis {group.name}"
        flight = group.start(row, CollectiveCall(out.view(-1), given.view(-1), what, counts_as=kind, **how))

        def read() -> Tensor:
            flight.wait()
            return result()

        return Pending(read)


def sum_in_ranks(parts: Sequence[Tensor]) -> Tensor:
    """`parts[0] + parts[1] + ...` in this order, in a new contiguous tensor; 16-bit ones are added in fp32 and rounded once."""
    first = parts[0]
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    # A single addition is rounded once in any dtype, so only three or more 16-bit summands need fp32.
    narrow = len(parts) > 2 and first.dtype.is_floating_point and first.dtype.itemsize < 4
    chunks = [(out, parts)]
    if len(parts) > 2 and all(part.is_contiguous() for part in parts):
        split = [torch.split(tensor.view(-1), _CHUNK_ELEMENTS) for tensor in (out, *parts)]
        chunks = [(target, summands) for target, *summands in zip(*split, strict=True)]
    for target, summands in chunks:
        total = torch.empty_like(target, dtype=torch.float32) if narrow else target
        sum_in_order(total, summands, add=False)
        if narrow:
            target.copy_(total)
    return out


def _checked_dim(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise LayoutError(f"a tensor of shape {list(tensor.shape)} has no dim {dim}")
    return dim % tensor.dim()


class SharedExchange(Exchange):
    """Collectives over memory shared by all ranks of a host: each rank writes its tensor once, into a ring that all ranks read, and
    sums in `wait`. Every rank of `group` creates one, in the same order."""

    def __init__(self, group: ProcessSet) -> None:
        super().__init__(group)
        self._group = group
        self._ring = SharedRing(group, "activations")
        self._pending: MutableMapping[int, Pending] = weakref.WeakValueDictionary()

    def _start(self, kind: Collective, tensor: Tensor, dim: int = -1, lengths: _Lengths = ()) -> Pending:
        ring, dtype, traffic = self._ring, tensor.dtype, self._group.traffic
        shapes = self._shapes(kind, tensor, dim, lengths)
        what = f"{_PHRASES[kind]} of activations over axis {self._group.name}"
        about = [_row(kind, dtype, shape, dim, lengths) for shape in shapes]
        self._group.require_member()
        with traffic.timed(kind):
            # All ranks must have consumed the entry that is about to be overwritten.
            if (oldest := ring.next - ring.room) >= 0:
                if (arriving := self._pending.get(oldest)) is not None:
                    arriving.read_result()
                ring.consumed.wait(oldest + 1, f"room for one more {what}")
            sequence, number = ring.next, ring.free_slot(tensor.nbytes)
            ring.own[number].view(shapes[self.index], dtype).copy_(tensor.detach())
            ring.publish(number, about[self.index])
        counted = sum(map(math.prod, shapes)) * dtype.itemsize if kind is _GATHER else tensor.nbytes
        traffic.count(kind, round(counted * (self._sent_part(lengths) if kind is _SWAP and dim < 0 else 1)))

        def read() -> Tensor:
            with traffic.timed(kind):
                ring.published.wait(sequence + 1, what)
                parts = []
                try:
                    for rank, shape in enumerate(shapes):
                        slot, other = ring.read(rank, sequence)
                        if other != about[rank]:  # Told at once: a rank that has seen it before may have ended.
                            raise self._disagreement(rank, other, ring.read(self.index, sequence)[1])
                        parts.append(slot.view(shape, dtype))
                except StorageError:  # The memory of an ended rank cannot be mapped any more.
                    self._group.watch.examine(self._group.ranks, what)
                    raise
                return self._combine(kind, parts, dim, lengths)

        pending = self._pending[sequence] = Pending(read, partial(ring.consume, sequence))
        return pending

    def _disagreement(self, rank: int, other: list[int], own: list[int]) -> CollectiveError:
        ranks = self._group.ranks
        theirs, ours = (array("q", about[1:]).tobytes().decode().rstrip() for about in (other, own))
        asked = f"rank {ranks[rank]} asked for a {theirs}, rank {ranks[self.index]} for a {ours}"
        why = f"ranks disagree on an exchange over axis {self._group.name}: {asked}"
        return CollectiveError(f"{why}. Every rank must run the same modules on tensors of the same shape")


@lru_cache(maxsize=256)
def _row(kind: Collective, dtype: torch.dtype, shape: tuple[int, ...], dim: int, lengths: _Lengths) -> list[int]:
    """Encode an exchange as words of a ring entry, which ranks compare, a checksum and a text. The cached list is not to change."""
    along = f" along dim {dim}" if dim >= 0 else ""
    text = f"{_PHRASES[kind]}{along} of {str(dtype).removeprefix('torch.')} {list(shape)}"
    room = (ABOUT_WORDS - 1) * 8
    return [zlib.crc32(f"{text} {lengths}".encode()), *memoryview(text.encode().ljust(room)[:room]).cast("q")]


def open_exchange(group: ProcessSet, device: torch.device, kind: TransportName = "auto") -> Exchange:
    """Open the exchange of activations over `group`. Every rank of the group calls this, in the same order. Raises `ConfigError`
    when the named kind cannot serve the group, and `StorageError` when memory is short."""
    name = choose_transport(kind, group, device)
    return SharedExchange(group) if name == "shared" else Exchange(None if name == "local" else group)
