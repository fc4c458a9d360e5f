"""Layers divided over the ranks of the tensor axis, and the input that several column layers share.

Parameters are ordinary local tensors under the names of the whole ones. An output embedding is a ColumnParallelLinear whose
outputs, the logits, are gathered; training computes the loss of local ones. Embeddings and experts keep their modules, whose
forwards are wrapped. `transposed` layers keep weights as `[in, out]` (GPT-2).

Queries, keys and values of an attention share an input, and so do gate and up projection of an MLP. Its gradient is a sum over the
ranks and these layers, which takes a single all-reduce. Each layer's backward computes only the gradient of its input; after the
last layer the all-reduce starts, and the gradients of the weights are computed meanwhile."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from zeromesh.comm.activation_collectives import Exchange
from zeromesh.errors import ConfigError, LayoutError, PhaseError
from zeromesh.intervals import Interval
from zeromesh.kernels.cpu_matmul import linear, linear_grad_bias, linear_grad_weight, linear_grad_x
from zeromesh.tensor import autograd_collectives
from zeromesh.tensor.autograd_collectives import Gradients, share_of_dim, uncompiled
from zeromesh.tensor.dropout_rng import ShardedRandomness
from zeromesh.tensor.plan.attention_split import is_transposed

_Forward = Callable[..., Tensor]


class SequenceShares:
    """Sequence parallelism of a model: decides whether its residual stream is divided into equal shares of the sequence: always
    while gradients are recorded, else (`generate` takes single tokens) if its length is a multiple of the ranks. Blocks on shares
    draw from `randomness` in training; None: the model has no dropout."""

    def __init__(self, exchange: Exchange, randomness: ShardedRandomness | None = None) -> None:
        self.exchange, self.randomness = exchange, randomness
        self._shared = True

    @property
    def active(self) -> bool:
        return self._shared or torch.is_grad_enabled()

    def decide(self, length: int) -> bool:
        """Decide whether a sequence of `length` that enters the blocks is divided, and return the decision. Raises `LayoutError`
        when it cannot be divided while gradients are recorded."""
        self._shared = length % self.exchange.size == 0
        if not self._shared and torch.is_grad_enabled():
            why = f"a sequence of {length} tokens cannot be shared out to {self.exchange.size} ranks"
            raise LayoutError(f"{why}; pad sequences to a multiple of {self.exchange.size}, or set parallel.sequence: false")
        return self._shared


@dataclass(kw_only=True, slots=True)
class _InputRead:
    """One input tensor that layers share, from their forwards to the end of backward, with the gradients not yet computed."""

    source: "SharedInput"
    mode: str
    """`sum`: the input is whole on all ranks; `gather`: it is a share, gathered here; `gathered`: the caller has gathered it."""
    needed: bool
    gradients: dict[int, Tensor] = field(default_factory=dict)
    """The output gradients of layers whose weight gradients are not computed yet, by the layer's position in `members`."""
    total: Tensor | None = None  # the gradient of the input, summed over the layers that backward has passed


@dataclass(eq=False, slots=True)
class SharedInput:
    """Passes the same input to all layers that read it."""

    exchange: Exchange
    shares: SequenceShares | None = None
    """The state of sequence parallelism if the input is a share of the sequence, which is gathered here; None: it is whole, or the
    caller gathers it (see `gathered`), as the code around the layers reads the whole input's shape."""
    members: list[Any] = field(default_factory=list)
    """The layers that read the input, each with its `weight`, which is `[in, out]` if the layer is `transposed`."""
    _latest: tuple[tuple[Tensor, int, bool], tuple[Tensor, _InputRead]] | None = None
    """The latest input, its version counter, and True if gradients were recorded; the tensor in its place, and its `_InputRead`."""
    _unread: int = 0
    gathered: tuple[Tensor, Tensor] | None = None
    """The whole input that layers read until `forget`, set by a caller that has gathered it, and this rank's share of it."""
    _narrow: tuple[Tensor, Tensor] | None = None

    def narrow_for_shape(self, x: Tensor, features: int) -> Tensor:
        """Return the first `features` of `x` for code that reads only its shape; layers given it read all of `x` until `forget`."""
        self._narrow = (x.detach()[..., :features], x)
        return self._narrow[0]

    @uncompiled
    def take(self, x: Tensor) -> tuple[Tensor, _InputRead]:
        """Return the tensor that a layer reads in place of `x`, the same for all layers that read `x`; shares are gathered."""
        if self._narrow is not None and self._narrow[0] is x:
            x = self._narrow[1]
        now = (x, 0 if x.is_inference() else x._version, torch.is_grad_enabled())
        if self._latest is None or self._latest[0][0] is not x or self._latest[0][1:] != now[1:]:
            mode, share = "sum", x
            if self.gathered is not None and self.gathered[0] is x:
                mode, share = "gathered", self.gathered[1]
            elif self.shares is not None and self.shares.active:
                mode = "gather"
            weights: list[Tensor] = [member.weight for member in self.members]
            reading = _InputRead(source=self, mode=mode, needed=x.requires_grad)
            output = _Take.apply(x, share.detach(), reading, *weights)  # type: ignore[no-untyped-call]
            self._latest, self._unread = (now, (output, reading)), len(self.members)
        handed_out = self._latest[1]
        self._unread -= 1
        if not self._unread:  # All layers have read the input, to which this may be the last reference.
            self._latest = None
        return handed_out

    def forget(self) -> None:
        """Drop the references to the latest input, even if some layers have not read it."""
        self._latest = self.gathered = self._narrow = None

    @uncompiled
    def project(self, x: Tensor, number: int) -> Tensor:
        """Compute layer `number`'s `x @ weight.T + bias`, or `x @ weight + bias` if it is transposed."""
        (output, reading), member = self.take(x), self.members[number]
        if not torch.is_grad_enabled():
            return linear(output, member.weight.t() if member.transposed else member.weight, member.bias)
        return cast(Tensor, _Project.apply(output, member.weight.detach(), member.bias, reading, number))  # type: ignore[no-untyped-call]


