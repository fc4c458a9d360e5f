"""Cross entropy, and log-probabilities and entropies of single tokens, over a linear head without holding all logits in fp32.

The gradient of a sum of losses is known with the logits, up to a factor that the caller knows (one over the number of targets,
times the loss scale). So forward overwrites each chunk's logits with their gradient, softmax - onehot, multiplies it into the
gradients of hidden states and weight, and drops it; backward returns the stored gradients, and nothing is computed twice (fused
linear cross entropy: Liger Kernel, Hsu et al. 2024, arXiv:2410.10989). If the vocabulary is divided over ranks, they exchange three
numbers for every target: the largest local logit m, the sum of exp(logit - m), and the target's logit on its rank (as in
Megatron-LM, arXiv:1909.08053).

The gradients of single values are known in backward only, so forward keeps three numbers for each token, its largest logit, the sum
of exponentials and its entropy, and backward computes the logits a second time (as in Wijmans et al. 2024, arXiv:2411.09009). With
p the softmax of the logits z, t the target and H the entropy, in nats, d log p_t / dz_j = [j = t] - p_j and dH / dz_j = -p_j (log
p_j + H). Forward goes by chunks of tokens. Backward goes by chunks of the vocabulary, whose gradients of the weight are each a
single product: in 16 bits, a sum over chunks of tokens would need the weight's gradient in fp32."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeromesh.comm.activation_collectives import Exchange, Pending
from zeromesh.errors import DataError, LayoutError, PhaseError
from zeromesh.kernels.cpu_matmul import linear, product_dtype, row_blocks
from zeromesh.offload.accelerator import on_accelerator

_ROW_ELEMENTS = 2**18  # of the softmax's scratch on CPU: 1 MiB in fp32, within the second-level cache
_ROW_ELEMENTS_ACCELERATOR = 2**24  # larger on accelerators, to amortize kernel launches
_CHUNK_TOKENS = 256  # of forward; a chunk of backward has at most twice as many logits


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitChange:
    """A change that a model makes to each logit z before its loss: `scale * z` (Cohere, Granite), or unless `cap` is 0,
    `cap * tanh(scale * z / cap)` (Gemma 2 and 3, arXiv:2408.00118)."""

    scale: float = 1.0
    cap: float = 0.0

    def __str__(self) -> str:
        cap = f", capped at {self.cap:g}" if self.cap else ""
        return f"a factor of {self.scale:g}{cap}"

    def close_to(self, other: "LogitChange") -> bool:
        """Return True if both are equal up to rounding to 16 bits."""
        return math.isclose(self.scale, other.scale, rel_tol=1e-2) and math.isclose(self.cap, other.cap, rel_tol=1e-2)

    def apply_(self, logits: Tensor) -> Tensor | None:
        """Change `logits` in place. Returns the derivative of the change over `scale`, of the same shape; None where it is 1."""
        if not self.cap:
            if self.scale != 1:
                logits.mul_(self.scale)
            return None
        logits.mul_(self.scale / self.cap).tanh_()
        slope = logits.square().neg_().add_(1)
        logits.mul_(self.cap)
        return slope


UNCHANGED = LogitChange()


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    seed: float,
    chunk_tokens: int | None = None,
    change: LogitChange = UNCHANGED,
    count: int | None = None,
    sizes: Sequence[int] = (),
    exchange: Exchange | None = None,
) -> Tensor:
    """Sum the cross entropy losses of `hidden @ weight.T + bias`, changed by `change`, over targets other than -100.

    Args:
        hidden: [tokens, hidden], floating point; its dtype is the compute dtype.
        weight: [vocab, hidden], same dtype.
        bias: [vocab], same dtype, or None.
        targets: [tokens], integers in [0, vocab) or -100.
        seed: the gradient of the result expected in backward; another one costs one more pass over the gradients.
        chunk_tokens: number of tokens per chunk, whose logits are in memory together; None: what needs the least memory.
        change: the transformation of each logit before the softmax, in the dtype of the softmax.
        count: number of targets other than -100, if the caller knows it and has checked that they are in the vocabulary; this
            saves a synchronization of host and device.
        sizes: with an `exchange`, number of vocabulary tokens on each of its ranks. Then `weight` and `bias` are this rank's
            part; `hidden`, `targets`, the result and the gradient of `hidden` are equal on all ranks.

    Returns a scalar: fp32, or float64 for float64 inputs. The softmax runs in that dtype, matrix products in the compute dtype (or
    a wider, faster one), and the weight's gradient is summed over chunks in fp32. If no gradient is needed, nothing is kept.
    Raises `LayoutError` for shapes and dtypes that do not fit, a bad `seed` or chunk, and `DataError` for other targets.
    """
    first, vocab = _check_shapes(hidden, weight, bias, targets, sizes, exchange)
    if chunk_tokens is None:
        chunk_tokens = chunk_for(len(hidden), hidden.shape[1], hidden.dtype, trained=weight.requires_grad)
    if not (math.isfinite(seed) and chunk_tokens >= 1):
        raise LayoutError(f"seed must be finite and chunk_tokens at least 1; got {seed} and {chunk_tokens}")
    trained = tuple(t is not None and t.requires_grad and torch.is_grad_enabled() for t in (hidden, weight, bias))
    counted = targets != -100
    if count is None or not on_accelerator(targets):
        require_targets_in(targets, vocab)
        kept = counted.nonzero().squeeze(1)
    else:
        kept = torch.sort(counted, descending=True, stable=True).indices[:count]
    if len(kept) < len(targets):
        hidden, targets = hidden.index_select(0, kept), targets[kept]
    seed = seed or 1.0  # A microbatch of weight 0 has seed 0, by which backward could not divide.
    settings: dict[str, Any] = {"seed": seed, "chunk_tokens": chunk_tokens, "trained": trained, "change": change}
    settings |= {"exchange": exchange, "first": first}
    head: Callable[..., HeadPass] = partial(HeadPass, targets=targets.long(), **settings)
    if not any(trained):
        return head(hidden.detach(), weight.detach(), bias).run()
    return _ChunkedCrossEntropy.apply(head, seed, hidden, weight, bias)  # type: ignore[no-untyped-call, no-any-return]


def _check_shapes(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, sizes: Sequence[int], among: Exchange | None
) -> tuple[int, int]:
    """Return the first token of the vocabulary that is here, and their number on all ranks. Raises `LayoutError` for shapes and
    dtypes that do not fit each other or the ranks' `sizes`."""
    fits = hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    fits = fits and targets.shape == hidden.shape[:1] and (bias is None or bias.shape == weight.shape[:1])
    if not fits:
        shapes = [None if t is None else tuple(t.shape) for t in (hidden, weight, bias, targets)]
        why = "expected hidden [tokens, hidden], weight [vocab, hidden], bias [vocab] or None, targets [tokens]"
        raise LayoutError(f"{why}; got {shapes}")
    if among is not None and (len(sizes) != among.size or sizes[among.index] != weight.shape[0]):
        held = f"rank {among.index} of {among.size} has {weight.shape[0]} tokens of the vocabulary"
        raise LayoutError(f"{held}, where sizes are {list(sizes)}")
    dtypes = {t.dtype for t in (hidden, weight, bias) if t is not None}
    if len(dtypes) != 1 or not hidden.is_floating_point():
        raise LayoutError(f"hidden, weight and bias must share one floating dtype; got {sorted(map(str, dtypes))}")
    return (0, weight.shape[0]) if among is None else (sum(sizes[: among.index]), sum(sizes))


