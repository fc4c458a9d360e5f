"""What moves activations between the ranks of the tensor axis, as autograd functions over an `Exchange`.

    function      forward                        backward                     where
    copy_in       as it is                       sum                          before what is divided
    sum_out       sum, plus a bias               as it is                     after what is divided
    gather        concatenation along a dim      this rank's share            after which all ranks have all
    split         this rank's share              concatenation                before which all ranks have all
    scatter_out   sum, of it this rank's share   concatenation                after what is divided, along the sequence

A gradient is *whole* where every rank has all of it, and *partial* where ranks have summands of it: it is partial between `copy_in`
and `sum_out`, and whole elsewhere. (Megatron-LM: Shoeybi et al. 2019, arXiv:1909.08053; along the sequence Korthikanti et al. 2022,
arXiv:2205.05198.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from zeromesh.comm.activation_collectives import Exchange

Gradients = tuple[torch.Tensor | None, ...]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """`torch.compile` calls the function as it is, between two graphs: what ranks tell each other has no place in one."""
    return cast(_Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def copy_in(x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """`x` itself; its gradient is summed over the ranks."""
    return _apply(_CopyIn, x, exchange)


def sum_out(x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange) -> torch.Tensor:
    """The sum of the ranks' `x` [..., features], plus `bias` [features], once."""
    return _apply(_SumOut, x, bias, exchange)


def gather(x: torch.Tensor, dim: int, exchange: Exchange, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """The ranks' `x` concatenated along `dim`; `sizes`: what each has along it, when they differ."""
    return _apply(_Gather, x, dim, exchange, sizes)


def split(x: torch.Tensor, dim: int, exchange: Exchange, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's share of `x` along `dim`: equal ones without `sizes`."""
    return _apply(_Split, x, dim, exchange, sizes)


def scatter_out(x: torch.Tensor, bias: torch.Tensor | None, dim: int, exchange: Exchange) -> torch.Tensor:
    """This rank's share along `dim` of the sum of the ranks' `x` [..., features], plus `bias` [features], once."""
    return _apply(_ScatterOut, x, bias, dim, exchange)


def share_of_dim(x: torch.Tensor, dim: int, exchange: Exchange, sizes: Sequence[int] | None = None) -> tuple[int, int]:
    """Start and length of this rank's share of `x` along `dim`."""
    lengths = sizes or [x.shape[dim] // exchange.size] * exchange.size
    return sum(lengths[: exchange.index]), lengths[exchange.index]


@uncompiled
def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    return cast(torch.Tensor, function.apply(*arguments))  # type: ignore[no-untyped-call]


def _own(x: torch.Tensor, dim: int, exchange: Exchange, sizes: Sequence[int] | None) -> torch.Tensor:
    """A copy, so that the whole may go."""
    return x.narrow(dim, *share_of_dim(x, dim, exchange, sizes)).clone(memory_format=torch.contiguous_format)


def _bias_gradient(grad: torch.Tensor, needed: bool) -> torch.Tensor | None:
    if not needed:
        return None
    wide = torch.float32 if grad.dtype.itemsize < 4 else grad.dtype
    return grad.flatten(0, -2).sum(dim=0, dtype=wide).to(grad.dtype)


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        return ctx.exchange.sum(grad).wait(), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange) -> torch.Tensor:
        total: torch.Tensor = exchange.sum(x).wait()
        return total if bias is None else total.add_(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        return grad, _bias_gradient(grad, ctx.needs_input_grad[1]), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, exchange: Exchange, sizes: Sequence[int] | None) -> torch.Tensor:
        ctx.dim, ctx.exchange, ctx.sizes = dim, exchange, sizes
        return exchange.gather(x, dim, sizes=sizes).wait()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        return _own(grad, ctx.dim, ctx.exchange, ctx.sizes), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, exchange: Exchange, sizes: Sequence[int] | None) -> torch.Tensor:
        ctx.dim, ctx.exchange, ctx.sizes = dim, exchange, sizes
        return _own(x, dim, exchange, sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        return ctx.exchange.gather(grad, ctx.dim, sizes=ctx.sizes).wait(), None, None, None


class _ScatterOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, dim: int, exchange: Exchange) -> torch.Tensor:
        ctx.dim, ctx.exchange = dim, exchange
        share: torch.Tensor = exchange.scatter_sum(x, dim).wait()
        return share if bias is None else share.add_(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        whole = ctx.exchange.gather(grad, ctx.dim).wait()
        return whole, _bias_gradient(grad, ctx.needs_input_grad[1]), None, None
