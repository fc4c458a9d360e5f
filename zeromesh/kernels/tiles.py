"""Runs a token-wise module on pieces of a sequence, called tiles, and computes each tile again in backward, so that a rank holds the
inner activations of one tile in place of the whole sequence's (tiled MLP of ALST: Bekman et al. 2025, arXiv:2506.13996)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from zeromesh.rng import GeneratorStates, kept_generators


def run_in_tiles(
    forward: Callable[[torch.Tensor], torch.Tensor], parameters: Sequence[nn.Parameter], tokens: int, x: torch.Tensor
) -> torch.Tensor:
    """Return `forward(x)` `[batch, sequence, out]` for `x` `[batch, sequence, in]`, on `tokens` of the sequence at a time. `forward`
    must act on each token alone, and reads no trained tensor but `parameters`. These get their whole gradient at once, summed over
    the tiles in fp32 where their dtype is narrower; dropout draws in backward what it drew before."""
    kind = x.device.type if torch.amp.is_autocast_available(x.device.type) else "cpu"
    pass_ = _TiledPass(forward, parameters, tokens, kind)
    # The input is saved before anything is computed: the recomputation of a block ends where it has what its backward reads, and
    # does not run a last module for nothing.
    saved = _SavedInput.apply(pass_, x, *parameters)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, _Output.apply(pass_, saved, x.detach()))  # type: ignore[no-untyped-call]


class _TiledPass:
    """One call of a module, from forward to backward, with the state that both need: the generators', and autocast's."""

    def __init__(
        self, forward: Callable[[torch.Tensor], torch.Tensor], parameters: Sequence[nn.Parameter], tokens: int, kind: str
    ) -> None:
        self._forward, self._parameters, self._tokens = forward, parameters, tokens
        self._random = GeneratorStates.now()
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Weights that autocast has cast without gradients must not be found in its cache when gradients are wanted.
        self._autocast = partial(torch.autocast, kind, dtype, enabled, cache_enabled=False)
        self.grad: torch.Tensor | None = None
        """The gradient of the output, between the backwards of the two functions."""

    def output(self, x: torch.Tensor) -> torch.Tensor:
        whole = None
        with self._autocast():
            for places, tile in self._tiles(x):
                out = self._forward(tile)
                whole = out.new_empty(*x.shape[:2], *out.shape[2:]) if whole is None else whole
                whole[:, places] = out
        return cast(torch.Tensor, whole)

    def gradients(self, x: torch.Tensor, of_input: bool) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the input and of the parameters, None where there is none."""
        grad, self.grad = cast(torch.Tensor, self.grad), None
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if of_input else None
        sums: list[torch.Tensor | None] = [None for _ in self._parameters]
        with kept_generators(), torch.enable_grad(), self._autocast():
            self._random.restore()
            for places, tile in self._tiles(x):
                inputs = (tile.requires_grad_(), *self._parameters) if of_input else self._parameters
                out = self._forward(tile)
                found = [*torch.autograd.grad(out, inputs, grad[:, places], allow_unused=True)]
                del out
                if grad_x is not None:
                    part = found.pop(0)
                    grad_x[:, places] = 0 if part is None else part
                for number, part in enumerate(found):
                    if part is None:
                        continue
                    if (total := sums[number]) is None:
                        total = sums[number] = torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
                    total.add_(part)
        both = zip(sums, self._parameters, strict=True)
        return grad_x, *[None if total is None else total.to(parameter.dtype) for total, parameter in both]

    def _tiles(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield contiguous copies, since a module may view its input in another shape, or change it in place."""
        for start in range(0, x.shape[1], self._tokens):
            places = slice(start, start + self._tokens)
            yield places, x.detach()[:, places].clone(memory_format=torch.contiguous_format)


class _SavedInput(torch.autograd.Function):
    """Saves the input, and returns a number on which the output depends; its backward computes all gradients."""

    @staticmethod
    def forward(ctx: Any, pass_: _TiledPass, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.pass_ = pass_
        ctx.save_for_backward(x)
        return x.new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        return None, *ctx.pass_.gradients(x, ctx.needs_input_grad[1])


class _Output(torch.autograd.Function):
    """Computes the output, and hands its gradient to the backward of `_SavedInput`."""

    @staticmethod
    def forward(ctx: Any, pass_: _TiledPass, saved: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.pass_ = pass_
        return pass_.output(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.pass_.grad = grad
        return None, grad.new_zeros(()), None
