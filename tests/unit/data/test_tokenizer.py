"""Tokenizers: the ids of prompts, padding, what tells two of them apart, and where one is looked for."""

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.support.text_files import word_tokenizer
from zeromesh.errors import DataError
from zeromesh.trainer.data.tokenizer import ByteTokenizer, PretrainedTokenizer, has_tokenizer, load_tokenizer, readable

WORDS = ["<pad>", "<bos>", "<eos>", "<sep>", "a", "b", "c"]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}b {% endif %}"
TEMPLATE += "{% if add_generation_prompt %}c{% endif %}"


def made(words: list[str] = WORDS, text: str = "<bos> $A <eos>", **special: Any) -> PretrainedTokenizer:
    return PretrainedTokenizer(tokenizer=word_tokenizer(words, "<pad>", text=text, **{"eos_token": "<eos>", **special}))


def test_ids_of_prompts_and_messages() -> None:
    tokenizer = made(chat_template=TEMPLATE)
    assert tokenizer.encode_prompt("a b c") == [1, 4, 5, 6, 2]
    assert tokenizer.encode_prompt("a b c", 4) == [1, 4, 5, 2]
    assert [(ids.tolist(), at) for ids, at in tokenizer.encode(["a b", "c"])] == [([4, 5], None), ([6], None)]
    assert (tokenizer.encode([]), tokenizer.prefix_ids) == ([], [1])
    ((ids, offsets),) = tokenizer.encode(["a b"], offsets=True)
    assert offsets is not None
    assert (ids.tolist(), offsets.tolist()) == ([4, 5], [[0, 1], [2, 3]])
    question = [{"role": "user", "content": "a"}]
    assert tokenizer.encode_messages(question) == [4, 6]
    assert tokenizer.encode_messages([{"role": "user", "content": [{"type": "text", "text": "a"}]}]) == [4, 6]
    tool = {"type": "function", "function": {"name": "a", "description": "a", "parameters": {"type": "object"}}}
    assert tokenizer.encode_messages(question, tools=[tool]) == [4, 5, 6]
    assert (tokenizer.decode([1, 4, 2]), tokenizer.decode_raw([1, 4, 2])) == ("<bos> a", "<bos> a <eos>")
    with pytest.raises(DataError, match="the tokenizer has none; give text, or a model whose tokenizer has one"):
        made().encode_messages(question)


EACH = "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}"
PARTS = "{% for part in m.content %}{{ part.text }}{% endfor %}"
END = "{% endif %}>{% endfor %}"
"""Templates, and what they write of two parts."""
TEMPLATES = {
    "text alone": ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<hi a 'b'><yo>"),
    "text by operators": ("{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}", "<hi a 'b'><yo>"),
    "text, else nothing": (EACH + END, "<hi a 'b'><yo>"),
    "text, else JSON": (EACH + "{{ m.content | tojson }}" + END, "<hi a 'b'><yo>"),
    "both": (EACH + PARTS + END, "<hia 'b'><yo>"),
    "parts alone": ("{% for m in messages %}<" + PARTS + ">{% endfor %}", "<hia 'b'><yo>"),
}


@pytest.mark.parametrize("form", TEMPLATES)
def test_parts_of_text_are_read_by_the_template_or_else_joined(form: str) -> None:
    template, wanted = TEMPLATES[form]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "a 'b'"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "yo"}]},
    ]

    def render(messages: Any) -> str:
        return render_jinja_template([messages], chat_template=template)[0][0]

    assert render(readable(turns, render)) == wanted
    plain = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}]
    assert readable(plain, render) is plain
    for call in ({"function": {"name": "f", "arguments": {"x": None}}}, {"name": "f", "arguments": "{}"}, 3):
        assert readable([{"role": "assistant", "tool_calls": [call]}], render)[0]["tool_calls"] == [call]
    for text, value in (('{"x": null}', {"x": None}), ("3", 3), ("x", None)):
        of: Any = [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": text}}]}]
        if value is None:
            with pytest.raises(DataError, match="tool_calls: arguments are no JSON: expected value"):
                readable(of, render)
            continue
        assert readable(of, render)[0]["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": value}}]
    for content in ([{"type": "image"}], ["hi"], [{"text": "hi"}], [{"type": "text"}]):
        with pytest.raises(DataError, match="content is a list of other parts than text; allowed are text and"):
            readable([{"role": "user", "content": content}], render)


