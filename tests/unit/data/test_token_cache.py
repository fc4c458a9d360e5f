"""Tokens of texts on disk: made once, by one rank of a host, made anew when anything changes, and never trusted unseen."""

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.text_files import joined_ids
from tests.support.workers import Workers
from zeromesh.errors import DataError, StorageError
from zeromesh.trainer.config.sections.training import DataSection
from zeromesh.trainer.data.datasets import load_datasets
from zeromesh.trainer.data.feed import RunData
from zeromesh.trainer.data.token_cache import TokenCache, TokenWriter
from zeromesh.trainer.data.tokenizer import ByteTokenizer, Encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Counting(ByteTokenizer):
    texts: list[str]
    name: str | None = "counting"

    def encode(self, texts: Sequence[str], *, offsets: bool = False) -> list[Encoded]:
        self.texts.extend(texts)
        return super(Counting, self).encode(texts, offsets=offsets)

    def digest(self) -> str | None:
        return self.name


class Home:
    """A text and a cache; `load` says how many texts were tokenised, and what was noted."""

    def __init__(self, folder: Path) -> None:
        self.text, self.cache = folder / "text", folder / "cache"
        self.text.mkdir()
        for number in range(20):
            (self.text / f"{number:02}.txt").write_text(f"document {number:02} " * 900)
        self.notes: list[str] = []
        self.told: list[str] = []

    def load(self, name: str | None = "counting", **changes: Any) -> tuple[int, RunData]:
        tokenizer = Counting(texts=[], name=name)
        keys = {"train": str(self.text), "sequence_length": 16, "eval_fraction": 0.2, **changes}
        cache = TokenCache(self.cache, self.notes.append)
        loaded = load_datasets(DataSection(**keys), tokenizer=tokenizer, cache=cache, tell=self.told.append)
        return len(tokenizer.texts), loaded

    @property
    def entries(self) -> list[Path]:
        return list(self.cache.iterdir())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def values(data: RunData) -> Any:
    return (data.train.fingerprint(), data.notes, data.byte_pair_entropy, joined_ids(data.train).tolist())


def test_text_is_tokenised_once_and_mapped_into_memory(home: Home) -> None:
    count, first = home.load()
    assert count == 20
    assert home.told[-1].startswith(f"tokenizing {home.text}: 210.9 KiB of 210.9 KiB, ")
    again, second = home.load()
    assert again == 0
    assert values(first) == values(second)
    base: Any = joined_ids(second.train)
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)
    assert home.load(sequence_length=32)[0] == 0
    assert os.stat(home.cache).st_mode & 0o077 == 0
    assert len(home.entries) == 1


def test_what_changes_the_tokens_makes_another_entry(home: Home) -> None:
    _, first = home.load()
    path = home.text / "03.txt"
    before = path.stat()
    path.write_text("DOCUMENT 03 " * 900)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # of the same size and time
    count, second = home.load()
    assert count == 20
    assert second.train.fingerprint() != first.train.fingerprint()
    assert home.load(name="another")[0] == 20
    assert home.load(eval_fraction=0.5)[0] == 20
    (home.text / "new.txt").write_text("new")
    assert home.load()[0] == 21
    assert len(home.entries) == 5


ONE_ROW = {"text": "the caf\u00e9", "body": "other words", "instruction": "w3", "output": "w4"}
ONE_ROW |= {"prompt": "w1", "completion": "w2"}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
READINGS: dict[str, dict[str, Any]] = {
    "text": {},
    "another column": {"text_field": "body"},
    "another encoding": {"encoding": "cp1252"},
    "pairs": {"format": "pairs"},
    "pairs of other columns": {"format": "pairs", "columns": {"completion": "instruction"}},
    "pairs, all of them learnt": {"format": "pairs", "loss_on": "all"},
    "short pairs": {"format": "pairs", "sequence_length": 4},
    "pairs beside a template": {"format": "pairs", "chat_template": TEMPLATE},
    "questions": {"format": "alpaca", "chat_template": TEMPLATE},
    "questions by another template": {"format": "alpaca", "chat_template": TEMPLATE.replace("{{ m", "#{{ m")},
}


def test_one_file_that_is_read_in_several_ways_has_an_entry_of_each(tmp_path: Path) -> None:
    """And each is found again."""
    path, cache = str(tmp_path / "rows.jsonl"), TokenCache(tmp_path / "cache")
    Path(path).write_text(f"{json.dumps(ONE_ROW, ensure_ascii=False)}\n" * 4, encoding="utf-8")

    def load(keys: dict[str, Any], cache: TokenCache) -> list[Any]:
        section = {"train": path, "sequence_length": 8, "eval_fraction": 0.0, **keys}
        train = load_datasets(DataSection(**section), cache=cache).train
        return [{name: each.tolist() for name, each in train[index].items()} for index in range(len(train))]

    wanted = [load(keys, TokenCache(None)) for keys in READINGS.values()]
    for _ in range(2):
        assert [load(keys, cache) for keys in READINGS.values()] == wanted


