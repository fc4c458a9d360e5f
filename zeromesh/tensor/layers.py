"""Layers divided over the ranks of the tensor axis. Parameters are ordinary local tensors under the names of the whole ones.
An output embedding is a ColumnParallelLinear whose outputs, the logits, are gathered; training computes the loss of local ones.
Embeddings and experts keep their modules, whose forwards are wrapped. `transposed` layers keep weights as `[in, out]` (GPT-2)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.comm.activation_collectives import Exchange
from zeromesh.errors import ConfigError
from zeromesh.intervals import Interval
from zeromesh.kernels.cpu_matmul import linear
from zeromesh.tensor import autograd_collectives
from zeromesh.tensor.dropout_rng import ShardedRandomness
from zeromesh.tensor.plan.attention_split import is_transposed
from zeromesh.tensor.shared_input import SequenceShares, SharedInput, sequence_dim

_Forward = Callable[..., Tensor]


class _Linear(nn.Module):
    """A layer with the `weight` and `bias` parameters of the linear layer that it replaces, which hold this rank's features."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.transposed = bool(is_transposed(linear))
        self.weight: nn.Parameter = linear.weight
        self.register_parameter("bias", linear.bias)
        self.bias: nn.Parameter | None
        self.in_features, self.out_features = self.weight.shape if self.transposed else self.weight.shape[::-1]


class ColumnParallelLinear(_Linear):
    """Computes some outputs of a linear layer from its whole input, `source`, which other layers share. `randomness` is switched to
    this rank's state afterwards. `sizes` are the outputs of each rank, if these are all-gathered. `rows` are this rank's outputs of
    a weight that all ranks have whole, with a partial gradient: for fused projections whose key and value heads ranks share."""

    def __init__(
        self,
        linear: Any,
        source: SharedInput,
        *,
        randomness: ShardedRandomness | None = None,
        sizes: Sequence[int] | None = None,
        rows: Sequence[Interval] | None = None,
    ) -> None:
        super().__init__(linear)
        self.exchange, self.sizes = source.exchange, sizes
        self._source, self._number = source, len(source.members)
        source.members.append(self)
        self._randomness, self._rows = randomness, rows

    def forward(self, x: Tensor) -> Tensor:
        """Project `x` [..., in] to [..., this rank's outputs], or to [..., all outputs] if they are gathered."""
        if self._rows is None:
            out = self._source.project(x, self._number)
        else:
            taken, _ = self._source.take(x)
            weight = self.weight.t() if self.transposed else self.weight
            whole = (weight,) if self.bias is None else (weight, self.bias)
            own = [torch.cat([each[rows.start : rows.end] for rows in self._rows]) for each in whole]
            out = linear(taken, own[0], own[1] if own[1:] else None)
        if self.sizes is not None:
            return autograd_collectives.all_gather(out, -1, self.exchange, self.sizes)
        if self._randomness is not None and self.training:
            self._randomness.enter()
        return out


class RowParallelLinear(_Linear):
    """Computes a linear layer from this rank's inputs; outputs are summed over the ranks, and the bias is added to the sum. With
    `shares` outputs are reduce-scattered along the sequence. Before, `randomness` is switched to the state shared by ranks, and
    `source`, the input of the column layers, is dropped. `splits` are the inputs of each rank, if all ranks have the whole."""

    def __init__(
        self,
        linear: Any,
        exchange: Exchange,
        *,
        shares: SequenceShares | None = None,
        randomness: ShardedRandomness | None = None,
        source: SharedInput | None = None,
        splits: Sequence[int] | None = None,
    ) -> None:
        super().__init__(linear)
        self._exchange, self._shares, self._randomness = exchange, shares, randomness
        self._source, self._splits = source, splits

    def forward(self, x: Tensor) -> Tensor:
        """Project `x` [..., this rank's inputs] to [..., out], or to this rank's share of the sequence."""
        if self._splits is not None:
            x = autograd_collectives.split(x, -1, self._exchange, self._splits)
        if self._source is not None:
            self._source.forget()
        if self._randomness is not None:
            self._randomness.leave()
        weight = self.weight.t() if self.transposed else self.weight
        if x.shape[-1] != weight.shape[1]:
            raise ConfigError(
                f"a layer that is divided by its inputs has {weight.shape[1]} of them here, and gets {x.shape[-1]}: what comes "
                "before it is divided otherwise; give rules that fit together (parallel.plan), or set parallel.tensor: 1"
            )
        out = linear(x, weight, None)
        if self._shares is not None and self._shares.active:
            return autograd_collectives.reduce_scatter_output(out, self.bias, sequence_dim(out), self._exchange)
        return autograd_collectives.all_reduce_output(out, self.bias, self._exchange)


def lookup_sharded_embedding(lookup: _Forward, tokens: Interval, exchange: Exchange, ids: Tensor) -> Tensor:
    """Return the embeddings `[*ids.shape, features]` of integer `ids`. `lookup` returns rows of this rank, which has those of the
    token ids in `tokens`, by id minus `tokens.start`."""
    foreign = (ids < tokens.start) | (ids >= tokens.end)
    vectors = lookup((ids - tokens.start).masked_fill(foreign, 0))
    return autograd_collectives.all_reduce_output(vectors.masked_fill(foreign.unsqueeze(-1), 0), None, exchange)


def run_sharded_experts(forward: _Forward, exchange: Exchange, /, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Run experts whose intermediate features are divided over the ranks; all-reduces this rank's summand, which `forward` returns.
    The arguments and their gradients are whole on every rank."""

    def copied(value: Tensor) -> Tensor:
        tracked = isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
        return autograd_collectives.copy_input(value, exchange) if tracked else value

    out = forward(*map(copied, args), **{name: copied(value) for name, value in kwargs.items()})
    return autograd_collectives.all_reduce_output(out, None, exchange)


def norms_over_ranks(layer: Any, adapter: str, among: Exchange, weight: Tensor, *, scaling: float, **_: Any) -> Tensor:
    """Return the norms [out] of the rows of `weight` [out, this rank's inputs] plus the product of an adapter of PEFT's `layer`,
    over the inputs of all ranks, without gradients (DoRA: Liu et al. 2024, arXiv:2402.09353)."""
    down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    whole = (weight.t() if layer.fan_in_fan_out else weight) + scaling * (up @ down).to(weight.dtype)
    return among.all_reduce_async(whole.detach().square().sum(1)).wait().sqrt()


def project_latent(forward: _Forward, latent: int, exchange: Exchange, x: Tensor) -> Tensor:
    """Return the outputs [..., latent + rotary] of an undivided projection `forward` (multi-head latent attention, DeepSeek-V2).
    Column layers sum the gradient of the latent outputs over ranks; that of the rotary outputs is summed here."""
    out = forward(x)
    return torch.cat((out[..., :latent], autograd_collectives.copy_input(out[..., latent:], exchange)), dim=-1)
