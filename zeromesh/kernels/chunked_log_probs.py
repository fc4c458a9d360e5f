"""Log-probabilities and entropies of single tokens over a linear head without holding all logits.

The gradients of single values are known in backward only, so forward keeps two numbers for each token, the logarithm of its
normalizer and its entropy, and backward computes each chunk's logits a second time (as in Wijmans et al. 2024, arXiv:2411.09009).
With p the softmax of the logits z, t the target and H the entropy, in nats, d log p_t / dz_j = [j = t] - p_j and
dH / dz_j = -p_j (log p_j + H).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeromesh.comm.activation_collectives import Exchange
from zeromesh.errors import LayoutError
from zeromesh.kernels.chunked_cross_entropy import (
    HeadPass,
    LogitChange,
    check_shapes,
    chunk_for,
    local_columns,
    require_targets_in,
)


class TokenScores(NamedTuple):
    """What is known of each token, all of one shape, and 0 or False without a target. Only the first two have gradients."""

    log_probs: Tensor
    entropy: Tensor
    """In nats."""
    log_squares: Tensor
    """The logarithm of the sum of squared probabilities."""
    mean_logits: Tensor
    is_top: Tensor
    """Boolean: whether the target is the first of the most probable tokens."""


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    scale: float = 1.0,
    cap: float = 0.0,
    chunk_tokens: int | None = None,
    sizes: Sequence[int] = (),
    exchange: Exchange | None = None,
) -> TokenScores:
    """Score each target under the softmax of `hidden @ weight.T + bias`, with logits of one chunk of tokens in memory at a time.

    Args:
        hidden: [..., hidden], floating point, such as [batch, tokens, hidden].
        weight: [vocab, hidden], same dtype.
        targets: [...], integers in [0, vocab), or -100, where scores and their gradients are 0.
        bias: [vocab], same dtype, or None.
        temperature: a positive number by which the logits are divided, after `scale` and `cap`.
        scale, cap: the change that the model makes to each logit (`LogitChange`).
        chunk_tokens: number of tokens whose logits are in memory together; None: what needs the least memory.
        sizes, exchange: the ranks over which the vocabulary is divided, as in `chunked_cross_entropy`.

    Returns scores of the shape of `targets`, float32, or float64 for float64 inputs. Backward may run several times. Raises
    `LayoutError` for shapes, dtypes and numbers that do not fit, and `DataError` for a target outside of the vocabulary.
    """
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    check_shapes(rows, weight, bias, flat, sizes, exchange)
    trained = weight.requires_grad and torch.is_grad_enabled()
    chunk = chunk_for(len(rows), rows.shape[1], rows.dtype, trained=trained) if chunk_tokens is None else chunk_tokens
    if not (targets.shape == hidden.shape[:-1] and temperature > 0 and chunk >= 1):
        raise LayoutError(
            f"targets are {list(targets.shape)} for hidden {list(hidden.shape)}, temperature is {temperature} and chunk_tokens is "
            f"{chunk}; allowed are a target for each hidden state, a temperature above 0, and chunks of at least 1"
        )
    first, vocab = (0, weight.shape[0]) if exchange is None else (sum(sizes[: exchange.index]), sum(sizes))
    require_targets_in(flat, vocab)
    kept = (flat != -100).nonzero().squeeze(1)
    head: Callable[..., _ScoresPass] = partial(
        _ScoresPass,
        rows=None if len(kept) == len(flat) else kept,
        targets=flat[kept].long(),
        seed=1.0,
        chunk_tokens=chunk,
        # A temperature divides what the cap leaves: T of cap * tanh(scale * z / cap) / T is in both of its numbers.
        change=LogitChange(scale=scale / temperature, cap=cap / temperature),
        exchange=exchange,
        first=first,
    )
    found = _ChunkedScores.apply(head, vocab, rows, weight, bias)  # type: ignore[no-untyped-call]
    return TokenScores(*(each.new_zeros(flat.shape).index_copy(0, kept, each).view(targets.shape) for each in found))


@dataclass(eq=False)
class _ScoresPass(HeadPass):
    """An evaluation of a linear head for `token_scores`: without `trained` tensors of the scores, otherwise of their gradients."""

    def _each_block(self, logits: Tensor, rows: slice, visit: Callable[[Tensor, Tensor | None, slice], None]) -> None:
        """Call `visit` with changed logits in the dtype of the softmax, the slope of the change, and their rows."""
        step = self.rows_at_once(logits)
        for start in range(0, len(logits), step):
            part = logits[start : start + step]
            wide = part.to(self.loss_dtype)
            slope = self.change.apply_(wide)
            visit(wide, slope, slice(rows.start + start, rows.start + start + len(part)))
            if any(self.trained) and wide is not part:
                part.copy_(wide)

    def scores(self, vocabulary: int) -> tuple[Tensor, TokenScores]:
        """Return the logarithm of each normalizer, and the scores, all [tokens with a target]."""
        found = self.hidden.new_empty(7, self.tokens, dtype=self.loss_dtype)

        def measure(z: Tensor, _: Tensor | None, rows: slice) -> None:
            here, picked = local_columns(z, self.targets[rows] - self.first)
            chosen, mean = z.gather(1, picked).squeeze(1).masked_fill(~here, 0), z.sum(dim=1)
            largest, top = z.max(dim=1)
            p = z.sub_(largest.unsqueeze(1)).exp()
            total, squares = p.sum(dim=1), p.square().sum(dim=1)
            weighted = p.mul_(z).sum(dim=1)
            found[:, rows] = torch.stack((largest, total, chosen, weighted, squares, mean, top + self.first))

        self.each_chunk(lambda chunk, rows: self._each_block(chunk, rows, measure))
        whole = found.unsqueeze(0)
        if self.exchange is not None:
            whole = self.exchange.all_gather_async(whole, 0).wait()
        # Sums over the ranks' parts of the vocabulary, of which each is relative to its own largest logit.
        largest, of = whole[:, 0].max(dim=0)
        apart = whole[:, 0] - largest
        factor = apart.exp()
        total = (whole[:, 1] * factor).sum(dim=0)
        log_total = total.log()
        weighted = ((whole[:, 3] + apart * whole[:, 1]) * factor).sum(dim=0)
        squares = (whole[:, 4] * factor.square()).sum(dim=0)
        top = whole[:, 6].gather(0, of.unsqueeze(0)).squeeze(0)
        return largest + log_total, TokenScores(
            log_probs=whole[:, 2].sum(dim=0) - largest - log_total,
            entropy=log_total - weighted / total,
            log_squares=squares.log() - 2 * log_total,
            mean_logits=whole[:, 5].sum(dim=0) / vocabulary,
            is_top=top == self.targets,
        )

    def backward(self, log_normalizer: Tensor, entropy: Tensor, by_log_prob: Tensor, by_entropy: Tensor | None) -> None:
        """Compute the gradients from those of the scores, all [tokens with a target]; None: entropies were not used."""

        def differentiate(z: Tensor, slope: Tensor | None, rows: slice) -> None:
            here, picked = local_columns(z, self.targets[rows] - self.first)
            seed = by_log_prob[rows].unsqueeze(1)
            p = z.sub_(log_normalizer[rows].unsqueeze(1)).exp()
            if by_entropy is None:
                z.copy_(p).mul_(-seed)
            else:
                z.add_(entropy[rows].unsqueeze(1)).mul_(by_entropy[rows].unsqueeze(1)).add_(seed).mul_(p).neg_()
            z.scatter_add_(1, picked, seed * here.unsqueeze(1))
            if slope is not None:
                z.mul_(slope)

        self.each_chunk(lambda chunk, rows: self._each_block(chunk, rows, differentiate))


class _ChunkedScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, make: Callable[..., _ScoresPass], vocabulary: int, *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        head = make(*inputs, trained=(False, False, False))
        log_normalizer, scores = head.scores(vocabulary)
        ctx.make = make
        ctx.save_for_backward(*inputs, log_normalizer, scores.entropy)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*scores[2:])
        return tuple(scores)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, by_log_prob: Tensor | None, by_entropy: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        *inputs, log_normalizer, entropy = ctx.saved_tensors
        head = ctx.make(*inputs, trained=tuple(ctx.needs_input_grad[2:]))
        head.backward(
            log_normalizer, entropy, torch.zeros_like(entropy) if by_log_prob is None else by_log_prob, by_entropy
        )
        return None, None, head.grad_hidden, head.grad_weight, head.grad_bias