def test_bytes_of_prompts() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode_prompt("caf\u00e9") == [*b"caf\xc3\xa9"]
    assert tokenizer.encode_prompt("caf\u00e9", 2) == [*b"ca"]
    assert tokenizer.decode([255, *b"caf\xc3\xa9", 255]) == tokenizer.decode_raw([*b"caf\xc3\xa9"]) == "caf\u00e9"
    assert tokenizer.decode([0xC3, 97]) == "\ufffda"
    assert (tokenizer.template("x", None), tokenizer.digest()) == ("x", "bytes")
    with pytest.raises(DataError, match="tokenizer is bytes: give text"):
        tokenizer.encode_messages([])


def test_what_ends_and_fills_a_text() -> None:
    assert [(each.end_of_text, each.padding, each.vocab_size) for each in (made(), made(pad_token="<pad>"))] == [
        (2, 2, 7), (2, 0, 7)
    ]  # fmt: skip
    assert made(eos_token=None, sep_token="<sep>").end_of_text == 3
    assert made(sep_token="<sep>").end_of_text == 2
    grown = made()
    grown.tokenizer.add_tokens(["new"])
    assert grown.vocab_size == 8
    assert made(bos_token="<bos>").special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}
    for wrong in (object(), lambda: None):
        with pytest.raises(DataError, match=r"processing_class is a (object|function); give a tokenizer"):
            PretrainedTokenizer(tokenizer=wrong)


def test_tokenizers_that_give_other_ids_have_other_digests() -> None:
    others = (
        made([*WORDS[:4], "b", "a", "c"]),
        made(text="<bos> $A"),
        made(eos_token="<sep>"),
        made(chat_template=TEMPLATE),
        made(eos_token=None, sep_token="<eos>"),
    )
    digests = [each.digest() for each in (made(), *others)]
    assert len({*digests}) == len(digests)
    assert made().digest() == digests[0]

    def call(texts: list[str], **_: Any) -> Any:
        return {"input_ids": [[4] for _ in texts]}

    call.eos_token_id = 2  # type: ignore[attr-defined]
    assert PretrainedTokenizer(tokenizer=call).digest() is None


def test_a_template_of_several_is_taken_by_its_name() -> None:
    own = made(chat_template={"default": "{{ 1 }}", "tool_use": "{{ 2 }}"})
    assert [own.template(None, None), own.template(None, [{}]), own.template("tool_use", None)] == [
        "{{ 1 }}", "{{ 2 }}", "{{ 2 }}"
    ]  # fmt: skip
    assert own.template("{{ 3 }}", None) == "{{ 3 }}"
    assert made().template(None, None) is None
    changed = own.with_template("tool_use")
    assert (changed.tokenizer.chat_template, own.tokenizer.chat_template["default"]) == ("{{ 2 }}", "{{ 1 }}")
    several = made(chat_template={"first": "{{ 1 }}", "second": "{{ 2 }}"})
    with pytest.raises(DataError, match=r"data\.chat_template: "):
        several.template(None, None)
    with pytest.raises(DataError, match="'third' is no template, file or name of the tokenizer's templates"):
        several.with_template("third")


def test_where_a_tokenizer_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_tokenizer(None) == load_tokenizer("bytes") == ByteTokenizer()
    assert not has_tokenizer(tmp_path)
    made().tokenizer.save_pretrained(tmp_path / "own")
    assert has_tokenizer(tmp_path / "own")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("~/own").digest() == load_tokenizer(tmp_path / "own").digest() == load_tokenizer("own").digest()
    for name in ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tokenizer_config.json"):
        (tmp_path / name).touch()
        assert has_tokenizer(tmp_path), name
        (tmp_path / name).unlink()
