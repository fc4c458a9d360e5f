"""The documents of a batch are read from its positions and its padding."""

import pytest
import torch

from zeromesh.context.documents import Documents, Span
from zeromesh.errors import DataError


@pytest.mark.parametrize(
    ("positions", "mask", "spans"),
    [
        ([[0, 1, 2, 0, 1]], None, [(0, 0, 3, 3), (0, 3, 5, 5)]),
        ([[0, 1, 2, 3, 4], [0, 0, 1, 7, 8]], None, [(0, 0, 5, 5), (1, 0, 1, 1), (1, 1, 5, 5)]),
        ([[0, 1, 44, 45, 45], [0, 2, 4, 6, 8]], [[1] * 5] * 2, [(0, 0, 5, 5), (1, 0, 5, 5)]),
        ([[7, 8, 9, 3, 9], [5, 6, 0, 0, 5]], None, [(0, 0, 3, 3), (0, 3, 5, 5), (1, 0, 2, 2), (1, 2, 3, 3), (1, 3, 5, 5)]),
        ([[0, 3, 1, 1, 2]], [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]], [(0, 2, 3, 3), (0, 3, 5, 5), (1, 0, 2, 2), (1, 2, 4, 5)]),
        ([[0, 1, 0, 1, 2]], [[1, 1, 1, 1, 0]], [(0, 0, 2, 2), (0, 2, 4, 5)]),
        ([[0, 1, 0, 0, 1]], [[1, 1, 0, 1, 1]], [(0, 0, 2, 3), (0, 3, 5, 5)]),
        ([[1, 1, 0, 1, 2]], [[0, 0, 1, 1, 1]], [(0, 2, 5, 5)]),
        ([[0, 1, 2, 3, 4]], [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [(0, 1, 4, 5), (1, 0, 5, 5)]),
        ([[0, 1, 2]], [[0, 0, 0]], []),
        ([[0, 1, 2]], [[1, 0, 1]], None),
        ([[0, 1, 2, 3]], [[1, 0, 1, 1]], None),
        ([[0, 1, 1, 2]], [[1, 1, 0, 1]], None),
    ],
)
def test_documents_begin_where_positions_restart(
    positions: list[list[int]], mask: list[list[int]] | None, spans: list[tuple[int, ...]] | None
) -> None:
    found = Documents.of(torch.tensor(positions), None if mask is None else torch.tensor(mask))
    assert (None if found is None else list(found.spans)) == spans


def test_a_row_of_positions_stands_for_all() -> None:
    found = Documents.of(torch.tensor([[0, 1, 0, 1]]), torch.ones(2, 4))
    assert found is not None
    assert found.packed
    numbers, places = found.tokens(torch.device("cpu"))
    assert numbers.tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert places.tolist() == [[0, 1, 0, 1]] * 2
    alone = Documents.of(torch.arange(4).expand(2, 4))
    assert alone is not None
    assert not alone.packed


@pytest.mark.parametrize("span", [Span(1, 0, 2, 2), Span(0, 1, 1, 2), Span(0, 1, 3, 2), Span(0, 1, 3, 9)])
def test_spans_out_of_order_are_refused(span: Span) -> None:
    with pytest.raises(ValueError, match="out of order in 1 rows of 8 tokens"):
        Documents(rows=1, length=8, spans=(span,))


def test_padding_inside_of_a_packed_document_is_refused() -> None:
    positions, mask = torch.tensor([[0, 1, 0, 1, 2, 3]]), torch.tensor([[1, 1, 1, 0, 1, 1]])
    with pytest.raises(DataError, match=r"padding \(attention_mask\) inside of a document"):
        Documents.of(positions, mask)
    mask[0, 3], positions[0, 4:] = 0, torch.tensor([0, 1])  # It begins after the padding.
    found = Documents.of(positions, mask)
    assert found is not None
    assert found.spans == ((0, 0, 2, 2), (0, 2, 3, 4), (0, 4, 6, 6))
