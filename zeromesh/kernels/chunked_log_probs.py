"""Log-probabilities and entropies of single tokens over a linear head without holding all logits.

The gradients of single values are known in backward only, so forward keeps three numbers for each token, its largest logit, the sum
of exponentials and its entropy, and backward computes the logits a second time (as in Wijmans et al. 2024, arXiv:2411.09009). With
p the softmax of the logits z, t the target and H the entropy, in nats, d log p_t / dz_j = [j = t] - p_j and
dH / dz_j = -p_j (log p_j + H). Forward goes by chunks of tokens. Backward goes by chunks of the vocabulary, whose gradients of the
weight are each a single product: in 16 bits, a sum over chunks of tokens would need the weight's gradient in fp32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeromesh.comm.activation_collectives import Exchange
from zeromesh.errors import LayoutError
from zeromesh.kernels import chunked_cross_entropy as cross_entropy
from zeromesh.kernels.chunked_cross_entropy import UNCHANGED, HeadPass, LogitChange

_CHUNK_TOKENS = 256  # of forward; a chunk of backward has at most twice as many logits


class TokenScores(NamedTuple):
    """The scores of tokens, tensors of one shape, 0 without a target. Only the first two have gradients. The names are TRL's."""

    log_probs: Tensor
    entropy: Tensor
    """In nats."""
    log_sum_sq_probs: Tensor
    """The logarithm of the sum of squared probabilities."""
    mean_logits: Tensor
    is_top1: Tensor
    """1 if the target is the first of the most probable tokens, else 0."""


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    change: LogitChange = UNCHANGED,
    sizes: Sequence[int] = (),
    exchange: Exchange | None = None,
) -> TokenScores:
    """Score each target under the softmax of `hidden @ weight.T + bias`, with logits of one chunk in memory at a time.

    Args:
        hidden: [tokens, hidden], floating point.
        weight: [vocab, hidden], same dtype.
        bias: [vocab], same dtype, or None.
        targets: [tokens], integers in [0, vocab), or -100, where scores and their gradients are 0.
        temperature: a positive number by which the logits are divided, after `change`.
        change, sizes, exchange: those of `chunked_cross_entropy`.

    Returns scores [tokens], float32, or float64 for float64 inputs. Backward may run several times. Raises `LayoutError` for shapes
    and dtypes that do not fit and a bad temperature, and `DataError` for a target outside of the vocabulary.
    """
    cross_entropy.check_shapes(hidden, weight, bias, targets, sizes, exchange)
    if not temperature > 0:
        raise LayoutError(f"temperature is {temperature}, and must be above 0")
    first, vocab = (0, weight.shape[0]) if exchange is None else (sum(sizes[: exchange.index]), sum(sizes))
    cross_entropy.require_targets_in(targets, vocab)
    kept = (targets != -100).nonzero().squeeze(1)
    # A temperature divides what the cap leaves: T of cap * tanh(scale * z / cap) / T is in both of its numbers.
    change = LogitChange(scale=change.scale / temperature, cap=change.cap / temperature)
    settings: dict[str, Any] = {"targets": targets[kept].long(), "chunk_tokens": _CHUNK_TOKENS, "seed": 1.0}
    settings |= {"change": change, "first": first}
    rows = hidden if len(kept) == len(targets) else hidden.index_select(0, kept)
    found = _ChunkedScores.apply(settings, exchange, vocab, rows, weight, bias)  # type: ignore[no-untyped-call]
    return TokenScores(*(each.new_zeros(len(targets)).index_copy(0, kept, each) for each in found))


