"""Conversations, pairs and mixtures from files to batches: which tokens the loss is of, against transformers and the text."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.text_files import word_tokenizer, write_rows
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.datasets import load_datasets
from zeromesh.trainer.data.feed import RunData
from zeromesh.trainer.data.packing import TokenDataset, best_fit
from zeromesh.trainer.data.sampler import SampleOrder, integer_weights
from zeromesh.trainer.data.token_cache import TokenCache
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer

CHATML = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ message.content }}"
    "{% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>{% endgeneration %}\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}{{ suffix }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = [
    [("system", "Be brief."), ("user", "hello there"), ("assistant", "hi"), ("user", "bye"), ("assistant", "so long")],
    [("user", "what is the time?"), ("assistant", "half past ten, as it was an hour ago")],
    [("assistant", "\nhow are you?"), ("user", "caf\u00e9 \u2615"), ("assistant", "a caf\u00e9, \u2615 and more")],
]


def messages(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


ROWS = [{"messages": messages(turns)} for turns in CHATS]
ASKED = {"messages": messages(CHATS[1])}
PAIRS = {"format": "pairs"}


@pytest.fixture(scope="module")
def raw() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges, as those of most chat models, trained on a few sentences."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    marks = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    texts = [content for turns in CHATS for _, content in turns]
    texts += ["assistant\n\nuser\n\nsystem\n\ntools\n\n" * 3, "Q: A: 12 " * 9]
    words.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token="<eos>")


@pytest.fixture
def own(raw: PreTrainedTokenizerFast) -> PretrainedTokenizer:
    return own_template(raw, CHATML)


def load(folder: Path, rows: list[dict[str, Any]], tokenizer: Any, /, **keys: Any) -> RunData:
    """The data of these rows, each in a sequence of its own and in their order."""
    train = write_rows(folder / "rows.jsonl", rows)
    section = {"train": train, "format": "chat", "sequence_length": 96, "eval_fraction": 0.0, "packing": False}
    return load_datasets(DataSection(**{**section, **keys}), tokenizer=tokenizer)


def labels_of(dataset: Any, *indices: int) -> list[list[int]]:
    return [dataset[index]["labels"].tolist() for index in indices]


def own_template(raw: PreTrainedTokenizerFast, template: str | None) -> PretrainedTokenizer:
    raw.chat_template = template
    return PretrainedTokenizer(tokenizer=raw)


def learnt(sample: dict[str, torch.Tensor]) -> tuple[list[int], list[int]]:
    """The ids of a sample before its padding, and its targets. Position 0 is never a target."""
    ids, labels = sample["input_ids"], sample["labels"]
    assert bool(((labels == -100) | (labels == ids)).all())
    end = int(((ids != 1) | (labels != -100)).nonzero().max()) + 1
    return ids[:end].tolist(), labels[:end].tolist()


# Labels


def by_hand(raw: PreTrainedTokenizerFast, turns: list[tuple[str, str]]) -> tuple[list[int], list[int]]:
    """Ids and labels of a conversation in ChatML: the text is put together here, and its tokens are looked up by their places."""
    text, answered = "<bos>", [False] * 5
    for role, content in turns:
        head, body = f"<|im_start|>{role}\n", f"{content}<|im_end|>\n"
        text += head + body
        answered += [False] * len(head) + [role == "assistant"] * len(body)
    encoded = raw(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        token if all(answered[begin:end]) else -100
        for token, (begin, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]
    return encoded["input_ids"], labels


def test_the_loss_is_on_the_assistant_s_turns(tmp_path: Path, raw: Any, own: PretrainedTokenizer) -> None:
    data = load(tmp_path, ROWS, own)
    assert isinstance(data.train, TokenDataset)
    for turns, sample in zip(CHATS, data.train, strict=False):
        ids, labels = learnt(sample)
        assert (ids, labels) == by_hand(raw, turns)
        said = raw.decode([token for token in labels if token != -100])
        answers = [f"{content}<|im_end|>\n" for role, content in turns if role == "assistant"]
        assert said in ("".join(answers), "".join(answers).removeprefix("\n"))
    everything = load(tmp_path, ROWS, own, loss_on="all")
    for turns, sample in zip(CHATS, everything.train, strict=False):
        ids, labels = learnt(sample)
        assert ids == by_hand(raw, turns)[0]
        assert labels == [-100, *ids[1:]]


def test_templates_that_mark_answers_are_as_in_transformers(tmp_path: Path, raw: Any, own: PretrainedTokenizer) -> None:
    template = tmp_path / "marked.jinja"
    template.write_text(MARKED)
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"x": 1}}}]}
    rows: list[dict[str, Any]] = [*ROWS, {"messages": [{"role": "user", "content": "1 + 1"}, call], "tools": tools}]
    rows.append({**ASKED, "tools": json.dumps(tools), "chat_template_kwargs": {"suffix": "!"}})
    # Columns of other rows are null in a table.
    nulls = [{**tools[0], "strict": None, "function": {**tools[0]["function"], "default": None}}]
    given_rows = [*rows, {**rows[-2], "tools": nulls}, {**rows[-1], "tools": json.dumps(nulls)}]
    rows += rows[-2:]
    as_text = {**call, "tool_calls": [{"function": {"name": "add", "arguments": '{"x": 1}'}}]}  # OpenAI's own form.
    given_rows.append({**rows[-2], "messages": [rows[-2]["messages"][0], as_text]})
    rows.append(rows[-2])
    data = load(tmp_path, given_rows, own, chat_template=str(template), sequence_length=400)
    for row, sample in zip(rows, data.train, strict=False):
        given = row.get("tools")
        wanted = raw.apply_chat_template(
            row["messages"],
            tools=json.loads(given) if isinstance(given, str) else given,
            chat_template=MARKED,
            return_assistant_tokens_mask=True,
            return_dict=True,
            **row.get("chat_template_kwargs", {}),
        )
        ids, labels = learnt(sample)
        assert ids == wanted["input_ids"]
        assert [int(label != -100) for label in labels] == wanted["assistant_masks"]


def test_parts_of_text_are_trained_on_as_text(tmp_path: Path, own: PretrainedTokenizer) -> None:
    """Rows in OpenAI's form, with a list of parts for each content, have the tokens and targets of the same rows as text."""
    rows: Any = [
        {"messages": [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in row["messages"]]} for row in ROWS
    ]
    parts, text = [load(tmp_path, each, own) for each in (rows, ROWS)]
    assert [learnt(sample) for sample in parts.train] == [learnt(sample) for sample in text.train]
    assert parts.answer_ends == text.answer_ends != ()


