"""What a `data` section makes of files: the parts that are held out, the rows and classes of each, and what is said of them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as tf
from PIL import Image

from tests.support.text_files import joined_ids, joined_text, word_tokenizer, write_rows
from zeromesh.errors import DataError
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.datasets import is_held_out, load_datasets, load_pictures
from zeromesh.trainer.data.feed import RunData
from zeromesh.trainer.data.packing import byte_pair_entropy
from zeromesh.trainer.data.tokenizer import PretrainedTokenizer
from zeromesh.trainer.formatting import Detail

PAIR = {"prompt": "ab", "completion": "cde"}  # six bytes with the end of text


def load(tokenizer: Any = None, /, **keys: Any) -> RunData:
    return load_datasets(DataSection(**{"eval_fraction": 0.0, **keys}), tokenizer=tokenizer)


def samples(dataset: Any) -> list[dict[str, Any]]:
    return [{name: each.tolist() for name, each in dataset[index].items()} for index in range(len(dataset))]


def test_the_same_names_are_held_out_on_every_machine_for_ever() -> None:
    held = [n for n in range(40) if is_held_out(f"{n:02}.txt", 0.25)]
    assert held == [2, 6, 14, 16, 19, 27, 32]
    assert not any(is_held_out(f"{n:02}.txt", 0.0) for n in range(40))


# Documents


@pytest.mark.parametrize(("length", "whole"), [(9, True), (10, False)])
def test_documents_of_one_sequence_are_enough_to_be_held_out(tmp_path: Path, length: int, whole: bool) -> None:
    """Of fewer tokens the last sequence is held out, and the entropy is that of all."""
    for number in (1, 2, 3):
        (tmp_path / f"{number:02}.txt").write_text("document"[: 8 - number] + str(number) * number)
    data = load(train=str(tmp_path), sequence_length=length, eval_fraction=0.25)
    kept, held = b"documen1\xffdocum333\xff", b"docume22\xff"
    stored, entropic = kept + held, kept if whole else kept + held
    assert (joined_text(data.train), joined_text(data.eval)) == ((kept, held) if whole else (stored[:10], stored[10:20]))
    assert data.byte_pair_entropy == byte_pair_entropy(np.frombuffer(entropic, np.uint8))


def test_what_is_said_of_documents(tmp_path: Path) -> None:
    for name, text in {"a.txt": "caf\u00e9", "b.txt": "hello"}.items():
        (tmp_path / name).write_text(text)
    data = load(train=str(tmp_path), sequence_length=5)
    where = f"data.train {str(tmp_path)!r}"
    entropy = f"byte-pair entropy of the training text: {data.byte_pair_entropy:.4f} nats per byte, the loss to beat"
    assert data.notes == (
        f"{where}: 10 bytes of text in 2 documents, 12 tokens, 2 sequences of 5; the last 2 tokens are no whole sequence and are "
        "dropped",
        entropy,
    )
    assert all(isinstance(note, Detail) for note in data.notes)
    whole = load(train=str(tmp_path), sequence_length=6)
    assert whole.notes[0] == f"{where}: 10 bytes of text in 2 documents, 12 tokens, 2 sequences of 6"
    (tmp_path / "c.bin").write_bytes(b"\0")
    (tmp_path / "d.bin").write_bytes(b"\0")
    left_out = load(train=str(tmp_path), sequence_length=6, eval_fraction=0.9).notes[-2]
    assert left_out == f"{where}: left out 2 files that are not text, such as 'c.bin'"
    assert not isinstance(left_out, Detail)


# Rows


def test_rows_as_long_as_a_sequence_are_whole_and_longer_ones_are_cut(tmp_path: Path) -> None:
    longer, empty = {"prompt": "ab", "completion": "cdef"}, {"prompt": "", "completion": ""}
    path = write_rows(tmp_path / "rows.jsonl", [PAIR])
    fits = load(train=path, format="pairs", sequence_length=6)
    assert samples(fits.train) == [
        {"input_ids": [*b"abcde\xff"], "labels": [-100, -100, *b"cde\xff"], "position_ids": [0, 1, 2, 3, 4, 5]}
    ]
    assert fits.notes == (
        f"data.train {path!r}: 1 row, 6 tokens, in 1 sequence of 6, which they fill to 100%; targets of the "
        "loss are 4 tokens of all rows",
    )
    assert isinstance(fits.notes[0], Detail)
    cut = load(train=write_rows(tmp_path / "rows.jsonl", [longer, PAIR, empty]), format="pairs", sequence_length=6)
    assert samples(cut.train)[0]["labels"] == [-100, -100, *b"cdef"]
    assert cut.notes == (
        f"data.train {path!r}: 2 rows, 12 tokens, in 2 sequences of 6, which they fill to 100%; targets of the loss are 8 tokens "
        "of all rows; 1 rows are longer than data.sequence_length and are cut; 1 have no target and are left out",
    )
    assert not isinstance(cut.notes[0], Detail)


def test_rows_that_are_held_out_are_counted_apart(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n:02}", "completion": "abc"} for n in range(12)])
    data = load(train=path, format="pairs", sequence_length=8, eval_fraction=0.25, packing=False)
    assert [bytes(each["input_ids"][:2]) for each in samples(data.eval)] == [b"03", b"04", b"06"]
    assert all("attention_mask" in each for each in samples(data.eval))
    assert [note.partition(": ")[2] for note in data.notes] == [
        "9 rows, 54 tokens, in 9 sequences of 8, which they fill to 75%; targets of the loss are 48 tokens of all rows",
        "3 rows, 18 tokens, in 3 sequences of 8, which they fill to 75%",
    ]
    assert "rows.jsonl', held out: 3" in data.notes[1]


@pytest.fixture
def words() -> PretrainedTokenizer:
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    made = word_tokenizer([*special.values(), "a", "b", "c"], "[PAD]", text="[CLS] $A [SEP]", **special)
    return PretrainedTokenizer(tokenizer=made)


@pytest.mark.parametrize(("names", "classes"), [(["b", "a"], "a b"), ([10, 9, 0], "0 9 10"), (["10", "9", "x"], "10 9 x")])
def test_every_row_has_its_own_class(tmp_path: Path, words: PretrainedTokenizer, names: list[Any], classes: str) -> None:
    """Also one that is held out; a text that is too long keeps the token that ends it."""
    order = {"a": 3, "b": 4, "c": 5}
    rows = [{"text": " ".join("abc"[n % 3] * (8 if n == 2 else n % 4 + 1)), "label": names[n % 3 % len(names)]} for n in range(12)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    keys: dict[str, Any] = {"train": path, "format": "labels", "sequence_length": 6}
    data = load(words, **keys, eval_fraction=0.25, separate_documents=True)
    assert data.classes == tuple(classes.split())
    held = [number for number in range(12) if number in (3, 4, 6)]
    for dataset, numbers in ((data.train, [n for n in range(12) if n not in held]), (data.eval, held)):
        wanted = []
        for number in numbers:
            ids = [1, *[order["abc"[number % 3]]] * min(4, len(rows[number]["text"].split())), 2]
            label = data.classes.index(str(rows[number]["label"]))
            mask = [1] * len(ids) + [0] * (6 - len(ids))
            wanted.append({"input_ids": [*ids, *[0] * (6 - len(ids))], "labels": label, "attention_mask": mask})
        assert samples(dataset) == wanted
    assert data.notes[0].endswith(f"; {len(names)} classes: {', '.join(data.classes)}")
    assert not any(isinstance(note, Detail) for note in data.notes)
    few = write_rows(tmp_path / "few.jsonl", [rows[4], rows[0]])
    alone = load(words, **keys, eval=few)
    assert [each["labels"] for each in samples(alone.eval)] == [data.classes.index(str(rows[n]["label"])) for n in (4, 0)]


# Mixtures and evaluation sets


def test_parts_of_a_mixture_are_read_by_their_own_keys(tmp_path: Path) -> None:
    text, pairs = tmp_path / "text.txt", write_rows(tmp_path / "pairs.jsonl", [PAIR] * 4)
    text.write_text("0123456789" * 5)
    mixture = {"long_text": {"train": str(text)}, "pairs": {"train": pairs, "format": "pairs", "weight": 3}}
    data = load(mixture=mixture, sequence_length=8)
    assert (data.eval, data.byte_pair_entropy) == (None, None)
    assert [note.partition(":")[0] for note in data.notes] == [
        f"data.mixture.long_text.train {str(text)!r}",
        f"data.mixture.pairs.train {pairs!r}",
        "data.mixture",
    ]
    assert data.notes[2] == "data.mixture: long_text 25.0%, pairs 75.0% of sequences; an epoch has 10 of them"
    alone = load(mixture=mixture, sequence_length=8, packing=False)
    for each in samples(alone.train):
        assert each["attention_mask"] == [1] * 8 if each["input_ids"][0] < 97 else [1] * 6 + [0] * 2


def test_documents_of_text_alone_have_no_mask_and_a_single_set_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789" * 5)
    data = load(train=str(tmp_path / "a.txt"), eval=str(tmp_path / "a.txt"), sequence_length=8)
    assert {*data.train[0], *data.eval[0]} == {"input_ids", "labels"}
    assert joined_ids(data.eval).tolist() == joined_ids(data.train).tolist()
    separate = load(train=str(tmp_path / "a.txt"), sequence_length=8, separate_documents=True)
    assert separate.answer_ends == (255,)  # As a model that knows other tokens would not end there.
    assert separate.train[0]["position_ids"].tolist() == list(range(8))


@pytest.mark.parametrize(("separate", "count"), [(None, 1), (False, 3)])
def test_rows_of_another_format_share_a_sequence_only_where_they_are_kept_apart(
    tmp_path: Path, separate: bool | None, count: int
) -> None:
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}"
    told = write_rows(tmp_path / "told.jsonl", [{"instruction": "ab", "output": "cd"}] * 3)
    pairs = write_rows(tmp_path / "pairs.jsonl", [PAIR] * 3)
    keys = {"format": "alpaca", "chat_template": chat, "sequence_length": 32, "separate_documents": separate}
    data = load(train=told, eval={"pairs": pairs, "same": told}, **keys)
    assert {name: len(each) for name, each in data.eval.items()} == {"pairs": count, "same": 1}
    noted = [note for note in data.notes if "has rows of format" in note]
    assert noted == [f"data.eval.pairs {pairs!r} has rows of format pairs"]


@pytest.mark.parametrize("name", ["chat.jinja", "folder/chat"])
def test_a_template_whose_file_is_missing_is_named(tmp_path: Path, words: PretrainedTokenizer, name: str) -> None:
    said = re.escape(f"data.chat_template: no file {name!r}; give a file, or the template itself")
    with pytest.raises(DataError, match=said):
        load(words, train=write_rows(tmp_path / "rows.jsonl", [PAIR]), format="pairs", chat_template=name)


# Folders of pictures


def test_pictures_of_other_modes_and_suffixes_are_taken(tmp_path: Path) -> None:
    for label, name, mode in (("b", "1.PNG", "L"), ("a", "2.png", "RGBA"), ("a", "1.jpeg", "RGB")):
        (tmp_path / label).mkdir(exist_ok=True)
        Image.new(mode, (4, 4)).save(tmp_path / label / name)
    processor = tf.ViTImageProcessorPil(size={"height": 8, "width": 8})
    found = load_pictures(DataSection(train=str(tmp_path), format="pictures", eval_fraction=0.0), processor, "RGB")
    assert [(str(path.relative_to(tmp_path)), label) for path, label in found.train.files] == [
        ("a/1.jpeg", 0), ("a/2.png", 0), ("b/1.PNG", 1)
    ]  # fmt: skip
    assert {tuple(found.train[index]["pixel_values"].shape) for index in range(3)} == {(3, 8, 8)}
    assert (found.eval, found.processor) == (None, processor)
    assert found.notes == ("data.train: 3 pictures in 2 classes: a, b",)
    held = load_pictures(DataSection(train=str(tmp_path), format="pictures", eval_fraction=0.01), processor, "RGB")
    assert (held.eval, len(held.train)) == (None, 3)
