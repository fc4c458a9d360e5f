"""Malice: manifests and headers made to be believed are refused by name, soon, and before anything large is made of them."""

import io
import json
import os
import pickle
import random
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.damage_cases import FILE, SPECS, STATE, Json, refused, replace, resign
from tests.support.stored_cases import split, targets_of, tell, values_of, verify
from zeromesh.checkpoint.io import format as manifest
from zeromesh.checkpoint.io import reader as readers
from zeromesh.checkpoint.io.file_slices import GRID
from zeromesh.checkpoint.io.format import check_names, check_plain, read_header
from zeromesh.checkpoint.io.reader import CheckpointReader, Damage, TensorFiles, find_damage
from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.offload.io.direct_io import BLOCK

# Manifests whose own hash is right


NAMES = [
    *("../../x", "..", ".", "", "/etc/passwd", "//etc/passwd", "optimizer/../x", "optimizer/..", "optimizer/"),
    *("optimizer//x", "./x", "a/b/c", ".hidden", "optimizer/.hidden", "x\0.json", "x" * 201, "x.json\n", "x\ny"),
    *("a\\b", "~root", "C:x", "x\ud800", "\u0661", "manifest.json"),
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_manifest_names_plain_files_alone(name: str, copy: Path) -> None:
    resign(copy, lambda content: content["files"].update({name: content["files"].pop(STATE)}))
    refused(copy, str(copy / manifest.MANIFEST), repr(name)[:99], "no plain name")


def pieces(change: Callable[[list[Any]], object]) -> Callable[[Json], object]:
    return lambda content: change(content["files"][FILE]["pieces"])


def piece(number: int, place: int, value: Any) -> Callable[[Json], object]:
    return pieces(lambda rows: rows[number].__setitem__(place, value))


def tensors(change: Callable[[Json], object]) -> Callable[[Json], object]:
    return lambda content: change(content["tensors"]["model"])


def head(place: int, value: Any) -> Callable[[Json], object]:
    return tensors(lambda rows: rows["head"].__setitem__(place, value))


def field(**values: Any) -> Callable[[Json], object]:
    return lambda content: content.update(values)


WRONG_NUMBERS: list[Any] = [*(-1, True, False, 0.0, 1.5, float("nan"), float("inf"), 1 << 62, 10**30, 10**4000, "0", None, [], {})]


@pytest.mark.parametrize("number", WRONG_NUMBERS, ids=lambda number: repr(number)[:20])
def test_numbers_of_a_manifest_are_whole_and_of_a_sane_size(number: Any, copy: Path) -> None:
    changes: list[Callable[[Json], object]] = [
        *(piece(0, 0, number), piece(-1, 1, number), piece(0, 3, number)),
        *(head(1, number), tensors(lambda rows: rows["head"][3].__setitem__(0, number)), field(step=number)),
        lambda content: content["files"][FILE].update(bytes=number),
        lambda content: content["part"].__setitem__(0, number),
        lambda content: content["part"].__setitem__(1, number),
    ]
    saved = (copy / manifest.MANIFEST).read_bytes()
    for change in changes:
        resign(copy, change)
        refused(copy, str(copy / manifest.MANIFEST))
        (copy / manifest.MANIFEST).write_bytes(saved)


NO_ROW = "is no [file, begin, dtype, shape]"
HOSTILE: dict[str, tuple[Callable[[Json], object], str]] = {
    "pieces overlap": (pieces(lambda rows: rows[1].__setitem__(0, rows[1][0] - 1)), "pieces overlap, leave a gap"),
    "pieces twice": (pieces(lambda rows: rows.insert(1, rows[0])), "pieces overlap, leave a gap"),
    "pieces with a gap": (pieces(lambda rows: rows.pop(1)), "pieces overlap, leave a gap"),
    "pieces out of order": (pieces(list.reverse), "pieces overlap, leave a gap"),
    "a piece beyond the file": (piece(-1, 1, 10**9), "or end beyond the file"),
    "a piece of nothing": (pieces(lambda rows: rows.insert(0, [0, 0, "0" * 32, 0])), "the piece [0, 0) after byte 0"),
    "a piece backwards": (pieces(lambda rows: rows[1].__setitem__(1, rows[1][0] - 1)), "pieces overlap, leave a gap"),
    "no last piece": (pieces(lambda rows: rows.pop()), f"the pieces of {FILE} end at byte"),
    "no pieces": (pieces(list.clear), f"the pieces of {FILE} end at byte 0"),
    "a short piece": (pieces(lambda rows: rows[0].pop()), "a piece that is no"),
    "a piece that is an object": (pieces(lambda rows: rows.__setitem__(0, {})), "a piece that is no"),
    "a checksum in capitals": (piece(0, 2, "A" * 32), "a piece that is no"),
    "a short checksum": (piece(0, 2, "a" * 31), "a piece that is no"),
    "a checksum and a line": (piece(0, 2, "a" * 32 + "\n"), "a piece that is no"),
    "a checksum that is a number": (piece(0, 2, 7), "a piece that is no"),
    "a file without pieces": (lambda content: content["files"][FILE].pop("pieces"), "a list of pieces"),
    "a file that is a list": (lambda content: content["files"].update({FILE: []}), "a list of pieces"),
    "a larger file": (lambda content: content["files"][FILE].update(bytes=10**9), f"the pieces of {FILE} end"),
    "a file that is not there": (lambda content: content["files"].update(x={"bytes": 0, "pieces": []}), "/x cannot be"),
    "tensors overlap": (tensors(lambda rows: rows["head"].__setitem__(1, rows["embed"][1] + 4)), "overlaps another"),
    "tensors at one place": (tensors(lambda rows: rows["head"].__setitem__(1, rows["embed"][1])), "overlaps another"),
    "an empty one inside": (tensors(lambda rows: rows["none"].__setitem__(1, rows["embed"][1] + 4)), "overlaps"),
    "a tensor beyond the file": (head(1, 10**6), "does not fit"),
    "an empty one beyond": (tensors(lambda rows: rows["none"].__setitem__(1, 10**6)), "does not fit"),
    "half an element": (tensors(lambda rows: rows["head"].__setitem__(1, rows["head"][1] + 1)), "does not fit"),
    "a vast shape": (head(3, [1 << 61] * 64), "does not fit"),
    "many dims": (head(3, [1] * 65), NO_ROW),
    "very many dims": (head(3, [1 << 61] * 9000), NO_ROW),
    "a shape of text": (head(3, "ab"), NO_ROW),
    "an unknown dtype": (head(2, "F4"), NO_ROW),
    "a dtype in a list": (head(2, ["F32"]), NO_ROW),
    "a tensor nowhere": (head(0, "/etc/passwd"), NO_ROW),
    "a tensor in a list": (head(0, [FILE]), NO_ROW),
    "a short row": (tensors(lambda rows: rows["head"].pop()), NO_ROW),
    "a row of text": (tensors(lambda rows: rows.update(head="abcd")), NO_ROW),
    "a name in red": (tensors(lambda rows: rows.update({"\x1b[31m": rows.pop("head")})), "\\x1b[31m"),
    "a name of two lines": (tensors(lambda rows: rows.update({"a\nb": rows.pop("head")})), "a\\nb"),
    "half a character": (tensors(lambda rows: rows.update({"\ud800": rows.pop("head")})), "\\ud800"),
    "a very long name": (tensors(lambda rows: rows.update({"x" * 1001: rows.pop("head")})), "xxxx"),
    "a kind elsewhere": (lambda content: content["tensors"].update({"../x": {}}), "'../x'"),
    "a kind of a list": (lambda content: content["tensors"].update(model=[]), "'model' should be an object"),
    "files that are a list": (field(files=[]), "files should be an object"),
    "tensors that are a list": (field(tensors=[]), "tensors should be an object"),
    "a layout that is a text": (field(layout="x"), "layout should be an object"),
    "aliases that are a list": (field(aliases=[]), "aliases should be an object"),
    "aliases of numbers": (field(aliases={"a": 1}), "aliases should be an object of texts"),
    "half a part": (field(part=[0]), "part should be"),
    "part of nothing": (field(part=[0, 0]), "part should be"),
    "a part too far": (field(part=[2, 2]), "part should be"),
    "no step": (lambda content: content.pop("step"), "step should be"),
    "another format": (field(format="torch"), "its format is 'torch'"),
    "no format": (lambda content: content.pop("format"), "its format is None"),
    "a newer schema": (field(schema=3), "schema 3, this version reads up to 2; use a newer zeromesh"),
    "a source that is no path": (field(source=[1]), "source should be the path of a directory"),
    "a vast schema": (field(schema=10**1000), "use a newer zeromesh"),
    "no schema": (lambda content: content.pop("schema"), "schema None"),
    "schema zero": (field(schema=0), "schema 0"),
    "schema true": (field(schema=True), "schema True"),
    "a schema with a point": (field(schema=1.0), "schema 1.0"),
    "a schema of text": (field(schema="1"), "schema '1'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused_by_name(case: str, copy: Path) -> None:
    change, word = HOSTILE[case]
    resign(copy, change)
    refused(copy, str(copy), word)


def test_a_manifest_of_too_many_files_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_MAX_FILES", 3)
    refused(copy, str(copy / manifest.MANIFEST), "names 7 files; at most 3")
    monkeypatch.setattr(manifest, "_MAX_FILES", 7)
    assert len(manifest.parse_manifest(copy / manifest.MANIFEST, (copy / manifest.MANIFEST).read_bytes()).files) == 7


def test_the_largest_of_everything_is_taken_and_no_more(tmp_path: Path) -> None:
    assert manifest.is_path("a" * 200 + "/" + "b" * 200)
    check_names(tmp_path, ["x" * 1000])
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({"a": entry(shape=[2] + [1] * 63)}) + bytes(8))
    assert read_header(path)["a"].numel == 2
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(path, 100_000_100)
    with pytest.raises(CheckpointError, match="header has 100000001 bytes"):
        read_header(path)
    nested = json.loads("[" * 63 + "0" + "]" * 63)
    for taken, beyond, said in ((2**1000 - 1, 2**1000, "more than 1000 bits"), (nested, [nested], "than 64 levels")):
        check_plain(tmp_path, "layout", taken)
        with pytest.raises(CheckpointError, match=said):
            check_plain(tmp_path, "layout", beyond)


def saved_by_torch() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(3)}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"null", b"[]", b"7", b'"text"', b"[" * 100_000, b'{"a":' * 100_000, b"1" * 100_000),
        b'{"layout":' + b"[" * 600 + b"]" * 600 + b"}",
        *(b'{"a":1,"a":1}', b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"\0" * 100, saved_by_torch()),
        *(pickle.dumps({"format": "zeromesh-checkpoint"}, protocol=number) for number in (0, None)),
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_what_is_no_manifest_is_refused_by_name(raw: bytes, copy: Path) -> None:
    (copy / manifest.MANIFEST).write_bytes(raw)
    refused(copy, str(copy / manifest.MANIFEST))


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        (b'"step":7', b'"step":7,"step":7', "appears twice"),
        (b'"pieces":', b'"bytes":3,"pieces":', "appears twice"),
        (b'"norm":', b'"norm":[],"norm":', "appears twice"),
        (b'"step":7', b'"step":8', "its own sha256"),
        (b'"step":7', b'"step": 7', "is not written as it was"),
        (b'"sha256":', b'"sha512":', "its own sha256"),
        (b'"eps":1e-20', b'"eps":1E-20', "is not written as it was"),
    ],
)
def test_a_manifest_says_everything_once_and_as_it_was_written(old: bytes, new: bytes, word: str, copy: Path) -> None:
    path = copy / manifest.MANIFEST
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new, 1))
    refused(copy, str(path), word)


