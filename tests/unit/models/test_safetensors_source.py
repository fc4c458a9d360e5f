"""Streaming a Hugging Face directory: every value exact, only the wanted bytes read, every broken file named."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.architectures import ARCHITECTURES, SIZES, Architecture, sentences, small_model
from zeromesh.checkpoint.io import reader as readers
from zeromesh.checkpoint.io.reader import TensorFiles
from zeromesh.errors import ConfigError, LayoutError, StorageError
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import Interval
from zeromesh.offload.io import direct_io
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.inference.generator import find_source
from zeromesh.trainer.models.build import build_model
from zeromesh.weight_init.weight_sources import materialize_buffers

KV = {"num_key_value_heads": 2, "vocab_size": 90, "pad_token_id": 0}
MOE = {**KV, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
MORE: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", **KV, "tie_word_embeddings": True},
    "mixtral of 12": {"model_type": "mixtral", **KV, "num_local_experts": 12},
    "qwen2_moe": {"model_type": "qwen2_moe", **MOE},
    "gemma2": {"model_type": "gemma2", **KV, "head_dim": 8},
}
FAMILIES = ARCHITECTURES | {
    name: Architecture(config={**SIZES, **config}, head="causal_lm", samples=sentences) for name, config in MORE.items()
}


def saved(family: str, directory: Path, shard: str = "5GB") -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family].build()
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(directory, max_shard_size=shard)
    return model


def load(directory: Path, head: Any = "causal_lm", **config: Any) -> Any:
    return build_model(ModelSection(source=str(directory), config=config, head=head), 0)


def test_reading_ahead_is_in_order_and_no_further_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path, "20KB")
    source: Any = load(tmp_path).source
    files, ahead, most = source._files, [], 0
    monkeypatch.setattr(readers, "_READ_AHEAD", 4000)
    monkeypatch.setattr(readers, "_CHUNK", 300)
    kind = readers.PositionalFile
    cached = next(iter(files.entries.values())).path
    monkeypatch.setattr(kind, "in_memory", lambda file, offset: file.path == str(tmp_path / cached))
    monkeypatch.setattr(kind, "read_ahead", lambda file, *extent: ahead.append((file.path, *extent)))
    wanted = [(name, 1, shape.numel()) for name, shape in source.shapes.items()]
    source.expect(iter(wanted))
    done = 0
    for name, start, end in wanted:
        files._thread.submit(int).result()  # After all that is to be read ahead by now.
        most = max(most, sum(length for *_, length in ahead) - done)
        source.read(name, start, end)
        if files.entries[name].path != cached:
            done += (end - start) * 4
    files._thread.shutdown()
    places = [(str(tmp_path / entry.path), entry.begin + start * 4, (end - start) * 4)
              for entry, start, end in ((files.entries[name], start, end) for name, start, end in wanted)
              if entry.path != cached]  # fmt: skip
    told = []
    for path, begin, length in ahead:
        assert length <= 1200
        if told and told[-1][0] == path and sum(told[-1][1:]) == begin:
            told[-1] = (path, told[-1][1], told[-1][2] + length)
        else:
            told.append((path, begin, length))
    assert told == places
    assert 4000 <= most < 4000 + 1200


def test_bytes_are_read_ahead_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found, read = tmp_path / "file", os.urandom(1 << 20), bytearray(1 << 20)
    path.write_bytes(found)
    preadv = os.preadv

    def noted(descriptor: int, pieces: Any, at: int) -> int:
        count = preadv(descriptor, pieces, at)
        read[at : at + count] = pieces[0][:count]
        return count

    with direct_io.PositionalFile(path, direct=False) as file:
        monkeypatch.setattr(os, "preadv", noted)
        file.read_ahead(100, 700_001)
    assert read[100:700_101] == found[100:700_101]
    assert not any(read[:100] + read[700_101:])


@pytest.mark.parametrize("reason", [None, errno.EAGAIN, errno.EOPNOTSUPP])
def test_a_byte_in_memory_needs_no_waiting(reason: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(10))
    preadv = os.preadv

    def answer(descriptor: int, pieces: Any, at: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        if reason is not None:
            raise OSError(reason, os.strerror(reason))
        return preadv(descriptor, pieces, at)

    monkeypatch.setattr(os, "preadv", answer)
    with direct_io.PositionalFile(tmp_path / "file", direct=False) as file:
        assert file.in_memory(9) == (reason is None)
        assert not file.in_memory(10)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_value_of_every_architecture_is_exact(family: str, shard: str, tmp_path: Path) -> None:
    original = saved(family, tmp_path, shard)
    built = load(tmp_path, FAMILIES[family].head)
    assert built.notes == ()
    assert all(parameter.is_meta for parameter in built.model.parameters())
    for name, value in original.named_parameters(remove_duplicate=False):
        n = value.numel()
        parts = [built.source.read(name, a, b).clone() for a, b in ((0, n // 3), (n // 3, n // 3), (n // 3, n))]
        assert torch.equal(torch.cat(parts), value.detach().reshape(-1)), name
    assert materialize_buffers(built.model, "cpu", 0, source=built.source) == ()
    wanted = dict(original.named_buffers())
    for name, value in built.model.named_buffers():
        assert torch.equal(value, wanted[name]), name
    built.source.close()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_built_without_memory(name: str) -> None:
    subject = ARCHITECTURES[name]
    built = build_model(ModelSection(config=subject.config, head=subject.head), 0)
    assert built.notes == ()
    for name, parameter in built.model.named_parameters():
        assert not built.source.read(name, 0, parameter.numel()).isnan().any(), name


def test_only_the_wanted_elements_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    built = load(tmp_path)
    counts: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        counts.append(preadv(descriptor, [buffers[0][:7]], offset))  # short reads are continued
        return counts[-1]

    monkeypatch.setattr(readers.os, "preadv", counted)
    assert built.source.read("model.layers.1.mlp.up_proj.weight", 5, 15).shape == (10,)
    assert sum(counts) == 40


COLUMNS = [[(0, 23)], [(0, 9)], [(4, 5)], [(0, 2), (5, 11), (20, 23)], [(at, at + 1) for at in range(0, 23, 2)]]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(("near", "pieces", "most"), [(1 << 14, 1024, 1 << 30), (8, 1024, 9), (60, 7, 30)])
def test_columns_of_rows_are_read_in_few_calls_which_may_end_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[tuple[int, int]], near: int, pieces: int, most: int
) -> None:
    whole = torch.randn(11, 23)
    save_file({"a": torch.randn(3), "b": whole}, tmp_path / "model.safetensors")
    files, preadv, sizes = TensorFiles(tmp_path), os.preadv, []

    def short(descriptor: int, buffers: list[Any], offset: int) -> int:
        assert len(buffers) <= pieces
        sizes.append(sum(map(len, buffers)))
        room, kept = most, []
        for buffer in buffers:
            kept.append(memoryview(buffer)[:room])
            room -= len(kept[-1])
        return preadv(descriptor, kept, offset)

    monkeypatch.setattr(direct_io, "_NEAR", near)
    monkeypatch.setattr(direct_io, "_MOST_PIECES", pieces)
    monkeypatch.setattr(direct_io.os, "preadv", short)
    rows = StridedRows(count=11, width=23, columns=tuple(Interval(start=start, end=end) for start, end in columns))
    local = torch.cat([whole[:, start:end] for start, end in columns], dim=1).reshape(-1)
    for start, end in [(0, len(local)), (3, len(local) - 2), (len(local) - 1, len(local)), (1, 2), (5, 10)]:
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.full((end - start,), float("nan"), dtype=dtype)
            files.fill("b", rows, Interval(start=start, end=end), out)
            assert torch.equal(out, local[start:end].to(dtype))
    assert near < 1024 or sizes[0] == rows.hull(Interval(start=0, end=len(local))).length * 4
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 90)
    said = r"ends after [\d,]+ bytes; [\d,]+ were to be read at|has changed since it was opened"
    with pytest.raises(StorageError, match=said):
        files.fill("b", rows, Interval(start=0, end=len(local)), torch.empty(len(local)))


def test_converted_parameters_are_kept_within_a_bound(tmp_path: Path) -> None:
    original = saved("mixtral", tmp_path)
    source: Any = load(tmp_path).source
    names = [f"model.layers.{i}.mlp.experts.{p}" for i in range(2) for p in ("gate_up_proj", "down_proj")]
    for name in names + names[::-1]:
        value = dict(original.named_parameters())[name].detach().reshape(-1)
        assert torch.equal(source.read(name, 100, 5000), value[100:5000])
        assert len(source._converted) == 1


def test_a_new_head_is_initialised_and_said(tmp_path: Path) -> None:
    saved("bert", tmp_path)
    built = load(tmp_path, "sequence_classification", num_labels=3)
    assert "newly initialised: bert.pooler.dense.weight" in built.notes[0]
    assert "not used by this model: cls.predictions" in built.notes[1]
    assert built.model.config.num_labels == 3
    assert built.source.read("classifier.weight", 0, 96).std() < 0.03  # HF's 0.02, the files hold 1.0
    assert built.source.read("bert.pooler.dense.bias", 0, 4).eq(0).all()


@pytest.mark.parametrize("classes", [2, 5])
def test_a_head_for_other_classes_is_initialised_and_said(classes: int, tmp_path: Path) -> None:
    stored = small_model("bert", "sequence_classification", vocab_size=90, num_labels=3)
    stored.save_pretrained(tmp_path)
    same, other = (load(tmp_path, "sequence_classification", num_labels=number) for number in (3, classes))
    assert not same.notes
    assert "there for other classes, so newly initialised: classifier.weight, classifier.bias" in other.notes[0]
    size = classes * 32
    new, kept = (each.source.read("classifier.weight", 0, count) for each, count in ((other, size), (same, 64)))
    assert not torch.equal(new[:64], kept)
    pooler = stored.bert.pooler.dense.weight.detach().reshape(-1)
    assert torch.equal(other.source.read("bert.pooler.dense.weight", 0, 1024), pooler)


def test_a_bare_base_model_loads_under_a_head(tmp_path: Path) -> None:
    original = saved("llama", tmp_path)
    original.model.save_pretrained(tmp_path / "base")
    built = load(tmp_path / "base")
    assert "newly initialised: lm_head.weight" in built.notes[0]
    q = original.model.layers[0].self_attn.q_proj.weight.detach().reshape(-1)
    assert torch.equal(built.source.read("model.layers.0.self_attn.q_proj.weight", 0, q.numel()), q)


@pytest.mark.parametrize("kind", ["base", "classifier"])
def test_a_head_that_nothing_trains_is_not_drawn(tmp_path: Path, kind: str) -> None:
    made = small_model("llama", "sequence_classification", vocab_size=90)
    (made.model if kind == "base" else made).save_pretrained(tmp_path)
    section = ModelSection(source=str(tmp_path))
    for given, trains in ((section, False), (section.model_copy(update={"train": ["!*"]}), True)):
        with pytest.raises(ConfigError, match=r"model.head: .* \(Llama.*\) lacks lm_head.weight, and nothing is trained; set"):
            build_model(given, 0, trains=trains)
    build_model(section, 0)
    fits = section.model_copy(update={"head": "base" if kind == "base" else "sequence_classification"})
    build_model(fits, 0, trains=False)


def test_how_to_generate_is_taken_along(tmp_path: Path) -> None:
    original = saved("llama", tmp_path)
    original.generation_config.max_new_tokens = 7
    original.generation_config.save_pretrained(tmp_path)
    assert load(tmp_path).model.generation_config.max_new_tokens == 7
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load(tmp_path)


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_all_mismatches_are_listed_at_once(tmp_path: Path) -> None:
    saved("llama", tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 4)
        tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(3)

    rewrite(tmp_path, change)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert caught.value.problems == (
        "model.norm.weight is missing",
        "model.layers.0.mlp.gate.weight is not part of LlamaForCausalLM",
        "model.layers.0.mlp.up_proj.weight has shape [3, 4], the model has [48, 32]",
    )


@pytest.mark.parametrize("parts", [("w1",), ("w1", "w3"), ("w2",)])
def test_a_missing_expert_is_an_error(parts: tuple[str, ...], tmp_path: Path) -> None:
    saved("mixtral", tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in parts:
            del tensors[f"model.layers.0.block_sparse_moe.experts.3.{part}.weight"]

    rewrite(tmp_path, change)
    with pytest.raises(ConfigError, match=r"do not fit the model: model\.layers\.0\.mlp\.experts"):
        load(tmp_path)


def test_tied_names_with_different_values_are_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    with pytest.raises(ConfigError, match="tie_word_embeddings: false"):
        load(tmp_path, tie_word_embeddings=True)


def test_either_name_of_a_tied_parameter_is_enough(tmp_path: Path) -> None:
    original = saved("llama-tied", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    value = load(tmp_path).source.read("model.embed_tokens.weight", 3, 50)
    assert torch.equal(value, original.lm_head.weight.detach().reshape(-1)[3:50])


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a/b", "a\\b", ""])
def test_an_index_cannot_leave_the_directory(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="not a plain name"):
        TensorFiles(tmp_path)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for names, message in (
        ({"a": "model.safetensors", "b": "model.safetensors"}, "b is not in model.safetensors"),
        ({"a": "other.safetensors"}, "other.safetensors is in"),
        ([], "no `weight_map`"),
    ):
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(ConfigError, match=message):
            TensorFiles(tmp_path)


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 3)
    with pytest.raises(StorageError, match="8 were to be read at"):
        files.elements("a")
    files.close()


def test_pickles_and_absent_directories_are_refused_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin is pickle.*save it as safetensors"):
        TensorFiles(tmp_path)
    with pytest.raises(ConfigError, match="is not a directory on this machine, and cannot be the name of a model on the Hub"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json; give a directory"):
        load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    said = r"has adapters, which are not loaded from there; merge them \(`python -c .*merge_and_unload"
    with pytest.raises(ConfigError, match=said):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")  # transformers loads the adapter on top of such a model.
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"merge them \(`zeromesh checkpoint export .* OUT --merge`\), and give OUT"):
        load(tmp_path)
    assert find_source(tmp_path) == str(tmp_path)


def test_bad_reads_are_named(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    source = load(tmp_path).source
    with pytest.raises(LayoutError, match="not among"):
        source.read("nothing", 0, 1)
    with pytest.raises(LayoutError, match="does not lie"):
        source.read("model.norm.weight", 0, 33)
