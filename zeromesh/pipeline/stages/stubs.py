"""Stub modules that stand for modules of other stages. Stubs have no parameters, and the attributes of the modules they replace.

For a stage with blocks 2 and 3 of six:

    embedding   0      1       2   3   4        5      norm  head
    NaN         pass   inject  own own capture  pass   NaN   not run

In a model that can be cut, nothing uses the result of a NaN stub; in any other model the loss is NaN instead of silently wrong. If
tensor ranks hold shares of the sequence between blocks, inject and capture have shares; the last block's result is gathered."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zeromesh.errors import PhaseError
from zeromesh.overrides import override
from zeromesh.pipeline.stages.model_anatomy import HIDDEN, Anatomy, WithoutValues

if TYPE_CHECKING:
    from zeromesh.tensor.shared_input import SequenceShares


@dataclass(slots=True)
class StageSlot:
    """The hidden states that the running stage has received and will send. All stubs of a model share one slot."""

    last: int
    shares: "SequenceShares | None"  # the state of sequence parallelism; None if blocks pass on the whole sequence
    inject_at: int = -1  # the index of the block that returns the received hidden state; -1 for none
    capture_at: int = -1
    received: torch.Tensor | None = None
    captured: torch.Tensor | None = None


class Stub(nn.Module):
    """A stand-in for a module of another stage, to which it delegates missing attributes."""

    def __init__(self, foreign: nn.Module) -> None:
        super().__init__()
        # A module in a tuple is no submodule, so its parameters are not the model's.
        self._foreign = (foreign,)
        self.training = foreign.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            foreign = self.__dict__.get("_foreign")
            if foreign is None:
                raise
            return getattr(foreign[0], name)


@contextmanager
def stubs_removed(model: nn.Module) -> Iterator[None]:
    """Inside the block the model has the modules of other stages, with meta parameters, in place of their stubs."""
    with ExitStack() as undone:
        for parent in list(model.modules()):
            for leaf, child in list(parent.named_children()):
                if isinstance(child, Stub):
                    undone.callback(override(parent._modules, leaf, child._foreign[0]))
        yield


class BlockStub(Stub):
    """A stub of another stage's block, which passes the hidden state on or, where blocks reshape it, returns what `shape` makes."""

    def __init__(
        self, foreign: nn.Module, index: int, anatomy: Anatomy, slot: StageSlot, shape: "NanStub | None" = None
    ) -> None:
        super().__init__(foreign)
        self._index, self._slot, self._shape = index, slot, (shape,)
        self._output, self._argument = anatomy.outputs[index], anatomy.hidden_argument

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: torch.Tensor = args[self._argument] if isinstance(self._argument, int) else kwargs[self._argument]
        slot = self._slot
        length = hidden.shape[1]
        if slot.shares is not None:
            if self._index == 0:
                slot.shares.decide(length)
            elif self._index > slot.inject_at:
                length *= slot.shares.exchange.size if slot.shares.active else 1
        if self._index == slot.inject_at:
            if slot.received is None:
                raise PhaseError(f"block {self._index} was to hand on a hidden state, but none was received")
            hidden = slot.received
        if self._index == slot.capture_at:
            slot.captured = hidden
        if self._shape[0] is not None:
            leaves, structure = pytree.tree_flatten(self._shape[0](*args, **kwargs))
            if self._index == slot.inject_at:
                leaves[pytree.tree_leaves(self._output).index(HIDDEN)] = hidden
            return pytree.tree_unflatten(leaves, structure)
        cache = next((value for value in (*args, *kwargs.values()) if hasattr(value, "get_mask_sizes")), None)
        if cache is not None and not getattr(cache, "length_without_layers", False):
            # Models ask one layer's cache for the length, and it may not be one of this stage's: this cache has one too, of width
            # 1. A layer that keeps a state in place of keys and values has no length.
            layer = next(iter(cache.layers[self._index : self._index + 1]), None)
            if layer is None or hasattr(layer, "update"):
                nothing = hidden.new_zeros(hidden.shape[0], 1, length, 1)
                cache.update(nothing, nothing, self._index)
        if self._index == slot.last:
            hidden = hidden.new_full((hidden.shape[0], length, *hidden.shape[2:]), float("nan"))
        return pytree.tree_map(lambda leaf: hidden if leaf is HIDDEN else leaf, self._output)


class NanStub(Stub):
    """A stub for a module outside the blocks, which returns NaN in the shapes of the module's results. `shape` is the module's copy
    on the meta device, see `meta_copy`. `before`: the module runs before the blocks."""

    def __init__(self, foreign: nn.Module, shape: nn.Module, slot: StageSlot, *, before: bool) -> None:
        super().__init__(foreign)
        self._slot, self._copy, self._before = slot, (shape,), before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Models move inputs to the device of a weight, but this stage has no such weight: take the device of known tensors.
        known = pytree.tree_leaves((self._slot.received, args, kwargs))
        devices = (leaf.device for leaf in known if isinstance(leaf, torch.Tensor) and not leaf.is_meta)
        device = next(devices, torch.device("cpu"))
        floats = [each.dtype for each in self._copy[0].parameters() if each.is_floating_point()]

        def on_meta(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to("meta", floats[0] if floats and tensor.is_floating_point() else None)

        positional, named = pytree.tree_map_only(torch.Tensor, on_meta, (args, kwargs))
        with torch.no_grad(), WithoutValues():  # type: ignore[no-untyped-call]
            output = self._copy[0](*positional, **named)

        def nan(like: torch.Tensor) -> torch.Tensor:
            # Models take dtypes of masks from it, and may write into results of embeddings. A head's large one is one number.
            shape = like.shape if self._before else ()
            if not like.is_floating_point():
                return torch.zeros(shape, dtype=like.dtype, device=device).expand(like.shape)
            received = self._slot.received
            dtype = like.dtype if received is None else received.dtype
            return torch.full(shape, float("nan"), dtype=dtype, device=device).expand(like.shape)

        return pytree.tree_map_only(torch.Tensor, nan, output)


def meta_copy(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device, to compute the shapes of its results; later changes of `module` do not affect it."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(each): torch.empty_like(each, device="meta") for each in tensors}).eval()
