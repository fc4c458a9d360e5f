"""Files of text and rows: which are found, by what name, and what each holds."""

import csv
import gzip
import lzma
from pathlib import Path
from typing import Any

import pytest

from tests.support.text_files import write_rows
from zeromesh.errors import DataError
from zeromesh.trainer.data.text_sources import TextSource, find_text, picture_suffixes, stdlib_source

PYTHON = (
    *("site-packages/a.py", "dist-packages/a.py", "__pycache__/a.py", "test/a.py", "tests/a.py", "idlelib/idle_test/a.py"),
    *("encodings/a.py", "pydoc_data/a.py", "config-3.11-x86/a.py", "_sysconfigdata__linux.py", "sitecustomize.py"),
    *("usercustomize.py", ".hidden/a.py", ".hidden.py", "lib/site-packages/a.py", "readme.txt"),
)


def texts(source: TextSource, *required: str, whole: bool = False) -> list[Any]:
    return [tuple(row.values.values()) for row in source.rows(required, [], [], whole=whole)]


def written(root: Path, content: str, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_what_is_no_source_of_the_standard_library_is_left_out(tmp_path: Path) -> None:
    kept = ("argparse.py", "config.py", "json/config-a.py", "json/decoder.py", "latest.py", "reconfig-a/x.py", "unittest/case.py")
    root = written(tmp_path, "x = 1", *PYTHON, *kept)
    assert [file.key for file in stdlib_source(root).files] == list(kept)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.ndjson", b'{"text": "one"}\n\n  \n{"text": "two"}', ["one", "two"]),
        ("A.JSONL", b'{"text": "one"}\n', ["one"]),
        ("a.jsonl.GZ", gzip.compress(b'{"text": "one"}\n', mtime=0), ["one"]),
        ("a.json.lzma", lzma.compress(b'\n[{"text": "one"}, {"text": "two"}]', lzma.FORMAT_ALONE), ["one", "two"]),
        ("a.csv", b"n|text\n1|a,b;c\n", ["a,b;c"]),
        ("a.csv", b"n;m,text\n1;2,one\n", ["one"]),
        ("a.csv", b"n;text|x\n1;a,b\n", None),
        ("a.csv", b"n\ttext\n1\ta;b\n", ["a;b"]),
        ("a.csv", b"text\none, two\n", None),
        ("a.csv", b'text\n"one, two"\n', ["one, two"]),
        ("a.tsv", b"n,m;o\ttext\n1\ta,b\n", ["a,b"]),
        ("a.csv", b"text,n\n" + b"x" * 200_000 + b",1\n", ["x" * 200_000]),
        ("a.txt", b"text\nmore", ["text\nmore"]),
        ("a.txt", b"one\r\ntwo\r", ["one\r\ntwo\r"]),
        ("json", b"no row", ["no row"]),
    ],
)
def test_rows_of_a_file_by_its_suffix(tmp_path: Path, name: str, content: bytes, found: list[str] | None) -> None:
    (tmp_path / name).write_bytes(content)
    limit = csv.field_size_limit(131_072)
    try:
        source = find_text(tmp_path / name, where="data.train")
        if found is None:
            with pytest.raises(DataError, match=r"has more fields than|has no field 'text'"):
                texts(source, "text", whole=True)
        else:
            assert texts(source, "text", whole=True) == [(each,) for each in found]
    finally:
        csv.field_size_limit(limit)


def test_columns_that_are_there_are_taken_and_others_left(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"a": 1, "b": 2, "c": 3, "d": 4}, {"a": 5, "b": 6, "d": 7}])
    source = find_text(path, where="data.train")
    rows = list(source.rows(["b", "a"], ["c", "e"], []))
    assert [row.values for row in rows] == [{"b": 2, "a": 1, "c": 3}, {"b": 6, "a": 5}]
    assert [(row.key, row.where) for row in rows] == [(f"a.jsonl:{n}", f"{path!r} row {n}") for n in (0, 1)]
    assert source.columns() == {"a", "b", "c", "d"}
    assert find_text(written(tmp_path, "x", "t.txt") / "t.txt", where="data.train").columns() == frozenset()
    with pytest.raises(DataError, match=r"row 1 has no field 'c', only 'a', 'b', 'd'; set data\.columns"):
        list(source.rows(["c"], [], []))
    with pytest.raises(DataError, match=r"row 0 has no field 'x', only .*; set data\.text_field"):
        list(source.rows(["x"], [], [], whole=True))


def test_files_without_rows_are_passed_over_only_in_a_directory(tmp_path: Path) -> None:
    folder = written(tmp_path / "all", "words", "note.txt", "sub/b.md")
    write_rows(folder / "a.jsonl", [{"text": "one"}])
    source, skipped = find_text(folder, where="data.train"), list[str]()
    assert [row.values for row in source.rows(["text"], [], skipped)] == [{"text": "one"}]
    assert skipped == ["note.txt", "sub/b.md"]
    named = find_text([folder / "a.jsonl", folder / "note.txt"], where="data.train")
    with pytest.raises(DataError, match=r"note\.txt' has no rows; give \.json, .*\.csv.*, or set data\.format: text"):
        list(named.rows(["text"], [], []))
    (folder / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"no file with rows in '.*all'; give [^ ]*.json(, [^ ]*)* files$"):
        list(find_text(folder, where="data.train").rows(["text"], [], []))


def test_patterns_and_lists_are_files_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "x", "b/2.txt", "b/c/1.txt", "a.txt", "b/.hidden.txt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def found(*given: str) -> tuple[list[str], tuple[str, ...]]:
        source = find_text(list(given), where="data.train")
        assert source.name == ", ".join(given)
        return [file.key for file in source.files], source.notes

    assert found("b", "a.txt") == (["2.txt", "c/1.txt", "a.txt"], ())
    assert found("~/a.txt", "a.txt") == (["a.txt", "a.txt"], ())
    assert found("b/**") == (["b/2.txt", "b/c/1.txt"], ("data.train 'b/**': 2 files",))
    assert found("b/*") == (["b/2.txt", "1.txt"], ("data.train 'b/*': 2 files",))
    assert found("[ab]*", "a.txt")[1] == ("data.train '[ab]*': 2 files",)
    assert [file.named for file in find_text(["b", "a.txt"], where="data.train").files] == [False, False, True]


def test_a_source_is_described_by_all_that_changes_its_text(tmp_path: Path) -> None:
    path = written(tmp_path, "x", "sub/a.txt") / "sub/a.txt"
    given: list[dict[str, Any]] = [{"spec": path}, {"spec": tmp_path}, {"spec": path, "encoding": "cp1252"}]
    described = [find_text(**each, where="data.train").description() for each in given]
    path.write_text("xy")
    described.append(find_text(path, where="data.train").description())
    assert all(one != other for at, one in enumerate(described) for other in described[:at])
    assert described[3] == find_text(path, where="another key").description()


def test_suffixes_of_pictures_are_in_lower_case() -> None:
    assert {".png", ".jpg", ".jpeg", ".webp"} <= {*picture_suffixes()} == {each.lower() for each in picture_suffixes()}
