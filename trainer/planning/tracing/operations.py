"""The costs of operators: products of matrices by shape, and bytes that all others move; and fused attention without values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from zeromesh.kernels import chunked_cross_entropy
from zeromesh.overrides import replaced
from zeromesh.trainer.planning.tracing.work import Product


class Cost(NamedTuple):
    """The cost of one call of an operator: either products of matrices, or bytes that it moves."""

    products: tuple[Product, ...] = ()
    moved: int = 0


def cost_of(func: Any, args: tuple[Any, ...], tensors: Sequence[Tensor], made: Sequence[Tensor]) -> Cost | None:
    """The cost of a call with these arguments, among them `tensors`, that has `made` others; None for a view, which costs none."""
    if _is_view(func):
        return None
    counted = _PRODUCTS.get(func.overloadpacket)
    if counted is None:
        return Cost(moved=sum(map(_bytes_moved, {id(each): each for each in (*tensors, *made)}.values())))
    dtype = str(made[0].dtype if made else tensors[0].dtype).removeprefix("torch.")
    return Cost(products=tuple(Product(dtype, *shape) for shape in counted(args, made)))


def _bytes_moved(tensor: Tensor) -> int:
    """Bytes of memory that are read or written for a tensor, of which an expanded one has fewer than elements."""
    shape = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(shape) * tensor.itemsize


@cache
def _is_view(func: Any) -> bool:
    """Return True if an operator computes nothing."""
    name = func.overloadpacket.__name__
    aliased = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    return (
        aliased or name in ("_unsafe_view", "detach", "lift_fresh") or name.startswith(("empty", "new_empty", "sym_"))
    )


# Products of matrices, as [batch, rows, inner, columns]

_Shapes = Iterator[tuple[int, int, int, int]]


def _mm(left: int) -> Callable[[Any, Any], _Shapes]:
    """Return a function for the shape of two matrices, or two batches of them, the first of which is argument number `left`."""

    def shapes(args: Any, _: Any) -> _Shapes:
        one, other = args[left], args[left + 1]
        yield (one.shape[0] if one.dim() == 3 else 1, one.shape[-2], one.shape[-1], other.shape[-1])

    return shapes


def _attention(grad: bool) -> Callable[[Any, Any], _Shapes]:
    """Return a function for fused attention: scores and their product with values; in backward scores again, and four gradients."""

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
    """Return a function that yields the shapes for a convolution, as the matrix products that it is."""

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
    """Yield the shape for rows that each meet one of several matrices (experts), or, for their gradients, two groups of rows."""
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
def kernels_of(device: str) -> Iterator[None]:
    """Inside the block take fused attention wherever a device would, which PyTorch does not know without values, and as many rows
    of the loss at once.

    The CPU's stands for those of accelerators too: it keeps as much, and works as much. What recomputes in backward may run in
    autograd's own thread, where a mode of this one is not in force.
    """
    rows = chunked_cross_entropy._ROW_ELEMENTS
    if device != "cpu":
        chunked_cross_entropy._ROW_ELEMENTS = chunked_cross_entropy._ROW_ELEMENTS_ACCELERATOR
    try:
        with replaced(functional, {"scaled_dot_product_attention": partial(_fused_attention, device != "cpu")}):
            yield
    finally:
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
