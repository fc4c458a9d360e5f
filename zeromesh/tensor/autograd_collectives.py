"""Moves activations between the ranks of the tensor axis, by autograd functions over an `Exchange`.

    function                forward                        backward              where
    copy_input              as it is                       all-reduce            before what is divided
    all_reduce_output       all-reduce, plus a bias        as it is              after what is divided
    all_gather              all-gather along a dim         this rank's share     after which all ranks have all
    split                   this rank's share              all-gather            before which all ranks have all
    reduce_scatter_output   reduce-scatter, plus a bias    all-gather            after what is divided, along the sequence

Between `copy_input` and `all_reduce_output` ranks have summands of a gradient, elsewhere all of it. (Megatron-LM: Shoeybi et al.
2019, arXiv:1909.08053; for sequence parallelism Korthikanti et al. 2022, arXiv:2205.05198.)"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch._compile import _disable_dynamo

from zeromesh.comm.activation_collectives import Exchange
from zeromesh.kernels.cpu_matmul import linear_grad_bias

Gradients = tuple[torch.Tensor | None, ...]
_Move = Callable[[torch.Tensor], torch.Tensor]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """Exclude a function from `torch.compile`, which then breaks the graph there: communication cannot be compiled. The compiler,
    which takes two seconds, is imported by the first call, and not by `torch.compiler.disable`."""
    return cast(_Function, _disable_dynamo(function))


def copy_input(x: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Return `x` itself; its gradient is summed over the ranks."""
    return apply_collective(x, None, lambda x: x.view_as(x), lambda grad: exchange.all_reduce_async(grad).wait())


def all_reduce_output(x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange) -> torch.Tensor:
    """Return the sum of the ranks' `x` [..., features], plus `bias` [features], added once."""
    return apply_collective(x, bias, lambda x: exchange.all_reduce_async(x).wait(), lambda grad: grad)


def all_gather(x: torch.Tensor, dim: int, exchange: Exchange, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Concatenate the ranks' `x` along `dim`; `sizes` gives each rank's length along it when these differ."""
    return apply_collective(x, None, *_gather_and_split(dim, exchange, sizes))


def split(x: torch.Tensor, dim: int, exchange: Exchange, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Return this rank's slice of `x` along `dim`; the slices are equal without `sizes`."""
    return apply_collective(x, None, *_gather_and_split(dim, exchange, sizes)[::-1])


def reduce_scatter_output(x: torch.Tensor, bias: torch.Tensor | None, dim: int, exchange: Exchange) -> torch.Tensor:
    """Return this rank's slice along `dim` of the sum of the ranks' `x` [..., features], plus `bias` [features], added once."""
    gathered, _ = _gather_and_split(dim, exchange, None)
    return apply_collective(x, bias, lambda x: exchange.reduce_scatter_async(x, dim).wait(), gathered)


def share_of_dim(x: torch.Tensor, dim: int, exchange: Exchange, sizes: Sequence[int] | None = None) -> tuple[int, int]:
    """Return start and length of this rank's slice of `x` along `dim`."""
    lengths = sizes or [x.shape[dim] // exchange.size] * exchange.size
    return sum(lengths[: exchange.index]), lengths[exchange.index]


def _gather_and_split(dim: int, exchange: Exchange, sizes: Sequence[int] | None) -> tuple[_Move, _Move]:
    def split(x: torch.Tensor) -> torch.Tensor:
        # A copy, not a view, so that the memory of `x` can be freed.
        return x.narrow(dim, *share_of_dim(x, dim, exchange, sizes)).clone(memory_format=torch.contiguous_format)

    return lambda x: exchange.all_gather_async(x, dim, sizes=sizes).wait(), split


@uncompiled
def apply_collective(x: torch.Tensor, bias: torch.Tensor | None, forward: _Move, backward: _Move) -> torch.Tensor:
    return cast(torch.Tensor, _Collective.apply(x, bias, forward, backward))  # type: ignore[no-untyped-call]


class _Collective(torch.autograd.Function):
    """Returns `forward(x)` plus `bias`; the gradient of `x` is `backward(grad)`. One or both are collectives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, forward: _Move, backward: _Move) -> torch.Tensor:
        ctx.move = backward
        moved = forward(x)
        return moved if bias is None else moved.add_(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Gradients:
        return ctx.move(grad), linear_grad_bias(grad) if ctx.needs_input_grad[1] else None, None, None