def test_a_template_that_forgets_is_refused(tmp_path: Path, own: PretrainedTokenizer) -> None:
    turns = [("user", "a"), ("assistant", "<think>hm</think>b"), ("user", "c"), ("assistant", "d")]
    rows = [{"messages": messages(turns[:2])}, {"messages": messages(turns)}]
    with pytest.raises(DataError, match=r"rows.jsonl' row 1: the chat template writes .* data.loss_on: all"):
        load(tmp_path, rows, own, chat_template=FORGETFUL)
    assert len(load(tmp_path, rows[:1], own, chat_template=FORGETFUL).train) == 1
    assert len(load(tmp_path, rows, own, chat_template=FORGETFUL, loss_on="all").train) == 2


def test_the_loss_is_on_completions(tmp_path: Path, raw: Any, own: PretrainedTokenizer) -> None:
    rows = [
        {"prompt": "Q: 1 + 1\nA:", "completion": " 2"},
        {"prompt": messages(CHATS[0][:-1]), "completion": messages(CHATS[0][-1:])},
    ]
    data = load(tmp_path, rows[:1], own, format="pairs", columns={"prompt": "prompt"})
    prompt, completion = (raw(rows[0][name])["input_ids"] for name in ("prompt", "completion"))
    assert learnt(data.train[0]) == ([*prompt, *completion, 1], [-100] * len(prompt) + [*completion, 1])
    data = load(tmp_path, rows[1:], own, format="pairs")
    ids, labels = by_hand(raw, CHATS[0])
    last = len(raw(f"{CHATS[0][-1][1]}<|im_end|>\n", add_special_tokens=False)["input_ids"])
    assert learnt(data.train[0]) == (ids, [-100] * (len(ids) - last) + labels[-last:])


