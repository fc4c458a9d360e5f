"""Attention within documents equals a plain softmax with a mask, in float64, gradients included."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.tensor_sizes import LargestTensor
from zeromesh.context import documents as documents_module
from zeromesh.context.attention import document_attention
from zeromesh.context.documents import Documents, Pattern, Span

LENGTH = 80


def whole(rows: int, length: int) -> Documents:
    spans = tuple(Span(row, 0, length, length) for row in range(rows))
    return Documents(rows=rows, length=length, spans=spans)


WHOLE = whole(2, LENGTH)
DOCUMENTS = Documents(
    rows=3,
    length=LENGTH,
    spans=(Span(0, 0, 17, 17), Span(0, 17, 73, LENGTH), Span(1, 5, 40, 40), Span(1, 40, 41, LENGTH), Span(2, 0, LENGTH, LENGTH)),
)
PATTERNS = {
    "causal": Pattern(),
    "window": Pattern(left=9),
    "wide window": Pattern(left=LENGTH),
    "chunks": Pattern(chunk=30),
    "both ways": Pattern(right=None),
    "window both ways": Pattern(left=12, right=12),
    "window in chunks": Pattern(left=7, chunk=32),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(documents_module, "_TILE", 16)
    documents_module.blocks.cache_clear()
    yield
    documents_module.blocks.cache_clear()


def seen(documents: Documents, pattern: Pattern) -> Tensor:
    """What each query sees, `[rows, length, length]`, from the definition."""
    found = torch.zeros(documents.rows, documents.length, documents.length, dtype=torch.bool)
    for row, begin, end, stop in documents.spans:
        queries, keys = torch.arange(begin, stop)[:, None], torch.arange(begin, end)[None]
        allowed = torch.ones(stop - begin, end - begin, dtype=torch.bool)
        if pattern.left is not None:
            allowed &= keys >= queries - pattern.left
        if pattern.right is not None:
            allowed &= keys <= queries + pattern.right
        if pattern.chunk is not None:
            allowed &= (keys - begin) // pattern.chunk == (queries - begin) // pattern.chunk
        found[row, begin:stop, begin:end] = allowed
    return found


def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    blind = ~mask.any(-1)[:, None, :, None]
    weights = scores.masked_fill(blind, 0.0).softmax(-1)[..., : key.shape[2]].masked_fill(blind, 0.0)
    return weights @ value


def made(documents: Documents, key_heads: int, width: int, values: int, *, sinks: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    rows, length = documents.rows, documents.length
    shapes = [(rows, 4, length, width), (rows, key_heads, length, width), (rows, key_heads, length, values)]
    shapes += [(4,)] if sinks else []
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("documents", [WHOLE, DOCUMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize(
    ("key_heads", "width", "values", "sinks"), [(4, 8, 8, False), (1, 8, 8, True), (2, 12, 8, False), (2, 8, 12, True)]
)
@pytest.mark.parametrize("spans", [None, ((0, 9), (30, 42), (60, 80))], ids=["all", "intervals"])
def test_attention_is_the_plain_softmax(
    pattern: Pattern, documents: Documents, key_heads: int, width: int, values: int, sinks: bool, spans: Any
) -> None:
    inputs = made(documents, key_heads, width, values, sinks=sinks)
    query, key, value, sink = (*inputs, None)[:4]
    chosen = torch.cat([torch.arange(*each) for each in spans or ((0, LENGTH),)])
    wanted = plain(query[:, :, chosen], key, value, seen(documents, pattern)[:, chosen], 0.3, sink)
    shares = None if spans is None else OneShare(spans, chosen, [key.detach(), value.detach()] * 2)
    parts = (each[:, :, chosen] for each in (query, key, value))
    found = document_attention(*parts, documents, pattern, scale=0.3, sinks=sink, shares=shares)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(wanted, inputs, gradient), strict=True
    ):
        if theirs.dim() > 1:  # The keys of others get their gradients there.
            ours, theirs = ours[:, :, chosen], theirs[:, :, chosen]
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@dataclass
class OneShare:
    """The tokens `chosen` of sequences, and what a gather of keys and values gives, in forward and in backward."""

    own: Any
    chosen: Tensor
    whole: list[Tensor]

    def spans(self, length: int) -> Any:
        return self.own

    def gather(self, share: Tensor, dim: int) -> Tensor:
        assert torch.equal(share, self.whole[0][:, :, self.chosen])
        return self.whole.pop(0)

    def scatter_sum(self, whole: Tensor, dim: int) -> Tensor:
        return whole[:, :, self.chosen]


def test_memory_and_work_are_those_of_documents() -> None:
    """64 documents of 64 tokens need no scores of 4096 x 4096, and no calls beside one a document."""
    lengths = range(0, 4096, 64)
    documents = Documents(rows=1, length=4096, spans=tuple(Span(0, begin, begin + 64, begin + 64) for begin in lengths))
    plan = documents_module.blocks(documents, Pattern(), ((0, 4096),))
    assert [sum(part.end - part.begin for part in block.parts) for block in plan] == [64] * 64
    query = torch.randn(1, 2, 4096, 8, requires_grad=True)
    with LargestTensor() as largest:
        document_attention(query, query, query, documents, Pattern(left=9)).sum().backward()
    assert largest.nbytes <= query.nbytes


def test_shapes_that_do_not_fit_are_refused() -> None:
    query = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match=r"\(1, 8, 8\) rows, queries and keys were given"):
        document_attention(query, query, query, whole(1, 9))
