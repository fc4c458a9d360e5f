"""Measures live memory and work of a run without values, by segment: the blocks, and the parts before and after them. Operators
compute integers alone; their work is by PyTorch's FLOP formulas and by the bytes that they move."""

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.comm.activation_collectives import Exchange, Pending
from zeromesh.kernels import chunked_head
from zeromesh.overrides import override, replaced
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.zero.hooks import on_gradient_of

_ALIGNMENT = 64  # The alignment of PyTorch's CPU allocator, in bytes.
BEFORE, AFTER = "before", "after"
"""The names of the segments before the first block and after the last one, which includes the loss."""


class Product(NamedTuple):
    """One matrix product, or a kernel of several products, such as attention."""

    dtype: str  # The name of the dtype as in a configuration, such as `bfloat16`.
    flops: float  # The number of floating-point operations, two per multiply-add.
    nbytes: int  # Bytes read and written.
    activation_bytes: int = 0
    """Bytes of input and output of a product with a weight, kept until the weight's gradient is computed; else 0."""


class TensorExchange(NamedTuple):
    """An exchange of one tensor between tensor or context ranks."""

    kind: str
    """The kind of collective, as in `Collective`: `all-reduce`, `all-gather`, `reduce-scatter` or `all-to-all`."""
    nbytes: int
    """Bytes of the whole tensor: the reduced one, the gathered one, or the one that is reduced before it is scattered."""
    ranks: int


@dataclass(kw_only=True, slots=True)
class Work:
    """The work of one pass through a part of a model, with its products and exchanges in the order of execution."""

    products: list[Product] = field(default_factory=list)
    moved: int = 0  # Bytes that all other operators read and write.
    operations: int = 0  # The number of launched operators, products included.
    exchanges: list[TensorExchange] = field(default_factory=list)

    def __add__(self, other: "Work") -> "Work":
        return Work(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(Work)})


def call_without_values(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_cpu: bool
) -> tuple[Any, Sequence[Tensor], Product | int | None]:
    """Call an operator so that floating-point results have no values, and integer results do. Returns the result, its tensors, and
    the cost: matrix products, or else the bytes that it moves; None for a view. A CPU has instructions for products of 16-bit
    matrices alone: its other operators, fused attention included, take as long as float32 ones."""
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if func is torch.ops.aten._local_scalar_dense.default and tensors[0].is_meta:
        return tensors[0].dtype == torch.bool or 1, (), None
    out = _without_floats(func, args, kwargs, tensors)
    made = [each for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]
    if _is_view(func):
        return out, made, None
    touched = {id(each): each for each in (*tensors, *made)}.values()
    kernel = func.overloadpacket
    if kernel not in _FLOPS:
        nbytes = sum(_bytes_moved(each, least=4 if on_cpu and each.is_floating_point() else 1) for each in touched)
        return out, made, nbytes
    moved, dtype = sum(map(_bytes_moved, touched)), (made[0] if made else tensors[0]).dtype
    if on_cpu and kernel in _FUSED:
        dtype = torch.promote_types(dtype, torch.float32)
    weight = _WEIGHTS.get(kernel)
    activation_bytes = 0 if weight is None else moved - _bytes_moved(args[weight])
    name = str(dtype).removeprefix("torch.")
    return out, made, Product(name, _FLOPS[kernel](*args, out_val=out), moved, activation_bytes)