def test_a_token_of_both_prompt_and_completion_is_no_target(tmp_path: Path, raw: Any, own: PretrainedTokenizer) -> None:
    """White space is missing in the places of the tokens of this tokenizer, so that these alone would not tell."""
    rows = [{"prompt": "Q: 12 A: ", "completion": "12 A"}]
    whole = raw("Q: 12 A: 12 A")["input_ids"]
    assert whole != raw(rows[0]["prompt"])["input_ids"] + raw(rows[0]["completion"])["input_ids"]
    data = load(tmp_path, rows, own, format="pairs")
    ids, labels = learnt(data.train[0])
    assert ids == [*whole, 1]
    assert raw.decode([label for label in labels if label != -100]) in (" A<eos>", "2 A<eos>")
    assert "in 1 an answer begins or ends inside of a token" in data.notes[0]


def test_tokens_without_places_are_of_the_pieces(
    tmp_path: Path, raw: Any, own: PretrainedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = load(tmp_path, ROWS[:2], own)
    monkeypatch.setattr(type(raw), "is_fast", False)
    assert labels_of(load(tmp_path, ROWS[:2], own).train, 0, 1) == labels_of(wanted.train, 0, 1)
    with pytest.raises(DataError, match=r"row 0: a token has a part of an answer .* use a fast tokenizer"):
        load(tmp_path, [{"prompt": "Q: 12 A: ", "completion": "12 A"}], own, format="pairs")


def test_tokens_without_white_space(tmp_path: Path) -> None:
    words = word_tokenizer(["<eos>", "<unk>", "a", "b", "c"], "<unk>", eos_token="<eos>")
    rows = [{"prompt": prompt, "completion": "c a"} for prompt in ("a b ", "a b")]
    data = load(tmp_path, rows, PretrainedTokenizer(tokenizer=words), format="pairs")
    assert data.train[0]["input_ids"].tolist()[:5] == [2, 3, 4, 2, 0]
    assert data.train[0]["labels"].tolist()[:6] == [-100, -100, 4, 2, 0, -100]
    assert data.train[1]["labels"].tolist()[:5] == [-100, -100, 2, 0, -100]
    assert "in 1 an answer begins or ends inside of a token" in data.notes[0]


def test_bytes_have_conversations_too(tmp_path: Path) -> None:
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    sample = load(tmp_path, ROWS[2:], None, chat_template=template).train[0]
    labels = bytes(label for label in sample["labels"].tolist() if label != -100)
    assert labels.decode() == "\nhow are you?\na caf\u00e9, \u2615 and more\n"
    text = bytes(sample["input_ids"].tolist()).rstrip(b"\xff").decode()
    assert text.startswith("[assistant] \nhow are you?\n[user] caf\u00e9")


def test_a_tokenizer_may_begin_texts(tmp_path: Path, raw: Any) -> None:
    words = Tokenizer.from_str(raw.backend_tokenizer.to_str())
    words.post_processor = TemplateProcessing(single="<bos> $A", pair="$A $B", special_tokens=[("<bos>", 0)])
    begun = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<bos>", eos_token="<eos>")
    rows, tokenizer = [{"prompt": "Q:", "completion": " 12"}], PretrainedTokenizer(tokenizer=begun)
    ids, labels = learnt(load(tmp_path, rows, tokenizer, format="pairs").train[0])
    prompt = begun("Q:")["input_ids"]
    assert prompt[0] == 0
    assert ids[: len(prompt)] == prompt
    assert [label for label in labels if label != -100] == [*ids[len(prompt) :]]


# What cannot be used


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        ([{"conversations": []}], {}, "row 0 has no field 'messages', only 'conversations'; set data.format: sharegpt"),
        ([{"messages": []}], PAIRS, "row 0 has no field 'prompt', only 'messages'; set data.format: chat"),
        ([{"prompt": "a", "completion": "b"}], {"format": "text"}, "set data.format: pairs"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], {"format": "text"}, "'rejected'; set train.method: dpo"),
        ([{"question": "a", "answer": "b"}], {"format": "text"}, "; set data.text_field, or data.format: pairs and data.c"),
        ([{"messages": "hello"}], {}, "field 'messages' is str; it should be a list of messages"),
        ([{"messages": []}], {}, "field 'messages' is an empty list"),
        ([{"messages": [{"from": "human", "value": "a"}]}], {}, "a message without role, only 'from', 'value'"),
        ([{"prompt": "a", "completion": messages(CHATS[1])}], PAIRS, "field 'prompt' is str; it should be text"),
        ([ASKED], {"chat_template": "{{ raise_exception('no') }}"}, "row 0: .* TemplateError: no"),
        (
            [{"messages": [{"role": "user", "content": [{"type": "image"}]}]}],
            {},
            "row 0: field 'messages': content is a list of other parts than text",
        ),
        ([{**ASKED, "tools": "{"}], {}, "field 'tools' is text, and no JSON"),
        ([ASKED], {"chat_template": "a/b.jinja"}, "data.chat_template: no file 'a/b.jinja'"),
        ([{"messages": messages(CHATS[1][:1])}], {}, "1 row, and none has a target of the loss in its first 96 tokens"),
        ([ASKED], {"train": "stdlib"}, "no file with rows in 'stdlib'"),
        *(
            (
                [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b", column: bad}],
                PAIRS,
                f"row 1: field '{column}' is {type(bad).__name__}; it should be text",
            )
            for column in ("prompt", "completion")
            for bad in (None, 5, {"a": 1})
        ),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, own: PretrainedTokenizer, rows: Any, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path, rows, own, **keys)