def test_nesting_of_any_depth_is_refused_in_the_same_way(copy: Path) -> None:
    path = copy / manifest.MANIFEST
    start, end = path.read_bytes().split(b'"layout":{')
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        for depth in range(100, 1100, 50):
            nested = opening * depth + b"0" + closing * depth
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                manifest.parse_manifest(path, start + b'"layout":{"x":' + nested + b"," + end)


def test_a_vast_manifest_is_not_even_read(copy: Path) -> None:
    os.truncate(copy / manifest.MANIFEST, manifest.MAX_BYTES + 1)
    refused(copy, str(copy / manifest.MANIFEST), "at most 1,073,741,824 are read")


def sparse(directory: Path, name: str, size: int, ends: list[int]) -> None:
    """Make a file of holes and record it; its checksums are wrong, which takes long to see."""
    rows = [[begin, end, "0" * 32, 0] for begin, end in pairwise(ends)]
    resign(directory, lambda content: content["files"].update({name: {"bytes": size, "pieces": rows}}))
    os.truncate(directory / name, size)


def test_a_piece_larger_than_the_grid_is_refused_by_name(copy: Path) -> None:
    for size in (GRID + 1, 1 << 40):
        sparse(copy, STATE, size, [0, size])
        refused(copy, STATE, f"a piece of {size:,} bytes; the format's grid is 4,194,304")


