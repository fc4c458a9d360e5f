"""Prompts: what lines of a file may be, and that dealing them out loses none and loads ranks evenly."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeromesh.errors import DataError
from zeromesh.trainer.inference.prompts import deal, parse_prompts, read_prompts


def test_lines_of_all_kinds() -> None:
    content = b'{"text": "Once"}\n\n{"input_ids": [1, 2], "id": 7}\r\n{"messages": [{"role": "user", "content": "Hi"}]}'
    assert parse_prompts(content, "p") == ["Once", [1, 2], [{"role": "user", "content": "Hi"}]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "p.jsonl, line 2: it is no JSON"),
        (b"[1]", "p.jsonl, line 2: a prompt is an object with one of text, messages, input_ids; it has none of them"),
        (b'{"text": "a", "input_ids": [1]}', "line 2: a prompt is an object with one of .*; it has text and input_ids"),
        (b'{"text": 3}', "line 2: text is text, not 3"),
        (b'{"text": ""}', 'line 2: text is text of at least one letter, not ""'),
        (b'{"input_ids": [1, -1]}', "line 2: input_ids is a list of token ids, .*, not .1, -1."),
        (b'{"input_ids": [true]}', "line 2: input_ids is a list of token ids"),
        (b'{"messages": ["Hi"]}', "line 2: messages is a list of messages"),
        (b"\xff", "line 2: it is no JSON"),
    ],
)
def test_a_line_that_is_no_prompt(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"text": "Once"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        read_prompts(path)


def test_a_file_without_prompts(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(b"\n \n")
    with pytest.raises(DataError, match=r"empty.jsonl has no prompt; give a line for each"):
        read_prompts(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "none.jsonl")


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.integers(1, 5), st.integers(1, 7))
def test_prompts_are_dealt_out_once_and_evenly(lengths: list[int], ranks: int, batch: int) -> None:
    rounds = deal(lengths, ranks=ranks, batch=batch)
    assert sorted(number for dealt in rounds for own in dealt for number in own) == list(range(len(lengths)))
    assert len(rounds) == -(-len(lengths) // (ranks * batch))
    assert all(len(dealt) == ranks and max(map(len, dealt)) <= batch for dealt in rounds)
    loads = [sum(lengths[number] for dealt in rounds for number in dealt[rank]) for rank in range(ranks)]
    # Whoever has the least is given the next, which is no longer than the ones before.
    assert max(loads) - min(loads) <= 2 * max(lengths)
    shortest = [min(lengths[number] for own in dealt for number in own) for dealt in rounds]
    longest = [max(lengths[number] for own in dealt for number in own) for dealt in rounds]
    assert all(before >= after for before, after in zip(shortest, longest[1:], strict=False))