def test_a_template_that_is_given_is_saved_with_the_tokenizer(tmp_path: Path, raw: Any) -> None:
    """And without one it is said what to set."""
    with pytest.raises(DataError, match=r"no chat template; set data\.chat_template"):
        load(tmp_path, [ASKED], own_template(raw, None))
    raw.save_pretrained(tmp_path / "tokenizer")
    keys = {"tokenizer": str(tmp_path / "tokenizer"), "chat_template": CHATML}
    data = load(tmp_path, [ASKED], None, **keys)
    assert isinstance(data.tokenizer, PretrainedTokenizer)
    assert data.tokenizer.tokenizer.chat_template == CHATML
    assert learnt(data.train[0]) == by_hand(raw, CHATS[1])


def test_saved_datasets_are_read(tmp_path: Path, own: PretrainedTokenizer) -> None:
    rows = [{"talk": messages(turns), "id": number} for number, turns in enumerate(CHATS)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "splits")
    found = load(tmp_path, [], own, train=str(tmp_path / "saved"), columns={"messages": "talk"}).train
    assert labels_of(found, 0, 2) == labels_of(load(tmp_path, ROWS, own).train, 0, 2)
    with pytest.raises(DataError, match=r"holds several splits; give one of them: '.*splits/train'"):
        load(tmp_path, [], own, train=str(tmp_path / "splits"))


