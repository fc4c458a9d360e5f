"""What one microbatch needs and does, block by block, found by running the user's own model without values.

Floating-point tensors are on the meta device and have a shape alone; whole numbers are real, so that masks, positions and the
choice of experts (which is even here) are what they are. Every operator passes by a mode that counts bytes that are alive, as
PyTorch's allocator would, and the work that it stands for:

    live ^        ____/\\__/\\__                      before | block 0 | block 1 | after      forward
         |    ___/            \\____               after | block 1 | block 0 | before      backward
         |___/                     \\____

Blocks that are alike are run twice at most, however many there are, and so a model of any depth takes a second. Gradients of
parameters are freed as soon as they are there: what becomes of them belongs to the states (`zero/memory_model.py`).
"""

from __future__ import annotations

import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.comm.activation_collectives import Exchange, ExchangeKind, Pending
from zeromesh.errors import ConfigError, ZeromeshError, summary
from zeromesh.kernels import chunked_cross_entropy
from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.options import ZeroOptions
from zeromesh.overrides import override
from zeromesh.tensor.parallelize_module import Parallelized
from zeromesh.tensor.plan.planner import plan_tensor
from zeromesh.trainer.losses.losses import Loss
from zeromesh.trainer.models.prepare import Mode, enable_activation_checkpointing, keep_attributes
from zeromesh.trainer.planning.work import Product, TensorExchange, Work
from zeromesh.units.plan import ModelCuts, ModelPlan, block_modules, plan_model
from zeromesh.zero.hooks import hook_before, on_gradient_of

_ALIGNMENT = 64
"""Bytes to which PyTorch's allocator on CPUs rounds up."""
BEFORE, AFTER = "before", "after"
"""The segments before the first block and after the last one, with the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A block, or what comes before or after all of them. Bytes are above those that earlier segments keep."""

    name: str
    kept: int
    """Bytes that stay from forward to backward, its output among them."""
    forward_peak: int
    """The most bytes in forward."""
    backward_peak: int
    """The most bytes in backward, gradients among them."""
    output: int
    """Bytes of the hidden state that it passes on; its gradient has as many."""
    forward: Work
    backward: Work
    """With what is computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The segments of a microbatch, in the order in which they run forward: before, every block, after."""

    segments: tuple[Segment, ...]

    @property
    def peak(self) -> int:
        """The most bytes of activations and gradients at any moment, where one rank runs all segments."""
        found = base = 0
        for segment in self.segments:
            found = max(found, base + segment.forward_peak, base + segment.backward_peak)
            base += segment.kept
        return found

    @property
    def work(self) -> Work:
        """All of it, forward and backward."""
        return sum((each.forward + each.backward for each in self.segments), Work())


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceOptions:
    """How the model is run: in which dtype, on which kind of device, divided among how many tensor ranks, with which activations
    recomputed."""

    compute: torch.dtype = torch.bfloat16
    device: str = "cpu"
    tensor: int = 1
    rules: tuple[tuple[str, str], ...] = ()
    """The user's own styles of layers, by pattern of their names."""
    sequence: bool = False
    recompute: Mode = "none"


