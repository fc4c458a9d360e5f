"""Messages that count things: one helper says `1 step` and `2 steps`."""

import pytest

from zeromesh.errors import counted, plural, ranks_text


@pytest.mark.parametrize(
    ("count", "noun", "spec", "text"),
    [
        (1, "step", "", "1 step"),
        (0, "rank", "", "0 ranks"),
        (1200, "file", ",", "1,200 files"),
        (2, "batch", "", "2 batches"),
        (3, "process", "", "3 processes"),
        (2, "more directory", "", "2 more directories"),
        (1, "whole step", "", "1 whole step"),
    ],
)
def test_a_noun_goes_with_its_number(count: int, noun: str, spec: str, text: str) -> None:
    assert counted(count, noun, spec) == text
    assert text.endswith(plural(count, noun))


def test_ranks_are_named() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 2]) == "ranks 1, 2"
