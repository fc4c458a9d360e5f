"""Measures live memory and work of a run without values, by segment: the blocks, and the parts before and after them."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.comm.activation_collectives import Exchange, Pending
from zeromesh.telemetry.step_recorder import Collective
from zeromesh.trainer.planning.tracing.operations import Product, TensorExchange, Work, call_without_values
from zeromesh.zero.hooks import on_gradient_of

_ALIGNMENT = 64  # The alignment of PyTorch's CPU allocator, in bytes.
BEFORE, AFTER = "before", "after"
"""The names of the segments before the first block and after the last one, which includes the loss."""


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
        floats = (each for each in pytree.tree_leaves(structure) if isinstance(each, Tensor) and each.requires_grad)
        hidden = next(floats, None)
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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
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
