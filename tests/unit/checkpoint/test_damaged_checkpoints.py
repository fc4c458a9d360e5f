"""Damage: whatever happened to a checkpoint's files, it is refused by name, and no foreign file is ever opened."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.damage_cases import FILE, MOMENTS, SPECS, STATE, Payload, files_in, made, refused, replace, resign
from tests.support.stored_cases import bits, read, values_of, verify
from zeromesh.checkpoint.io import format as manifest
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.errors import CheckpointError


def test_what_nobody_touched_is_read(original: Path, copy: Path) -> None:
    verify(CheckpointReader(original))
    resign(copy, lambda content: None)
    assert (copy / manifest.MANIFEST).read_bytes() == (original / manifest.MANIFEST).read_bytes()
    for name in files_in(copy):
        if name != manifest.MANIFEST:
            replace(copy, name, (copy / name).read_bytes())
    verify(CheckpointReader(copy))
    assert len(files_in(original)) == 8
    assert len(CheckpointReader(original).manifest.files[FILE].pieces) > 3


@given(data=st.data())
@settings(max_examples=50)
def test_a_flipped_byte_is_refused_by_name(original: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(files_in(original)).filter(lambda name: (original / name).stat().st_size))
    path = original / name
    raw = path.read_bytes()
    at, mask = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(1, 255))
    tensors = [t for t in CheckpointReader(original).manifest.tensors if t.path == name and t.begin <= at < t.end]
    try:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :])
        message = refused(original, name)
    finally:
        path.write_bytes(raw)
    if tensors:
        assert any(spec.name in message.partition("they hold")[2] for spec in SPECS)
        assert "rank" in message


def test_every_byte_of_the_manifest_counts(original: Path) -> None:
    path = original / manifest.MANIFEST
    raw = path.read_bytes()
    assert b"1e-20" in raw
    assert b"\\u00e9" in raw
    for at in range(len(raw)):
        for mask in (0x01, 0x20):
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                manifest.parse_manifest(path, raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :])


def linked(path: Path) -> None:
    outside = path.parent.parent.parent / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Remove the file, and put something else in its place."""
    return lambda path: (path.unlink(), make(path))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut by one": lambda path: os.truncate(path, path.stat().st_size - 1),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "removed": Path.unlink,
    "grown by nothing visible": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "grown by a hole": lambda path: os.truncate(path, path.stat().st_size + (1 << 40)),
    "linked": linked,
    "linked to nothing": instead(lambda path: path.symlink_to("nothing")),
    "linked to itself": instead(lambda path: path.symlink_to(path.name)),
    "a pipe": instead(os.mkfifo),
    "a directory": instead(Path.mkdir),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_what_was_written_is_refused_by_name(damage: str, original: Path, tmp_path: Path) -> None:
    for name in files_in(original):
        if not (original / name).stat().st_size and damage in ("cut by one", "cut in half", "emptied"):
            continue
        directory = Path(shutil.copytree(original, tmp_path / "copies" / "step"))
        DAMAGES[damage](directory / name)
        refused(directory, str(directory), name)
        shutil.rmtree(tmp_path / "copies")


def test_another_checkpoints_file_is_refused_by_name(original: Path, tmp_path: Path) -> None:
    other = made(tmp_path, 7, 2)
    different = [name for name in files_in(original) if (original / name).read_bytes() != (other / name).read_bytes()]
    assert {FILE, MOMENTS, STATE, manifest.MANIFEST} <= set(different)
    for name in different:
        directory = Path(shutil.copytree(original, tmp_path / "mixed"))
        shutil.copyfile(other / name, directory / name)
        # A manifest of the same sizes is sound: it is the files that do not agree with it.
        refused(directory, "not what rank", name if name != manifest.MANIFEST else "")
        shutil.rmtree(directory)


def test_a_linked_directory_is_refused_by_name(copy: Path, tmp_path: Path) -> None:
    shutil.move(copy / "optimizer", tmp_path / "elsewhere")
    (copy / "optimizer").symlink_to(tmp_path / "elsewhere")
    refused(copy, f"{copy / 'optimizer'} is no directory")


