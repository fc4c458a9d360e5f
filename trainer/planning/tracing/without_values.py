"""Operators without values: floating-point results are on the meta device, whole numbers are real.

What an operator makes of tensors of certain shapes is worked out once. Most shape functions of PyTorch are written in Python and
take longer than all else of a trace, and a model calls the same operators with the same shapes in every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zeromesh.trainer.planning.tracing.operations import Cost, cost_of

Shaped = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


class Call(NamedTuple):
    """A call of an operator: what it returned, the tensors among that, and what it did; None: nothing, as views do."""

    out: Any
    made: Sequence[Tensor]
    cost: Cost | None


class _Known(NamedTuple):
    """The result of a call with arguments of certain shapes: one tensor, or several in a tuple or a list (`kind`)."""

    kind: type | None
    shaped: tuple[Shaped | None, ...]
    cost: Cost | None

    def call(self) -> Call:
        made = [_empty(each) if each is not None else None for each in self.shaped]
        tensors = [each for each in made if each is not None]
        return Call(made[0] if self.kind is None else self.kind(made), tensors, self.cost)


class Operators:
    """Calls operators, and remembers what those make that take floating-point tensors and return new ones."""

    def __init__(self) -> None:
        self._known: dict[object, _Known] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Call an operator so that its floating-point results have no values, and its whole numbers do."""
        tensors: list[Tensor] = []
        said = _said((args, kwargs), tensors)
        if func is torch.ops.aten._local_scalar_dense.default and tensors[0].is_meta:
            return Call(tensors[0].dtype == torch.bool or 1, (), None)
        # The same tensor twice is read once.
        places: dict[int, int] = {}
        same = tuple([places.setdefault(id(each), len(places)) for each in tensors])
        key = (func, said, same)
        known = self._known.get(key)
        if known is not None:
            return known.call()
        out = _without_floats(func, args, kwargs, tensors)
        single = isinstance(out, Tensor)
        made = [out] if single else [each for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]
        cost = cost_of(func, args, tensors, made)
        if all(each.is_meta for each in tensors) and _is_new(out, made, tensors):
            leaves = [out] if single else out
            shaped = tuple(None if each is None else _shaped(each) for each in leaves)
            self._known[key] = _Known(None if single else type(out), shaped, cost)
        return Call(out, made, cost)


def _said(value: Any, tensors: list[Tensor]) -> object:
    """Return an operator's arguments as far as shapes depend on them, to be compared; adds the tensors in them to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _shaped(value) if value.is_meta else None
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, list | tuple):
        return tuple([_said(each, tensors) for each in value])
    return (value.__class__, value)  # True is 1, but not for a dtype


def _shaped(tensor: Tensor) -> Shaped:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(shaped: Shaped) -> Tensor:
    shape, strides, dtype = shaped
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _is_new(out: Any, made: Sequence[Tensor], given: Sequence[Tensor]) -> bool:
    """Return True if a call returned only tensors without values, each in memory of its own that is as large as it is."""
    alone = isinstance(out, Tensor) or (
        type(out) in (tuple, list) and all(each is None or isinstance(each, Tensor) for each in out)
    )
    own, others = ({each.untyped_storage()._cdata for each in tensors} for tensors in (made, given))
    return (
        alone
        and len(own) == len(made) > 0
        and not own & others
        and all(
            each.is_meta and each.untyped_storage().nbytes() == _empty(_shaped(each)).untyped_storage().nbytes()
            for each in made
        )
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
            moved[id(tensor)] = _empty(_shaped(tensor))
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
    return _empty(_shaped(tensor))


def _chosen(func: Any, args: Any, like: Tensor) -> Tensor:
    """Whole numbers that an operator finds among floating-point ones: places are taken in turn, so that experts get as many tokens
    each; what is compared is unequal."""
    if like.dtype == torch.bool or not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    places = args[0].shape[-1] if args[0].dim() else 1
    return (torch.arange(like.numel()) % max(1, places)).to(like.dtype).view(like.shape)