def require_targets_in(targets: Tensor, vocab: int) -> None:
    """Raise `DataError` for a target that is neither -100 nor in [0, vocab)."""
    bound = targets[targets != -100]
    if bound.numel() and not 0 <= int(bound.min()) <= int(bound.max()) < vocab:
        why = f"targets lie in [{int(bound.min())}, {int(bound.max())}], but the head knows ids in [0"
        raise DataError(f"{why}, {vocab}); check the tokenizer against the model's vocab_size")


def chunk_for(tokens: int, hidden: int, dtype: torch.dtype, *, trained: bool = True) -> int:
    """Choose the tokens per chunk that need the least memory, for elements of [tokens, hidden] x [vocab, hidden]. In fp32 and
    wider, 256 are enough for fast matrix products. In a 16-bit dtype several chunks need an fp32 sum of the gradient (4 vocab x
    hidden bytes) of a weight that is `trained`, and all logits (2 vocab x tokens bytes) are cheaper up to 2 x hidden tokens."""
    several = dtype.itemsize >= 4 or not trained or tokens > 2 * hidden + 256
    return max(1, min(tokens, 256) if several else tokens)


@dataclass(eq=False)
class HeadPass:
    """One evaluation of a linear head: the summed loss and, if needed, its gradients times `seed`. `targets` are int64. With an
    `exchange`, the head holds tokens from `first` on, and a chunk's gradient of hidden states is summed over ranks in the next."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    _: KW_ONLY
    targets: Tensor
    seed: float
    chunk_tokens: int
    trained: tuple[bool, ...]
    change: LogitChange
    exchange: Exchange | None
    first: int

    def __post_init__(self) -> None:
        weight = self.weight
        # The constant factor of the change's derivative; the rest differs from logit to logit.
        self.seed *= self.change.scale
        (self.tokens, width), self.vocab = self.hidden.shape, weight.shape[0]
        self.chunk = max(1, min(self.chunk_tokens, self.tokens))
        self.loss_dtype = torch.float64 if weight.dtype is torch.float64 else torch.float32
        self.matmul_dtype = product_dtype(weight.dtype, weight.device.type)
        wide = self.matmul_dtype != weight.dtype
        self.blocks = row_blocks(self.vocab, max(self.chunk, width)) if wide else [slice(0, self.vocab)]
        self.grad_hidden = torch.empty_like(self.hidden) if self.trained[0] else None
        # One chunk's product is rounded once; a sum of several needs the wide dtype.
        dtype = self.loss_dtype if self.chunk < self.tokens else weight.dtype
        self.grad_weight = weight.new_empty(weight.shape, dtype=dtype) if self.trained[1] else None
        self.grad_bias = weight.new_zeros(self.vocab, dtype=self.loss_dtype) if self.trained[2] else None

    def run(self) -> Tensor:
        """Return the sum of the losses; `grad_hidden`, `grad_weight` and `grad_bias` then hold the gradients."""
        losses = self.hidden.new_empty(self.tokens, dtype=self.loss_dtype)
        softmax = self.softmax if self.exchange is None else self.sharded_softmax
        self.each_chunk(lambda chunk, rows: softmax(chunk, self.targets[rows], losses[rows]))
        return losses.sum()

    def each_chunk(self, visit: Callable[[Tensor, slice], None]) -> None:
        """Call `visit(logits, rows)` with each chunk's logits and its rows of `targets`. What it leaves in place of the logits is
        taken for their gradient over `seed`, of which the gradients are computed that are needed."""
        sums: list[tuple[Tensor, Pending]] = []
        for start in range(0, self.tokens, self.chunk):
            end = min(start + self.chunk, self.tokens)
            chunk = linear(self.hidden[start:end], self.weight, self.bias)
            visit(chunk, slice(start, end))
            if any(self.trained):
                self.gradients(chunk, start, end)
            del chunk  # The next one takes its memory.
            if self.exchange is not None and self.grad_hidden is not None:
                part = self.grad_hidden[start:end]
                sums.append((part, self.exchange.all_reduce_async(part)))
            running = 1 if end < self.tokens else 0  # The sum of a chunk runs while the next one is computed.
            while len(sums) > running:
                part, pending = sums.pop(0)
                part.copy_(pending.wait())
        dtype = self.hidden.dtype
        if self.grad_bias is not None:
            self.grad_bias = self.grad_bias.mul_(self.seed).to(dtype)
        if self.grad_weight is not None:
            self.grad_weight = self.grad_weight.zero_() if self.tokens == 0 else self.grad_weight
            self.grad_weight = self.grad_weight.to(dtype)

    def row_parts(self, logits: Tensor, *, keep: bool) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows that fit into a cache, and their changed logits in the dtype of the softmax. What is left in them, times the
        slope of the change, is put in place of the logits, unless these are to `keep`."""
        most = _ROW_ELEMENTS_ACCELERATOR if on_accelerator(logits) else _ROW_ELEMENTS
        step = min(max(1, most // self.vocab), len(logits))
        alone = logits.dtype == self.loss_dtype and not keep
        scratch = None if alone else logits.new_empty(step, self.vocab, dtype=self.loss_dtype)
        for start in range(0, len(logits), step):
            rows = slice(start, min(start + step, len(logits)))
            part = logits[rows]
            wide = part if scratch is None else scratch[: len(part)].copy_(part)
            slope = self.change.apply_(wide)
            yield rows, wide
            if slope is not None and not keep:
                wide.mul_(slope)
            if wide is not part and not keep:
                part.copy_(wide)

    def softmax(self, logits: Tensor, targets: Tensor, losses: Tensor) -> None:
        """Write the losses; if needed, overwrite `logits` by their gradient over `seed`: (softmax - onehot) times the slope."""
        for rows, z in self.row_parts(logits, keep=not any(self.trained)):
            picked = targets[rows].unsqueeze(1)
            z.sub_(z.amax(dim=1, keepdim=True))
            chosen = z.gather(1, picked)
            total = z.exp_().sum(dim=1, keepdim=True)
            losses[rows] = (total.log() - chosen).squeeze(1)
            if any(self.trained):
                z.div_(total).scatter_add_(1, picked, torch.full_like(chosen, -1.0))

    def sharded_softmax(self, logits: Tensor, targets: Tensor, losses: Tensor) -> None:
        """Do as `softmax` where the vocabulary is divided over ranks."""
        largest, total, log_probs = normalized(self.everyone(self.statistics(logits, targets)))
        torch.neg(log_probs, out=losses)
        if any(self.trained):
            self.differentiate(logits, targets, torch.stack((largest, total)), torch.full_like(losses, -1.0))

    def statistics(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return `[3, tokens]` of this rank's logits: the largest one m, the sum of exp(logit - m), the target's logit or 0. The
        logits are kept: rounding both exp(logit - m) and the softmax to 16 bits would round twice."""
        found = logits.new_empty(3, len(logits), dtype=self.loss_dtype)
        for rows, z in self.row_parts(logits, keep=True):
            here, picked = local_columns(z, targets[rows] - self.first)
            chosen, largest = z.gather(1, picked).squeeze(1).masked_fill_(~here, 0), z.amax(dim=1)
            total = z.sub_(largest.unsqueeze(1)).exp_().sum(dim=1)
            found[:, rows] = torch.stack((largest, total, chosen))
        return found

    def everyone(self, own: Tensor) -> Tensor:
        """Return `[ranks, statistics, tokens]` of statistics `[statistics, tokens]`."""
        own = own.unsqueeze(0)
        return own if self.exchange is None else self.exchange.all_gather_async(own, 0).wait()

    def differentiate(
        self, logits: Tensor, targets: Tensor, normal: Tensor, by_log_prob: Tensor, by_entropy: Tensor | None = None
    ) -> None:
        """Overwrite `logits` by their gradient, from those of log-probabilities and entropies, [tokens]. `normal` has the largest
        logit, the sum of exp(logit - m) and, for gradients of entropies, these."""
        for rows, z in self.row_parts(logits, keep=False):
            here, picked = local_columns(z, targets[rows] - self.first)
            largest, total, *entropy = normal[:, rows].unsqueeze(2)
            seed = by_log_prob[rows].unsqueeze(1)
            z.sub_(largest)
            if by_entropy is None:
                z.exp_().div_(total).mul_(-seed)
            else:
                p = z.exp().div_(total)
                z.add_(entropy[0] - total.log()).mul_(by_entropy[rows].unsqueeze(1)).add_(seed).mul_(p).neg_()
            z.scatter_add_(1, picked, seed * here.unsqueeze(1))

    def gradients(self, dlogits: Tensor, start: int, end: int) -> None:
        """Multiply a chunk's gradient of the logits into those of hidden states, weight and bias."""
        hidden = self.hidden[start:end].to(self.matmul_dtype)
        first = start == 0
        grad_hidden = None if self.grad_hidden is None else self.grad_hidden[start:end]
        wide = grad_hidden
        if grad_hidden is not None and grad_hidden.dtype != self.matmul_dtype:
            wide = torch.empty_like(hidden)
        for number, block in enumerate(self.blocks):
            part = dlogits[:, block].to(self.matmul_dtype)
            if wide is not None:
                wide.addmm_(part, self.weight[block].to(self.matmul_dtype), beta=float(number > 0), alpha=self.seed)
            if self.grad_weight is not None:
                out, factor = self.grad_weight[block], part.t()
                if out.dtype == factor.dtype:
                    out.addmm_(factor, hidden, beta=0.0 if first else 1.0, alpha=self.seed)
                elif first:
                    out.copy_(torch.mm(factor, hidden)).mul_(self.seed)
                else:
                    out.add_(torch.mm(factor, hidden), alpha=self.seed)
            if self.grad_bias is not None:
                self.grad_bias[block] += part.sum(dim=0, dtype=self.loss_dtype)
        if grad_hidden is not None and wide is not None and wide is not grad_hidden:
            grad_hidden.copy_(wide)


def local_columns(part: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of the targets `local` [rows] that have a column in `part`, and a valid column index for each, `[rows, 1]`."""
    return (local >= 0) & (local < part.shape[1]), local.clamp(0, part.shape[1] - 1).unsqueeze(1)


def normalized(everyone: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit m, the sum of exp(logit - m) and the log-probability of each target, [tokens], from the ranks'
    statistics, of which each is relative to its own largest logit."""
    largest = everyone[:, 0].amax(dim=0)
    total = (everyone[:, 1] * (everyone[:, 0] - largest).exp()).sum(dim=0)
    return largest, total, everyone[:, 2].sum(dim=0) - largest - total.log()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., HeadPass], seed: float, *inputs: Tensor | None) -> Tensor:
        head = make(*inputs)
        total = head.run()
        ctx.seed = seed
        ctx.gradients = [head.grad_hidden, head.grad_weight, head.grad_bias]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise PhaseError("backward ran a second time through chunked_cross_entropy, which keeps its gradients once")
        gradients: list[Tensor | None] = ctx.gradients
        ctx.gradients = None
        # Reading the number would make the host wait for an accelerator, so the factor is always applied there. A seed
        # that came through a product and a quotient is off by a rounding error, too small to change the result.
        close = 4 * torch.finfo(grad.dtype).eps
        if on_accelerator(grad) or not math.isclose(float(grad), ctx.seed, rel_tol=close):
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_((grad / ctx.seed).to(torch.promote_types(gradient.dtype, torch.float32)))
        return None, None, *gradients


class TokenScores(NamedTuple):
    """The scores of tokens, tensors of one shape, 0 without a target. Only the first two have gradients. The names are TRL's."""

    log_probs: Tensor
    entropy: Tensor
    """The entropy of each distribution, in nats."""
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
    first, vocab = _check_shapes(hidden, weight, bias, targets, sizes, exchange)
    if not temperature > 0:
        raise LayoutError(f"temperature is {temperature}, and must be above 0")
    require_targets_in(targets, vocab)
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
            here, picked = local_columns(z, targets[rows] - self.first)
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
        largest, total, log_probs = normalized(everyone)
        apart = everyone[:, 0] - largest
        factor = apart.exp()
        entropy = total.log() - ((everyone[:, 3] + apart * everyone[:, 1]) * factor).sum(dim=0) / total
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
        scores, normal = _ScoresPass(*inputs, **settings, exchange=exchange, trained=(False,) * 3).scores(vocab)
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
