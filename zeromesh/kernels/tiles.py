"""Runs a token-wise module on pieces of a sequence, called tiles, and computes each tile again in backward, so that a rank holds
the inner activations of one tile in place of the whole sequence's (tiled MLP of ALST: Bekman et al. 2025, arXiv:2506.13996)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zeromesh.overrides import override
from zeromesh.rng import GeneratorStates, kept_generators

Gradients = tuple[Tensor | None, ...]
PRESENT = {"tokens": slice(None)}
"""The tokens of the sequence that a module sees in forward: those of a tile, or all of them outside of one."""


def run_in_tiles(forward: Callable[[Tensor], Tensor], params: Sequence[nn.Parameter], tokens: int, x: Tensor) -> Tensor:
    """Return `forward(x)` `[batch, sequence, out]` for `x` `[batch, sequence, in]`, on `tokens` of the sequence at once. `forward`
    must act on each token alone, and reads no trained tensor but `params`. These get their whole gradient at once, summed over
    the tiles in fp32 where their dtype is narrower; dropout draws in backward what it drew before."""
    # The input is saved first: a block's recomputation ends where it has what backward reads, and does not run a last module.
    saved = _SavedInput.apply(x, *params)  # type: ignore[no-untyped-call]
    tiled = _TiledPass(forward, params, tokens, x)
    return cast(Tensor, _Tiled.apply(tiled, saved.grad_fn, saved, *params))  # type: ignore[no-untyped-call]


class _TiledPass:
    """One call of a module, with the state of the generators and of autocast that its backward needs too."""

    def __init__(self, run: Callable[[Tensor], Tensor], params: Sequence[nn.Parameter], tokens: int, x: Tensor) -> None:
        self._forward, self._parameters, self._tokens = run, params, tokens
        self._random = GeneratorStates.now()
        kind = x.device.type if torch.amp.is_autocast_available(x.device.type) else "cpu"
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Weights that were cast without gradients must not be found in the cache when gradients are wanted.
        self._autocast = partial(torch.autocast, kind, dtype, enabled, cache_enabled=False)

    def output(self, x: Tensor) -> Tensor:
        whole: Tensor | None = None
        with self._autocast():
            for places, tile in self._tiles(x):
                with override(PRESENT, "tokens", places):
                    out = self._forward(tile)
                whole = out.new_empty(*x.shape[:2], *out.shape[2:]) if whole is None else whole
                whole[:, places] = out
        return cast(Tensor, whole)

    def gradients(self, x: Tensor, grad: Tensor) -> Gradients:
        """Return the gradients of the input and of the parameters, None for those that no tile has used."""
        grad_x, sums = torch.zeros_like(x), dict[int, Tensor]()
        with kept_generators(), torch.enable_grad(), self._autocast():
            self._random.restore()
            for places, tile in self._tiles(x):
                inputs = (tile.requires_grad_(), *self._parameters)
                found = torch.autograd.grad(self._forward(tile), inputs, grad[:, places], allow_unused=True)
                for number, part in enumerate(found):
                    if part is not None and number:
                        if number not in sums:
                            sums[number] = torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32))
                        sums[number] += part
                    elif part is not None:
                        grad_x[:, places] = part
        return grad_x, *(sums[n].to(p.dtype) if n in sums else None for n, p in enumerate(self._parameters, 1))

    def _tiles(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield contiguous copies, since a module may view its input in another shape, or change it in place."""
        for start in range(0, x.shape[1], self._tokens):
            places = slice(start, start + self._tokens)
            yield places, x.detach()[:, places].clone(memory_format=torch.contiguous_format)


class _SavedInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.others = (None,) * len(parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return grad, *ctx.others


class _Tiled(torch.autograd.Function):
    """Computes the output, and in backward the gradients from the input that `node` has saved."""

    @staticmethod
    def forward(ctx: Any, tiled: _TiledPass, node: Any, x: Tensor, *_parameters: Tensor) -> Tensor:
        ctx.tiled, ctx.node = tiled, node
        return tiled.output(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        return None, None, *ctx.tiled.gradients(*ctx.node.saved_tensors, grad)
