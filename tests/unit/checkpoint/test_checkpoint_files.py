"""A checkpoint's files: what ranks write is what safetensors and any other ranks read, and it appears all at once."""

import json
import random
import tempfile
import threading
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support.stored_cases import (
    SOME,
    bits,
    joined,
    manifest_of,
    read,
    small_units,
    spec,
    specs,
    split,
    targets_of,
    tell,
    values_of,
    verify,
    write,
)
from zeromesh.checkpoint.io import file_slices
from zeromesh.checkpoint.io import format as manifest
from zeromesh.checkpoint.io import reader as readers
from zeromesh.checkpoint.io.file_slices import PlacedValues
from zeromesh.checkpoint.io.format import Manifest, TensorSpec, index_files, plan_files, read_header
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.checkpoint.io.writer import ShardWriter, WritePiece, bytes_for_others, plan_pieces
from zeromesh.checkpoint.store import CheckpointStore
from zeromesh.errors import CheckpointError, StorageError
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import Interval
from zeromesh.offload import TieredTensor
from zeromesh.offload.io.direct_io import BLOCK, PositionalFile

FEW = settings(max_examples=8)
randoms = st.integers(0, 2**32).map(random.Random)
F32, BF16 = torch.float32, torch.bfloat16


# Writing and reading


@given(wanted=specs(), ranks=st.integers(1, 4), readers=st.integers(1, 4), rng=randoms, seed=st.integers(0, 99))
@FEW
def test_what_ranks_wrote_is_what_safetensors_the_manifest_and_any_other_ranks_read(
    wanted: list[TensorSpec], ranks: int, readers: int, rng: random.Random, seed: int
) -> None:
    values, made = values_of(wanted, seed), list[Manifest]()

    def noted(manifest: Manifest) -> Manifest:
        made.append(manifest)
        return manifest

    with tempfile.TemporaryDirectory() as root, small_units():
        reader = write(Path(root), 7, split(values, ranks, rng), tensor=ranks, alter=noted)
        verify(reader)
        stored: dict[tuple[str, str], torch.Tensor] = {}
        for path in reader.manifest.files:
            if path.endswith(".safetensors"):
                kind = "model" if path.startswith("model-") else path.removeprefix("optimizer/").partition("-")[0]
                with safe_open(reader.directory / path, framework="pt") as file:
                    assert file.metadata() == {"format": "pt"}
                    stored |= {(kind, name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for holdings in split(values, readers, rng):
            expected = [bits(holding.values.memory) for holding in holdings]
            for holding in holdings:
                holding.values.memory.view(torch.uint8).zero_()
            reader.read(targets_of(reader, holdings), tell)
            assert [bits(holding.values.memory) for holding in holdings] == expected
    assert {key: (value.dtype, tuple(value.shape), bits(value)) for key, value in stored.items()} == {
        (spec.kind, spec.name): (spec.dtype, spec.shape, bits(value)) for spec, value in values.items()
    }
    found, planned = reader.manifest, made[0]
    assert sorted(map(repr, found.tensors)) == sorted(map(repr, planned.tensors))
    assert planned.files.items() <= found.files.items()
    assert (found.step, found.aliases, found.layout, found.part) == (7, planned.aliases, planned.layout, (0, 1))
    assert found.nbytes == sum(record.nbytes for record in found.files.values())


def test_pieces_of_the_real_grid_are_written_and_read(tmp_path: Path) -> None:
    values = {each: torch.randn(each.shape) for each in (spec("a", (1700, 1000)), spec("b", (555_555,)))}
    reader = write(tmp_path, 1, split(values, 3, random.Random(5)))
    record = reader.manifest.files["model-00001-of-00001.safetensors"]
    assert record.nbytes == BLOCK + 4 * (1_700_000 + 555_555) > 2 * file_slices.GRID
    assert max(piece.end - piece.begin for piece in record.pieces) <= file_slices.GRID
    assert len({piece.rank for piece in record.pieces}) > 1
    memory = read(reader, "a", 400_000, torch.zeros(1_200_000))
    assert torch.equal(memory, values[spec("a", (1700, 1000))].reshape(-1)[400_000:1_600_000])


def test_bytes_become_elements_in_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads a checkpoint and what reads a plain directory take a tensor from one function, where a codec decodes."""
    narrow = spec("w", (5, 9), BF16)
    value = torch.randn(5, 9).to(BF16)
    reader = write(tmp_path, 1, split({narrow: value}, 2, random.Random(0)))
    decode = file_slices.elements_of
    for module in (file_slices, readers):
        monkeypatch.setattr(module, "elements_of", lambda data, tensor: 2 * decode(data, tensor))
    memory, filled = read(reader, "w", 0, torch.zeros(45)), torch.zeros(45)
    files = readers.TensorFiles(reader.directory)
    files.fill("w", StridedRows.whole(45), Interval(start=0, end=45), filled)
    for found in (memory, filled, files.elements("w")):
        assert torch.equal(found.float(), 2 * value.float().reshape(-1))
    files.close()


def test_memory_of_another_dtype_is_converted_on_both_ways(tmp_path: Path) -> None:
    narrow = spec("w", (5, 9), BF16)
    wide = torch.randn(5, 9)
    (holdings,) = split({narrow: wide}, 1, random.Random(0))
    reader = write(tmp_path, 1, [holdings])
    with safe_open(reader.directory / "model-00001-of-00001.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("w"), wide.to(BF16))
    memory = read(reader, "w", 0, torch.zeros(45, dtype=torch.float64))
    assert torch.equal(memory, wide.to(BF16).double().reshape(-1))


@pytest.mark.parametrize(
    ("wanted", "pieces"),
    [
        ([(7000, 5), (1030, 7), (6998, 2), (1100, 900), (7005, 100)], [1, 3]),
        ([(0, 10 * 1024), (5, 9000), (10 * 1024 - 1, 1), (0, 7), (5, 9000)], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_piece_is_read_once_and_only_where_something_of_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[tuple[int, int]], pieces: list[int]
) -> None:
    """Pieces end at every second block. Elements that are wanted twice are given twice."""
    value = torch.arange(10 * 1024.0)
    (holdings,) = split({spec("w", (10 * 1024,)): value}, 1, random.Random(0))
    with small_units():
        reader = write(tmp_path, 1, [holdings])
    tensor = reader.tensor("model", "w")
    assert tensor is not None
    begun: list[int] = []
    real = PositionalFile.read

    def noted(file: PositionalFile, data: torch.Tensor, offset: int) -> None:
        begun.append(offset)
        real(file, data, offset)

    monkeypatch.setattr(PositionalFile, "read", noted)
    memories = [(first, TieredTensor.of(torch.full((length,), -1.0))) for first, length in wanted]
    targets = [PlacedValues.stored(tensor, first, memory) for first, memory in memories]
    reader.read(targets, tell)
    for target, (first, length) in zip(targets, wanted, strict=True):
        assert torch.equal(target.values.memory, value[first : first + length])
    assert sorted(begun) == [2 * BLOCK * piece for piece in pieces]


def test_tied_names_small_files_and_indices_are_found(tmp_path: Path) -> None:
    reader = write(tmp_path, 1, split(values_of(SOME, 0), 2, random.Random(1)), {"config.json": b'{"a": [1, 2]}'})
    first = reader.manifest.tensors[0]
    assert reader.tensor(first.kind, "tied.weight") == reader.tensor(first.kind, first.name)
    assert reader.tensor("model", "nothing") is None
    assert reader.tensor("nothing", "embed") is None
    indices = {path: reader.directory / path for path in reader.manifest.files if path.endswith(".index.json")}
    assert sorted(indices) == ["model.safetensors.index.json", "optimizer/exp_avg.safetensors.index.json"]
    for where in indices.values():
        for name, file in json.loads(where.read_bytes())["weight_map"].items():
            assert name in read_header(where.parent / file)
    assert reader.document("config.json") == {"a": [1, 2]}
    assert reader.content("config.json") == b'{"a": [1, 2]}'
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        reader.content("tokenizer.json")


@given(wanted=specs(), writers=st.integers(1, 5))
@settings(max_examples=50)
def test_tensors_are_dense_and_aligned_as_headers_and_indices_say(wanted: list[TensorSpec], writers: int) -> None:
    with small_units():
        files = plan_files(wanted, writers)
    planned = sorted((each.kind, each.name) for file in files for each in file.tensors)
    assert planned == sorted((each.kind, each.name) for each in wanted)
    places: dict[str, dict[str, str]] = {}
    totals: dict[str, int] = {}
    for file in files:
        (kind,) = {each.kind for each in file.tensors}
        assert len(file.header) % BLOCK == 0
        assert int.from_bytes(file.header[:8], "little") == len(file.header) - 8
        folder, _, name = file.path.rpartition("/")
        index = ("model" if kind == "model" else f"{folder}/{kind}") + ".safetensors.index.json"
        at = len(file.header)
        for placed in file.tensors:
            assert placed.begin == at
            assert placed.begin % placed.dtype.itemsize == 0
            at += placed.nbytes
            places.setdefault(index, {})[placed.name] = name
            totals[index] = totals.get(index, 0) + placed.nbytes
        assert file.nbytes == at
        with tempfile.TemporaryDirectory() as root:
            path = Path(root) / name
            path.write_bytes(file.header + bytes(file.nbytes - len(file.header)))
            entries = read_header(path)
        assert {(e.name, e.dtype, e.shape, e.begin, e.numel) for e in entries.values()} == {
            (t.name, t.dtype, t.shape, t.begin, t.numel) for t in file.tensors
        }
        assert all(entry.path == name and key == entry.name for key, entry in entries.items())
    found = {path: json.loads(text) for path, text in index_files(files).items()}
    assert {path: index["weight_map"] for path, index in found.items()} == places
    assert {path: index["metadata"]["total_size"] for path, index in found.items()} == totals


def test_a_kind_has_as_many_files_as_writers_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [spec(f"w{n}", (100,)) for n in range(10)]
    assert [file.path for file in plan_files(wanted, 4)] == ["model-00001-of-00001.safetensors"]
    # Files of 4 GiB at most, and for writers of 64 MiB at least, 64 of them at most.
    cases = [(8, 1024, 1, 2), (9, 1024, 1, 3), (3, 64, 9, 3), (3, 63, 9, 2), (65, 64, 99, 64)]
    for count, mib, writers, files in cases:
        assert len(plan_files([spec(f"w{n}", (mib << 18,)) for n in range(count)], writers)) == files, (count, mib)
    monkeypatch.setattr(manifest, "_LEAST_FILE", 1000)
    paths = [file.path for file in plan_files(wanted, 4)]
    assert paths == [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
    assert [len(file.tensors) for file in plan_files(wanted, 2)] == [5, 5]
    monkeypatch.setattr(manifest, "_LARGEST_FILE", 800)
    assert len(plan_files(wanted, 1)) == 5
    assert [file.path for file in plan_files([spec("w", (3,), kind="exp_avg")], 1)] == [
        "optimizer/exp_avg-00001-of-00001.safetensors"
    ]


@pytest.mark.parametrize(
    ("longer", "first", "part", "words", "steps"),
    [(0, 1, (1, 2), r"is part 2 of 2.*zeromesh checkpoint merge", [1]), (1, 0, (0, 1), r"the pieces of .* end at byte", [])],
    ids=["a part may have gaps, and is not read alone", "what no reader would take is not committed"],
)
def test_a_whole_checkpoint_has_all_pieces(
    tmp_path: Path, longer: int, first: int, part: tuple[int, int], words: str, steps: list[int]
) -> None:
    def changed(whole: Manifest) -> Manifest:
        files = {
            path: manifest.FileRecord(nbytes=record.nbytes + longer, pieces=record.pieces[first:])
            for path, record in whole.files.items()
        }
        return Manifest(step=whole.step, files=files, tensors=whole.tensors, part=part)

    with small_units(), pytest.raises(CheckpointError, match=words):
        write(tmp_path, 1, split(values_of(SOME, 0), 2, random.Random(1)), alter=changed)
    assert CheckpointStore(tmp_path).steps() == steps


def test_weights_that_are_elsewhere_are_of_a_newer_schema_and_no_bytes_of_the_checkpoint(tmp_path: Path) -> None:
    files = {path: manifest.FileRecord(nbytes=0, pieces=()) for path in ("source/a", "b")}
    files["source/a"] = file_slices.record_of("source/a", BytesIO(b"123"), 3)
    for source, away, nbytes, schema in (("/there", True, 0, 2), ("", False, 3, 1)):
        one = Manifest(step=1, files=files, source=source)
        assert [one.is_elsewhere(path) for path in ("source/a", "b", "sources")] == [away, False, False]
        assert one.nbytes == nbytes
        text = one.to_json()
        assert (json.loads(text)["schema"], manifest.parse_manifest(tmp_path, text)) == (schema, one)


# Writers


def source(path: str, begin: int, memory: torch.Tensor, owner: int | None = None) -> PlacedValues:
    stored = replace(spec("w", tuple(memory.shape), memory.dtype), path=path, begin=begin)
    return PlacedValues.stored(stored, 0, TieredTensor.of(memory), owner)


def test_a_writer_without_the_others_edges_says_which_bytes_are_nobodys(tmp_path: Path) -> None:
    files = plan_files([spec("w", (3000,))], 2)
    directory = CheckpointStore(tmp_path).create(1, files)
    first, second = ({files[0].path: [source(files[0].path, BLOCK + 4 * at, torch.ones(1500))]} for at in (0, 1500))
    alone = ShardWriter(directory, plan_pieces(files, first, [], {}), 0)
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors: 6000 of the bytes \[4096, 12288\)"):
        joined(alone)
    helped = ShardWriter(directory, plan_pieces(files, first, bytes_for_others(second), {}), 0)
    assert [(piece.begin, piece.end) for piece in joined(helped)] == [(BLOCK, 3 * BLOCK)]


def test_a_disk_that_fails_is_the_training_threads_affair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_slices, "GRID", BLOCK)
    files = plan_files([spec("w", (100 * 1024,))], 1)
    directory = CheckpointStore(tmp_path).create(1, files)
    rows = [source(files[0].path, BLOCK + BLOCK * n, torch.ones(1024), n) for n in range(100)]

    def failing(file: PositionalFile, data: torch.Tensor, offset: int) -> None:
        raise StorageError(f"{file.path!r} cannot be written: the disk is gone")

    monkeypatch.setattr(PositionalFile, "write", failing)
    one = ShardWriter(directory, plan_pieces(files, {files[0].path: rows}, [], {}), 0)
    with pytest.raises(StorageError, match="the disk is gone"):
        joined(one)
    update = threading.Thread(target=one.wait_until_copied, args=(99, tell), daemon=True)
    update.start()
    update.join(30)
    assert not update.is_alive()  # A step waits no longer for what will never be written.


def test_what_is_released_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = spec("w", (3000,))
    files = plan_files([wanted], 1)
    store = CheckpointStore(tmp_path)
    memory = torch.arange(3000.0)
    path = files[0].path
    half = [source(path, BLOCK + 6000 * n, memory[1500 * n : 1500 * n + 1500], n) for n in range(2)]
    may_write, fill = threading.Event(), ShardWriter._fill

    def gated(self: ShardWriter, *arguments: object) -> None:
        may_write.wait(60)
        fill(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardWriter, "_fill", gated)
    runs = {path: [PlacedValues.of_bytes(path, 0, files[0].header), *half]}
    one = ShardWriter(store.create(1, files), plan_pieces(files, runs, [], {0: 1, 1: 0}), 0)
    assert not one.start().done()
    for owner in (1, 0):
        one.wait_until_copied(owner, may_write.set)  # Nothing is written before this rank has begun to wait.
        memory[1500 * owner : 1500 * owner + 1500] = -1
    one.wait_until_copied(17, tell)  # No piece has elements of this one.
    store.commit(1, manifest_of(1, files, one.join(tell)))
    found = read(CheckpointReader(store.path(1)), "w", 0, torch.zeros(3000))
    assert torch.equal(found, torch.arange(3000.0))
    assert (memory == -1).all()


def test_what_changes_first_is_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_slices, "GRID", BLOCK)
    files = plan_files([spec("w", (5 * 1024,))], 1)
    rows = [source(files[0].path, BLOCK + BLOCK * n, torch.ones(1024), n) for n in range(5)]
    order = {3: 0, 1: 1, 4: 2, 0: 3, 2: 4}
    pieces = plan_pieces(files, {files[0].path: rows}, [], order)
    one = ShardWriter(CheckpointStore(tmp_path).create(1, files), pieces, 0)
    begun: list[int] = []
    fill = one._fill

    def noted(piece: WritePiece, data: torch.Tensor) -> None:
        begun.append(piece.where.start // BLOCK - 1)
        fill(piece, data)

    monkeypatch.setattr(one, "_fill", noted)
    joined(one)
    assert begun == [3, 1, 4, 0, 2]


def test_edges_are_found_with_one_look_at_each_source(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    to_bytes = PlacedValues.to_bytes

    def counted(self: PlacedValues) -> bytes:
        looked.append(self)
        return to_bytes(self)

    monkeypatch.setattr(PlacedValues, "to_bytes", counted)
    rows = [source("f", 100 + 6000 * n, torch.full((500,), float(n))) for n in range(300)]
    found = bytes_for_others({"f": rows})
    assert [begin for _, begin, _ in found] == [row.begin for row in rows if row.begin % BLOCK]
    assert len(looked) == len(found)