class Tracer:
    """Traces microbatches of one whole model, which may have values or not and is without them until `close`."""

    def __init__(self, model: nn.Module, loss: Loss, compute: torch.dtype) -> None:
        """`loss` is that of the whole model; parameters stand in the dtype `compute`."""
        self.model, self.loss = model, loss
        self._undo = ExitStack()
        self._undo.callback(keep_attributes(model))
        self._undo.enter_context(_without_values(model, compute))
        self._blocks = _shorten(model, self._undo)

    def close(self) -> None:
        """Give the model back what it had."""
        self._undo.close()

    def trace(self, batch: Mapping[str, Any], options: TraceOptions) -> Trace:
        """Run a microbatch. `batch` holds real whole numbers; of its other tensors only shapes matter.

        Raises:
            ConfigError: for a model that cannot be run without values, with the operator or the reason.
            LayoutError: for a model that cannot be divided so.
        """
        put_back = keep_attributes(self.model)
        try:
            meter = _run(self.model, batch, self.loss, options)
        except ZeromeshError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{type(self.model).__name__} cannot be run without values, so its memory and time cannot be predicted: "
                f"{summary(error)}; give the layout yourself"
            ) from error
        finally:
            put_back()
        return Trace(segments=tuple(_expand(meter.segments(), self._blocks)))

    def plan(self, zero: ZeroOptions, options: TraceOptions) -> ModelPlan:
        """Cut the model of one tensor rank into units. Blocks that are alike have the same specs.

        Raises:
            LayoutError: for a model that cannot be divided so.
        """
        divided = _divide(self.model, _TracedExchange(options.tensor), options)
        try:
            # Chunks of a pipeline keep small blocks as units of their own, as it is wanted here.
            cuts = ModelCuts(parts={} if divided is None else divided.parts, chunks=2)
            found = plan_model(self.model, options.compute, GroupRules(zero.optimizer).group_of, cuts)
        finally:
            if divided is not None:
                divided.restore()
        units = {unit.module: unit for unit in found.units}
        stands = {stand for _, stand in self._blocks}
        blocks = [replace(units[stand], module=name) for name, stand in self._blocks if stand in units]
        return ModelPlan(units=(*(unit for name, unit in units.items() if name not in stands), *blocks))


def trace_microbatch(model: nn.Module, batch: Mapping[str, Any], loss: Loss, options: TraceOptions) -> Trace:
    """Trace one microbatch of a model, which is afterwards as it was. Raises as `Tracer.trace` does."""
    tracer = Tracer(model, loss, options.compute)
    try:
        return tracer.trace(batch, options)
    finally:
        tracer.close()


def _run(model: nn.Module, batch: Mapping[str, Any], loss: Loss, options: TraceOptions) -> _Meter:
    """Forward and backward of one microbatch."""
    exchange = _TracedExchange(options.tensor)
    divided = _divide(model, exchange, options)
    undo: list[Callable[[], object]] = []
    try:
        model.train()
        known = set(block_modules(model))
        blocks = {name: block for name, block in model.named_modules() if block in known}
        if options.recompute != "none":
            enable_activation_checkpointing(model, options.recompute, blocks=block_modules(model))
        meter = exchange.meter = _Meter()
        for name, block in blocks.items():
            undo.append(override(block, "forward", partial(meter.run, name, block.forward)))
        for parameter in model.parameters():
            if parameter.requires_grad:
                undo.append(hook_before(parameter, forget_gradient).remove)
        for tensor in (*model.parameters(), *model.buffers()):
            meter.know(tensor)
        with meter, _kernels_of(options.device):
            total = loss(model, dict(batch), seed=1.0)
            meter.turn()
            if total.requires_grad:
                total.backward(torch.ones_like(total))  # type: ignore[no-untyped-call]
            del total
            meter.close()
        return meter
    finally:
        while undo:
            undo.pop()()
        if divided is not None:
            divided.restore()


def _divide(model: nn.Module, exchange: _TracedExchange, options: TraceOptions) -> Parallelized | None:
    """Leave tensor rank 0's part of each layer."""
    if options.tensor == 1:
        return None
    plan = plan_tensor(model, options.tensor, dict(options.rules) or None)
    return Parallelized(model, exchange, plan, sequence=options.sequence)


def forget_gradient(parameter: Tensor) -> None:
    """Free a gradient as soon as it is there, as the engine does."""
    parameter.grad = None


# What is alive, and what is done


@dataclass(kw_only=True, slots=True)
class _Stretch:
    """A stretch of the run that belongs to one segment."""

    name: str
    backward: bool
    begin: int
    peak: int
    end: int = 0
    output: int = 0
    products: list[Product] = field(default_factory=list)
    exchanges: list[TensorExchange] = field(default_factory=list)
    moved: int = 0
    operations: int = 0

    @property
    def work(self) -> Work:
        return Work(
            products=_counted(self.products),
            exchanges=_counted(self.exchanges),
            moved=self.moved,
            operations=self.operations,
        )