def sequence_dim(x: Tensor) -> int:
    """Return the dim of `x` that is divided into shares: 1 of [batch, sequence, hidden], 0 of [tokens, hidden]."""
    return 1 if x.dim() > 2 else 0


class _Take(torch.autograd.Function):
    """Sums the gradient of the input over the ranks in backward, and computes those of the weights meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Tensor, reading: _InputRead, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.reading = reading
        # The share is gathered again in backward, so that no rank keeps the whole.
        ctx.save_for_backward(share)
        if reading.mode == "gather":
            return reading.source.exchange.all_gather_async(x, sequence_dim(x)).wait()
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> Gradients:
        reading: _InputRead = ctx.reading
        exchange, members, (x,) = reading.source.exchange, reading.source.members, ctx.saved_tensors
        summed, reading.total = reading.total, None
        if summed is not None:  # `grad` is of uses outside of `_Project`, or None.
            grad = summed if grad is None else summed.add_(grad)
        wanted = sorted(reading.gradients)
        shared, dim = reading.mode != "sum", sequence_dim(x)
        whole = exchange.all_gather_async(x, dim) if shared and wanted else None
        total = None
        if grad is not None and ctx.needs_input_grad[0]:
            total = exchange.reduce_scatter_async(grad, dim) if shared else exchange.all_reduce_async(grad)
        if whole is not None:
            x = whole.wait()
        of_weights: list[Tensor | None] = [None] * len(members)
        for number in wanted:
            pair = reading.gradients[number], x
            of_weights[number] = linear_grad_weight(*(pair[::-1] if members[number].transposed else pair))
        reading.gradients.clear()
        of_x = None if total is None else total.wait()
        if of_x is not None and grad is not None and reading.mode == "gathered":
            # The caller's all-gather takes only this rank's share of this gradient, so the rest stays uninitialized.
            place = torch.empty_like(grad, memory_format=torch.contiguous_format)
            start, length = share_of_dim(grad, 1, exchange)
            place.narrow(1, start, length).copy_(of_x)
            of_x = place
        return of_x, None, None, *of_weights


class _Project(torch.autograd.Function):
    """A linear layer, whose backward adds to the input's gradient and leaves the weight's gradient to the backward of `_Take`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, reading: _InputRead, number: int) -> Tensor:
        ctx.reading, ctx.number = reading, number
        ctx.save_for_backward(weight)
        return linear(x, weight.t() if reading.source.members[number].transposed else weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        reading: _InputRead = ctx.reading
        if ctx.number in reading.gradients:
            raise PhaseError("backward ran through a column layer twice before it reached the layer's input")
        (weight,), member = ctx.saved_tensors, reading.source.members[ctx.number]
        weight = weight.t() if member.transposed else weight
        if reading.needed and reading.total is not None and grad.dtype.itemsize >= 4:
            reading.total.view(-1, reading.total.shape[-1]).addmm_(grad.reshape(-1, grad.shape[-1]), weight)
        elif reading.needed:
            own = linear_grad_x(grad, weight)
            reading.total = own if reading.total is None else reading.total.add_(own)
        if member.weight.requires_grad:
            reading.gradients[ctx.number] = grad
        return None, None, linear_grad_bias(grad) if ctx.needs_input_grad[2] else None, None, None


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
            why = f"a layer that is divided by its inputs has {weight.shape[1]} of them here, and gets {x.shape[-1]}"
            cure = "give rules that fit together (parallel.plan), or set parallel.tensor: 1"
            raise ConfigError(f"{why}: what comes before it is divided otherwise; {cure}")
        out = linear(x, weight, None)
        if self._shares is not None and self._shares.active:
            return autograd_collectives.reduce_scatter_output(out, self.bias, sequence_dim(out), self._exchange)
        return autograd_collectives.all_reduce_output(out, self.bias, self._exchange)


def lookup_sharded_embedding(lookup: _Forward, tokens: Interval, exchange: Exchange, ids: Tensor) -> Tensor:
    """Return embeddings `[*ids.shape, features]` of integer `ids`. `lookup` has this rank's rows, by id - `tokens.start`."""
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
