"""Prompts: what lines of a file may be, how they are dealt out, and what stands before the first label that counts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trainer_cases import llama
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.generation.evaluation_prompts import BatchGeneration, prompts_of, without_targets
from zeromesh.trainer.generation.library_loop import partition_prompts
from zeromesh.trainer.generation.prompts import parse_prompts, problem_of, read_prompts, split_prompt, tokens_of


def test_lines_of_all_kinds() -> None:
    content = b'{"text": "Once"}\n\n{"input_ids": [1, 2], "id": 7}\r\n{"messages": [{"role": "user", "content": "Hi"}]}'
    lines = parse_prompts(content, "p")
    assert [line.prompt for line in lines] == [
        {"text": "Once"}, {"input_ids": [1, 2]}, {"messages": [{"role": "user", "content": "Hi"}]}
    ]  # fmt: skip
    assert [line.id for line in lines] == [0, 7, 2]
    assert lines[1].where == "p, line 3"


def test_a_line_may_bring_settings() -> None:
    (line,) = parse_prompts(b'{"text": "Once", "temperature": 0.5, "seed": 3}', "p")
    assert split_prompt(line.prompt, "p") == ("Once", {"temperature": 0.5, "seed": 3})


def test_all_bad_lines_are_named_at_once() -> None:
    with pytest.raises(DataError) as caught:
        parse_prompts(b'{"text": 1}\n{"text": "good"}\n' + b"{\n" * 11, "p")
    lines = str(caught.value).splitlines()
    assert len(lines) == 11
    assert lines[0].startswith("p, line 1: ")
    assert lines[-1] == "and 2 more"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2: a prompt is an object with one of text, messages, input_ids; it is not JSON"),
        (b"[1]", r"p.jsonl, line 2: a prompt is an object with one of text, messages, input_ids; it is not a JSON object: \[1\]"),
        (b'{"text": "a", "input_ids": [1]}', "line 2: a prompt has one of .*; it has text and input_ids"),
        (b'{"id": 3}', "line 2: a prompt has one of .*; it has none"),
        (b'{"text": "a", "id": [1]}', "line 2: id is text or a number, not .1."),
        (b'{"text": "a", "seed": -1}', r"line 2: seed is an integer in \[0, 2\*\*63 - 1\], not -1"),
        (b'{"text": "a", "seed": 9223372036854775808}', "line 2: seed is an integer .*, not 9223372036854775808"),
        (b'{"text": "a", "seed": true}', "line 2: seed is an integer .*, not true"),
        (b'{"text": ' + b"7" * 70 + b"}", f"line 2: text is text, not {'7' * 60}\\.\\.\\.$"),
        (b'{"text": ' + b"7" * 60 + b"}", f"line 2: text is text, not {'7' * 60}$"),
        (b'{"input_ids": []}', "line 2: input_ids is a list of token ids"),
        (b'{"messages": [{"content": "Hi"}]}', "line 2: messages is a list of messages"),
        (b'{"text": [1]}', "line 2: text is text, not .1."),
        (b'{"text": 3}', "line 2: text is text, not 3"),
        (b'{"text": ""}', 'line 2: text is text of at least one letter, not ""'),
        (b'{"input_ids": [1, -1]}', "line 2: input_ids is a list of token ids, .*, not .1, -1."),
        (b'{"input_ids": [true]}', "line 2: input_ids is a list of token ids"),
        (b'{"messages": ["Hi"]}', "line 2: messages is a list of messages"),
        (b"\xff", "it is not JSON"),
        (b'{"text": "a\\ud800"}', "line 2: it has half of a character"),
        (b'{"text": "a", "id": "\\udfff"}', "line 2: it has half of a character"),
    ],
)
def test_a_line_that_is_no_prompt(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"text": "Once"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        read_prompts(path)


@pytest.mark.parametrize("count", [1, 10, 11, 12])
def test_at_most_ten_bad_lines_are_shown(count: int) -> None:
    with pytest.raises(DataError) as caught:
        parse_prompts(b"{\n" * count, "p")
    more = {11: ["and 1 more"], 12: ["and 2 more"]}.get(count, [])
    assert str(caught.value).splitlines()[min(count, 10) :] == more


class _Tokens:
    def encode_prompt(self, text: str) -> list[int]:
        if text == "?":
            raise DataError("unknown")
        return list(text.encode())

    def encode_messages(self, messages: Any) -> list[int]:
        return [len(messages)]


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("ab", [97, 98]), ([3, 0], [3, 0]), ((5,), [5]), ([{"role": "user"}, {"role": "user"}], [2])]
)
def test_tokens_of_prompts(prompt: Any, tokens: list[int]) -> None:
    assert (problem_of(prompt), tokens_of(prompt, cast("Any", _Tokens()), "p")) == ("", tokens)


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "message"),
    [
        ("", _Tokens(), "p is text of at least one letter"),
        ([], _Tokens(), "p is text, a list of token ids, or a list of messages, with something in it"),
        ([1, -1], _Tokens(), "p is text, a list of token ids"),
        ([True], _Tokens(), "p is text, a list of token ids"),
        (b"ab", _Tokens(), "p is text, a list of token ids"),
        (3, _Tokens(), "p is text, a list of token ids"),
        ("a", None, "p is text, and the model has no tokenizer"),
        ([{"role": "user"}], None, "p is text, and the model has no tokenizer"),
        ("a\ud800", _Tokens(), "p has half of a character"),
        ([{"role": "a\ud800"}], _Tokens(), "p has half of a character"),
        ("?", _Tokens(), "p: unknown"),
    ],
)
def test_prompts_without_tokens(prompt: Any, tokenizer: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        tokens_of(prompt, tokenizer, "p")


def test_a_file_without_prompts(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(b"\n \n")
    with pytest.raises(DataError, match=r"empty.jsonl has no prompt; give a line for each"):
        read_prompts(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="cannot be read: it is a directory, not a regular file; give a file, or -"):
        read_prompts(tmp_path)


def test_a_link_to_a_file_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "Once"}\r\n')
    (tmp_path / "link.jsonl").symlink_to("p.jsonl")
    assert [line.prompt for line in read_prompts(tmp_path / "link.jsonl")] == [{"text": "Once"}]


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.integers(1, 5), st.integers(1, 7))
def test_prompts_are_dealt_out_once_and_evenly(lengths: list[int], ranks: int, batch: int) -> None:
    rounds = partition_prompts(lengths, ranks=ranks, batch=batch)
    assert sorted(number for dealt in rounds for own in dealt for number in own) == list(range(len(lengths)))
    assert len(rounds) == -(-len(lengths) // (ranks * batch))
    assert all(len(dealt) == ranks and max(map(len, dealt)) <= batch for dealt in rounds)
    loads = [sum(lengths[number] for dealt in rounds for number in dealt[rank]) for rank in range(ranks)]
    # Whoever has the least is given the next, which is no longer than the ones before.
    assert max(loads) - min(loads) <= 2 * max(lengths)
    shortest = [min(lengths[number] for own in dealt for number in own) for dealt in rounds]
    longest = [max(lengths[number] for own in dealt for number in own) for dealt in rounds]
    assert all(before >= after for before, after in zip(shortest, longest[1:], strict=False))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=80), st.integers(1, 5), st.integers(1, 7))
def test_prompts_of_one_length_are_dealt_out_together(lengths: list[int], ranks: int, batch: int) -> None:
    rounds = partition_prompts(lengths, ranks=ranks, batch=batch, one_length=True)
    assert sorted(number for dealt in rounds for own in dealt for number in own) == list(range(len(lengths)))
    assert all(len(dealt) == ranks and max(map(len, dealt)) <= batch for dealt in rounds)
    assert all(len({lengths[number] for number in own}) <= 1 for dealt in rounds for own in dealt)
    assert all(any(dealt) for dealt in rounds)
    whole = partition_prompts(lengths, ranks=ranks, batch=batch, one_length=True, whole_rounds=True)
    assert sorted(number for dealt in whole for own in dealt for number in own) == list(range(len(lengths)))
    assert all(len({lengths[number] for own in dealt for number in own}) == 1 for dealt in whole)
    alike = [10] * (ranks * batch)
    assert len(partition_prompts(alike, ranks=ranks, batch=batch, one_length=True)) == 1


def test_batches_of_a_round() -> None:
    """The longest first, in turn; of one length a whole batch for each rank, the costliest first."""
    lengths = [3, 9, 5, 5, 3, 9, 5]
    assert partition_prompts(lengths, ranks=2, batch=2) == [[[1, 2], [5, 3]], [[6, 4], [0]]]
    alike = partition_prompts(lengths, ranks=2, batch=3, one_length=True)
    assert alike == [[[2, 3], [1]], [[5], [6]], [[0], [4]]]
    whole = partition_prompts(lengths, ranks=2, batch=3, one_length=True, whole_rounds=True)
    assert whole == [[[1], [5]], [[2, 3], [6]], [[0], [4]]]


IDS = torch.tensor([[11, 12, 13, 14], [21, 22, 0, 0], [0, 31, 32, 33]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]])
LABELS = torch.tensor([[-100, -100, -100, 14], [-100, 22, -100, -100], [-100, -100, 32, -100]])


def test_a_prompt_ends_before_the_first_label_that_counts() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS, "position_ids": IDS, "token_type_ids": IDS + 1}
    inputs, lengths = prompts_of(batch, [4, 5, 6], 9)
    assert inputs["input_ids"].tolist() == [[11, 12, 13], [9, 9, 21], [9, 9, 31]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1]]
    assert inputs["token_type_ids"].tolist() == [[12, 13, 14], [0, 0, 22], [0, 0, 32]]
    assert inputs.keys() == {"input_ids", "attention_mask", "token_type_ids"}
    assert lengths.tolist() == [3, 1, 1]


def test_without_labels_all_of_a_sample_is_the_prompt() -> None:
    inputs, lengths = prompts_of({"input_ids": IDS, "attention_mask": MASK}, [4, 5, 6], 9)
    assert inputs["input_ids"].tolist() == [[11, 12, 13, 14], [9, 9, 21, 22], [9, 31, 32, 33]]
    assert lengths.tolist() == [4, 2, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": IDS}, "samples 4, 5, 6 have no prompt"),
        ({"labels": torch.cat([LABELS[:2], IDS[2:]])}, "sample 6 has no prompt"),
        ({"input_ids": IDS.reshape(1, -1)}, r"need one row of input_ids each, \[3, length\]; the batch has \[1, 12\]"),
        ({"attention_mask": MASK[:, None]}, r"attention_mask has shape \[3, 1, 4\]"),
    ],
)
def test_batches_without_prompts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prompts_of({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS, **changes}, [4, 5, 6], 0)


def test_inputs_of_a_decoder_that_are_made_of_labels_are_left_out() -> None:
    batch = {"input_ids": IDS, "labels": LABELS, "decoder_input_ids": LABELS, "decoder_attention_mask": LABELS}
    assert without_targets(batch).keys() == {"input_ids"}
    begun = {**batch, "decoder_input_ids": LABELS[:, :1]}
    assert without_targets(begun).keys() == {"input_ids", "decoder_input_ids", "decoder_attention_mask"}


def generation(model: Any, **fields: Any) -> BatchGeneration:
    """The generation of a model that is not partitioned."""
    placed: Any = SimpleNamespace(module=model, processing_class=None, mesh=None, engine=None)
    return BatchGeneration(placed, fields, seed="0")


def test_a_prompt_that_leaves_no_room_is_named() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}
    why = "the prompt of sample 4 has 3 tokens, which with 30 new ones are more than the model's 32"
    with pytest.raises(DataError, match=why):
        generation(llama(), max_new_tokens=30).tokens(batch, [4, 5, 6], torch.float32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"do_sample": True, "top_k": -1}, "top_k is -1; give a whole number from 0"),
        ({"temperature": float("nan")}, "temperature is nan; give a number"),
        ({"suppress_tokens": [10**6]}, "suppress_tokens is .1000000.; give ids of tokens"),
        ({"max_length": 9}, "max_length counts the padding of prompts; give max_new_tokens"),
        ({"num_return_sequences": 2}, "num_return_sequences: 2: a sample has one prediction"),
    ],
)
def test_settings_are_refused_before_an_evaluation_begins(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"predict_with_generate: {message}"):
        generation(llama(), **fields)


def test_a_model_may_suppress_tokens_beyond_its_own_vocabulary() -> None:
    model: Any = llama()
    model.generation_config.begin_suppress_tokens = [220, 50256]  # The defaults of Whisper, in a copy with few tokens.
    assert generation(model, max_new_tokens=2).settings.begin_suppress_tokens == [220, 50256]
    with pytest.raises(ConfigError, match="forced_eos_token_id is 50256; give ids of tokens"):
        generation(model, forced_eos_token_id=50256)
