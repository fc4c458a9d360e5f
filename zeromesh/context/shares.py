"""Shares of sequences: what each rank of the context axis has of them, and how ranks exchange it.

A sequence is cut into 2 C equal pieces for C ranks, and rank r has the pieces r and 2 C - 1 - r, so that under a causal mask all
ranks have equally many pairs of tokens (zigzag, as in Llama 3: Grattafiori et al. 2024, 3.3.2). Attention needs the keys and values
of all. Either they are gathered, and in backward again, so that they exist for one layer at a time; or ranks swap their shares of
all heads for whole sequences of some heads (Ulysses: Jacobs et al. 2023)."""

from dataclasses import dataclass

import torch

from zeromesh.comm.activation_collectives import Exchange
from zeromesh.errors import LayoutError
from zeromesh.settings.keys import ContextMethod
from zeromesh.tensor.autograd_collectives import apply_collective


@dataclass(frozen=True, kw_only=True, eq=False)
class Context:
    """The ranks that share sequences. Tensors are shares along a dim, or whole, in order; lengths are multiples of 2 x ranks."""

    exchange: Exchange
    method: ContextMethod = "auto"
    heads_first: bool = False
    """True if `auto` takes heads wherever ranks can divide them, since the device has fused kernels for whole sequences alone."""
    sequence: int = 1  # The number of tensor ranks that divide a share further between their layers.

    @property
    def multiple(self) -> int:
        """The number of which lengths of sequences are multiples."""
        return 2 * self.exchange.size * self.sequence

    def spans(self, length: int) -> tuple[tuple[int, int], ...]:
        """Return begin and end of the two pieces that this rank has of a sequence of `length` tokens."""
        ranks, index = self.exchange.size, self.exchange.index
        piece = length // (2 * ranks)
        return tuple((number * piece, (number + 1) * piece) for number in (index, 2 * ranks - 1 - index))

    def share(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's share of a tensor along `dim`, a copy."""
        return torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in self.spans(whole.shape[dim])], dim)

    def gather(self, share: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the whole tensor of which each rank gives its share along `dim`; nothing is recorded for autograd."""
        return self._ordered(self.exchange.all_gather_async(share, dim).wait(), dim)

    def scatter_sum(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum the ranks' tensors, and return this rank's share of the sum along `dim`."""
        return self.exchange.reduce_scatter_async(self._dealt(whole, dim), dim).wait()

    def gather_with_gradient(self, share: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the whole tensor; the gradient of a share is the sum of what all ranks make of it."""
        return apply_collective(share, None, lambda x: self.gather(x, dim), lambda grad: self.scatter_sum(grad, dim))

    def to_heads(self, share: torch.Tensor) -> torch.Tensor:
        """Return `[batch, heads / ranks, sequence, width]` for this rank's share of all heads, `[batch, heads, share, width]`.
        Raises `LayoutError` if the ranks cannot have equally many heads."""
        return apply_collective(share, None, self._to_heads, self._to_shares)

    def to_shares(self, heads: torch.Tensor) -> torch.Tensor:
        """Undo `to_heads`."""
        return apply_collective(heads, None, self._to_shares, self._to_heads)

    def method_for(self, heads: int, key_heads: int) -> ContextMethod:
        """Return the method for attention with these numbers of heads of queries and of keys; auto: that receives fewer bytes."""
        ranks = self.exchange.size
        if self.method != "auto" or heads % ranks:
            return "gather" if self.method == "auto" else self.method
        # Key heads that do not divide are repeated for all heads of queries.
        moved = key_heads if key_heads % ranks == 0 else heads
        return "heads" if self.heads_first or key_heads * ranks > heads + moved else "gather"

    def _pieces(self, tensor: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        count, length = 2 * self.exchange.size, tensor.shape[dim]
        if length % count:
            raise LayoutError(f"a sequence of {length} tokens cannot be cut into {count} equal pieces")
        return tensor.chunk(count, dim)

    def _ordered(self, shares: torch.Tensor, dim: int) -> torch.Tensor:
        """Put pieces of shares that are one behind the other in the order of the sequence."""
        pieces = self._pieces(shares, dim)
        return torch.cat(pieces[::2] + pieces[::-2], dim)

    def _dealt(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Undo `_ordered`."""
        pieces = self._pieces(whole, dim)
        return torch.cat([each for pair in zip(pieces, pieces[::-1], strict=True) for each in pair][: len(pieces)], dim)

    def _to_heads(self, share: torch.Tensor) -> torch.Tensor:
        return self._ordered(torch.cat(list(self.exchange.all_to_all_async(share, 1).wait()), 2), 2)

    def _to_shares(self, heads: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.exchange.all_to_all_async(self._dealt(heads, 2), 2).wait()), 1)
