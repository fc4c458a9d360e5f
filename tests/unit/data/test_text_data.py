"""Text to packed sequences: what is read, what is held out, one clear error for what cannot be read."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.text_files import joined_ids, joined_text, word_tokenizer, write_rows
from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.datasets import is_held_out, load_datasets
from zeromesh.trainer.data.packing import MixedDataset, TokenDataset, byte_pair_entropy
from zeromesh.trainer.data.text_sources import find_text, stdlib_source
from zeromesh.trainer.data.token_cache import StoredText, TextAmount, TokenWriter
from zeromesh.trainer.data.tokenizer import ByteTokenizer, PretrainedTokenizer, load_tokenizer


def loaded(**keys: Any) -> Any:
    """Data of a section that is short and has nothing held out, whose paths may be those of pathlib."""
    return load_datasets(DataSection.model_construct(**{"sequence_length": 8, "eval_fraction": 0.0, **keys}))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every attempt to reach the network fail the test."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("something reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def tokenizer_directory(tmp_path: Path) -> Path:
    """A word-level tokenizer of four words, as `save_pretrained` writes it."""
    special = {"eos_token": "<eos>", "unk_token": "<unk>", "model_max_length": 4}
    word_tokenizer(["<eos>", "<unk>", "a", "b"], "<unk>", **special).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_the_standard_library_is_source_alone_and_is_the_same_twice() -> None:
    """And it prints the loss to beat."""
    source = stdlib_source()
    keys = [file.key for file in source.files]
    assert keys == sorted(keys)
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(keys)
    assert all(key.endswith(".py") for key in keys)
    assert not [key for key in keys if {"test", "tests", "site-packages"} & set(key.split("/"))]
    assert sum(file.path.stat().st_size for file in source.files) > 5_000_000
    data, again = (loaded(sequence_length=256, eval_fraction=0.05) for _ in range(2))
    assert data.train.fingerprint() == again.train.fingerprint()
    assert data.byte_pair_entropy is not None
    assert 2.3 < data.byte_pair_entropy < 2.5
    assert f"{data.byte_pair_entropy:.4f} nats" in data.notes[-1]
    assert joined_ids(data.train).dtype == np.uint8
    assert 0.01 < len(data.eval) / (len(data.train) + len(data.eval)) < 0.12


def test_the_standard_library_may_be_missing(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "_sysconfigdata_x.py", "test/t.py", "note.txt", "c.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x" * 100)
    assert [file.key for file in stdlib_source(tmp_path).files] == ["a.py", "b.py", "c.py"]
    with pytest.raises(DataError, match="no Python source"):
        stdlib_source(tmp_path / "nowhere")


# Files


def test_documents_are_joined_with_end_of_text_and_the_rest_is_dropped_and_said(tmp_path: Path) -> None:
    for name, text in {"b.txt": "world", "a.txt": "hello", "empty.txt": ""}.items():
        (tmp_path / name).write_text(text)
    data = loaded(train=tmp_path, sequence_length=5)
    assert joined_text(data.train) == b"hello\xffworl"
    assert "the last 2 tokens are no whole sequence" in data.notes[0]
    assert "in 2 documents" in data.notes[0]
    assert data.eval is None


def test_sequences_have_equal_and_separate_inputs_and_labels(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world!")
    train = loaded(train=tmp_path, sequence_length=6).train
    sample = train[1]
    assert bytes(sample["input_ids"].tolist()) == b"world!"
    assert sample["labels"].equal(sample["input_ids"])
    sample["labels"][0] = -100
    assert train[1]["labels"][0] == ord("w")
    assert sample["input_ids"][0] == ord("w")
    for index in (2, -1):
        with pytest.raises(IndexError):
            train[index]


def test_a_directory_is_read_in_order_of_names_without_hidden_and_binary_files(tmp_path: Path) -> None:
    for name, content in {"sub/a.md": b"one", ".git/x": b"hidden", "b.txt": b"two", "c.bin": b"\0\1\2"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    skipped: list[str] = []
    rows = find_text(tmp_path, where="data.train").rows(["text"], [], skipped, whole=True)
    assert [row.key for row in rows] == ["b.txt", "sub/a.md"]
    assert skipped == ["c.bin"]
    assert any("c.bin" in note for note in loaded(train=tmp_path, sequence_length=4).notes)


@pytest.mark.parametrize(
    ("name", "content", "keys", "message"),
    [
        ("c.bin", b"\0\1\2", {}, "is not text"),
        ("e.txt", b"caf\xe9", {}, r"e\.txt' is not utf-8: byte 3 of its text is e9 \(unexpected end"),
        (
            "e.txt",
            b"caf\xe9",
            {"encoding": "utf-16"},
            r"e\.txt' is not utf-16: UTF-16 stream does not start with BOM; set data\.encoding",
        ),
        ("a.txt", b"", {"encoding": "koi9"}, r"data\.encoding: unknown encoding: koi9"),
        ("a.txt", b"", {"encoding": "hex"}, r"data\.encoding: 'hex' is not a text encoding"),
        ("a.json", b'{"text": "a"}\n{"text"', {}, "is not valid json: line 2: "),
        ("a.json", b"5\n", {}, "line 1 is a int"),
        ("a.jsonl", b'{"text": "x"\n{', {}, "a.jsonl.*is not valid json"),
        ("a.parquet", b"no parquet", {}, "a.parquet.*cannot be read as"),
        ("a.txt", b"", {}, "0 tokens in 0 documents"),
        ("a.txt", b"short", {}, "6 tokens in 1 documents, less than one sequence of 8"),
        (
            "b.csv",
            b"text,label\nhello,1\nhello, you,1\n",
            {},
            r"b\.csv' line 3 has more fields than the first one has names; quote a text .* ','",
        ),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, keys: dict[str, Any], message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        loaded(train=tmp_path / name, **keys)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"train": "wikitext/wikitext-2"}, r"data\.train: no file or directory 'wikitext/wikitext-2'"),
        ({"eval": "wikitext/wikitext-2"}, r"data\.eval: no file or directory 'wikitext/wikitext-2'"),
        ({"train": "empty"}, "no text file in"),
        ({"train": []}, "empty list"),
        ({"train": "*.jsonl"}, r"data\.train: no text file in '.*\*\.jsonl'"),
    ],
)
def test_what_is_not_there_is_one_error_and_no_hub_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("hello world")
    with pytest.raises(DataError, match=message):
        loaded(**{"train": "a.txt", **keys})


@pytest.mark.parametrize(
    ("name", "before", "behind"),
    [("a.txt", "", ""), ("b.txt", "x" * 1_500_000, ""), ("c.csv", 'text\n"', '"'), ("d.jsonl", '{"text": "', '"}\n')],
)
def test_text_in_another_encoding_is_refused_until_named(tmp_path: Path, name: str, before: str, behind: str) -> None:
    """With the file, the byte and the key, for text and for rows; also behind the first piece of a file, and in the last one."""
    text = "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440"
    (tmp_path / name).write_bytes(f"{before}{text}{behind}".encode("koi8-r"))
    with pytest.raises(DataError, match=rf"{name}' is not utf-8: byte {len(before):,} .*; set data\.encoding"):
        loaded(train=tmp_path / name)
    data = loaded(train=tmp_path / name, encoding="koi8-r")
    assert f"{'' if behind else before}{text}".encode().startswith(joined_text(data.train)[:8])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("form", ["txt", "csv", "jsonl"])
def test_a_byte_order_mark_says_the_encoding(tmp_path: Path, encoding: str, form: str) -> None:
    text = "caf\u00e9 \u2615 \u043c\u0438\u0440 "
    row = json.dumps({"text": text}, ensure_ascii=False)
    written = {"txt": text, "csv": f"text\n{text}\n", "jsonl": f"{row}\n"}[form]
    (tmp_path / f"a.{form}").write_bytes(written.encode(encoding))
    data = loaded(train=tmp_path / f"a.{form}")
    assert joined_text(data.train) == text.encode()[: len(data.train) * 8]


PACKED: dict[str, Any] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pyarrow.compress(content, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("name", PACKED)
def test_compressed_files_and_patterns_are_read(tmp_path: Path, name: str) -> None:
    for number in (2, 0, 1):
        row = json.dumps({"text": f"row {number}: 12345"})
        (tmp_path / f"{number}.jsonl.{name}").write_bytes(PACKED[name](f"{row}\n".encode()))
    data = loaded(train=str(tmp_path / f"*.jsonl.{name}"))
    assert joined_text(data.train) == b"row 0: 12345\xffrow 1: 12345\xffrow 2: 12345\xff"[:32]
    assert any(note.endswith(f"*.jsonl.{name}': 3 files") for note in data.notes)
    whole = (tmp_path / f"0.jsonl.{name}").read_bytes()
    for content in (whole[:-9], b"nothing that was packed"):
        (tmp_path / f"0.jsonl.{name}").write_bytes(content)
        with pytest.raises(DataError, match=rf"0\.jsonl\.{name}' cannot be read: "):
            loaded(train=tmp_path / f"0.jsonl.{name}")


def test_rows_of_json_are_lines_or_one_list(tmp_path: Path) -> None:
    """Half a character becomes '?', as bytes have none."""
    (tmp_path / "a.json").write_text('[\n {"text": "one"},\n {"text": "\\ud83d\\ude00\\ud83d"}\n]\n')
    source = find_text(tmp_path, where="data.train")
    assert [row.values["text"] for row in source.rows(["text"], [], [])] == ["one", "\U0001f600?"]


@pytest.mark.parametrize(
    ("text", "prefix_ids"),
    [("", []), ("<unk> $A", [1]), ("<unk> $A <eos>", [1]), ("$A <eos>", []), ("<unk> <eos> $A <unk>", [1, 0])],
)
def test_documents_begin_as_their_tokenizer_says(tokenizer_directory: Path, text: str, prefix_ids: list[int]) -> None:
    own = load_tokenizer(tokenizer_directory).tokenizer  # type: ignore[union-attr]
    if text:
        special = [("<unk>", 1), ("<eos>", 0)]
        own.backend_tokenizer.post_processor = processors.TemplateProcessing(single=text, special_tokens=special)
    assert PretrainedTokenizer(tokenizer=own).prefix_ids == prefix_ids


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_rows_are_documents(tmp_path: Path, form: str) -> None:
    rows = [{"body": "hello", "id": 1}, {"body": "", "id": 2}, {"body": "w\u00f6rld", "id": 3}]
    path = write_rows(tmp_path / f"rows.{form}", rows)
    data = loaded(train=path, text_field="body", sequence_length=13)
    assert joined_text(data.train) == b"hello\xffw\xc3\xb6rld\xff"
    assert "in 2 documents" in data.notes[0]
    with pytest.raises(DataError, match=r"row 0 has no field 'text', only 'body', 'id'"):
        loaded(train=path)
    with pytest.raises(DataError, match="field 'id' is int, not text"):
        loaded(train=path, text_field="id")


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
def test_rows_of_csv_are_documents(tmp_path: Path, ending: str, separator: str) -> None:
    rows = [["id", "text"], ["1", '"hello, ""you"""'], ["2", "NA"], ["3", "12"], ["4", '"two\nlines"'], ["5", ""]]
    path = tmp_path / f"rows.{ending}"
    path.write_text("".join(separator.join(row) + "\n" for row in rows))
    wanted = b'hello, "you"|NA|12|two\nlines|'.replace(b"|", b"\xff")
    assert joined_text(loaded(train=path, sequence_length=4).train) == wanted[: len(wanted) // 4 * 4]
    with pytest.raises(DataError, match=r"row 0 has no field 'body', only 'id', 'text'; set data\.text_field"):
        loaded(train=path, text_field="body")


def test_csv_of_other_countries(tmp_path: Path) -> None:
    """Semicolons are what spreadsheets write there. A comma inside of a text that has no quotes would cut it without a word."""
    (tmp_path / "a.csv").write_bytes("\ufefftext;label\r\nhello, you;1\r\n".encode())
    assert joined_text(loaded(train=tmp_path / "a.csv", sequence_length=4).train) == b"hello, y"


def test_row_files_may_be_empty_and_have_names_that_look_like_patterns(tmp_path: Path) -> None:
    for name, text in {"a[1]": '{"text": "one"}\n', "b*": '{"text": "two"}\n', "bc": ""}.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    source = find_text(tmp_path, where="data.train")
    assert [row.key for row in source.rows(["text"], [], [])] == ["a[1].jsonl:0", "b*.jsonl:0"]
    datasets.Dataset.from_dict({"text": [""]}).select([]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="holds 0 tokens in 0 documents"):
        loaded(train=str(tmp_path / "a.parquet"))


@pytest.mark.usefixtures("offline")
def test_rows_leave_nothing_in_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    loaded(train=write_rows(tmp_path / "a.jsonl", [{"text": "hello world"}]))
    assert not list((tmp_path / "cache").rglob("*.arrow"))


def test_held_out_documents_are_whole_and_depend_on_their_names_alone(tmp_path: Path) -> None:
    def held(count: int) -> Any:
        for number in range(count):
            (tmp_path / f"{number:02}.txt").write_text(f"{number:02}" * 8)
        return loaded(train=tmp_path, sequence_length=17, eval_fraction=0.25)

    data = held(40)
    expected = [f"{number:02}" for number in range(40) if is_held_out(f"{number:02}.txt", 0.25)]
    assert joined_text(data.eval) == b"".join(each.encode() * 8 + b"\xff" for each in expected)
    assert 3 < len(expected) < 20
    assert len(data.train) + len(data.eval) == 40
    assert joined_text(held(41).eval).startswith(joined_text(data.eval))


@given(fraction=st.floats(0, 1))
def test_the_held_out_part_grows_with_the_fraction(fraction: float) -> None:
    keys = [f"k{number}" for number in range(200)]
    held = [key for key in keys if is_held_out(key, fraction)]
    assert abs(len(held) - 200 * fraction) < 45
    assert all(is_held_out(key, min(1.0, fraction * 1.1)) for key in held)


def test_of_one_document_the_last_sequences_are_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    data = loaded(train=tmp_path / "a.txt", sequence_length=10, eval_fraction=0.2)
    assert (len(data.train), len(data.eval)) == (8, 2)
    assert "last 2 sequences" in data.notes[1]
    tiny = loaded(train=tmp_path / "a.txt", sequence_length=80, eval_fraction=0.2)
    assert tiny.eval is None
    assert "too little" in tiny.notes[0]


def test_eval_text_of_its_own_leaves_the_training_text_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("training text")
    (tmp_path / "b.txt").write_text("held-out")
    data = loaded(train=[tmp_path / "a.txt"], eval=tmp_path / "b.txt", eval_fraction=0.5)
    assert (joined_text(data.train), joined_text(data.eval)) == (b"training", b"held-out")


@given(texts=st.lists(st.text(), max_size=4))
def test_bytes_round_trip_and_never_hold_end_of_text(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    for text, (tokens, _) in zip(texts, tokenizer.encode(texts, offsets=True), strict=True):
        assert tokenizer.end_of_text not in tokens
        assert tokens.tobytes().decode() == text
    assert tokenizer.encode(["a\ud800b"])[0][0].tobytes() == b"a?b"  # A lone surrogate does not end a run.


@pytest.mark.usefixtures("offline")
def test_a_saved_tokenizer_is_loaded_from_its_directory(tmp_path: Path, tokenizer_directory: Path) -> None:
    (tmp_path / "x.txt").write_text("a b b a c a b")
    data = loaded(train=tmp_path / "x.txt", tokenizer=str(tokenizer_directory), sequence_length=4)
    assert joined_ids(data.train).tolist() == [2, 3, 3, 2, 1, 2, 3, 0]
    assert (data.tokenizer.vocab_size, data.tokenizer.end_of_text) == (4, 0)
    assert data.byte_pair_entropy is None


@pytest.mark.usefixtures("offline")
def test_a_tokenizer_that_is_absent_or_without_end_is_one_error(tmp_path: Path, tokenizer_directory: Path) -> None:
    for name in ("gpt2", "meta-llama/Llama-3.1-8B", tmp_path / "nowhere"):
        with pytest.raises(DataError, match="hub names are not looked up"):
            load_tokenizer(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no tokenizer \(tokenizer\.json"):
        load_tokenizer(tmp_path / "empty")
    own: Any = load_tokenizer(tokenizer_directory)
    own.tokenizer.eos_token = None
    with pytest.raises(DataError, match="neither eos_token nor sep_token"):
        PretrainedTokenizer(tokenizer=own.tokenizer)
    (tokenizer_directory / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(tokenizer_directory)


# Packing


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32), (256000, np.int32)]
)
def test_tokens_are_stored_in_the_narrowest_dtype(vocabulary: int, dtype: type) -> None:
    """And a tokenizer that breaks its word is named."""
    file = io.BytesIO()
    writer = TokenWriter(file, vocabulary)
    writer.append(np.asarray([0, vocabulary - 1, vocabulary - 2]), text_bytes=2)
    assert np.frombuffer(file.getvalue(), dtype).tolist() == [0, vocabulary - 1, vocabulary - 2]
    assert (writer.amount.tokens, writer.largest) == (3, vocabulary - 1)
    for wrong in ([3, vocabulary], [-1, 3]):
        with pytest.raises(DataError, match=f"vocabulary has {vocabulary}"):
            writer.append(np.asarray(wrong), text_bytes=0)


def packed_of(tokens: np.ndarray[Any, Any], length: int, separator: int | None = None, begin: int | None = None) -> TokenDataset:
    none = TextAmount()
    stored: dict[str, Any] = {"kept": none, "held": none, "remarks": {}, "path": Path(), "blocks": [None]}
    text = StoredText(tokens=tokens, largest=int(tokens.max()), digest=str(tokens), **stored)
    keys = {"separate": separator is not None, "masked": False, "separator": separator or 0, "begin": begin}
    return TokenDataset.join(text, 0, TextAmount(tokens=tokens.size), length, **keys)


def test_an_id_past_the_model_s_vocabulary_is_named() -> None:
    dataset = packed_of(np.asarray([1, 2, 3, 4, 9, 4], dtype=np.uint8), 2)
    dataset.check_vocabulary(10)
    with pytest.raises(DataError, match=r"text has token id 9 but .* has 9 tokens \(ids 0 to 8\)"):
        dataset.check_vocabulary(9)


def test_fingerprints_tell_content_dtype_and_length_apart() -> None:
    """And stay, as checkpoints have them."""
    tokens = np.arange(12, dtype=np.uint8)
    variants = [(tokens, 4), (tokens, 3), (tokens[::-1].copy(), 4), (tokens.astype(np.uint16), 4), (tokens.copy(), 4)]
    found = [packed_of(*each).fingerprint() for each in variants]
    assert len(set(found[:4])) == 4
    assert found[0] == found[4] == "6d11341839fd0b2e"
    whole = packed_of(tokens, 4)
    parts = [replace(whole, cuts=whole.cuts[:3]), replace(whole, cuts=whole.cuts[1:]), packed_of(tokens, 2), whole]
    assert len({each.fingerprint() for each in parts}) == 4
    mixtures = [MixedDataset(each, [1.0, 2.0]) for each in (parts[:2], parts[1::-1], parts[1:3])]
    assert len({each.fingerprint() for each in mixtures}) == 3
    marked = replace(packed_of(tokens, 4), marked=True)
    places = ({"begins": range(1, 12, 4)}, {"cuts": range(0, 6, 2)}, {"labels": np.arange(3)})
    changes = ({}, {"sequence_length": 3}, {"separate": True}, {"separator": 9}, *places)
    assert len({replace(marked, **each).fingerprint() for each in changes}) == len(changes)


def test_byte_pair_entropy_of_texts_whose_entropy_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert byte_pair_entropy(np.asarray([0, 1] * 50)) == 0.0
    coins = np.random.default_rng(0).integers(0, 4, 200_000).astype(np.uint8)
    whole = byte_pair_entropy(coins)
    assert whole == pytest.approx(math.log(4), abs=1e-4)
    monkeypatch.setattr("zeromesh.trainer.data.packing._PAIRS_AT_ONCE", 777)
    assert byte_pair_entropy(coins) == whole


@pytest.mark.parametrize(
    ("begin", "tokens", "places"),
    [
        (None, [5, 6, 1, 7, 8, 1], [0, 1, 2, 0, 1, 2]),
        (2, [2, 5, 1, 2, 7, 1], [0, 1, 2, 0, 1, 2]),
        (2, [2, 5, 1, 6, 7, 1], [0, 1, 2, 3, 4, 5]),  # The text itself has the separator.
        (1, [1, 5, 1, 1, 7, 1], [0, 1, 2, 0, 1, 2]),
        (1, [1, 1, 5, 6, 1, 1], [0, 0, 1, 2, 3, 0]),
        (1, [5, 1, 1, 6, 1, 1], [0, 1, 0, 1, 2, 0]),
    ],
)
def test_where_documents_begin(begin: int | None, tokens: list[int], places: list[int]) -> None:
    sample = packed_of(np.asarray(tokens, dtype=np.uint8), len(tokens), 1, begin)[0]
    assert sample["position_ids"].tolist() == places
    assert sample["labels"].tolist() == [token if place else -100 for token, place in zip(tokens, places, strict=True)]


@pytest.mark.parametrize("length", [12, 24])
def test_separate_documents_are_as_if_alone(length: int) -> None:
    """A model's logits of each document of a packed sequence are those that it gives for the document by itself."""
    documents = [[5, 6, 7, 8, 1], [9, 10, 1], [11, 12, 13, 14, 15, 16, 17, 1], [2, 3, 4, 5, 6, 7, 8, 1]]
    tokens = np.array([token for document in documents for token in document][: 24 // length * length], dtype=np.uint8)
    dataset = packed_of(tokens, length, separator=1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, use_cache=False)).double().eval()
    for index in range(len(dataset)):
        sample = dataset[index]
        with torch.no_grad():
            packed = model(input_ids=sample["input_ids"][None], position_ids=sample["position_ids"][None]).logits[0]
        starts = [place for place in range(length) if sample["position_ids"][place] == 0]
        assert len(starts) > 1
        for start, end in itertools.pairwise([*starts, length]):
            with torch.no_grad():
                alone = model(input_ids=sample["input_ids"][None, start:end]).logits[0]
            assert torch.allclose(packed[start:end], alone, rtol=1e-9, atol=1e-12)
            assert sample["labels"][start] == -100
            assert torch.equal(sample["labels"][start + 1 : end], sample["input_ids"][start + 1 : end])


def test_several_evaluation_sets_by_name(tmp_path: Path) -> None:
    for name, count in {"train": 90, "a": 30, "b": 60}.items():
        (tmp_path / f"{name}.txt").write_text("once upon a time " * count)
    sets = {"a": str(tmp_path / "a.txt"), "b_c": [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]}
    section = load_config({"data": {"train": str(tmp_path / "train.txt"), "eval": sets, "sequence_length": 32}}).data
    found = load_datasets(section)
    assert {name: len(each) for name, each in found.eval.items()} == {"a": 511 // 32, "b_c": (511 + 1021) // 32}
    assert any("data.eval.b_c" in note for note in found.notes)
    with pytest.raises(ConfigError, match=r"data.eval: '.*none.txt' does not exist"):
        load_config({"data": {"eval": {"a": str(tmp_path / "none.txt")}}})