def test_datasets_of_the_hub(tmp_path: Path, own: PretrainedTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repository").mkdir()
    wanted = load(tmp_path / "repository", ROWS, own).train
    asked, real = [], datasets.load_dataset

    def of_this_machine(name: str, config: str | None, split: str) -> Any:
        asked.append((name, config, split))
        if name == "some/other":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'some/other' doesn't exist on the Hub")
        return real(str(tmp_path / "repository"), split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr("datasets.load_dataset", of_this_machine)
    found = load(tmp_path, [], own, train="hub:some/chats").train
    assert labels_of(found, 0, 2) == labels_of(wanted, 0, 2)
    load(tmp_path, [], own, mixture={"a": {"train": "hub:some/chats/main:train"}}, train="stdlib")
    assert asked == [("some/chats", None, "train"), ("some/chats", "main", "train")]
    for spec, message in {
        "hub:some/other": "'hub:some/other' cannot be had: DatasetNotFoundError: Dataset 'some/other' doesn't exist",
        "hub:some/chats:test": "'hub:some/chats:test' cannot be had: ValueError: Unknown split",
        "hub:chats": "'hub:chats' is no dataset of the Hub; give hub:OWNER/NAME",
    }.items():
        with pytest.raises(DataError, match=f"data.train: {message}"):
            load(tmp_path, [], own, train=spec)


def test_conversations_share_sequences_and_are_cut(
    tmp_path: Path, raw: Any, own: PretrainedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeromesh.trainer.data.packing._TOKENS_AT_ONCE", 7)
    rows = [{"messages": messages(turns)} for turns in (*CHATS, *CHATS, CHATS[1][:1])]
    sizes = [len(by_hand(raw, turns)[0]) for turns in CHATS]
    length = max(sizes) - 3
    data = load(tmp_path, rows, own, packing=True, sequence_length=length)
    assert f"6 rows, {2 * sum(min(size, length) for size in sizes):,} tokens" in data.notes[0]
    assert "2 rows are longer than data.sequence_length and are cut; 1 have no target and are left out" in data.notes[0]
    found = []
    for index in range(len(data.train)):
        sample = data.train[index]
        starts = (sample["position_ids"] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], length], strict=True):
            assert sample["position_ids"][start:end].tolist() == list(range(end - start))
            if sample["input_ids"][start] == 0:
                found.append((sample["input_ids"][start:end].tolist(), sample["labels"][start:end].tolist()))
            else:
                assert sample["labels"][start:end].eq(-100).all()
    wanted = [tuple(each[:length] for each in by_hand(raw, turns)) for turns in (*CHATS, *CHATS)]
    assert sorted(found) == sorted(wanted)


def test_packed_conversations_are_as_if_alone(tmp_path: Path, own: PretrainedTokenizer) -> None:
    """The gradient of the loss of packed conversations is that of each in a sequence of its own."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=340, use_cache=False)).double()
    gradients = []
    for packing, length in ((True, 300), (False, 130)):
        train = load(tmp_path, ROWS, own, packing=packing, sequence_length=length).train
        assert len(train) == (1 if packing else 3)
        batch = [train[index] for index in range(len(train))]
        inputs = {name: torch.stack([each[name] for each in batch]) for name in batch[0]}
        model.zero_grad()
        model(**inputs).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12)


@given(lengths=st.lists(st.integers(1, 20), max_size=60), capacity=st.integers(20, 40))
def test_best_fit_fills_sequences(lengths: list[int], capacity: int) -> None:
    found = best_fit(np.asarray(lengths, dtype=np.int64), capacity)
    filled = np.bincount(found, weights=lengths) if lengths else np.empty(0)
    assert (filled <= capacity).all()
    assert best_fit(np.asarray([2, 6, 5, 4, 3]), 10).tolist() == [1, 0, 1, 0, 1]  # The least room that is enough.
    assert set(found.tolist()) == set(range(len(filled)))
    assert len(filled) <= 11 / 9 * np.ceil(sum(lengths) / capacity) * (capacity / (capacity - 10)) + 1


def test_tokens_of_conversations_are_kept(tmp_path: Path, own: PretrainedTokenizer) -> None:
    path, cache = write_rows(tmp_path / "rows.jsonl", ROWS), TokenCache(tmp_path / "cache")

    def loaded(**keys: Any) -> tuple[list[str], Any]:
        section = {"train": path, "format": "chat", "sequence_length": 96, "eval_fraction": 0.0, **keys}
        told: list[str] = []
        data = load_datasets(DataSection(**section), tokenizer=own, cache=cache, tell=told.append)
        return told, (data.notes, data.train.fingerprint(), [data.train[0]["labels"].tolist()])

    told, first = loaded()
    assert len(told) == 3
    assert loaded() == ([], first)
    assert loaded(packing=False)[0] == []
    for change in ({"loss_on": "all"}, {"chat_template": MARKED}, {"sequence_length": 64}):
        told, other = loaded(**change)
        assert len(told) == 3
        assert other != first


def test_processes_give_equal_tokens(tmp_path: Path, own: PretrainedTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"messages": messages(CHATS[number % 3])} for number in range(30)]
    wanted = load(tmp_path, rows, own, packing=True)
    monkeypatch.setattr("zeromesh.trainer.data.datasets._LARGE", 0)
    monkeypatch.setattr("zeromesh.trainer.data.datasets.available_cores", lambda: 2)
    monkeypatch.setattr("zeromesh.trainer.data.conversations._ROWS_AT_ONCE", 4)
    found = load(tmp_path, rows, own, packing=True)
    assert (found.notes, found.train.fingerprint()) == (wanted.notes, wanted.train.fingerprint())
    with pytest.raises(DataError, match=r"rows.jsonl' row 30: field 'messages' is an empty list"):
        load(tmp_path, [*rows, {"messages": []}], own)

    def killed(self: object, row: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("zeromesh.trainer.data.conversations.Renderer.render", killed)
    with pytest.raises(DataError, match="a process that tokenizes has ended"):
        load(tmp_path, rows, own)


def test_few_conversations_are_held_out(tmp_path: Path, own: PretrainedTokenizer) -> None:
    rows = [{"messages": messages(CHATS[number % 3])} for number in range(40)]
    data = load(tmp_path, rows, own, eval_fraction=0.2)
    assert len(data.train) + len(data.eval) == 40
    few = load(tmp_path, rows[:2], own, eval_fraction=0.001)
    assert (len(few.train), len(few.eval)) == (1, 1)
    assert not torch.equal(few.train[0]["input_ids"], few.eval[0]["input_ids"])


@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 7), min_size=4, max_size=4),
    seed=st.integers(0, 1 << 62),
    shuffle=st.booleans(),
)
def test_a_mixture_is_exact_everywhere(weights: list[int], lengths: list[int], seed: int, shuffle: bool) -> None:
    parts = tuple(zip(lengths, integer_weights(weights), strict=False))
    order = SampleOrder(length=sum(lengths), parts=parts, seed=seed, shuffle=shuffle)
    bounds = np.cumsum([0, *(length for length, _ in parts)])
    seen: list[list[int]] = [[] for _ in weights]
    for sample in range(3 * sum(weights) + 1):
        index = order.dataset_index(sample)
        part = int(np.searchsorted(bounds, index, side="right")) - 1
        seen[part].append(index - int(bounds[part]))
        for turns, weight in zip(seen, weights, strict=True):
            assert abs(len(turns) - (sample + 1) * weight / sum(weights)) < max(1.0, len(weights) / 2)
    for part, turns in enumerate(seen):
        alone = SampleOrder(length=lengths[part], seed=seed + (part << 64), shuffle=shuffle)
        assert turns == [alone.dataset_index(turn) for turn in range(len(turns))]


def test_weights_become_whole() -> None:
    assert integer_weights([0.5, 0.25, 1.0]) == (2, 1, 4)
    assert integer_weights([30, 10]) == (3, 1)
    assert integer_weights([0.333, 0.667]) == (333, 667)
    with pytest.raises(ConfigError, match="round them"):
        integer_weights([0.1234567, 0.7654321])


def test_a_mixture_of_text_conversations_and_pairs(tmp_path: Path, own: PretrainedTokenizer) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"question": "Q: 1\nA:", "completion": " 12"}])
    mixture = {
        "text": {"train": str(tmp_path / "text.txt"), "format": "text", "weight": 0.5},
        "chat": {"train": str(tmp_path / "rows.jsonl"), "weight": 0.25},
        "pairs": {"train": pairs, "format": "pairs", "columns": {"prompt": "question"}, "weight": 0.25},
    }
    given = {"train": "stdlib", "packing": True, "eval_fraction": 0.2}
    data = load(tmp_path, ROWS, own, mixture=mixture, **given)
    lengths = [len(part) for part in data.train.parts]
    assert len(data.train) == sum(lengths)
    assert set(data.eval) == ({"text", "chat"} if lengths[1] else {"text"})
    assert all(sorted(data.train[index]) == ["input_ids", "labels", "position_ids"] for index in range(len(data.train)))
    assert "data.mixture: text 50.0%, chat 25.0%, pairs 25.0% of sequences" in data.notes[-1]
    for part in data.train.parts:
        part.check_vocabulary(340)
    with pytest.raises(DataError, match="vocabulary has 4 tokens"):
        data.train.parts[0].check_vocabulary(4)
    other = {**mixture, "text": {**mixture["text"], "weight": 1.0}}
    changed = load(tmp_path, ROWS, own, mixture=other, **given)
    assert (changed.train.weights, data.train.weights) == ((4, 1, 1), (2, 1, 1))
    assert changed.train.fingerprint() == data.train.fingerprint()
    alone = load(tmp_path, ROWS, own, mixture=mixture, eval=str(tmp_path / "rows.jsonl"), packing=True)
    assert isinstance(alone.eval, TokenDataset)


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "loss_on", "content", "ending"),
    [
        (CHATML, "answers", "half past ten.", (3,)),
        (CHATML, "all", "half past ten.", (3,)),
        (MARKED, "answers", "half past ten.", (3,)),
        (PLAIN, "answers", "half past ten.", ()),
        (PLAIN, "answers", "half past ten.<eos>", (1,)),
    ],
)
def test_the_token_that_ends_answers_is_found(
    tmp_path: Path, own: PretrainedTokenizer, template: str, loss_on: str, content: str, ending: tuple[int, ...]
) -> None:
    rows = [{"messages": messages([("user", f"{n}"), ("assistant", f"{n} {content}")])} for n in range(8)]
    assert load(tmp_path, rows, own, chat_template=template, loss_on=loss_on).answer_ends == ending
    pairs = [{"prompt": "a", "completion": "b"}]
    assert load(tmp_path, pairs, own, format="pairs").answer_ends == (1,)


@pytest.mark.parametrize(("count", "ending"), [(9, ()), (10, (1,))])
def test_more_than_nine_in_ten_answers_end_alike(
    tmp_path: Path, own: PretrainedTokenizer, count: int, ending: tuple[int, ...]
) -> None:
    """Of those with words; of the others nothing is known."""
    answers = [*["yes<eos>"] * count, "no", " "]
    rows = [{"messages": messages([("user", f"{n}"), ("assistant", each)])} for n, each in enumerate(answers)]
    assert load(tmp_path, rows, own, chat_template=PLAIN).answer_ends == ending


def test_columns_of_a_template_have_the_names_of_the_files(tmp_path: Path, own: PretrainedTokenizer) -> None:
    template = "{% if tools %}with {% endif %}{% for m in messages %}{{ m.content }}{{ suffix }}{% endfor %}"
    keys = {"chat_template": template, "loss_on": "all", "columns": {"tools": "calls", "chat_template_kwargs": "more"}}
    tool = {"type": "function", "function": {"name": "a", "parameters": {}}}
    said = [{"role": "user", "content": "how are you?"}]
    others = ({}, {"calls": ""}, {"calls": None}, {"calls": [tool]}, {"calls": json.dumps([tool])}, {"more": {"suffix": "!"}})
    data = load(tmp_path, [{"messages": said, **each} for each in others], own, **keys)
    found = [own.decode(learnt(data.train[index])[0]) for index in range(len(others))]
    assert found == ["how are you?"] * 3 + ["with how are you?"] * 2 + ["how are you?!"]


def test_an_evaluation_set_may_have_another_format(tmp_path: Path, own: PretrainedTokenizer) -> None:
    alone = load(tmp_path, ROWS, own, packing=True).train
    chats = write_rows(tmp_path / "chats.jsonl", ROWS)
    told = [{"instruction": f"say {word}", "output": word} for word in ("one", "two")]
    data = load(tmp_path, told, own, format="alpaca", packing=True, eval={"chats": chats})
    (evaluated,) = data.eval.values()
    wanted = [learnt(alone[index]) for index in range(len(alone))]
    assert [learnt(evaluated[index]) for index in range(len(evaluated))] == wanted
    assert any("has rows of format chat" in note for note in data.notes)
    with pytest.raises(DataError, match=r"only 'messages'; make files of several formats parts of data\.mixture"):
        load(tmp_path, told, own, format="alpaca", train=[str(tmp_path / "rows.jsonl"), chats])
