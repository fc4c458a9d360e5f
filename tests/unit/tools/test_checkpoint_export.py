"""What `zeromesh checkpoint` makes of checkpoints: model directories as the hub has them, and wholes of parts."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from tests.support.commands import ended
from tests.support.doc_blocks import script
from tests.support.trainer_cases import LLAMA
from tests.unit.tools.checkpoint_runs import Copied, Trained, contents, flip, rewritten, same, weights, write_manifest
from zeromesh.checkpoint import store
from zeromesh.checkpoint.io import format as formats
from zeromesh.checkpoint.io.file_slices import PlacedValues
from zeromesh.checkpoint.io.format import FileRecord
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.offload import TieredTensor
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.models.hub_form import HubNames

ROOT = Path(__file__).resolve().parents[3]
IDS = torch.arange(10)[None]


@pytest.mark.parametrize("name", ["llama", "mixed", "tied", "mixtral"])
def test_an_export_is_the_trained_model(trained: Trained, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SYNCED_BYTES", 4096)  # Tensors are written in several parts.
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(trained.run(name)), str(out)]) == 0
    loaded, note = tf.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not [problem for problem, values in note.items() if values]
    assert loaded.dtype == torch.float32
    model = trained.models[name]
    assert same(dict(loaded.named_parameters()), dict(model.named_parameters()))
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    names = sorted(path.name for path in out.iterdir() if "token" not in path.name)
    assert names == ["config.json", "generation_config.json", "model.safetensors"]
    if name == "tied":
        assert tf.AutoTokenizer.from_pretrained(out)("one two")["input_ids"] == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_converted_weights_get_the_names_of_the_hub(trained: Trained, tmp_path: Path) -> None:
    """Transformers' own saving is the reference; it needs the whole model in memory."""
    assert main(["checkpoint", "export", str(trained.run("mixtral")), str(tmp_path / "out")]) == 0
    trained.models["mixtral"].save_pretrained(tmp_path / "theirs")
    found, wanted = weights(tmp_path / "out"), weights(tmp_path / "theirs")
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in found
    assert same(found, wanted)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}),
        ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),  # other names alone
        ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
        ("llama", {}),
    ],
)
def test_groups_of_conversions_are_those_of_the_library(tmp_path: Path, kind: str, fields: dict[str, Any]) -> None:
    model = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.for_model(kind, **{**LLAMA, **fields}))
    model.save_pretrained(tmp_path)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    names = HubNames.of_directory(tmp_path, {name: tensor.to("meta") for name, tensor in state.items()})
    assert not names.note
    groups = names.groups
    assert sorted(name for group in groups for name in group.names) == sorted(state)
    found: dict[str, torch.Tensor] = {}
    for group in groups:
        outputs = names._revert({name: state[name] for name in group.names})
        shapes, wanted = ({name: each.shape for name, each in all_.items()} for all_ in (outputs, group.outputs))
        assert shapes == wanted
        assert group.converted or len(outputs) == len(group.names) == 1
        found |= outputs
    assert same(found, weights(tmp_path))
    assert any(group.converted for group in groups) == (kind in ("qwen3_moe", "qwen2_moe"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "keep"])
def test_exports_in_other_dtypes(trained: Trained, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(trained.last("mixed")), str(out), "--dtype", dtype]) == 0
    stored = torch.bfloat16 if dtype == "keep" else getattr(torch, dtype)
    assert json.loads((out / "config.json").read_text())["dtype"] == str(stored).removeprefix("torch.")
    master = trained.models["mixed"].state_dict()
    assert same(weights(out), {name: tensor.to(stored) for name, tensor in master.items()})
    if dtype == "keep":
        assert same(weights(out), weights(trained.last("mixed")))


