"""Directories that bitsandbytes has quantized: what is read of them, as they lie and decoded, and what is refused."""

from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from tests.support.quantized_directories import mark, quantize, quantize_fp8, quantize_packed, random_mxfp4
from tests.support.trainer_cases import llama, seeded, sentences, settings
from zeromesh import Generator, Trainer
from zeromesh.errors import ConfigError
from zeromesh.flat.codec import Codec
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import Interval
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.models.build import build_model
from zeromesh.trainer.weights.quantized_files import QuantizedFiles
from zeromesh.units.unit import all_buckets

pytest.importorskip("bitsandbytes")
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    seeded(llama).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("kind", ["nf4", "nested", "fp4", "int8"])
def test_what_is_read_is_what_bitsandbytes_decodes(base: Path, tmp_path: Path, kind: str) -> None:
    wanted = quantize(base, tmp_path / "small", kind)
    files = QuantizedFiles(tmp_path / "small")
    assert {name: spec.shape for name, spec in files.entries.items()} == {
        name: tuple(value.shape) for name, value in wanted.items()
    }
    files.expect((name, 0, value.numel()) for name, value in wanted.items())
    for name, value in wanted.items():
        flat = value.reshape(-1)
        assert torch.equal(files.whole(name), value), name
        for start, end in ((0, 1), (3, 30), (31, 32), (flat.numel() - 7, flat.numel())):
            assert torch.equal(files.elements(name, start, end), flat[start:end]), name
        out = torch.empty(flat.numel() - 9, dtype=torch.float64)
        files.fill(name, StridedRows.whole(flat.numel()), Interval(start=4, end=flat.numel() - 5), out)
        assert torch.equal(out, flat[4:-5].double())
        assert files.is_stored_as(name, value.dtype) == ("_proj" not in name)
    files.close()


def test_codes_are_taken_as_they_lie_by_their_own_codec_alone(base: Path, tmp_path: Path) -> None:
    quantize(base, tmp_path / "small", "nested")
    section = ModelSection(source=str(tmp_path / "small"))
    source, own = build_model(section, 3).source, Codec(name="nf4", block=64, nested=True)
    found, values = source.encoded(UP, own, torch.float32), source.read(UP, 0, 32 * 48)
    assert found is not None
    out = torch.empty_like(values)
    own.decode(found.codes, own.scale_values(found.scales, found.tables), out)
    assert torch.equal(out, values)
    assert source.file_position(UP, 0, torch.bfloat16) is None
    assert source.file_position("lm_head.weight", 0, torch.bfloat16) is not None
    assert source.encoded("lm_head.weight", own, torch.float32) is None
    for other in (Codec(name="fp4", block=64, nested=True), Codec(name="nf4", block=64), Codec(name="nf4", block=128)):
        assert source.encoded(UP, other, torch.float32) is None
    source.close()


def test_adapters_over_four_bits_keep_the_form_of_the_directory(base: Path, tmp_path: Path) -> None:
    quantize(base, tmp_path / "small", "nested")
    losses = []
    for number, (source, weights) in enumerate([("small", None), ("base", "nf4"), ("base", None)]):
        model = {"source": str(tmp_path / source), "lora": {"rank": 2}, "weights": weights}
        config = settings(str(tmp_path), model=model, run={"name": str(number), "max_steps": 2})
        config["precision"] = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
        with Trainer(None, config, sentences()) as trainer:
            losses.append(trainer.fit().losses)
    assert losses[0] == losses[1] != losses[2]


def test_all_of_a_quantized_directory_can_be_trained(base: Path, tmp_path: Path) -> None:
    wanted = quantize(base, tmp_path / "small", "nf4")
    built = build_model(ModelSection(source=str(tmp_path / "small")), 3)
    for name, _ in built.model.named_parameters():
        found = built.source.read(name, 0, wanted[name].numel())
        assert torch.equal(found, wanted[name].reshape(-1)), name
    assert not hasattr(built.model.config, "quantization_config")
    built.source.close()


def test_what_transformers_decodes_while_it_loads_is_read(base: Path, tmp_path: Path) -> None:
    wanted = quantize_fp8(base, tmp_path / "fp8", 16)
    random_mxfp4(tmp_path / "mxfp4")
    how = {"quantization_config": tf.Mxfp4Config(dequantize=True), "dtype": torch.bfloat16}
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "mxfp4", **how).state_dict()
    for directory, values in (("fp8", wanted), ("mxfp4", loaded)):
        built = build_model(ModelSection(source=str(tmp_path / directory)), 3)
        for name, parameter in built.model.named_parameters():
            found = built.source.read(name, 0, parameter.numel())
            assert torch.equal(found.to(values[name].dtype), values[name].reshape(-1)), name
        assert built.source.file_position("model.embed_tokens.weight", 0, torch.bfloat16) is not None
        built.source.close()


def test_compressed_tensors_are_decoded_by_its_package(base: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    wanted = quantize_packed(base, tmp_path / "packed")
    built = build_model(ModelSection(source=str(tmp_path / "packed")), 3)
    for name, parameter in built.model.named_parameters():
        found = built.source.read(name, 0, parameter.numel())
        assert torch.equal(found.to(torch.bfloat16), wanted[name].reshape(-1)), name
    built.source.close()


def test_other_forms_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    quantize(base, small, "nested")
    tensors = load_file(small / "model.safetensors")
    tensors[f"{UP}.absmax"] = tensors[f"{UP}.absmax"][:-1].clone()
    save_file(tensors, small / "model.safetensors", {"format": "pt"})
    section = ModelSection(source=str(small))
    with pytest.raises(ConfigError, match=rf"{UP} is not quantized as bitsandbytes 0.50 does it \(.*absmax has 23 elements"):
        build_model(section, 3)
    for method in ("gptq", "awq", "hqq", "unheard-of"):
        mark(small, {"quant_method": method, "bits": 4})
        with pytest.raises(ConfigError, match=rf"by {method}, which transformers does not decode .* dequantize it with"):
            build_model(section, 3)


@pytest.mark.parametrize("tier", ["none", "file"])
def test_generation_is_that_of_the_decoded_weights(base: Path, tmp_path: Path, tier: str) -> None:
    decoded = quantize(base, tmp_path / "small", "nested")
    save_file(decoded, base / "model.safetensors", {"format": "pt"})
    found = []
    for source in (base, tmp_path / "small"):
        sections = {"run": {"output_dir": str(tmp_path)}, "zero": {"stage": 3}, "offload": {"parameters": tier}}
        with Generator(source, **sections) as generator:
            encoded = [each for each in all_buckets(generator.engine.units) if each.layout.first.codec is not None]
            assert bool(encoded) == (source != base)
            files = [part.slot for each in encoded for part in each.master.encoded.parts if part.slot is not None]
            assert {Path(slot.label).parent for slot in files} == ({source} if encoded and tier == "file" else set())
            found.append([each.tokens for each in generator.generate([[1, 2, 3], [9, 8]], max_new_tokens=6)])
    assert found[0] == found[1]
