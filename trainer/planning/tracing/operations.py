"""The costs of operators, by PyTorch's FLOP formulas and by the bytes that they move; and fused attention without values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import flop_counter

from zeromesh.kernels import chunked_cross_entropy
from zeromesh.overrides import replaced
from zeromesh.trainer.planning.tracing.work import Product


class Cost(NamedTuple):
    """The cost of one operator call: matrix products, or else the bytes that it moves."""

    product: Product | None = None
    moved: int = 0


def cost_of(
    func: Any, args: tuple[Any, ...], tensors: Sequence[Tensor], out: Any, made: Sequence[Tensor]
) -> Cost | None:
    """Return the cost of a call, whose arguments include `tensors` and whose result `out` includes the tensors `made`; None for a
    view."""
    if _is_view(func):
        return None
    moved = sum(map(_bytes_moved, {id(each): each for each in (*tensors, *made)}.values()))
    kernel = func.overloadpacket
    if kernel not in _FLOPS:
        return Cost(moved=moved)
    dtype = str(made[0].dtype if made else tensors[0].dtype).removeprefix("torch.")
    flops = _FLOPS[kernel](*args, out_val=out)
    weight = _WEIGHTS.get(kernel)
    around = 0 if weight is None else moved - _bytes_moved(args[weight])
    return Cost(product=Product(dtype, flops, moved, around))


def _bytes_moved(tensor: Tensor) -> int:
    """Return the bytes read or written for a tensor; expanded dims are counted once."""
    shape = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(shape) * tensor.itemsize


@cache
def _is_view(func: Any) -> bool:
    name = func.overloadpacket.__name__
    aliased = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    return (
        aliased or name in ("_unsafe_view", "detach", "lift_fresh") or name.startswith(("empty", "new_empty", "sym_"))
    )


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any) -> int:
    shapes = (each.shape for each in (grad, query, key, value))
    return int(flop_counter.sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _grouped(one: Tensor, other: Tensor, *_: Any, out_val: Any) -> int:
    """Return the FLOPs of a grouped matrix product (experts), or of its gradients."""
    return 2 * one.shape[-2] * one.shape[-1] * other.shape[-1]


_aten: Any = torch.ops.aten
_FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_counter.flop_registry,
    _aten.addmm_: flop_counter.flop_registry[_aten.addmm],
    _aten._grouped_mm: _grouped,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
_WEIGHTS = {_aten.mm: 1, _aten.addmm: 2, _aten.addmm_: 2, _aten._grouped_mm: 1, _aten.convolution: 1}
"""The index of the weight argument of operators that multiply activations by a weight."""


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Inside the block, force fused attention wherever the device would choose it, which PyTorch cannot tell without values, and
    the device's chunk size of the loss.

    The CPU's kernel represents those of accelerators, with equal memory and work. A patch is used because recomputation may run
    in autograd's thread, where a dispatch mode of this thread is not active.
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
    """Return the result of fused attention; a device that `drops` also fuses attention with dropout, without keeping a mask."""
    fits = query.dim() == 4 and query.shape[-1] == value.shape[-1] and (drops or not dropout_p)
    if not fits or (attn_mask is not None and attn_mask.requires_grad):
        return _plain_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros(attn_mask.shape, dtype=query.dtype, device="meta")
    found: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return found