def _empty_like(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _without_floats(func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    if not any(each.is_meta for each in tensors):
        if torch.device(kwargs.get("device") or "cpu").type == "meta":
            wanted = kwargs.get("dtype") or torch.get_default_dtype()
            if func.overloadpacket.__name__ == "arange" and kwargs.get("dtype") is None:
                wanted = torch.int64 if all(isinstance(each, int) for each in args) else wanted
            kwargs["device"] = "meta" if wanted.is_floating_point else "cpu"
        try:
            out = func(*args, **kwargs)
        except NotImplementedError:
            # Some CPU kernels that count integers, such as the experts of tokens, take floating-point inputs alone.
            dtype = next(each.dtype for each in args if isinstance(each, Tensor))
            wide = func(*pytree.tree_map_only(Tensor, Tensor.double, args), **kwargs)
            out = pytree.tree_map_only(Tensor, lambda made: made.to(dtype), wide)
        return pytree.tree_map_only(
            Tensor, lambda made: _empty_like(made) if made.is_floating_point() or made.is_complex() else made, out
        )
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    if func.overloadpacket is _aten._grouped_mm and tensors[0].dtype != torch.bfloat16:
        # The meta kernel of experts' products knows bfloat16 alone.
        narrow = tuple(each.to(torch.bfloat16) for each in args[:2])
        return _without_floats(func, (*narrow, *args[2:]), kwargs, [*narrow, *tensors[2:]]).to(tensors[0].dtype)
    moved = {id(each): _empty_like(each) for each in tensors if not each.is_meta}
    given = {id(moved.get(id(each), each)): each for each in tensors}
    if moved:
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: moved.get(id(tensor), tensor), (args, kwargs))
    out = func(*args, **kwargs)
    if not moved and isinstance(out, Tensor) and out.is_floating_point():
        return out
    return pytree.tree_map_only(Tensor, partial(_with_integers, func, args, given), out)


def _with_integers(func: Any, args: Any, given: Mapping[int, Tensor], made: Tensor) -> Tensor:
    """Return a result `made`, or the tensor `given` for its id, as it is, or integers on the CPU if it is a new integer tensor on
    the meta device. Indices are round-robin, so that experts get equally many tokens, and comparisons are unequal."""
    made = given.get(id(made), made)
    if made.is_floating_point() or made.is_complex() or not made.is_meta or id(made) in given:
        return made
    if made.dtype == torch.bool or not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return torch.zeros(made.shape, dtype=made.dtype)
    places = args[0].shape[-1] if args[0].dim() else 1
    return (torch.arange(made.numel()) % max(1, places)).to(made.dtype).view(made.shape)


def _bytes_moved(tensor: Tensor, least: int = 1) -> int:
    """Return the bytes read or written for a tensor, `least` for an element; expanded dims are counted once."""
    shape = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(shape) * max(tensor.itemsize, least)


@cache
def _is_view(func: Any) -> bool:
    name = func.overloadpacket.__name__
    if name in ("_unsafe_view", "detach", "lift_fresh") or name.startswith(("empty", "new_empty", "sym_")):
        return True
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


_aten: Any = torch.ops.aten
_counts: Mapping[Any, Callable[..., int]] = flop_counter.flop_registry
_FLASH = "_scaled_dot_product_flash_attention"
_FUSED = {getattr(_aten, f"{_FLASH}_for_cpu{end}"): _counts[getattr(_aten, _FLASH + end)] for end in ("", "_backward")}
_FLOPS: Mapping[Any, Callable[..., int]] = {
    **_counts,
    _aten.addmm_: _counts[_aten.addmm],
    # Experts, and the gradients of their products.
    _aten._grouped_mm: lambda one, other, *_, out_val: 2 * math.prod(one.shape[-2:]) * other.shape[-1],
    **_FUSED,
}
_WEIGHTS = {_aten.mm: 1, _aten.addmm: 2, _aten.addmm_: 2, _aten._grouped_mm: 1, _aten.convolution: 1}
"""The index of the weight argument of operators that multiply activations by a weight."""


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Inside the block, force fused attention wherever the device would choose it, which PyTorch cannot tell without values, and
    the device's chunk size of the loss. The CPU's kernel represents those of accelerators, with equal memory and work. A patch is
    used because recomputation may run in autograd's thread, where no dispatch mode of this thread is active."""
    elements = chunked_head._ROW_ELEMENTS if device == "cpu" else chunked_head._ROW_ELEMENTS_ACCELERATOR
    attention = replaced(functional, {"scaled_dot_product_attention": partial(_fused_attention, device != "cpu")})
    with override(chunked_head, "_ROW_ELEMENTS", elements), attention, replaced(torch, {"autocast": _autocast}):
        yield


_plain_attention, _plain_autocast = functional.scaled_dot_product_attention, torch.autocast


def _autocast(device_type: str, *args: Any, **kwargs: Any) -> torch.autocast:
    """Return autocast of a device; PyTorch has none of the meta device, for which that of a CPU does as little."""
    return _plain_autocast("cpu" if device_type == "meta" else device_type, *args, **kwargs)


def _fused_attention(
    drops: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of fused attention; a device that `drops` also fuses attention with dropout, without keeping a mask."""
    fits = query.dim() == 4 and query.shape[-1] == value.shape[-1] and (drops or not dropout_p)
    if not fits or (attn_mask is not None and attn_mask.requires_grad):
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device="meta")
    fused = _aten._scaled_dot_product_flash_attention_for_cpu
    found: Tensor = fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A block, or the part before or after all blocks. Bytes are counted above those that earlier segments keep."""

    name: str
    kept: int  # Bytes that are kept from forward to backward, output included.
    forward_peak: int
    backward_peak: int  # The peak bytes in backward, gradients included.
    output: int  # Bytes of the output hidden state; its gradient has as many.
    forward: Work
    backward: Work  # The work of backward, recomputation included.


@dataclass(kw_only=True, slots=True)
class _SegmentSpan:
    name: str
    backward: bool
    begin: int
    peak: int
    end: int = 0
    output: int = 0
    work: Work = field(default_factory=Work)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Executes operators without values, and counts bytes and work."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_cpu = device == "cpu"
        self._live = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._spans: list[_SegmentSpan] = []
        self._order: list[str] = []
        self.begin(BEFORE, backward=False)

    def run(self, name: str, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a block. Recomputation in backward counts towards the block's backward segment."""
        if self._spans[-1].backward or name in self._order:
            return forward(*args, **kwargs)
        if not self._order:
            self._begin_backward_of(BEFORE, (args, kwargs))
        elif self._spans[-1].name == AFTER:  # Operators between two blocks count towards the later one.
            self._spans[-1].name = name
        self._order.append(name)
        self.begin(name, backward=False)
        output = forward(*args, **kwargs)
        self._begin_backward_of(name, output)
        self.begin(AFTER, backward=False)
        return output

    def _begin_backward_of(self, name: str, structure: Any) -> None:
        """Begin the backward of segment `name` once the gradient of the first tensor in its output is computed."""
        hidden = next((each for each in pytree.tree_leaves(structure) if isinstance(each, Tensor) and each.requires_grad), None)
        if hidden is None:
            return
        self._spans[-1].output = hidden.nbytes

        def begin_backward() -> None:
            if self._spans[-1].name != name:
                self.begin(name, backward=True)

        on_gradient_of([hidden], begin_backward)

    def begin(self, name: str, *, backward: bool) -> None:
        """Begin a part of a segment, to which bytes and work count until the next call."""
        if self._spans:
            self._spans[-1].end = self._live
        self._spans.append(_SegmentSpan(name=name, backward=backward, begin=self._live, peak=self._live))

    @property
    def work(self) -> Work:
        return self._spans[-1].work

    def segments(self) -> Iterator[Segment]:
        """Yield the segments in the order of forward."""
        for name in (BEFORE, *self._order, AFTER):
            spans = [each for each in self._spans if each.name == name]
            own, back = ([each for each in spans if each.backward is way] for way in (False, True))
            begin = own[0].begin
            yield Segment(
                name=name,
                kept=own[-1].end - begin,
                forward_peak=max(each.peak for each in own) - begin,
                backward_peak=max((each.peak for each in back), default=begin) - begin,
                output=own[-1].output,
                forward=sum((each.work for each in own), Work()),
                backward=sum((each.work for each in back), Work()),
            )

    def register_state(self, tensor: Tensor) -> None:
        """Exclude the storage of an existing tensor, such as a parameter, from the bytes of activations."""
        self._storages[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())

    def _count_storage(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        nbytes = -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        self._live += nbytes
        self._spans[-1].peak = max(self._spans[-1].peak, self._live)

        def freed(_: object) -> None:
            self._live -= nbytes
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, freed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, made, cost = call_without_values(func, args, dict(kwargs or {}), on_cpu=self._on_cpu)
        for tensor in made:
            self._count_storage(tensor)
        if cost is not None:
            self.work.operations += 1
            if isinstance(cost, Product):
                self.work.products.append(cost)
            else:
                self.work.moved += cost
        return out


class TracedExchange(Exchange):
    """The collectives of the first rank of a set, recorded without peers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.meter: Meter | None = None

    def _start(self, kind: Collective, tensor: Tensor, dim: int = -1, lengths: tuple[int, ...] = ()) -> Pending:
        shape = list(tensor.shape)
        if kind is not Collective.ALL_REDUCE:
            shape[dim] = sum(lengths) if kind is Collective.ALL_GATHER else lengths[0]
        made = tensor.new_empty([self.size, *shape] if kind is Collective.ALL_TO_ALL else shape)
        if self.meter is not None:
            self.meter.work.exchanges.append(TensorExchange(kind.value, max(made.nbytes, tensor.nbytes), self.size))
        return Pending(lambda: made)