def _counted(run: Iterable[Any]) -> tuple[tuple[Any, int], ...]:
    """What follows itself, once and with how often."""
    return tuple((each, sum(1 for _ in group)) for each, group in groupby(run))


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators without values, and counts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._spans: list[_Stretch] = []
        self._order: list[str] = []
        self._begin(BEFORE, backward=False)

    # Segments

    def run(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward of a block. In backward, where it is recomputed, the segment is that of backward."""
        if self._spans[-1].backward or name in self._order:
            return forward(*args, **kwargs)
        if not self._order:
            self._listen(BEFORE, (args, kwargs))
        self._order.append(name)
        self._begin(name, backward=False)
        output = forward(*args, **kwargs)
        self._listen(name, output)
        self._begin(AFTER, backward=False)
        return output

    def turn(self) -> None:
        """Backward begins."""
        self._begin(AFTER, backward=True)

    def close(self) -> None:
        """The microbatch is done."""
        self._spans[-1].end = self._live

    def _listen(self, name: str, structure: Any) -> None:
        """Once the gradient of a segment's output is there, backward is in that segment."""
        floats = (each for each in pytree.tree_leaves(structure) if isinstance(each, Tensor) and each.requires_grad)
        hidden = next(floats, None)
        if hidden is None:
            return
        self._spans[-1].output = hidden.nbytes

        def arrived() -> None:
            if self._spans[-1].name != name:
                self._begin(name, backward=True)

        on_gradient_of([hidden], arrived)

    def _begin(self, name: str, *, backward: bool) -> None:
        if self._spans:
            self._spans[-1].end = self._live
        self._spans.append(_Stretch(name=name, backward=backward, begin=self._live, peak=self._live))

    def segments(self) -> list[Segment]:
        """What was found, in the order of forward. What runs between two blocks belongs to the later one."""
        names = [BEFORE, *self._order, AFTER]
        forward = [each for each in self._spans if not each.backward]
        last = max(index for index, each in enumerate(forward) if each.name == AFTER)
        owners = [
            AFTER if index == last else each.name if each.name != AFTER else forward[index + 1].name
            for index, each in enumerate(forward)
        ]
        found = []
        for name in names:
            own = [each for each, owner in zip(forward, owners, strict=True) if owner == name]
            back = [each for each in self._spans if each.backward and each.name == name]
            begin = own[0].begin
            found.append(
                Segment(
                    name=name,
                    kept=own[-1].end - begin,
                    forward_peak=max(each.peak for each in own) - begin,
                    backward_peak=max((each.peak for each in back), default=begin) - begin,
                    output=own[-1].output,
                    forward=sum((each.work for each in own), Work()),
                    backward=sum((each.work for each in back), Work()),
                )
            )
        return found

    # Bytes

    def know(self, tensor: Tensor) -> None:
        """A tensor that was there before: it is a state, and no activation."""
        self._storages[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        nbytes = -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        self._live += nbytes
        self._spans[-1].peak = max(self._spans[-1].peak, self._live)

        def gone(_: object) -> None:
            self._live -= nbytes
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, gone)

    # Operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and tensors[0].is_meta:
            return tensors[0].dtype == torch.bool or 1
        out = _without_floats(func, args, kwargs, tensors)
        made = (
            [out] if isinstance(out, Tensor) else [each for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]
        )
        for tensor in made:
            self._hold(tensor)
        if not _is_view(func):
            self._work(func, args, tensors, made)
        return out

    def _work(self, func: Any, args: tuple[Any, ...], tensors: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        span = self._spans[-1]
        counted = _PRODUCTS.get(func.overloadpacket)
        span.operations += 1
        if counted is not None:
            dtype = str(made[0].dtype if made else tensors[0].dtype).removeprefix("torch.")
            span.products.extend(Product(dtype, *shape) for shape in counted(args, made))
        else:
            span.moved += sum(map(_bytes_moved, {id(each): each for each in (*tensors, *made)}.values()))

    def exchanged(self, kind: ExchangeKind, nbytes: int) -> None:
        """Tensor ranks exchange a tensor of so many bytes."""
        self._spans[-1].exchanges.append(TensorExchange(kind.collective.value, nbytes))


def _bytes_moved(tensor: Tensor) -> int:
    """Bytes of memory that are read or written for a tensor, of which an expanded one has fewer than elements."""
    shape = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(shape) * tensor.itemsize


@cache
def _is_view(func: Any) -> bool:
    """Whether an operator computes nothing."""
    name = func.overloadpacket.__name__
    aliased = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    return (
        aliased or name in ("_unsafe_view", "detach", "lift_fresh") or name.startswith(("empty", "new_empty", "sym_"))
    )


def _without_floats(func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Call an operator so that its floating-point results have no values, and its whole numbers do."""
    if not any(each.is_meta for each in tensors):
        if torch.device(kwargs.get("device") or "cpu").type == "meta":
            wanted = kwargs.get("dtype") or torch.get_default_dtype()
            if func.overloadpacket.__name__ == "arange" and kwargs.get("dtype") is None:
                wanted = torch.int64 if all(isinstance(each, int) for each in args) else wanted
            kwargs["device"] = "meta" if wanted.is_floating_point else "cpu"
        return pytree.tree_map_only(Tensor, _as_meta_float, func(*args, **kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    real = {id(each): each for each in tensors if not each.is_meta}
    if not real:
        out = func(*args, **kwargs)
        plain = isinstance(out, Tensor) and out.is_floating_point()
        return out if plain else pytree.tree_map_only(Tensor, partial(_found, func, args, tensors), out)
    moved: dict[int, Tensor] = {}

    def to_meta(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return moved[id(tensor)]

    out = func(*pytree.tree_map_only(Tensor, to_meta, args), **pytree.tree_map_only(Tensor, to_meta, kwargs))
    back = {id(copy): real[key] for key, copy in moved.items()}

    def from_meta(tensor: Tensor) -> Tensor:
        return back[id(tensor)] if id(tensor) in back else _found(func, args, tensors, tensor)

    return pytree.tree_map_only(Tensor, from_meta, out)


def _found(func: Any, args: Any, given: Sequence[Tensor], made: Tensor) -> Tensor:
    """A result as it is, or with values where it holds whole numbers that are new."""
    if made.is_floating_point() or made.is_complex() or not made.is_meta or any(made is each for each in given):
        return made
    return _chosen(func, args, made)


def _as_meta_float(tensor: Tensor) -> Tensor:
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _chosen(func: Any, args: Any, like: Tensor) -> Tensor:
    """Whole numbers that an operator finds among floating-point ones: places are taken in turn, so that experts get as many tokens
    each; what is compared is unequal."""
    if like.dtype == torch.bool or not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    places = args[0].shape[-1] if args[0].dim() else 1
    return (torch.arange(like.numel()) % max(1, places)).to(like.dtype).view(like.shape)


# Products of matrices, as [batch, rows, inner, columns]

_Shapes = Iterator[tuple[int, int, int, int]]


def _mm(left: int) -> Callable[[Any, Any], _Shapes]:
    """Of two matrices, or of two batches of them, the first of which is argument number `left`."""

    def shapes(args: Any, _: Any) -> _Shapes:
        one, other = args[left], args[left + 1]
        yield (one.shape[0] if one.dim() == 3 else 1, one.shape[-2], one.shape[-1], other.shape[-1])

    return shapes


def _attention(grad: bool) -> Callable[[Any, Any], _Shapes]:
    """Of fused attention: scores and their product with values; in backward scores again, and four gradients."""

    def shapes(args: Any, _: Any) -> _Shapes:
        query, key, value = args[1:4] if grad else args[:3]
        batch = math.prod(query.shape[:-2])
        queries, keys, size, depth = query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1]
        yield (batch, queries, size, keys)
        yield (batch, queries, keys, depth)
        if grad:
            yield (batch, queries, depth, keys)
            yield (batch, keys, queries, depth)
            yield (batch, keys, queries, size)

    return shapes


def _convolution(grad: bool) -> Callable[[Any, Any], _Shapes]:
    """Of a convolution, as the product that it is."""

    def shapes(args: Any, made: Any) -> _Shapes:
        weight = args[2] if grad else args[1]
        out = args[0] if grad else made[0]
        transposed = args[8] if grad else args[6]
        rows = (args[1] if grad else args[0]) if transposed else out
        positions = rows.shape[0] * math.prod(rows.shape[2:])
        wanted = sum(args[-1][:2]) if grad else 1
        for _ in range(wanted):
            yield (1, positions, weight[0].numel(), weight.shape[0])

    return shapes


def _grouped(args: Any, made: Any) -> _Shapes:
    """Of rows that each meet one of several matrices (experts), or of groups of rows with one another, for gradients of those."""
    one, other = args[:2]
    yield (1, one.shape[-2], one.shape[-1], other.shape[-1])


_aten: Any = torch.ops.aten
_PRODUCTS: dict[Any, Callable[[Any, Any], _Shapes]] = {
    _aten.mm: _mm(0),
    _aten.bmm: _mm(0),
    _aten.addmm: _mm(1),
    _aten.addmm_: _mm(1),
    _aten.baddbmm: _mm(1),
    _aten._grouped_mm: _grouped,
    _aten.convolution: _convolution(grad=False),
    _aten.convolution_backward: _convolution(grad=True),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention(grad=False),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(grad=True),
}


@contextmanager
def _kernels_of(device: str) -> Iterator[None]:
    """Inside the block take fused attention wherever a device would, which PyTorch does not know without values, and as many rows
    of the loss at once.

    The CPU's stands for those of accelerators too: it keeps as much, and works as much. What recomputes in backward may run in
    autograd's own thread, where a mode of this one is not in force.
    """
    rows = chunked_cross_entropy._ROW_ELEMENTS
    functional.scaled_dot_product_attention = partial(_fused_attention, device != "cpu")
    if device != "cpu":
        chunked_cross_entropy._ROW_ELEMENTS = chunked_cross_entropy._ROW_ELEMENTS_ACCELERATOR
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = _plain_attention
        chunked_cross_entropy._ROW_ELEMENTS = rows


_plain_attention = functional.scaled_dot_product_attention


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
    """Fused attention; on a device that `drops`, with dropout too, whose random numbers are not kept."""
    fits = query.dim() == 4 and query.shape[-1] == value.shape[-1] and (drops or not dropout_p)
    if not fits or (attn_mask is not None and attn_mask.requires_grad):
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device="meta")
    found: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return found


class _TracedExchange(Exchange):
    """Exchanges of tensor rank 0 with ranks that are not there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meter: _Meter | None = None

    def _start(self, kind: ExchangeKind, tensor: Tensor, dim: int = -1, lengths: tuple[int, ...] = ()) -> Pending:
        shape = list(tensor.shape)
        if kind is not ExchangeKind.SUM:
            shape[dim] = sum(lengths) if kind is ExchangeKind.GATHER else lengths[0]
        made = tensor.new_empty(shape)
        if self.meter is not None:
            self.meter.exchanged(kind, max(made.nbytes, tensor.nbytes))
        return Pending(lambda: made)


# A model without values, and as few blocks as tell about all


@contextmanager
def _without_values(model: nn.Module, compute: torch.dtype) -> Iterator[None]:
    """Let the model's floating-point tensors stand on the meta device, parameters in the dtype `compute`, inside the block."""
    undo: list[Callable[[], None]] = []
    made: dict[int, nn.Parameter] = {}
    main = _main_dtype(model)
    try:
        for module in model.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    dtype = compute if parameter.dtype == main else parameter.dtype
                    empty = torch.empty_like(parameter, dtype=dtype, device="meta")
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                undo.append(partial(module._parameters.__setitem__, leaf, parameter))
                module._parameters[leaf] = made[id(parameter)]
            for leaf, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and not buffer.is_meta:
                    undo.append(partial(module._buffers.__setitem__, leaf, buffer))
                    module._buffers[leaf] = torch.empty_like(buffer, device="meta")
        yield
    finally:
        while undo:
            undo.pop()()


def _main_dtype(model: nn.Module) -> torch.dtype:
    counts = Counter(each.dtype for each in model.parameters() if each.is_floating_point())
    return counts.most_common(1)[0][0] if counts else torch.float32


def _shorten(model: nn.Module, undo: ExitStack) -> list[tuple[str, str]]:
    """Take blocks out of lists that have more than two of a kind; returns every block in order, with the one that stands for it.

    The names of blocks are those that they have until then, and those of their stands are what they have afterwards.
    """
    blocks = set(block_modules(model))
    found: list[tuple[str, str]] = []
    for path, module in list(model.named_modules()):
        children = list(module.named_children())
        own = [(name, child) for name, child in children if child in blocks]
        if not isinstance(module, nn.ModuleList) or len(own) < len(children) or not own:
            found += [(f"{path}.{name}".strip("."), f"{path}.{name}".strip(".")) for name, _ in own]
            continue
        kinds = [_kind(child) for _, child in own]
        kept: list[int] = []
        for index, kind in enumerate(kinds):
            if sum(kinds[each] == kind for each in kept) < 2 or index == len(kinds) - 1:
                kept.append(index)
        stands = [
            kept.index(index) if index in kept else [n for n, each in enumerate(kept) if kinds[each] == kind][1]
            for index, kind in enumerate(kinds)
        ]
        found += [(f"{path}.{index}", f"{path}.{stand}") for index, stand in enumerate(stands)]
        if len(kept) < len(own):
            _replace_list(model, path, nn.ModuleList([own[index][1] for index in kept]), undo)
    return found


def _replace_list(model: nn.Module, path: str, made: nn.ModuleList, undo: ExitStack) -> None:
    """Put a shorter list where one was, and say so in configurations that say how long it is."""
    parent_path, _, leaf = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    old: Any = model.get_submodule(path)
    parent._modules[leaf] = made
    undo.callback(parent._modules.__setitem__, leaf, old)
    configs = {id(each): each for module in model.modules() if (each := getattr(module, "config", None)) is not None}
    for config in configs.values():
        if getattr(config, "num_hidden_layers", None) == len(old):
            # By the name that the class may map to another one.
            config.num_hidden_layers = len(made)
            undo.callback(setattr, config, "num_hidden_layers", len(old))


_NUMBERS = re.compile(r"idx|index|number|layer_id")


def _kind(block: nn.Module) -> object:
    """What alike blocks have in common: their modules, sizes and settings."""
    found = []
    for name, module in block.named_modules():
        sizes = [
            (leaf, tuple(each.shape), each.dtype, each.requires_grad)
            for leaf, each in module.named_parameters(recurse=False)
        ]
        settings = [
            (key, repr(value))
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and not _NUMBERS.search(key)
        ]
        found.append((name, type(module), tuple(sizes), tuple(sorted(settings))))
    return tuple(found)


def _expand(segments: Sequence[Segment], blocks: Sequence[tuple[str, str]]) -> Iterator[Segment]:
    """The segments of the whole model, of those of its short form."""
    found = {each.name: each for each in segments}
    order = {name: number for number, name in enumerate(found)}
    ran = [(name, stand) for name, stand in blocks if stand in found]
    lists = {stand.rpartition(".")[0]: order[stand] for _, stand in reversed(ran)}
    yield found[BEFORE]
    for name, stand in sorted(ran, key=lambda each: lists[each[1].rpartition(".")[0]]):
        yield replace(found[stand], name=name)
    yield found[AFTER]
