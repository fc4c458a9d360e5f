"""`zeromesh checkpoint`: what it says of checkpoints, whole, damaged and different."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.commands import ended
from tests.unit.tools.checkpoint_runs import Copied, Trained, contents, flip, rewritten, write_manifest
from zeromesh.checkpoint.io import format as formats
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.tools.checkpoint import reading
from zeromesh.trainer.tools.checkpoint.reading import summary_row


def test_list_says_what_each_holds(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    head, columns, *rows = ended(capsys, ["checkpoint", "list", str(trained.run("llama"))]).out.splitlines()
    assert head == str(trained.run("llama") / "checkpoints")
    named = ["step", "date (UTC)", "size", "loss", "eval loss", "tokens", "written by", "state"]
    assert re.split(" {2,}", columns) == named
    assert [row.split()[0] for row in rows] == ["1", "2"]
    assert all(row.endswith("1 rank, stage 3, float32/float32  whole") for row in rows)


def test_list_in_json_names_what_is_broken_or_left_behind(copied: Copied, capsys: pytest.CaptureFixture[str]) -> None:
    root = copied("llama") / "checkpoints"
    (root / "step-00000001/config.json").unlink()
    for name in ("step-00000009.tmp", ".trash-00000003-77"):
        (root / name).mkdir()
    found = json.loads(ended(capsys, ["checkpoint", "list", "--json", str(root)]).out)
    assert found["leftovers"] == [".trash-00000003-77", "step-00000009.tmp"]
    one, two = found["checkpoints"]
    assert (one["step"], one["whole"], two["step"], two["whole"]) == (1, False, 2, True)
    assert "config.json cannot be read: No such file" in one["reason"]
    assert two["tokens"] > 0
    assert two["loss"] > 3
    axes = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
    assert two["layout"]["mesh"] == dict.fromkeys(axes, 1)
    assert two["bytes"] == sum(path.stat().st_size for path in (root / "step-00000002").rglob("*.*"))
    printed = ended(capsys, ["checkpoint", "list", str(root)]).out
    assert "NOT WHOLE: " in printed
    assert "\nstep-00000009.tmp: being written or removed, or left behind by a kill" in printed


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"whole": True, "part": [0, 1]}, ["", "", "", "2 ranks, shard 2, stage 1, bfloat16/float32", "whole"]),
        ({"whole": False, "part": [1, 4], "layout": {}}, ["", "", "", "", "part 2 of 4"]),
        ({"whole": False, "part": None, "layout": {"mesh": 3}}, ["", "", "", "", "NOT WHOLE: gone"]),
        (
            {"whole": True, "part": [0, 1], "loss": 0.0, "eval_loss": 1.23456, "tokens": 0, "layout": {"ranks": 1}},
            ["0.0000", "1.2346", "0", "1 rank", "whole"],
        ),
    ],
)
def test_a_row_about_a_checkpoint(more: dict[str, Any], wanted: list[str]) -> None:
    mesh = {"replicate": 1, "shard": 2}
    layout = {"mesh": mesh, "ranks": 2, "stage": 1, "compute": "bfloat16", "master": "float32"}
    known = {"step": 7, "date": "2026-01-02T03:04:05Z", "bytes": 2048, "layout": layout, "reason": "gone"}
    row = summary_row({**known, "loss": None, "eval_loss": None, "tokens": None, **more})
    assert row == ["7", "2026-01-02 03:04:05", "2.0 KiB", *wanted]


def test_what_is_moved_is_told_with_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    clock = iter([10.0, 12.0, 14.0, 15.0, 15.0])
    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    console: Any = SimpleNamespace(status=said.append)
    moved = reading.Throughput(console, "reading", 8 << 20)
    moved(2 << 20)
    moved(2 << 20)
    assert said == ["reading: 2.0 MiB of 8.0 MiB, 1.0 MiB/s", "reading: 4.0 MiB of 8.0 MiB, 1.0 MiB/s"]
    assert str(moved) == "4.0 MiB in 5 s (819.2 KiB/s)"


def test_inspect_sums_up_a_checkpoint(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(ended(capsys, ["checkpoint", "inspect", str(trained.run("mixed")), "--json"]).out)
    count = sum(parameter.numel() for parameter in trained.models["mixed"].parameters())
    assert {kind: (each["parameters"], each["dtypes"]) for kind, each in found["kinds"].items()} == {
        "model": (count, ["BF16"]),
        "master": (count, ["F32"]),
        "exp_avg": (count, ["F32"]),
        "exp_avg_sq": (count, ["F32"]),
    }
    assert (found["step"], found["state"]["updates"], found["state"]["settings"]["optimizer.lr"]) == (1, 1, 0.01)
    assert found["files"].keys() == contents(trained.last("mixed")).keys()
    assert "tensors" not in found
    printed = ended(capsys, ["checkpoint", "inspect", str(trained.last("tied")), "--tensors", "wte"]).out
    assert "lm_head.weight is transformer.wte.weight" in printed
    assert "optimizer.lr: 0.01" in printed
    rows = [line.split() for line in printed.splitlines() if "transformer.wte.weight  " in line]
    assert [row[0] for row in rows] == ["model", "exp_avg", "exp_avg_sq"]
    assert rows[0][2:5] == ["F32", "[64,", "32]"]
    assert rows[0][-2:] == ["rank", "0"]


def test_inspect_gives_places_that_can_be_read(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    directory = trained.last("llama")
    assert main(["checkpoint", "inspect", str(directory), "--tensors", "*.1.*k_proj*", "--json"]) == 0
    (place,) = [each for each in json.loads(capsys.readouterr().out)["tensors"] if each["kind"] == "model"]
    data = (directory / place["file"]).read_bytes()[place["begin"] : place["end"]]
    wanted = trained.models["llama"].get_parameter(place["name"]).detach().numpy()
    assert np.array_equal(np.frombuffer(data, "<f4").reshape(place["shape"]), wanted)


def test_verify_passes_what_is_whole(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ended(capsys, ["checkpoint", "verify", str(trained.run("llama"))]).out.splitlines()
    assert [": whole: 9 files, " in line and "/s)" in line for line in lines] == [True, True]


def test_verify_names_every_damaged_file(copied: Copied, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied("mixed")
    directory = run / "checkpoints/step-00000001"
    reader = CheckpointReader(directory)
    norm = reader.tensor("model", "model.norm.weight")
    assert norm is not None
    flip(directory / norm.path, norm.begin)
    flip(directory / "trainer_state.json", 5)
    os.truncate(directory / "optimizer/master-00001-of-00001.safetensors", 20000)
    (directory / "optimizer/exp_avg-00001-of-00001.safetensors").unlink()
    (directory / "config.json").rename(directory / "other.json")
    (directory / "config.json").symlink_to("other.json")
    (directory / "pytorch_model.bin").write_bytes(b"from elsewhere")
    said = ended(capsys, ["checkpoint", "verify", str(run)], 1).out
    blocks = dict(re.findall(r"^  (\S+)\n((?:    .*\n)+)", said, re.MULTILINE))
    assert re.match(rf"{directory}: DAMAGED: 6 of 11 files", said)
    states = [f"optimizer/{name}-00001-of-00001.safetensors" for name in ("master", "exp_avg")]
    assert blocks.keys() == {norm.path, "trainer_state.json", *states, "config.json", "pytorch_model.bin"}
    assert "are not what rank 0 wrote" in blocks[norm.path]
    assert "tensors: model.norm.weight, model.embed_tokens.weight" in blocks[norm.path]
    assert "layers.1.post_attention_layernorm" not in blocks[norm.path]
    assert "has 20,000 bytes" in blocks["optimizer/master-00001-of-00001.safetensors"]
    assert "model.norm.weight" not in blocks["optimizer/master-00001-of-00001.safetensors"]
    assert "and 1 more" in blocks["optimizer/exp_avg-00001-of-00001.safetensors"]
    assert "is a link or no file" in blocks["config.json"]
    assert "tensors" not in blocks["trainer_state.json"]
    assert "NOT WHOLE" in ended(capsys, ["checkpoint", "list", str(run)]).out


def test_verify_goes_on_after_a_damaged_checkpoint(
    copied: Copied, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    run = copied("llama")
    newest, oldest = (run / "checkpoints" / f"step-0000000{step}" for step in (2, 1))
    (newest / "manifest.json").write_bytes(b"{}")
    flip(oldest / "config.json", 5)
    first, second, file, *_ = ended(capsys, ["checkpoint", "verify", str(run)], 1).out.splitlines()
    assert first.startswith(f"{newest}: DAMAGED: ")
    assert second.startswith(f"{oldest}: DAMAGED: 1 of 9 files, ")
    assert file == "  config.json"
    assert threads[-1] == 5


def test_a_directory_is_found_by_what_it_holds(copied: Copied, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied("llama")
    first, root = run / "checkpoints" / "step-00000001", run / "checkpoints"
    assert "it is one: `inspect` shows it" in ended(capsys, ["checkpoint", "list", str(first)], 2).err
    # The manifest is of the step that the directory's name has.
    first.rename(root / "step-00000005")
    wrong, _ = json.loads(ended(capsys, ["checkpoint", "list", "--json", str(run)]).out)["checkpoints"][::-1]
    assert (wrong["step"], wrong["whole"], wrong["reason"]) == (5, False, "its manifest is of step 1")
    for step in (2, 5):
        (root / f"step-0000000{step}").rename(root / f".trash-0000000{step}-1")
    said = ended(capsys, ["checkpoint", "inspect", str(run)], 2).err
    assert f"{root} holds no checkpoint, but .trash-00000002-1, .trash-00000005-1, which a kill has left" in said
    assert "no checkpoints\n.trash-00000002-1: being" in ended(capsys, ["checkpoint", "list", str(run)]).out


def test_a_part_of_a_name_is_enough(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", "inspect", str(trained.run("llama")), "--json", "--tensors"]
    for pattern, found in (("1.mlp.up", 3), ("up_proj.weight", 6), ("*up_proj", 0), ("model.norm.weigh?", 3), ("norm.weigh?", 0)):
        assert main([*words, pattern]) == (0 if found else 2)
        out = capsys.readouterr().out
        assert len(json.loads(out)["tensors"] if found else []) == found


def test_the_largest_difference_stands_first(copied: Copied, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied("llama")
    one, two = (run / "checkpoints" / f"step-0000000{step}" for step in (2, 3))
    shutil.copytree(one, two)
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    for name, value, other in zip(names, (1.0, 5.0), (1.25, 7.0), strict=True):
        rewritten(one, name, value)
        rewritten(two, name, other)
    _, _, first, second, last = ended(capsys, ["checkpoint", "diff", str(one), str(two)], 1).out.splitlines()
    assert first.startswith(f"model {names[1]}: max |difference| 2 at [0, 0] (5.0 in A, 7.0 in B); 1 of ")
    assert second.startswith(f"model {names[0]}: max |difference| 0.25 at [0, 0] (1.0 in A, 1.25 in B); ")
    assert last == "2 of 63 tensors that both have differ"
    # A difference of exactly the tolerance is none.
    within = ["checkpoint", "diff", str(one), str(two), "--tolerance"]
    assert "1 of 63 tensors" in ended(capsys, [*within, "0.25"], 1).out
    assert "the same within 2: 63 tensors" in ended(capsys, [*within, "2"]).out
    for directory, value in ((one, "nan"), (two, "nan")):
        rewritten(directory, names[1], float(value))
    assert names[1] not in ended(capsys, within[:-1], 1).out


def test_verify_reads_headers_as_other_programs_do(copied: Copied, capsys: pytest.CaptureFixture[str]) -> None:
    """A writer's mistake that no checksum shows: another program would find other tensors than this one."""
    directory = copied("llama") / "checkpoints/step-00000002"
    path = directory / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"model.norm.weight":', b'"model.norm.heavys":', 1))
    manifest = CheckpointReader(directory).manifest
    pieces = tuple(
        replace(piece, checksum=formats.checksum(path.read_bytes()[piece.begin : piece.end]))
        for piece in manifest.files[path.name].pieces
    )
    record = replace(manifest.files[path.name], pieces=pieces)
    write_manifest(directory, replace(manifest, files={**manifest.files, path.name: record}))
    assert main(["checkpoint", "verify", str(directory)]) == 1
    assert "do not agree about model.norm.heavys, model.norm.weight" in capsys.readouterr().out