def test_an_export_through_small_windows(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromesh.checkpoint.io.format._LARGEST_FILE", 30000)
    monkeypatch.setattr("zeromesh.trainer.tools.checkpoint.reading.WINDOW_BYTES", 4096)
    for name in ("llama", "mixtral"):
        out = tmp_path / name
        assert main(["checkpoint", "export", str(trained.run(name)), str(out)]) == 0
        index = json.loads((out / "model.safetensors.index.json").read_text())
        files = {path.name for path in out.glob("*.safetensors")}
        assert set(index["weight_map"].values()) == files
        assert len(files) > 2
        loaded = tf.AutoModelForCausalLM.from_pretrained(out)
        assert same(dict(loaded.named_parameters()), dict(trained.models[name].named_parameters()))


def test_a_model_of_no_library_is_exported(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert main(["checkpoint", "export", str(trained.run("pictures")), str(out)]) == 0
    assert "no config.json: only the weights are written" in capsys.readouterr().out
    assert same(weights(out), trained.models["pictures"].state_dict())


def test_numbers_beyond_float16_are_refused(copied: Copied, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = copied("llama"), tmp_path / "out"
    rewritten(run / "checkpoints/step-00000002", "model.layers.1.mlp.up_proj.weight", -123456.0)
    said = ended(capsys, ["checkpoint", "export", str(run), str(out), "--dtype", "float16"], 2).err
    assert "model.layers.1.mlp.up_proj.weight has 1 numbers up to 1.235e+05, and float16 ends at 6.55e+04" in said
    assert not out.exists()
    assert main(["checkpoint", "export", str(run), str(out), "--dtype", "bfloat16"]) == 0
    # What is infinite already stays what it is.
    rewritten(run / "checkpoints/step-00000002", "model.layers.1.mlp.up_proj.weight", float("inf"))
    assert main(["checkpoint", "export", str(run), str(tmp_path / "half"), "--dtype", "float16"]) == 0
    assert weights(tmp_path / "half")["model.layers.1.mlp.up_proj.weight"][0, 0] == float("inf")


def test_options_of_adapters_and_averages_are_for_runs_that_have_them(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint", "export", str(trained.run("llama")), str(tmp_path / "out")]
    assert "--merge is for runs with adapters, and" in ended(capsys, [*words, "--merge"], 2).err
    assert "has no averaged weights (ema.decay); leave --ema out" in ended(capsys, [*words, "--ema"], 2).err
    assert list(tmp_path.iterdir()) == []


def test_every_name_of_the_dtype_in_a_configuration_is_the_new_one(trained: Trained, tmp_path: Path) -> None:
    directory = trained.copy("llama", tmp_path) / "checkpoints/step-00000002"
    content = json.loads((directory / "config.json").read_text())
    content |= {"torch_dtype": "float32", "tower_config": {"dtype": "float32", "torch_dtype": 3}, "other": {"dtype": "x"}}
    text = json.dumps(content).encode()
    (directory / "config.json").write_bytes(text)
    manifest = CheckpointReader(directory, checked=False).manifest
    record = manifest.files["config.json"]
    piece = replace(record.pieces[0], begin=0, end=len(text), checksum=formats.checksum(text))
    files = {**manifest.files, "config.json": replace(record, nbytes=len(text), pieces=(piece,))}
    write_manifest(directory, replace(manifest, files=files))
    assert main(["checkpoint", "export", str(directory), str(tmp_path / "out"), "--dtype", "float16"]) == 0
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (found["dtype"], found["torch_dtype"]) == ("float16", "float16")
    assert (found["tower_config"], found["other"]) == ({"dtype": "float16", "torch_dtype": 3}, {"dtype": "x"})


def test_an_export_keeps_what_is_there(copied: Copied, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = copied("llama"), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "exists and is not an empty directory" in ended(capsys, ["checkpoint", "export", str(run), str(out)], 2).err
    flip(run / "checkpoints/step-00000002/model-00001-of-00001.safetensors", 30000)
    assert main(["checkpoint", "export", str(run), str(tmp_path / "new")]) == 1
    assert "are not what rank 0 wrote" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "out"]
    assert (out / "notes.txt").read_text() == "mine"


def split(directory: Path, out: Path, count: int) -> list[Path]:
    """The parts that `count` hosts would have written: every piece is in one of them, in turn."""
    manifest = CheckpointReader(directory).manifest
    parts = []
    for index in range(count):
        part, files = out / f"part{index}", {}
        for path, record in manifest.files.items():
            first = (index - (len(record.pieces) > 1)) % count
            pieces = record.pieces[first::count]
            files[path] = FileRecord(nbytes=record.nbytes, pieces=pieces)
            if not pieces and index % 2:
                continue  # A part may lack what it has no piece of.
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            data = (directory / path).read_bytes()
            with (part / path).open("wb") as file:
                file.truncate(record.nbytes)
                for piece in pieces:
                    file.seek(piece.begin)
                    file.write(data[piece.begin : piece.end])
        write_manifest(part, replace(manifest, files=files, part=(index, count)))
        parts.append(part)
    return parts


@pytest.mark.parametrize("count", [2, 3])
def test_parts_make_the_whole(trained: Trained, tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    whole = trained.last("mixed")
    parts = [str(part) for part in split(whole, tmp_path, count)]
    assert all(contents(Path(part)) != contents(whole) for part in parts)
    assert main(["checkpoint", "merge", *reversed(parts), "--out", str(tmp_path / "out")]) == 0
    assert contents(tmp_path / "out") == contents(whole)
    assert CheckpointReader(tmp_path / "out").manifest == CheckpointReader(whole).manifest
    assert main(["checkpoint", "verify", str(tmp_path / "out")]) == 0
    assert main(["checkpoint", "diff", str(tmp_path / "out"), str(whole)]) == 0
    capsys.readouterr()
    # A part alone is no checkpoint, but can be looked at and verified.
    assert main(["checkpoint", "export", parts[0], str(tmp_path / "no")]) == 1
    assert f"is part 1 of {count}, one of each host; put them together first" in capsys.readouterr().err
    assert main(["checkpoint", "verify", parts[1]]) == 0
    assert f"part1 (part 2 of {count})" in ended(capsys, ["checkpoint", "inspect", parts[1]]).out


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("absent", "part 2 of 3 is missing; give the directories of all hosts"),
        ("twice", "part1 are both part 2 of 3"),
        ("step", "are not parts of one checkpoint: they differ in step"),
        ("run", "they differ in step, the sizes of files, tensors, layout"),
        ("whole", "is a whole checkpoint, not a part of one"),
        ("gap", "are in no part: an unfinished checkpoint"),
        ("overlap", "are in two parts"),
        ("flipped", "are not what rank 0 wrote"),
        ("short", "has 100 bytes"),
    ],
)
def test_parts_that_are_no_checkpoint_are_refused(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: str, message: str
) -> None:
    whole, name = trained.last("mixed"), "optimizer/master-00001-of-00001.safetensors"
    parts = split(whole, tmp_path, 3)
    manifest = CheckpointReader(parts[1], checked=False).manifest
    record = manifest.files[name]
    if spoil == "absent":
        parts.pop(1)
    elif spoil == "twice":
        parts[2] = parts[1]
    elif spoil == "step":
        write_manifest(parts[1], replace(manifest, step=7))
    elif spoil == "run":
        parts[1] = split(trained.last("llama"), tmp_path / "other", 3)[1]
    elif spoil == "whole":
        parts = [whole]
    elif spoil == "gap":
        files = {**manifest.files, name: replace(record, pieces=record.pieces[1:])}
        write_manifest(parts[1], replace(manifest, files=files))
    elif spoil == "overlap":
        other = CheckpointReader(parts[0], checked=False).manifest.files[name].pieces[0]
        pieces = tuple(sorted([*record.pieces, other], key=lambda piece: piece.begin))
        write_manifest(parts[1], replace(manifest, files={**manifest.files, name: replace(record, pieces=pieces)}))
    elif spoil == "flipped":
        flip(parts[1] / name, record.pieces[0].begin)
    elif spoil == "short":
        os.truncate(parts[1] / name, 100)
    assert message in ended(capsys, ["checkpoint", "merge", *map(str, parts), "--out", str(tmp_path / "out")], 1).err
    assert not (tmp_path / "out").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_reader_of_the_page_reads_everything(trained: Trained, copied: Copied) -> None:
    code, there = script("docs/checkpoint-format.md", "reader.py").code, {}
    assert len(code.splitlines()) <= 30
    exec(code, there)
    for name in trained.models:
        directory = trained.last(name)
        ours = CheckpointReader(directory)
        found = {(kind, tensor): array for kind, tensor, array in there["read_checkpoint"](directory)}
        assert len(found) == len(ours.manifest.tensors)
        for stored in ours.manifest.tensors:
            wanted = torch.empty(stored.shape, dtype=stored.dtype)
            ours.read([PlacedValues.stored(stored, 0, TieredTensor.of(wanted.view(-1)))], lambda: None)
            wanted = wanted.float() if wanted.dtype == torch.bfloat16 else wanted
            array = found[stored.kind, stored.name]
            assert array.dtype == wanted.numpy().dtype
            assert np.array_equal(array, wanted.numpy())
    directory = copied("llama") / "checkpoints/step-00000002"
    flip(directory / "optimizer/exp_avg-00001-of-00001.safetensors", 50000)
    with pytest.raises(ValueError, match=r"exp_avg-00001-of-00001.safetensors: bytes"):
        list(there["read_checkpoint"](directory))
    flip(directory / "manifest.json", (directory / "manifest.json").read_bytes().index(b'"step":') + 7)
    with pytest.raises(ValueError, match="the manifest is damaged"):
        list(there["read_checkpoint"](directory))