def test_an_entry_that_another_process_has_written_meanwhile_is_read(home: Home) -> None:
    inside: list[Any] = []

    def nested(text: str) -> None:
        home.told.append(text)
        if not inside:
            inside.append(None)
            inside[0] = home.load()

    keys = {"train": str(home.text), "sequence_length": 16, "eval_fraction": 0.2}
    tokenizer = Counting(texts=[])
    outer = load_datasets(DataSection(**keys), tokenizer=tokenizer, cache=TokenCache(home.cache), tell=nested)
    assert (inside[0][0], len(tokenizer.texts), len(home.entries)) == (20, 20, 1)
    assert values(outer) == values(inside[0][1])


@pytest.mark.parametrize("place", [0, 1], ids=["kept", "held out"])
def test_the_largest_token_of_all_documents_is_known(place: int) -> None:
    """And tokens of another width are other tokens."""

    def write(*writers: TokenWriter) -> None:
        for number, writer in enumerate(writers):
            writer.append(np.asarray([1, 200 if number == place else 3]), text_bytes=2)

    narrow, wide = (TokenCache(None).get(None, size, write, lambda *_: {}, marked=False) for size in (256, 300))
    assert (narrow.largest, narrow.kept.tokens, narrow.held.tokens) == (200, 2, 2)
    assert narrow.tokens.tolist() == wide.tokens.tolist() == ([1, 3, 1, 200] if place else [1, 200, 1, 3])
    assert narrow.digest != wide.digest


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


DAMAGES = {
    "a byte of the tokens": lambda entry: _flip(entry / "tokens.bin", 70_000),
    "a digit of the description": lambda entry: _flip(entry / "entry.json", 200),
    "cut tokens": lambda entry: os.truncate(entry / "tokens.bin", 1000),
    "a description that is none": lambda entry: (entry / "entry.json").write_text("{}"),
    "no description": lambda entry: (entry / "entry.json").unlink(),
    "a link": lambda entry: _link(entry / "tokens.bin"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_entry_is_noticed_and_made_anew(home: Home, name: str) -> None:
    first = values(home.load()[1])
    (entry,) = home.entries
    DAMAGES[name](entry)
    count, second = home.load()
    assert count == 20
    assert first == values(second)
    (note,) = home.notes
    assert note.startswith(f"tokens in {entry} are damaged (")
    assert home.load()[0] == 0


def test_damage_that_the_start_does_not_see_is_noticed_later(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromesh.trainer.data.token_cache._CHECKED_AT_ONCE", 65536)
    home.load()
    (entry,) = home.entries
    _flip(entry / "tokens.bin", 70_000)
    count, loaded = home.load()
    assert count == 0
    assert len(loaded.train[0]["input_ids"]) == 16
    said = r"tokens.bin' is damaged at byte 65,536; start again, and the text is tokenised anew"
    with pytest.raises(DataError, match=said):
        loaded.train[70_000 // 16]
    assert home.load()[0] == 20


def test_what_cannot_be_recognised_again_is_not_kept(home: Home) -> None:
    assert home.load(name=None)[0] == 20
    assert home.load(name=None)[0] == 20
    assert not home.cache.exists()


def test_a_cache_that_cannot_be_written_is_one_error(home: Home) -> None:
    home.cache.write_text("a file")
    with pytest.raises(StorageError, match=r"set data\.cache"):
        home.load()


def test_what_a_killed_process_left_is_removed_after_a_day(home: Home) -> None:
    home.cache.mkdir()
    for name, age in {".old.tmp": 2e5, ".new.tmp": 10}.items():
        (home.cache / name).mkdir()
        os.utime(home.cache / name, (0, (home.cache / name).stat().st_mtime - age))
    home.load()
    assert sorted(path.name for path in home.entries if path.name.startswith(".")) == [".new.tmp"]


def test_one_rank_tokenizes_and_the_others_wait(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(2, "first_hour_cases:tokenized", folder=str(tmp_path))
    assert [each["texts"] for each in found] == [[40, 0, 0], [0, 0, 0]]
    assert found[0]["losses"] == found[1]["losses"]
    first, second, other = found[0]["losses"]
    assert first == second
    assert other != first
