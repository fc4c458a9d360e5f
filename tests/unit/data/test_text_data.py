"""Text to packed sequences: what is read, what is held out, one clear error for what cannot be read."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.datasets import is_held_out, load_datasets
from zeromesh.trainer.data.packing import PackedDataset, byte_pair_entropy
from zeromesh.trainer.data.text_sources import find_text, read_text, stdlib_source
from zeromesh.trainer.data.token_cache import StoredText, TextAmount, TokenWriter, token_dtype
from zeromesh.trainer.data.tokenizer import ByteTokenizer, PretrainedTokenizer, load_tokenizer


def text_section(**keys: Any) -> DataSection:
    """A `data` section, short and with nothing held out, whose paths may be those of pathlib."""
    return DataSection.model_construct(**{"sequence_length": 8, "eval_fraction": 0.0, **keys})


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
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    directory = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", unk_token="<unk>", model_max_length=4
    ).save_pretrained(directory)
    return directory


def tokens_of(dataset: PackedDataset) -> Any:
    """The flat ids of all sequences."""
    return dataset.text.tokens[dataset.first :][: dataset.sequences * dataset.sequence_length]


def text_of(dataset: PackedDataset) -> bytes:
    return bytes(tokens_of(dataset).astype(np.uint8))


# The standard library


def test_the_standard_library_is_source_alone_and_is_the_same_twice() -> None:
    source = stdlib_source()
    keys = [file.key for file in source.files]
    assert keys == sorted(keys)
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(keys)
    assert all(key.endswith(".py") for key in keys)
    assert not [key for key in keys if {"test", "tests", "site-packages"} & set(key.split("/"))]
    assert sum(file.path.stat().st_size for file in source.files) > 5_000_000
    section = text_section(sequence_length=256, eval_fraction=0.05)
    assert load_datasets(section).train.fingerprint() == load_datasets(section).train.fingerprint()


def test_the_standard_library_prints_the_loss_to_beat() -> None:
    data = load_datasets(text_section(sequence_length=256, eval_fraction=0.05))
    assert data.byte_pair_entropy is not None
    assert 2.3 < data.byte_pair_entropy < 2.5
    assert f"{data.byte_pair_entropy:.4f} nats" in data.notes[-1]
    assert tokens_of(data.train).dtype == np.uint8
    assert data.eval is not None
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
    (tmp_path / "b.txt").write_text("world")
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "empty.txt").write_text("")
    data = load_datasets(text_section(train=tmp_path, sequence_length=5))
    assert text_of(data.train) == b"hello\xffworl"
    assert "the last 2 tokens are no whole sequence" in data.notes[0]
    assert "last 2 tokens" in data.notes[0]
    assert "in 2 documents" in data.notes[0]
    assert data.eval is None


def test_sequences_have_equal_and_separate_inputs_and_labels(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world!")
    train = load_datasets(text_section(train=tmp_path, sequence_length=6)).train
    sample = train[1]
    assert bytes(sample["input_ids"].tolist()) == b"world!"
    assert sample["labels"].equal(sample["input_ids"])
    sample["labels"][0] = -100
    assert train[1]["labels"][0] == ord("w")
    assert sample["input_ids"][0] == ord("w")
    with pytest.raises(IndexError):
        train[2]
    with pytest.raises(IndexError):
        train[-1]


def test_a_directory_is_read_in_order_of_names_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "sub" / "a.md").write_text("one")
    (tmp_path / ".git" / "x").write_text("hidden")
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    source = find_text(tmp_path, where="data.train")
    skipped: list[str] = []
    assert [row.key for row in source.rows(["text"], [], skipped, whole=True)] == ["b.txt", "sub/a.md"]
    assert skipped == ["c.bin"]
    assert any("c.bin" in note for note in load_datasets(text_section(train=tmp_path, sequence_length=4)).notes)
    with pytest.raises(DataError, match="is not text"):
        load_datasets(text_section(train=tmp_path / "c.bin"))


def test_text_in_another_encoding_is_refused_until_it_is_named(tmp_path: Path) -> None:
    """With the file, the byte and the key, for text and for rows; also behind the first piece of a file, and in the last one."""
    text = "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440"
    for name, before in (("a.txt", ""), ("b.txt", "x" * 1_500_000), ("c.csv", 'text\n"'), ("d.jsonl", '{"text": "')):
        behind = {"c.csv": '"', "d.jsonl": '"}\n'}.get(name, "")
        (tmp_path / name).write_bytes(f"{before}{text}{behind}".encode("koi8-r"))
        section = text_section(train=tmp_path / name)
        with pytest.raises(DataError, match=rf"{name}' is not utf-8: byte {len(before):,} .*; set data\.encoding"):
            load_datasets(section)
        data = load_datasets(section.model_copy(update={"encoding": "koi8-r"}))
        wanted = f"{before if name < 'c' else ''}{text}"
        assert wanted.encode().startswith(text_of(data.train)[:8])  # type: ignore[arg-type]
    (tmp_path / "e.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"e\.txt' is not utf-8: byte 3 of its text is e9 \(unexpected end"):
        read_text(tmp_path / "e.txt")
    with pytest.raises(
        DataError, match=r"e\.txt' is not utf-16: UTF-16 stream does not start with BOM; set data\.encoding"
    ):
        load_datasets(text_section(train=tmp_path / "e.txt", encoding="utf-16"))
    with pytest.raises(DataError, match=r"data\.encoding: unknown encoding: koi9"):
        load_datasets(text_section(train=tmp_path / "a.txt", encoding="koi9"))
    with pytest.raises(DataError, match=r"data\.encoding: 'hex' is not a text encoding"):
        load_datasets(text_section(train=tmp_path / "a.txt", encoding="hex"))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("form", ["txt", "csv", "jsonl"])
def test_a_byte_order_mark_says_the_encoding(tmp_path: Path, encoding: str, form: str) -> None:
    text = "caf\u00e9 \u2615 \u043c\u0438\u0440 "
    written = {"txt": text, "csv": f"text\n{text}\n", "jsonl": json.dumps({"text": text}, ensure_ascii=False) + "\n"}[
        form
    ]
    (tmp_path / f"a.{form}").write_bytes(written.encode(encoding))
    data = load_datasets(text_section(train=tmp_path / f"a.{form}"))
    assert text_of(data.train) == text.encode()[: len(data.train) * 8]  # type: ignore[arg-type]


PACKED: dict[str, Any] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": None}


@pytest.mark.parametrize("name", PACKED)
def test_compressed_files_and_patterns_are_read(tmp_path: Path, name: str) -> None:
    import pyarrow

    pack = PACKED[name] or (lambda content: pyarrow.compress(content, codec="zstd", asbytes=True))
    for number in (2, 0, 1):
        row = json.dumps({"text": f"row {number}: 12345"})
        (tmp_path / f"{number}.jsonl.{name}").write_bytes(pack(f"{row}\n".encode()))
    data = load_datasets(text_section(train=str(tmp_path / f"*.jsonl.{name}")))
    assert text_of(data.train) == b"row 0: 12345\xffrow 1: 12345\xffrow 2: 12345\xff"[:32]  # type: ignore[arg-type]
    assert any(note.endswith(f"*.jsonl.{name}': 3 files") for note in data.notes)
    whole = (tmp_path / f"0.jsonl.{name}").read_bytes()
    for content in (whole[:-9], b"nothing that was packed"):
        (tmp_path / f"0.jsonl.{name}").write_bytes(content)
        with pytest.raises(DataError, match=rf"0\.jsonl\.{name}' cannot be read: "):
            load_datasets(text_section(train=tmp_path / f"0.jsonl.{name}"))
    with pytest.raises(DataError, match=r"data\.train: no text file in '.*\*\.txt'"):
        load_datasets(text_section(train=str(tmp_path / "*.txt")))


def test_rows_of_json_are_lines_or_one_list(tmp_path: Path) -> None:
    """Half a character becomes '?', as bytes have none; what is no row is named by its line."""
    (tmp_path / "a.json").write_text('[\n {"text": "one"},\n {"text": "\\ud83d\\ude00\\ud83d"}\n]\n')
    source = find_text(tmp_path, where="data.train")
    found = [row.values["text"] for row in source.rows(["text"], [], [])]
    assert found == ["one", "\U0001f600?"]
    for content, message in (
        ('{"text": "a"}\n{"text"', "cannot be read as json: line 2: "),
        ("5\n", "line 1 is a int"),
    ):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(DataError, match=message):
            load_datasets(text_section(train=tmp_path / "a.json"))


def test_documents_begin_as_the_tokenizer_begins_a_text(tokenizer_directory: Path) -> None:
    from tokenizers import processors

    own = load_tokenizer(tokenizer_directory).tokenizer  # type: ignore[union-attr]
    assert PretrainedTokenizer(tokenizer=own).beginning == []
    for single, beginning in (
        ("<unk> $A", [1]),
        ("<unk> $A <eos>", [1]),
        ("$A <eos>", []),
        ("<unk> <eos> $A <unk>", [1, 0]),
    ):
        own.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<unk>", 1), ("<eos>", 0)]
        )
        assert PretrainedTokenizer(tokenizer=own).beginning == beginning


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_rows_are_documents(tmp_path: Path, form: str) -> None:
    import datasets

    rows = [{"body": "hello", "id": 1}, {"body": "", "id": 2}, {"body": "w\u00f6rld", "id": 3}]
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif form == "json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = load_datasets(text_section(train=str(path), text_field="body", sequence_length=13))
    assert text_of(data.train) == b"hello\xffw\xc3\xb6rld\xff"
    assert "in 2 documents" in data.notes[0]
    with pytest.raises(DataError, match=r"row 0 has no field 'text', only 'body', 'id'"):
        load_datasets(text_section(train=str(path)))
    with pytest.raises(DataError, match="field 'id' is int, not text"):
        load_datasets(text_section(train=str(path), text_field="id"))


def test_row_files_may_be_empty_and_have_names_that_look_like_patterns(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "b*.jsonl").write_text('{"text": "two"}\n')
    (tmp_path / "bc.jsonl").write_text("")
    source = find_text(tmp_path, where="data.train")
    assert [row.key for row in source.rows(["text"], [], [])] == ["a[1].jsonl:0", "b*.jsonl:0"]


@pytest.mark.usefixtures("offline")
def test_rows_leave_nothing_in_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache))
    (tmp_path / "a.jsonl").write_text('{"text": "hello world"}\n')
    load_datasets(text_section(train=tmp_path / "a.jsonl"))
    assert not list(cache.rglob("*.arrow"))


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", '{"text": "x"\n{'), ("a.parquet", "no parquet")])
def test_broken_rows_name_the_file(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=rf"{name}.*cannot be read as"):
        load_datasets(text_section(train=tmp_path / name))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("key", ["train", "eval"])
def test_a_missing_path_is_one_error_and_no_hub_is_asked(tmp_path: Path, key: str) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    section = text_section(train=tmp_path).model_copy(update={key: "wikitext/wikitext-2"})
    with pytest.raises(DataError, match=rf"data\.{key}: no file or directory 'wikitext/wikitext-2'"):
        load_datasets(section)


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no text file in"):
        load_datasets(text_section(train=tmp_path))
    with pytest.raises(DataError, match="empty list"):
        load_datasets(text_section(train=[]))
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="0 tokens in 0 documents"):
        load_datasets(text_section(train=tmp_path))
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="6 tokens in 1 documents, less than one sequence of 8"):
        load_datasets(text_section(train=tmp_path))


# Held-out text


def test_held_out_documents_are_whole_and_depend_on_their_names_alone(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02}" * 8)
    data = load_datasets(text_section(train=tmp_path, sequence_length=17, eval_fraction=0.25))
    assert data.eval is not None
    expected = [f"{number:02}" for number in range(40) if is_held_out(f"{number:02}.txt", 0.25)]
    assert text_of(data.eval) == b"".join(each.encode() * 8 + b"\xff" for each in expected)
    assert 3 < len(expected) < 20
    assert len(data.train) + len(data.eval) == 40
    (tmp_path / "40.txt").write_text("40" * 8)
    more = load_datasets(text_section(train=tmp_path, sequence_length=17, eval_fraction=0.25))
    assert more.eval is not None
    assert text_of(more.eval).startswith(text_of(data.eval))


@given(fraction=st.floats(0, 1))
def test_the_held_out_part_grows_with_the_fraction(fraction: float) -> None:
    keys = [f"k{number}" for number in range(200)]
    held = [key for key in keys if is_held_out(key, fraction)]
    assert abs(len(held) - 200 * fraction) < 45
    assert all(is_held_out(key, min(1.0, fraction * 1.1)) for key in held)


def test_of_one_document_the_last_sequences_are_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    data = load_datasets(text_section(train=tmp_path / "a.txt", sequence_length=10, eval_fraction=0.2))
    assert data.eval is not None
    assert (len(data.train), len(data.eval)) == (8, 2)
    assert "last 2 sequences" in data.notes[1]
    tiny = load_datasets(text_section(train=tmp_path / "a.txt", sequence_length=80, eval_fraction=0.2))
    assert tiny.eval is None
    assert "too little" in tiny.notes[0]


def test_eval_text_of_its_own_leaves_the_training_text_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("training text")
    (tmp_path / "b.txt").write_text("held-out")
    section = text_section(train=[tmp_path / "a.txt"], eval=tmp_path / "b.txt", eval_fraction=0.5)
    data = load_datasets(section)
    assert text_of(data.train) == b"training"
    assert data.eval is not None
    assert text_of(data.eval) == b"held-out"


# Tokenizers


@given(texts=st.lists(st.text(), max_size=4))
def test_bytes_round_trip_and_never_hold_end_of_text(texts: list[str]) -> None:
    tokenizer = ByteTokenizer()
    for text, tokens in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokenizer.end_of_text not in tokens
        assert tokens.tobytes().decode() == text


def test_a_lone_surrogate_does_not_end_a_run() -> None:
    assert ByteTokenizer().encode(["a\ud800b"])[0].tobytes() == b"a?b"


@pytest.mark.usefixtures("offline")
def test_a_saved_tokenizer_is_loaded_from_its_directory(tmp_path: Path, tokenizer_directory: Path) -> None:
    (tmp_path / "x.txt").write_text("a b b a c a b")
    section = text_section(train=tmp_path / "x.txt", tokenizer=str(tokenizer_directory), sequence_length=4)
    data = load_datasets(section)
    assert tokens_of(data.train).tolist() == [2, 3, 3, 2, 1, 2, 3, 0]
    assert (data.tokenizer.vocab_size, data.tokenizer.end_of_text) == (4, 0)
    assert data.byte_pair_entropy is None


@pytest.mark.usefixtures("offline")
def test_a_tokenizer_that_is_not_here_is_one_error(tmp_path: Path, tokenizer_directory: Path) -> None:
    for name in ("gpt2", "meta-llama/Llama-3.1-8B", tmp_path / "nowhere"):
        with pytest.raises(DataError, match="hub names are not looked up"):
            load_tokenizer(name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no tokenizer \(tokenizer\.json"):
        load_tokenizer(tmp_path / "empty")
    (tokenizer_directory / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(tokenizer_directory)


def test_a_tokenizer_needs_an_end_of_text(tokenizer_directory: Path) -> None:
    loaded = load_tokenizer(tokenizer_directory)
    assert isinstance(loaded, PretrainedTokenizer)
    loaded.tokenizer.eos_token = None
    with pytest.raises(DataError, match="neither eos_token nor sep_token"):
        PretrainedTokenizer(tokenizer=loaded.tokenizer)


# Packing


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(256, np.uint8), (257, np.uint16), (65536, np.uint16), (65537, np.int32), (256000, np.int32)],
)
def test_tokens_are_stored_in_the_narrowest_dtype(vocabulary: int, dtype: type) -> None:
    assert token_dtype(vocabulary) is dtype
    file = io.BytesIO()
    writer = TokenWriter(file, vocabulary)
    writer.append(np.asarray([0, vocabulary - 1, vocabulary - 2]), text_bytes=2)
    assert np.frombuffer(file.getvalue(), dtype).tolist() == [0, vocabulary - 1, vocabulary - 2]
    assert (writer.amount.tokens, writer.largest) == (3, vocabulary - 1)


def test_a_tokenizer_that_breaks_its_word_is_named() -> None:
    buffer = TokenWriter(io.BytesIO(), 10)
    for wrong in ([3, 10], [-1, 3]):
        with pytest.raises(DataError, match="vocabulary has 10"):
            buffer.append(np.asarray(wrong), text_bytes=0)


def packed_of(tokens: np.ndarray[Any, Any], length: int, separator: int | None = None) -> PackedDataset:
    none = TextAmount()
    text = StoredText(
        tokens=tokens,
        kept=none,
        held=none,
        largest=int(tokens.max()),
        digest=str(tokens),
        remarks={},
        path=Path(),
        blocks=[None],
    )
    return PackedDataset(
        text=text, first=0, sequences=tokens.size // length, sequence_length=length, separator=separator
    )


def test_an_id_past_the_model_s_vocabulary_is_named() -> None:
    dataset = packed_of(np.asarray([1, 2, 3, 4, 9, 4], dtype=np.uint8), 2)
    dataset.check_vocabulary(10)
    with pytest.raises(DataError, match=r"text has token id 9 but .* has 9 tokens \(ids 0 to 8\)"):
        dataset.check_vocabulary(9)


def test_fingerprints_tell_content_dtype_and_length_apart() -> None:
    tokens = np.arange(12, dtype=np.uint8)
    variants = [
        packed_of(tokens, 4),
        packed_of(tokens, 3),
        packed_of(tokens[::-1].copy(), 4),
        packed_of(tokens.astype(np.uint16), 4),
    ]
    assert len({each.fingerprint() for each in variants}) == 4
    assert variants[0].fingerprint() == packed_of(tokens.copy(), 4).fingerprint()


def test_byte_pair_entropy_of_texts_whose_entropy_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert byte_pair_entropy(np.asarray([0, 1] * 50)) == 0.0
    rng = np.random.default_rng(0)
    coins = rng.integers(0, 4, 200_000).astype(np.uint8)
    whole = byte_pair_entropy(coins)
    assert whole == pytest.approx(math.log(4), abs=1e-4)
    monkeypatch.setattr("zeromesh.trainer.data.packing._PAIRS_AT_ONCE", 777)
    assert byte_pair_entropy(coins) == whole


@pytest.mark.parametrize("length", [12, 24])
def test_separate_documents_are_as_if_alone(length: int) -> None:
    """A model's logits of each document of a packed sequence are those that it gives for the document by itself."""
    documents = [[5, 6, 7, 8, 1], [9, 10, 1], [11, 12, 13, 14, 15, 16, 17, 1], [2, 3, 4, 5, 6, 7, 8, 1]]
    tokens = np.array([token for document in documents for token in document][: 24 // length * length], dtype=np.uint8)
    dataset = packed_of(tokens, length, separator=1)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=32, use_cache=False
    )
    model = LlamaForCausalLM(config).double().eval()
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
    assert isinstance(found.eval, dict)
    assert {name: len(each) for name, each in found.eval.items()} == {"a": 511 // 32, "b_c": (511 + 1021) // 32}
    assert any("data.eval.b_c" in note for note in found.notes)
    with pytest.raises(ConfigError, match=r"data.eval: '.*none.txt' does not exist"):
        load_config({"data": {"eval": {"a": str(tmp_path / "none.txt")}}})
