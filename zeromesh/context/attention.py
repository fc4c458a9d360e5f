"""Exact attention within documents, by torch's fused kernels: memory grows with tokens, and work with the documents' squares.

Queries see keys in rectangles and triangles (`documents.blocks`). Each is one call of a kernel that also returns the log-sum-exp of
its scores, by which results over several parts of keys are merged: with `l_i` of part i and `l = log sum exp l_i`, the result is
`sum exp(l_i - l) out_i` (FlashAttention-2, arXiv 2307.08691; Ring Attention, arXiv 2310.01889). Backward of a part takes the merged
result and log-sum-exp, which gives its share of the gradients. A sink is one more score without a value."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from zeromesh.context.documents import Block, Documents, Part, Pattern, blocks

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
    queries: Sequence[tuple[int, int]] | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of `query` `[rows, heads, tokens, width]` over `key` `[rows, key heads, length, width]` and `value` `[rows,
    key heads, length, value width]` of whole sequences on the CPU, `[rows, heads, tokens, value width]`; heads are a multiple of
    key heads. `documents` say which tokens are together, and `pattern` what a query sees of its document.

    `queries` are the intervals of the sequence whose tokens `query` has, one after another; None: all. `scale` multiplies scores,
    `width ** -0.5` by default. `sinks` `[heads]` are scores that each query also has, without a value. Sums are in fp32 at least.
    Queries that see nothing get zeros. Raises `ValueError` for shapes that do not fit together."""
    intervals = ((0, documents.length),) if queries is None else tuple(queries)
    tokens = sum(end - begin for begin, end in intervals)
    wanted = (documents.rows, tokens, documents.length)
    if (given := (query.shape[0], query.shape[2], key.shape[2])) != wanted:
        raise ValueError(f"{given} rows, queries and keys were given, and documents and intervals have {wanted}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    width, values = query.shape[-1], value.shape[-1]
    # The kernel wants values as wide as keys; zeros change no score and no other value.
    if values < width:
        value = pad(value, (0, width - values))
    elif width < values:
        query, key = pad(query, (0, values - width)), pad(key, (0, values - width))
    plan = blocks(documents, pattern, intervals)
    out: Tensor = _Attention.apply(query, key, value, sinks, plan, pattern, scale)  # type: ignore[no-untyped-call]
    return out[..., :values]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        plan: tuple[Block, ...],
        pattern: Pattern,
        scale: float,
    ) -> Tensor:
        rows, heads, tokens, width = query.shape
        out = query.new_zeros(rows, tokens, heads, width).transpose(1, 2)  # as the projection behind it reads it
        sums = query.new_full((rows, heads, tokens), float("-inf"), dtype=_wide(query))
        for block in plan:
            own, asked = _slices(block)
            results = [
                _forward(
                    query[own, :, asked],
                    key[own, :, part.begin : part.end],
                    value[own, :, part.begin : part.end],
                    is_causal=part.causal,
                    attn_mask=_mask(block, part, pattern, query),
                    scale=scale,
                )
                for part in block.parts
            ]
            result, total = results[0]
            if sinks is not None or len(results) > 1:
                logs = [each for _, each in results]
                logs += [] if sinks is None else [sinks.to(total.dtype).view(1, -1, 1).expand_as(total)]
                total = torch.stack(logs).logsumexp(0)
                weighted = [each * (log - total).exp().unsqueeze(-1) for each, log in results]
                result = torch.stack(weighted).sum(0) if len(weighted) > 1 else weighted[0]
            out[own, :, asked] = result
            sums[own, :, asked] = total
        ctx.save_for_backward(query, key, value, sinks, out, sums)
        ctx.given = plan, pattern, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        query, key, value, sinks, out, sums = ctx.saved_tensors
        plan, pattern, scale = ctx.given
        to_query, to_key, to_value = (torch.zeros_like(each, dtype=_wide(each)) for each in (query, key, value))
        for block in plan:
            own, asked = _slices(block)
            for part in block.parts:
                seen = slice(part.begin, part.end)
                found = _backward(
                    gradient[own, :, asked],
                    query[own, :, asked],
                    key[own, :, seen],
                    value[own, :, seen],
                    out[own, :, asked],
                    sums[own, :, asked],
                    0.0,
                    part.causal,
                    attn_mask=_mask(block, part, pattern, query),
                    scale=scale,
                )
                to_query[own, :, asked] += found[0]
                to_key[own, :, seen] += found[1]
                to_value[own, :, seen] += found[2]
        to_sinks = None
        if sinks is not None:
            # A sink's probability takes away from the others, whose mean gradient is `sum(gradient * out)`.
            mean = (gradient * out).sum(-1, dtype=sums.dtype)
            share = (sinks.to(sums.dtype).view(1, -1, 1) - sums).exp()
            to_sinks = -torch.where(sums.isfinite(), share * mean, 0.0).sum((0, 2)).to(sinks.dtype)
        found = to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype)
        return *found, to_sinks, None, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _slices(block: Block) -> tuple[slice, slice]:
    return slice(block.first, block.last), slice(block.at, block.at + block.end - block.begin)


def _mask(block: Block, part: Part, pattern: Pattern, like: Tensor) -> Tensor | None:
    """Return 0 for what queries see of a band and -inf for the rest, in the dtype of queries; the kernel takes no booleans."""
    if not part.band:
        return None
    distance = torch.arange(part.begin, part.end)[None] - torch.arange(block.begin, block.end)[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= False if pattern.left is None else distance < -pattern.left
    hidden |= False if pattern.right is None else distance > pattern.right
    return like.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