class _ScoresPass(HeadPass):
    """An evaluation of a linear head for `token_scores`."""

    def statistics(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return `[7, tokens]`: what `HeadPass` returns, then the sums of exp(logit - m) (logit - m), of exp(2 (logit - m)) and of
        the logits, and the token with the largest one."""
        found = logits.new_empty(7, len(logits), dtype=self.loss_dtype)
        for rows, z in self.row_parts(logits, keep=False):
            here, picked = cross_entropy.local_columns(z, targets[rows] - self.first)
            chosen, mean = z.gather(1, picked).squeeze(1).masked_fill_(~here, 0), z.sum(dim=1)
            largest, top = z.max(dim=1)
            p = z.sub_(largest.unsqueeze(1)).exp()
            total, squares, weighted = p.sum(dim=1), p.square().sum(dim=1), z.mul_(p).sum(dim=1)
            found[:, rows] = torch.stack((largest, total, chosen, weighted, squares, mean, top + self.first))
        return found

    def scores(self, vocabulary: int) -> tuple[TokenScores, Tensor]:
        """Return the scores [tokens], and what `differentiate` takes as `normal`."""
        own = self.hidden.new_empty(7, self.tokens, dtype=self.loss_dtype)

        def measure(logits: Tensor, rows: slice) -> None:
            own[:, rows] = self.statistics(logits, self.targets[rows])

        self.each_chunk(measure)
        everyone = self.everyone(own)
        largest, total, log_probs = cross_entropy.normalized(everyone)
        apart = everyone[:, 0] - largest
        factor = apart.exp()
        weighted = ((everyone[:, 3] + apart * everyone[:, 1]) * factor).sum(dim=0)
        entropy = total.log() - weighted / total
        squares = (everyone[:, 4] * factor.square()).sum(dim=0).log() - 2 * total.log()
        top = everyone[:, 6].gather(0, everyone[:, :1].argmax(dim=0)).squeeze(0)
        mean, is_top = everyone[:, 5].sum(dim=0) / vocabulary, (top == self.targets).to(self.loss_dtype)
        return TokenScores(log_probs, entropy, squares, mean, is_top), torch.stack((largest, total, entropy))

    def backward(self, normal: Tensor, by_log_prob: Tensor, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs from those of the scores, [tokens]; None: entropies were not used."""
        self.each_chunk(lambda logits, _: self.differentiate(logits, self.targets, normal, by_log_prob, by_entropy))
        return self.grad_hidden, self.grad_weight, self.grad_bias


class _ChunkedScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: dict[str, Any], exchange: Exchange | None, vocab: int, *inputs: Any) -> TokenScores:
        head = _ScoresPass(*inputs, **settings, exchange=exchange, trained=(False,) * 3)
        scores, normal = head.scores(vocab)
        ctx.settings, ctx.exchange = settings, exchange
        ctx.save_for_backward(*inputs, normal)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*scores[2:])
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_score: Tensor | None, by_entropy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, normal = ctx.saved_tensors
        seed = torch.zeros_like(normal[0]) if by_score is None else by_score
        settings: dict[str, Any] = {**ctx.settings, "exchange": None, "chunk_tokens": len(hidden)}
        settings["trained"] = trained = ctx.needs_input_grad[3:]
        # Gradients of hidden states are sums over chunks.
        inputs = ((hidden, normal.dtype), (weight, weight.dtype), (bias, weight.dtype))
        grads = [torch.zeros_like(t, dtype=d) if need else None for (t, d), need in zip(inputs, trained, strict=True)]
        step = max(1, 2 * ctx.settings["chunk_tokens"] * len(weight) // max(1, len(hidden)))
        for start in range(0, len(weight), step):
            block = slice(start, start + step)
            settings["first"] = ctx.settings["first"] + start
            head = _ScoresPass(hidden, weight[block], None if bias is None else bias[block], **settings)
            found = head.backward(normal, seed, by_entropy)
            for total, rows, grad in zip(grads, (slice(None), block, block), found, strict=True):
                if total is not None and grad is not None:
                    total[rows] += grad
        if grads[0] is not None:
            grads[0] = grads[0].to(hidden.dtype)
            if ctx.exchange is not None:
                grads[0] = ctx.exchange.all_reduce_async(grads[0]).wait()
        return None, None, None, *grads