@pytest.mark.parametrize(
    "name",
    [
        *("model-00002-of-00002.safetensors", "model.safetensors", "pytorch_model.bin", "optimizer/exp_avg.pt"),
        *(".metadata", "optimizer/.metadata", "__0_0.distcp", "deep/er/weights.pth", "weights.PT", ".hidden.pkl"),
    ],
)
def test_weights_from_elsewhere_are_refused_by_name(name: str, copy: Path) -> None:
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    (copy / name).write_bytes(b"x")
    refused(copy, name, "does not name")


def test_weights_under_a_name_that_is_no_text_are_refused(copy: Path) -> None:
    Path(os.fsdecode(os.fsencode(copy) + b"/\xff\x1b[2J.pt")).write_bytes(b"x")
    refused(copy, "[2J.pt", "does not name")
    for path in copy.glob("*.pt"):
        path.unlink()
    (copy / "evil.safetensors").symlink_to("/etc/passwd")
    refused(copy, "evil.safetensors", "does not name")


def test_notes_beside_a_checkpoint_are_not_its_affair(copy: Path) -> None:
    (copy / "README.md").write_text("good loss")
    verify(CheckpointReader(copy))


def test_only_what_a_reader_needs_has_to_be_whole(copy: Path) -> None:
    reader = CheckpointReader(copy)
    tensor = reader.tensor("model", "embed")
    assert tensor is not None
    pieces = [piece for piece in reader.manifest.files[FILE].pieces if piece.begin >= tensor.begin]
    damaged = pieces[0]
    path = copy / FILE
    raw = bytearray(path.read_bytes())
    raw[damaged.begin] ^= 1
    path.write_bytes(raw)
    start, end = ((at - tensor.begin) // 4 for at in (damaged.begin, damaged.end))
    (expected,) = (value for spec, value in values_of(SPECS, 1).items() if (spec.kind, spec.name) == ("model", "embed"))
    after = read(reader, "embed", end, torch.zeros(tensor.numel - end))
    assert after.numel()
    assert bits(after) == bits(expected.reshape(-1)[end:])
    memory = torch.full((tensor.numel,), -7.0)
    with pytest.raises(CheckpointError, match=rf"{FILE}: bytes \[{damaged.begin:,}, .*they hold .*embed"):
        read(reader, "embed", 0, memory)
    assert (memory[start:end] == -7).all()  # What was not verified has gone nowhere.


# Code


def test_the_payload_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "mark")))  # noqa: S301 - the test would prove nothing otherwise
    assert (tmp_path / "mark").is_dir()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for module, name in ((os, "open"), (io, "open")):
        original = getattr(module, name)

        def noted(path: Any, *arguments: Any, original: Any = original, **options: Any) -> Any:
            found.append(str(path) if isinstance(path, int) else os.fsdecode(path))
            return original(path, *arguments, **options)

        monkeypatch.setattr(module, name, noted)
    return found


@pytest.mark.parametrize("name", [".metadata", "state.pt", "pytorch_model.bin", "optimizer/optimizer.pkl", "notes.txt"])
def test_a_pickle_beside_is_never_opened(name: str, copy: Path, opened: list[str]) -> None:
    """It is refused unless its name is harmless."""
    mark = copy.parent / "mark"
    (copy / name).write_bytes(pickle.dumps(Payload(mark)))
    opened.clear()
    if name == "notes.txt":
        reader = CheckpointReader(copy)
        verify(reader)
        reader.document(STATE)
        expected = {str(copy / each) for each in files_in(copy) if each not in (name, "tokenizer.json")}
        assert {path for path in opened if path.startswith(str(copy))} == expected
    else:
        refused(copy, name)
        assert str(copy / manifest.MANIFEST) in opened
    assert str(copy / name) not in opened
    assert not mark.exists()


@pytest.mark.parametrize("name", [manifest.MANIFEST, STATE, "config.json", FILE])
def test_a_pickle_in_the_place_of_a_file_is_not_executed(name: str, copy: Path) -> None:
    mark = copy.parent / "mark"
    payload = pickle.dumps(Payload(mark))
    if name == manifest.MANIFEST:
        (copy / name).write_bytes(payload)
    else:
        replace(copy, name, payload)
    refused(copy, name, by=lambda path: CheckpointReader(path).document(name))
    assert not mark.exists()