def test_a_small_file_that_is_vast_is_not_read_into_memory(copy: Path) -> None:
    size = 1 << 34
    sparse(copy, STATE, size, [*range(0, size, GRID), size])
    assert size > readers.MAX_CONTENT_BYTES
    refused(copy, STATE, f"{size:,} bytes", by=lambda path: CheckpointReader(path).content(STATE))


@pytest.mark.parametrize("cuts", [(2, 6), (4001,), (-1,), (-3, 1)])
def test_pieces_that_cut_elements_are_refused_by_name(cuts: tuple[int, ...], copy: Path) -> None:
    """Pieces end within an element, or begin between elements."""
    replace(copy, FILE, (copy / FILE).read_bytes(), tuple(BLOCK + cut for cut in cuts))
    reader = CheckpointReader(copy)
    verify(reader)
    values = {spec: value for spec, value in values_of(SPECS, 1).items() if spec.kind == "model"}
    (holdings,) = split(values, 1, random.Random(0))
    targets = targets_of(reader, holdings)
    refused(copy, FILE, "cuts an element of", by=lambda path: reader.read(targets, tell))


# Headers of safetensors files


def entry(**changes: Any) -> Json:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def header(content: Any, length: int | None = None) -> bytes:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw


HEADERS: dict[str, tuple[bytes, str]] = {
    "a vast length": (header({"a": entry()}, 2**64 - 1) + bytes(8), "header has 18446744073709551615 bytes"),
    "a large length": (header({"a": entry()}, 10**12) + bytes(8), "header has 1000000000000 bytes"),
    "a length beyond the file": (header({"a": entry()}, 1000) + bytes(8), "header has 1000 bytes"),
    "a file of seven bytes": (b"1234567", "but the file has 7"),
    "an empty file": (b"", "but the file has 0"),
    "deep nesting": (header(b"[" * 100_000), "is not JSON"),
    "a name twice": (header(b'{"a": 1, "a": 1}'), "appears twice"),
    "an open brace": (header(b"{"), "is not JSON"),
    "no UTF-8": (header(b"\xff\xfe"), "is not JSON"),
    "a list": (header([]), "not a JSON object"),
    "no dtype": (header({"a": {"shape": [2], "data_offsets": [0, 8]}}) + bytes(8), "no dtype, shape"),
    "a tensor that is text": (header({"a": "text"}), "no dtype, shape"),
    "a tensor that is a number": (header({"a": 3}), "no dtype, shape"),
    "one offset": (header({"a": entry(data_offsets=[0])}) + bytes(8), "two data_offsets"),
    "offsets of text": (header({"a": entry(data_offsets="08")}) + bytes(8), "not whole numbers"),
    "offsets backwards": (header({"a": entry(data_offsets=[8, 0])}) + bytes(8), "gives a -8 bytes"),
    "a hole": (header({"a": entry(data_offsets=[4, 12])}) + bytes(12), "hole or an overlap before a"),
    "an overlap": (header({"a": entry(), "b": entry()}) + bytes(8), "hole or an overlap before b"),
    "half of the data": (header({"a": entry()}) + bytes(4), "cut short or has a tail"),
    "a tail": (header({"a": entry()}) + bytes(9), "cut short or has a tail"),
    "another size": (header({"a": entry(shape=[3])}) + bytes(8), "gives a 8 bytes"),
    "a dtype of eight bits": (header({"a": entry(dtype="F8_E5M2FNUZ")}) + bytes(8), "dequantized first"),
    "another one": (header({"a": entry(dtype="F8_E4M3FNUZ", data_offsets=[0, 2])}) + bytes(2), "dequantized first"),
    "a dtype in a list": (header({"a": entry(dtype=["F32"])}) + bytes(8), "known are"),
    "a negative shape": (header({"a": entry(shape=[-1, -2])}) + bytes(8), "not whole numbers"),
    "a true shape": (header({"a": entry(shape=[True, 2])}) + bytes(8), "not whole numbers"),
    "a shape with a point": (header({"a": entry(shape=[2.0])}) + bytes(8), "not whole numbers"),
    "a shape of text": (header({"a": entry(shape="2")}) + bytes(8), "not whole numbers"),
    "many dims": (header({"a": entry(shape=[1] * 65)}) + bytes(8), "65 dims"),
    "very many dims": (header({"a": entry(shape=[1 << 61] * 40_000)}) + bytes(8), "40,000 dims"),
    "a vast shape": (header({"a": entry(shape=[10**4000, 2])}) + bytes(8), "not whole numbers"),
    "vast offsets": (header({"a": entry(shape=[0], data_offsets=[10**4299] * 2)}), "not whole numbers"),
    "nines": (header({"a": entry(dtype="U8", shape=[0], data_offsets=[int("9" * 4300)] * 2)}), "not whole numbers"),
    "a name in red": (header({"\x1b[31m": entry()}) + bytes(8), "\\x1b[31m"),
    "half a character": (header({"\ud800": entry()}) + bytes(8), "\\ud800"),
    "a very long name": (header({"x" * 1001: entry()}) + bytes(8), "xxxx"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_hostile_header_is_refused_by_name(case: str, copy: Path, tmp_path: Path) -> None:
    """In a checkpoint, and in a directory that another program has written."""
    raw, word = HEADERS[case]
    resign(copy, lambda content: content["tensors"].pop("model"))
    replace(copy, FILE, raw)
    message = refused(copy, str(copy / FILE), word, by=lambda path: read_header(path / FILE))
    assert [(damage.path, damage.reasons) for damage in damage_of(copy)] == [(FILE, (message,))]
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(ConfigError, match=re.escape(word)):
        TensorFiles(tmp_path)


def damage_of(directory: Path) -> list[Damage]:
    return list(find_damage(CheckpointReader(directory, checked=False), lambda nbytes: None))


def test_of_many_damaged_pieces_one_is_described_and_the_others_are_counted(copy: Path) -> None:
    pieces = CheckpointReader(copy).manifest.files[FILE].pieces
    raw = bytearray((copy / FILE).read_bytes())
    for piece in pieces[-3:]:
        raw[piece.begin] ^= 1
    (copy / FILE).write_bytes(raw)
    (damage,) = damage_of(copy)
    first, more = damage.reasons
    assert f"bytes [{pieces[-3].begin:,}, {pieces[-3].end:,}) are not what" in first
    assert more == f"so are 2 more of its {len(pieces)} pieces"


@pytest.mark.parametrize(
    "change",
    [
        tensors(lambda rows: rows.update(embed=rows["head"], head=rows["embed"])),
        tensors(lambda rows: rows.update(head=rows.pop("embed"))),
        tensors(lambda rows: rows.pop("head")),
        head(2, "I32"),
        tensors(lambda rows: rows["head"][3].reverse()),
    ],
)
def test_a_header_that_tells_another_story_is_found(change: Callable[[Json], object], copy: Path) -> None:
    resign(copy, change)
    (damage,) = damage_of(copy)
    assert damage.path == FILE
    assert f"{copy / FILE}: its header and the manifest do not agree about" in damage.reasons[0]
    assert "head" in damage.reasons[0]
