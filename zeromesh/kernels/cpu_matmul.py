"""16-bit matrix products on CPUs that multiply faster in fp32, as a trial tells: factors are widened tile by tile. Inputs, outputs
and tensors saved for backward stay in 16 bits, and sums inside a product are fp32. docs/decisions/0014 has the figures."""

import threading
from time import thread_time
from timeit import timeit
from typing import Any, cast

import torch
from torch.nn import functional

_WEIGHT_TILE = 2**18  # elements widened at once: 1 MiB, small beside activations, and no slower than larger tiles
_TOKEN_TILE = 2**20  # larger, so that a weight is widened for enough tokens to be worth it
_LEAST_ROWS = 128  # of a block, fewer of which are multiplied slowly

_TRIAL_SIZE = 512
_TRIAL_ROUNDS = 5
_WIDE_LIMIT = 0.8
"""The largest fraction of the 16-bit time at which widening is chosen; below 1, so that a tie gives the same choice everywhere."""

_fastest: dict[torch.dtype, torch.dtype] = {}  # the fastest dtype of products on this CPU, by 16-bit dtype, as measured


def product_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """Return the dtype in which matrices of `dtype` are multiplied fastest: on CPUs, fp32 for 16-bit ones if that is faster. The
    first call for a dtype measures both, which takes some tens of milliseconds."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return dtype
    if dtype not in _fastest:
        narrow, wide = _try_products(dtype)
        _fastest[dtype] = torch.float32 if wide <= _WIDE_LIMIT * narrow else dtype
    return _fastest[dtype]


def _try_products(dtype: torch.dtype) -> tuple[float, float]:
    """Return the CPU seconds of a product of matrices of `dtype`, and of one computed in fp32."""
    left, right = (torch.ones(_TRIAL_SIZE, _TRIAL_SIZE, dtype=dtype, device="cpu") for _ in range(2))
    products = (lambda: torch.mm(left, right.t()), lambda: torch.mm(left.float(), right.float().t()).to(dtype))
    rounds = [[timeit(each, timer=thread_time, number=1) for each in products] for _ in range(_TRIAL_ROUNDS)]
    narrow, wide = map(min, zip(*rounds, strict=True))
    return narrow, wide


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Split a weight of `[rows, columns]` into blocks of rows large enough for a fast product and small when widened."""
    return _slices(rows, columns, _WEIGHT_TILE)


def _slices(rows: int, columns: int, elements: int) -> list[slice]:
    step = max(1, min(rows, max(_LEAST_ROWS, elements // max(1, columns))))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


class _Scratch(threading.local):
    """Each thread's fp32 tiles, reused: allocated anew, they would fragment the memory between activations that stay."""

    def __init__(self) -> None:
        self._tiles: dict[str, torch.Tensor] = {}

    def tile(self, name: str, rows: int, columns: int) -> torch.Tensor:
        if name not in self._tiles or self._tiles[name].numel() < rows * columns:
            self._tiles[name] = torch.empty(rows * columns, dtype=torch.float32)
        return self._tiles[name][: rows * columns].view(rows, columns)

    def wide(self, name: str, narrow: torch.Tensor) -> torch.Tensor:
        if narrow.stride(0) < narrow.stride(1):  # Transposed: copied in the order in which it lies in memory.
            return self.wide(name, narrow.t()).t()
        return self.tile(name, *narrow.shape).copy_(narrow)


_scratch = _Scratch()


@torch.library.custom_op("zeromesh::wide_linear", mutates_args=())
def wide_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` for `x` [..., in], `weight` [out, in] and `bias` [out] of one 16-bit dtype, multiplied in fp32, as a
    single operator of PyTorch, so that graphs compile around it and selective checkpointing can keep its output."""
    flat = x.reshape(-1, x.shape[-1])
    out = x.new_empty(flat.shape[0], weight.shape[0])
    for tokens in _slices(flat.shape[0], flat.shape[1], _TOKEN_TILE):
        wide = _scratch.wide("tokens", flat[tokens])
        for rows in row_blocks(*weight.shape):
            product = _scratch.tile("product", wide.shape[0], rows.stop - rows.start)
            torch.mm(wide, _scratch.wide("weight", weight[rows]).t(), out=product)
            out[tokens, rows] = product if bias is None else product.add_(bias[rows])
    return out.view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("zeromesh::wide_linear_grad_weight", mutates_args=())
def _grad_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    flat, factor = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    out = x.new_empty(flat.shape[1], factor.shape[1])
    for rows in row_blocks(*out.shape):
        total = _scratch.tile("weight", rows.stop - rows.start, out.shape[1])
        for tokens in _slices(flat.shape[0], max(out.shape), _TOKEN_TILE):
            part = _scratch.wide("product", flat[tokens, rows]).t()
            total.addmm_(part, _scratch.wide("tokens", factor[tokens]), beta=float(tokens.start > 0))
        out[rows] = total
    return out


wide_linear.register_fake(lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]))
_grad_weight.register_fake(lambda grad, x: x.new_empty(grad.shape[-1], x.shape[-1]))


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    return (
        linear_grad_x(grad, weight) if of_x else None,
        _grad_weight(grad, x) if of_weight else None,
        linear_grad_bias(grad) if of_bias else None,
    )


wide_linear.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear` in the fastest dtype."""
    if _is_widened(x, weight):
        return cast(torch.Tensor, wide_linear(x, weight, bias))
    # For strided rows, such as the last position of each text, torch would copy the weight for every row.
    return functional.linear(x.contiguous(), weight, bias)


def linear_grad_x(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `grad @ weight`, the gradient of the input of `linear`; nothing is recorded for autograd."""
    if _is_widened(grad, weight):
        return cast(torch.Tensor, wide_linear(grad, weight.t(), None))
    return torch.matmul(grad, weight)


def linear_grad_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return `grad.T @ x` over all dims but the last, the gradient of the weight of `linear`; nothing is recorded for autograd."""
    if _is_widened(grad, x):
        return cast(torch.Tensor, _grad_weight(grad, x))
    return torch.mm(grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]))


def linear_grad_bias(grad: torch.Tensor) -> torch.Tensor:
    """Return the sum of `grad` over all dims but the last, in fp32 for 16-bit dtypes: the gradient of the bias of `linear`."""
    wide = torch.float32 if grad.dtype.itemsize < 4 else grad.dtype
    return grad.flatten(0, -2).sum(dim=0, dtype=wide).to(grad.dtype)


def _is_widened(x: torch.Tensor, other: torch.Tensor) -> bool:
    return x.dtype == other.dtype and x.dim() > 1 and x.numel() > 0 and product_dtype(x.dtype, x.device.type) != x.dtype
