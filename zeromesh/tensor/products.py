"""16-bit matrix products on CPUs without matrix tiles (AMX): factors are widened to fp32 on the way, tile by tile.

Such a CPU multiplies 16-bit matrices at about half the speed of fp32 (70 against 130 GFLOP/s measured on one AVX-512 core that has
bf16 instructions), so widening, which costs one pass over each factor, pays. Inputs, outputs and what is kept for backward stay
in the 16-bit dtype; sums inside a product are fp32, as in the hardware's own 16-bit products. docs/decisions/0008 has the figures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_WEIGHT_TILE = 2**18  # elements widened at once: 1 MiB, small beside activations, and no slower than larger tiles
_TOKEN_TILE = 2**20  # larger, so that a weight is widened for enough tokens to be worth it
_LEAST_ROWS = 128


@cache
def product_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype in which matrices of `dtype` are multiplied fastest: fp32 for 16-bit ones where a CPU has no tiles for them."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    tiles = "_is_amx_tile_supported" if dtype is torch.bfloat16 else "_is_amx_fp16_supported"
    return dtype if getattr(torch.cpu, tiles, lambda: False)() else torch.float32


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Cut a weight of `[rows, columns]` into blocks of rows that are worth a product and small when widened."""
    return _cut(rows, columns, _WEIGHT_TILE)


def _cut(rows: int, columns: int, elements: int) -> list[slice]:
    step = max(1, min(rows, max(_LEAST_ROWS, elements // max(1, columns))))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


@contextmanager
def fastest_products(dtype: torch.dtype, device_type: str) -> Iterator[None]:
    """Inside the block this thread's linear layers multiply in the dtype that is fastest for factors of `dtype`."""
    with _WideProducts() if product_dtype(dtype, device_type) != dtype else nullcontext():
        yield


class _WideProducts(TorchFunctionMode):
    """Diverts `linear`, and `addmm` as the transposed linear layers of GPT-2 call it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and _widens(args, kwargs):
            return _wide_linear(args[0], args[1], args[2] if len(args) > 2 else None)
        if func is torch.addmm and len(args) == 3 and _widens(args[1:], kwargs) and args[0].dim() == 1:
            return _wide_linear(args[1], args[2].t(), args[0])
        return func(*args, **(kwargs or {}))


def _widens(factors: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether these are plain matrices of a dtype that is multiplied faster in a wider one."""
    if kwargs or len(factors) < 2:
        return False
    x, weight = factors[:2]
    same = weight.dim() == 2 and x.dim() > 0 and x.numel() > 0 and x.dtype == weight.dtype
    return bool(same and product_dtype(x.dtype, x.device.type) != x.dtype)


class _Scratch(threading.local):
    """Each thread's fp32 tiles. They are used again: freed and taken anew, they would lie between activations that stay."""

    def __init__(self) -> None:
        self._tiles: dict[str, torch.Tensor] = {}

    def tile(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """`[rows, columns]` of arbitrary values, the same memory for the same name."""
        tile = self._tiles.get(name)
        if tile is None or tile.numel() < rows * columns:
            tile = self._tiles[name] = torch.empty(rows * columns, dtype=torch.float32)
        return tile[: rows * columns].view(rows, columns)

    def wide(self, name: str, narrow: torch.Tensor) -> torch.Tensor:
        """A matrix in fp32."""
        return self.tile(name, *narrow.shape).copy_(narrow)


_scratch = _Scratch()


class _WideLinear(torch.autograd.Function):
    """`x @ weight.T + bias` for `x` [..., in], `weight` [out, in], `bias` [out] or None."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias = None if bias is None else bias.dtype
        flat = x.reshape(-1, x.shape[-1])
        out = x.new_empty(flat.shape[0], weight.shape[0])
        for tokens in _cut(flat.shape[0], flat.shape[1], _TOKEN_TILE):
            wide = _scratch.wide("tokens", flat[tokens])
            for rows in row_blocks(*weight.shape):
                product = _scratch.tile("product", wide.shape[0], rows.stop - rows.start)
                torch.mm(wide, _scratch.wide("weight", weight[rows]).t(), out=product)
                out[tokens, rows] = product if bias is None else product.add_(bias[rows])
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            _grad_x(flat, weight).view(x.shape) if of_x else None,
            _grad_weight(flat, x.reshape(-1, x.shape[-1]), weight) if of_weight else None,
            flat.sum(dim=0, dtype=torch.float32).to(ctx.bias) if of_bias else None,
        )


_wide_linear: Callable[..., torch.Tensor] = _WideLinear.apply


def _grad_x(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`grad @ weight`."""
    out = grad.new_empty(grad.shape[0], weight.shape[1])
    for tokens in _cut(grad.shape[0], max(weight.shape), _TOKEN_TILE):
        total = _scratch.tile("tokens", tokens.stop - tokens.start, weight.shape[1])
        for rows in row_blocks(*weight.shape):
            part = _scratch.wide("product", grad[tokens, rows])
            total.addmm_(part, _scratch.wide("weight", weight[rows]), beta=float(rows.start > 0))
        out[tokens] = total
    return out


def _grad_weight(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`grad.T @ x`."""
    out = torch.empty_like(weight)
    for rows in row_blocks(*weight.shape):
        total = _scratch.tile("weight", rows.stop - rows.start, weight.shape[1])
        for tokens in _cut(grad.shape[0], max(weight.shape), _TOKEN_TILE):
            part = _scratch.wide("product", grad[tokens, rows]).t()
            total.addmm_(part, _scratch.wide("tokens", x[tokens]), beta=float(tokens.start > 0))
        out[rows] = total
    return out
