"""Cross entropy where each rank has the logits of some tokens of the vocabulary. Logits themselves never travel.

For every target, ranks exchange three numbers: the largest local logit m, the sum of exp(logit - m), and the target's logit where
it is one's own (else 0). (Megatron-LM exchanges maximum, sum and logit one after the other: Shoeybi et al. 2019, arXiv:1909.08053.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from zeromesh.comm.activation_collectives import Exchange, Pending
from zeromesh.errors import LayoutError
from zeromesh.kernels.chunked_cross_entropy import UNCHANGED, HeadPass, LogitChange, summed_loss


def vocab_parallel_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    sizes: Sequence[int],
    exchange: Exchange,
    seed: float,
    chunk_tokens: int,
    change: LogitChange = UNCHANGED,
    ignore_index: int = -100,
) -> torch.Tensor:
    """`chunked_cross_entropy` over a head of which each rank has some tokens.

    Args:
        hidden: [tokens, hidden], the same on all ranks.
        weight: [this rank's part of the vocabulary, hidden], same dtype.
        bias: [this rank's part of the vocabulary], or None.
        targets: [tokens], integers in [0, sum of sizes) or `ignore_index`, the same on all ranks.
        sizes: tokens of the vocabulary on each rank, in order.
        seed, chunk_tokens, change: see `chunked_cross_entropy`.

    Returns the same scalar on all ranks. The gradient of `hidden` is whole on all of them; the sum over the ranks of one chunk goes
    on while the next one is computed. Raises as `chunked_cross_entropy` does.
    """
    if len(sizes) != exchange.size or sizes[exchange.index] != weight.shape[0]:
        raise LayoutError(
            f"rank {exchange.index} of {exchange.size} has {weight.shape[0]} tokens of the vocabulary, where sizes are "
            f"{list(sizes)}"
        )
    return summed_loss(
        hidden,
        weight,
        bias,
        targets,
        run=partial(_PartOfHead, change=change, exchange=exchange, start=sum(sizes[: exchange.index])),
        vocab=sum(sizes),
        seed=seed,
        chunk_tokens=chunk_tokens,
        ignore_index=ignore_index,
    )


def _statistics(part: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """[3, rows]: largest logit m, sum of exp(logit - m), logit of the target or 0.

    `part` [rows, part of the vocabulary] becomes exp(logit - m); `local` [rows]: the target's number here, outside the part
    where it is another rank's.
    """
    own = (local >= 0) & (local < part.shape[1])
    picked = local.clamp(0, part.shape[1] - 1).unsqueeze(1)
    chosen = part.gather(1, picked).squeeze(1).masked_fill_(~own, 0)
    largest = part.amax(dim=1)
    total = part.sub_(largest.unsqueeze(1)).exp_().sum(dim=1)
    return torch.stack((largest, total, chosen))


def _combine(statistics: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses [rows]; largest logit and sum of exp(logit - largest) over all ranks [rows]. `statistics` is this rank's [3, rows]."""
    everyone = exchange.gather(statistics.unsqueeze(0), 0).wait()
    largest = everyone[:, 0].amax(dim=0)
    total = (everyone[:, 1] * (everyone[:, 0] - largest).exp()).sum(dim=0)
    return total.log() + (largest - everyone[:, 2].sum(dim=0)), largest, total


def _subtract_targets(softmax: torch.Tensor, local: torch.Tensor) -> None:
    """softmax - onehot, in place, for the targets that are in this part."""
    own = (local >= 0) & (local < softmax.shape[1])
    picked = local.clamp(0, softmax.shape[1] - 1).unsqueeze(1)
    softmax.scatter_add_(1, picked, own.unsqueeze(1).to(softmax.dtype).neg_())


class _PartOfHead(HeadPass):
    """One evaluation of a head whose tokens from `start` on are here."""

    def __init__(self, *arguments: Any, exchange: Exchange, start: int, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._exchange = exchange
        self._start = start
        self._under_way: tuple[torch.Tensor, Pending] | None = None

    def softmax(self, logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> None:
        """Do as `HeadPass.softmax` does, with maxima and sums over all ranks."""
        local = targets - self._start
        rows = self.rows_at_once(logits)
        # A cap's slope needs the logits again after the exchange.
        alone = logits.dtype == self.wide and not self.change.cap
        scratch = None if alone else logits.new_empty(rows, self.vocab, dtype=self.wide)
        statistics = logits.new_empty(3, logits.shape[0], dtype=self.wide)
        blocks = [slice(start, start + rows) for start in range(0, logits.shape[0], rows)]
        for block in blocks:
            part = logits[block]
            wide = part if scratch is None else scratch[: part.shape[0]].copy_(part)
            self.change.apply_(wide)
            statistics[:, block] = _statistics(wide, local[block])
        found, largest, total = _combine(statistics, self._exchange)
        losses.copy_(found)
        if not self.wants_gradients:
            return
        for block in blocks:
            part = logits[block]
            if scratch is None:
                part.mul_(((statistics[0, block] - largest[block]).exp() / total[block]).unsqueeze(1))
                _subtract_targets(part, local[block])
                continue
            # Logits are still as they were: in 16 bits rounding exp(logit - m) as well as the softmax would round twice.
            wide = scratch[: part.shape[0]].copy_(part)
            slope = self.change.apply_(wide)
            wide.sub_(largest[block].unsqueeze(1)).exp_().div_(total[block].unsqueeze(1))
            _subtract_targets(wide, local[block])
            if slope is not None:
                wide.mul_(slope)
            part.copy_(wide)

    def gradients(self, dlogits: torch.Tensor, start: int, end: int) -> None:
        """Do as the whole head does; then the sum of this chunk's gradient of hidden states begins, and the last one's ends."""
        super().gradients(dlogits, start, end)
        if self.grad_hidden is not None:
            part = self.grad_hidden[start:end]
            begun = (part, self._exchange.sum(part))
            self._arrive()
            self._under_way = begun

    def finish(self) -> None:
        """Wait for the last sum, and bring the gradients into the form of what they belong to."""
        self._arrive()
        super().finish()

    def _arrive(self) -> None:
        if self._under_way is not None:
            part, pending = self._under_way
            part.copy_(pending.wait())
            self._under_way = None