def test_what_is_the_same_is_the_same(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", str(trained.run("llama")), str(trained.last("llama"))]) == 0
    assert "the same bit by bit: 63 tensors" in capsys.readouterr().out


@pytest.mark.parametrize("window", [64 << 20, 10000])
def test_one_changed_element_is_found(
    trained: Trained, copied: Copied, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr("zeromesh.trainer.tools.checkpoint.reading.WINDOW_BYTES", window)
    name = "model.layers.1.mlp.up_proj.weight"
    before = float(trained.models["llama"].get_parameter(name).detach()[0, 0])
    directory = copied("llama") / "checkpoints/step-00000002"
    rewritten(directory, name, before + 0.5)
    words = ["checkpoint", "diff", str(trained.last("llama")), str(directory)]
    said = ended(capsys, words, 1).out
    line = rf"^model {re.escape(name)}: max \|difference\| 0\.5 at \[0, 0\] \(.* in A, .* in B\);"
    assert re.search(line, said, re.M)
    assert "1 of 1,536 elements differ\n1 of 63 tensors that both have differ\n" in said
    assert main([*words, "--tolerance", "0.4"]) == 1
    assert main([*words, "--tolerance", "0.6"]) == 0
    rewritten(directory, name, float("nan"))
    assert "max |difference| inf at [0, 0]" in ended(capsys, [*words, "--tolerance", "1e30"], 1).out


def test_other_runs_differ_in_what_they_are(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    first = trained.run("llama") / "checkpoints/step-00000001"
    said = ended(capsys, ["checkpoint", "diff", str(first), str(trained.last("llama"))], 1).out
    assert "step: 1 in A, 2 in B\n" in said
    assert " more\n" in said
    assert "63 of 63 tensors that both have differ" in said
    said = ended(capsys, ["checkpoint", "diff", str(first), str(trained.run("mixed"))], 1).out
    assert "master (21 tensors): only in B" in said
    assert "F32 in A, BF16 in B" in said
    said = ended(capsys, ["checkpoint", "diff", str(trained.run("tied")), str(first)], 1).out
    assert "alias lm_head.weight: 'transformer.wte.weight' in A, '(absent)' in B" in said
    assert "model transformer.wte.weight: only in A" in said
    assert "0 of 0 tensors that both have differ" in said
    assert "model.class: 'GPT2LMHeadModel' in A, 'LlamaForCausalLM' in B" in said


@pytest.mark.parametrize("words", [["list"], ["inspect"], ["verify"], ["export", "{}"], ["diff", "{}"]])
def test_a_path_of_nothing_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    action, *rest = words
    for path, message in ((tmp_path, "holds no checkpoints"), (tmp_path / "gone", "is not a directory")):
        said = ended(capsys, ["checkpoint", action, str(path), *(word.format(tmp_path / "x") for word in rest)], 2).err
        assert said.startswith("zeromesh: ")
        assert message in said


def test_no_tensor_of_such_a_name(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "inspect", str(trained.run("llama")), "--tensors", "nrom"]) == 2
    assert "--tensors 'nrom': no tensor has such a name" in capsys.readouterr().err


def test_names_of_others_cannot_command_a_terminal(copied: Copied, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copied("llama") / "checkpoints/step-00000002"
    manifest = CheckpointReader(directory).manifest
    write_manifest(directory, replace(manifest, layout={"compute": "\x1b[2Jgone"}))
    for words in (["list", str(directory.parent)], ["inspect", str(directory)]):
        said = ended(capsys, ["checkpoint", *words]).out
        assert "[2Jgone" in said
        assert "\x1b" not in said
