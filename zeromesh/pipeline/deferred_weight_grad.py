"""Computes gradients of linear weights separately from the rest of backward: the W of zero-bubble schedules.

Backward queues the two factors of the weight's gradient. Later these are multiplied, and a backward through the parameter alone
accumulates the product into `parameter.grad`, so that hooks on the parameter run as usual, once for each microbatch."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zeromesh.errors import PhaseError
from zeromesh.kernels.cpu_matmul import linear, linear_grad_weight, linear_grad_x
from zeromesh.overrides import override

_Queue = Callable[[Tensor, Tensor], None]
_Products = dict[nn.Parameter, list[tuple[GradientEdge, Tensor, Tensor]]]
"""For each weight, one entry per use: the autograd edge that accumulates its gradient, and the gradient's two matrix factors."""


class WeightQueue:
    """Queues the factors of weight gradients under a key (a pair of chunk and microbatch), and computes the gradients later."""

    def __init__(self) -> None:
        self._queued: dict[Hashable, _Products] = {}
        self._current: _Products | None = None

    @contextmanager
    def deferring(self, key: Hashable) -> Iterator[None]:
        """Inside the block, backward queues factors of weight gradients under `key`. Raises `PhaseError` if `key` has a queue."""
        if self._current is not None or key in self._queued:
            raise PhaseError(f"gradients of weights of {key} are queued already")
        self._queued[key] = {}
        with override(self, "_current", self._queued[key]):
            yield

    def add(self, weight: nn.Parameter, edge: GradientEdge, first: Tensor, second: Tensor) -> None:
        """Queue the factors of one use of a weight, whose gradient goes to `edge`. Raises PhaseError outside of `deferring`."""
        if self._current is None:
            raise PhaseError("backward of a model whose gradients of weights are deferred ran outside of `deferring`")
        self._current.setdefault(weight, []).append((edge, first, second))

    def run(self, key: Hashable) -> None:
        """Compute the gradients in the order of backward, freeing factors on the way. Raises `PhaseError` if `key` has no queue."""
        if key not in self._queued:
            raise PhaseError(f"gradients of weights of {key} were to be computed, but its backward has not run")
        products = self._queued.pop(key)
        while products:
            weight = next(iter(products))
            uses = products.pop(weight)
            edge, *factors = uses.pop(0)
            gradient = linear_grad_weight(*factors).view(weight.shape)
            del factors
            while uses:  # A weight used several times has one gradient.
                gradient.add_(linear_grad_weight(*uses.pop(0)[1:]).view(weight.shape))
            torch.autograd.backward([edge], [gradient])


class _DeferredLinear(torch.autograd.Function):
    """A linear layer whose backward passes the factors of the weight's gradient to `queue`. `weight` is a plain tensor: autograd
    would run the hooks of a parameter that is an input without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, queue: _Queue) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed, ctx.queue = transposed, queue
        return linear(x, weight.t() if transposed else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, _, of_bias, *_ = ctx.needs_input_grad
        ctx.queue(*((x, grad) if ctx.transposed else (grad, x)))
        grad_x = linear_grad_x(grad, weight.t() if ctx.transposed else weight) if of_x else None
        return grad_x, None, grad.flatten(0, -2).sum(dim=0) if of_bias else None, None, None


def defer_weights(model: nn.Module, blocks: Iterable[nn.Module], queue: WeightQueue) -> Callable[[], None]:
    """Make the linear layers in `blocks` defer weight gradients to a queue; returns a call that undoes this. Only weights that
    nothing else in `model` shares are deferred, since another use's gradient would come at another time. Layers other than
    `torch.nn.Linear` and GPT-2's transposed one keep their backward."""
    holders = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    undo = ExitStack()
    for module in nn.ModuleList(blocks).modules():
        kind, own = type(module), vars(module).get("forward")
        transposed = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
        ours = own is None or str(getattr(own, "__module__", "")).startswith("zeromesh.")
        if ours and (kind is nn.Linear or transposed) and holders[id(module._parameters["weight"])] == 1:
            undo.callback(override(module, "forward", partial(_forward, module, queue, transposed)))
    return undo.close


def _forward(module: Any, queue: WeightQueue, transposed: bool, x: Tensor) -> Tensor:
    weight: nn.Parameter = module.weight
    if not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
        return linear(x, weight.t() if transposed else weight, module.bias)
    # The edge stays valid when the weight's values are released.
    add = partial(queue.add, weight, get_gradient_edge(weight))
    return cast(Tensor, _DeferredLinear.apply(x, weight.detach(), module.bias, transposed, add))  # type: ignore[no-untyped-call]
