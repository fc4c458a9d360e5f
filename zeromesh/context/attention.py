"""Exact attention within documents, by torch's fused kernels: memory grows with tokens, and work with the documents' squares.

Queries see parts of keys (`documents.blocks`). For each a kernel is called that also returns the log-sum-exp `l_i` of its scores:
with `l = log sum exp l_i` the result is `sum exp(l_i - l) out_i` (FlashAttention-2, arXiv 2307.08691; Ring Attention, arXiv
2310.01889). Backward of a part takes the merged result and `l`, and gives its share. A sink is one more score, without a value."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeromesh.context.documents import Block, Documents, Part, Pattern, blocks
from zeromesh.context.shares import Context

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

CAUSAL = Pattern()


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    pattern: Pattern = CAUSAL,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    shares: Context | None = None,
) -> Tensor:
    """Return attention of `query` `[rows, heads, tokens, width]` over `key` `[rows, key heads, length, width]` and `value` `[rows,
    key heads, length, value width]` of whole sequences on the CPU, `[rows, heads, tokens, value width]`; heads are a multiple of
    key heads. `documents` say which tokens are together, and `pattern` what a query sees of its document.

    With `shares`, `query`, `key` and `value` are of this rank's tokens, and keys and values of all are gathered, in backward again.
    `scale` multiplies scores, `width ** -0.5` by default. `sinks` `[heads]` are scores that each query also has, without a value.
    Sums are in fp32 at least. Queries that see nothing get zeros. Raises `ValueError` for shapes that do not fit together."""
    intervals = ((0, documents.length),) if shares is None else shares.spans(documents.length)
    tokens = sum(end - begin for begin, end in intervals)
    wanted = (documents.rows, tokens, tokens)
    if (given := (query.shape[0], query.shape[2], key.shape[2])) != wanted:
        raise ValueError(f"{given} rows, queries and keys were given, and documents and shares have {wanted}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    plan = blocks(documents, pattern, intervals)
    out: Tensor = _Attention.apply(plan, scale, shares, sinks, query, key, value)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Sequence[Block], scale: float, shares: Context | None, sinks: Tensor | None, *given: Tensor
    ) -> Tensor:
        query, key, value = _whole(given, shares)
        rows, heads, tokens, width = query.shape
        wide = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(rows, tokens, heads, width).transpose(1, 2)  # as the projection behind it reads it
        sums = query.new_full((rows, heads, tokens), float("-inf"), dtype=wide)
        for block in plan:
            own, asked = _slices(block)
            results: list[tuple[Tensor, Tensor]] = []
            for part in block.parts:
                inputs = query[own, :, asked], *(each[own, :, part.begin : part.end] for each in (key, value))
                mask = _mask(block, part, query)
                results.append(_forward(*inputs, is_causal=part.causal, attn_mask=mask, scale=scale))
            result, total = results[0]
            if sinks is not None or len(results) > 1:
                logs = [log for _, log in results]
                logs += [] if sinks is None else [sinks.to(wide).view(1, -1, 1).expand_as(total)]
                total = torch.stack(logs).logsumexp(0)
                result = reduce(torch.add, (each * (log - total).exp().unsqueeze(-1) for each, log in results))
            out[own, :, asked] = result
            sums[own, :, asked] = total
        ctx.save_for_backward(*given, sinks, out, sums)
        ctx.plan, ctx.scale, ctx.shares = plan, scale, shares
        return out[..., : given[2].shape[-1]]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *given, sinks, out, sums = ctx.saved_tensors
        query, key, value = _whole(given, ctx.shares)
        gradient = _padded(gradients[0], out.shape[-1])
        totals = [torch.zeros_like(each, dtype=sums.dtype) for each in (query, key, value)]
        for block in ctx.plan:
            own, asked = _slices(block)
            of_queries = [each[own, :, asked] for each in (gradient, query, out, sums)]
            for part in block.parts:
                seen = slice(part.begin, part.end)
                keys, values = key[own, :, seen], value[own, :, seen]
                inputs = *of_queries[:2], keys, values, *of_queries[2:]
                found = _backward(*inputs, 0.0, part.causal, attn_mask=_mask(block, part, query), scale=ctx.scale)
                for total, each, tokens in zip(totals, found, (asked, seen, seen), strict=True):
                    total[own, :, tokens] += each
        to_sinks = None
        if sinks is not None:
            # A sink's probability takes away from the others, whose mean gradient is `sum(gradient * out)`.
            mean = (gradient * out).sum(-1, dtype=sums.dtype)
            share = (sinks.to(sums.dtype).view(1, -1, 1) - sums).exp()
            to_sinks = -torch.where(sums.isfinite(), share * mean, 0.0).sum((0, 2)).to(sinks.dtype)
        found = [total[..., : before.shape[-1]] for total, before in zip(totals, given, strict=True)]
        if ctx.shares is not None:
            found[1:] = [ctx.shares.scatter_sum(each, 2) for each in found[1:]]
        return None, None, None, to_sinks, *(each.to(query.dtype) for each in found)


def _whole(given: Sequence[Tensor], shares: Context | None) -> tuple[Tensor, ...]:
    """Return queries, and whole keys and values. The kernel wants values as wide as keys; zeros change no score or other value."""
    query, key, value = given
    width = max(query.shape[-1], value.shape[-1])
    if shares is not None:
        key, value = shares.gather(key, 2), shares.gather(value, 2)
    return _padded(query, width), _padded(key, width), _padded(value, width)


def _padded(tensor: Tensor, width: int) -> Tensor:
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))


def _slices(block: Block) -> tuple[slice, slice]:
    return slice(block.first, block.last), slice(block.at, block.at + block.end - block.begin)


def _mask(block: Block, part: Part, like: Tensor) -> Tensor | None:
    """Return 0 for what queries see of a band and -inf for the rest, in the dtype of queries; the kernel takes no booleans."""
    if part.band is None:
        return None
    distance = torch.arange(part.begin, part.end)[None] - torch.arange(block.begin, block.end)[:, None]
    hidden = (distance < -part.band[0]) | (distance > part.band[1])
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
