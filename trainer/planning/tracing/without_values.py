"""Operators without values: floating-point results are on the meta device, integers are real."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zeromesh.trainer.planning.tracing.operations import Cost, cost_of


class Call(NamedTuple):
    """A call of an operator: its result, the tensors of the result, and its cost; None for a view."""

    out: Any
    made: Sequence[Tensor]
    cost: Cost | None


def call_without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Call an operator so that floating-point results have no values, and integer results do."""
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if func is torch.ops.aten._local_scalar_dense.default and tensors[0].is_meta:
        return Call(tensors[0].dtype == torch.bool or 1, (), None)
    out = _without_floats(func, args, kwargs, tensors)
    made = [each for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]
    return Call(out, made, cost_of(func, args, tensors, out, made))


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _without_floats(func: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
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
            moved[id(tensor)] = _empty_like(tensor)
        return moved[id(tensor)]

    out = func(*pytree.tree_map_only(Tensor, to_meta, args), **pytree.tree_map_only(Tensor, to_meta, kwargs))
    back = {id(copy): real[key] for key, copy in moved.items()}

    def from_meta(tensor: Tensor) -> Tensor:
        return back[id(tensor)] if id(tensor) in back else _found(func, args, tensors, tensor)

    return pytree.tree_map_only(Tensor, from_meta, out)


def _found(func: Any, args: Any, given: Sequence[Tensor], made: Tensor) -> Tensor:
    """Return a result as it is, or with values if it is a new integer tensor."""
    if made.is_floating_point() or made.is_complex() or not made.is_meta or any(made is each for each in given):
        return made
    return _chosen(func, args, made)


def _as_meta_float(tensor: Tensor) -> Tensor:
    if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    return _empty_like(tensor)


def _chosen(func: Any, args: Any, like: Tensor) -> Tensor:
    """Return values for integers that depend on floating-point inputs: indices are round-robin, so that experts get equally many
    tokens, and comparisons are unequal."""
    if like.dtype == torch.bool or not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
        return torch.zeros(like.shape, dtype=like.dtype)
    places = args[0].shape[-1] if args[0].dim() else 1
    return (torch.arange(like.numel()) % max(1, places)).to(like.dtype).view(like.shape)
