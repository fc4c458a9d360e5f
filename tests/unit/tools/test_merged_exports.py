"""Merged exports of a run over an encoded base: from the original or the decoded weights, and into 4 bits again."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from tests.support.architectures import TINY, small_model
from tests.support.trainer_cases import llama, seeded
from zeromesh import Generator, Trainer
from zeromesh.errors import ConfigError
from zeromesh.flat.codec import Codec
from zeromesh.trainer.models.hub_form import HubForm, HubNames
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint.export import export_checkpoint
from zeromesh.zero.full_state import persistent_buffers

IDS = torch.arange(12)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found.clone()


def rounded(values: torch.Tensor) -> torch.Tensor:
    codec, flat, found = Codec(name="nf4", block=64, nested=True), values.reshape(-1), torch.empty_like(values)
    codes = codec.encode(lambda start, end: flat[start:end], flat.numel())
    codec.decode(codes.codes, codec.scale_values(codes.scales, codes.tables), found.view(-1))
    return found


@contextmanager
def trained(folder: Path, build: Any, **kept: Any) -> Iterator[tuple[Path, torch.Tensor, Any]]:
    """A run's checkpoint, its logits, and its model: PEFT's, of the decoded base."""
    seeded(build).save_pretrained(folder / "base")
    model = {"source": str(folder / "base"), "weights": "nf4", "lora": {"rank": 2, "targets": "all-linear"}}
    sections: dict[str, Any] = {"run": {"name": "r", "output_dir": str(folder), "max_steps": 2}, "model": model}
    sections |= {"optimizer": {"lr": 0.1}, "precision": {"compute": "float32"}, "checkpoint": {"every_steps": 2, **kept}}
    with Trainer(None, sections, [{"input_ids": IDS[0], "labels": IDS[0]}] * 4) as trainer:
        trainer.fit()
        yield folder / "r/checkpoints/step-00000002", logits(trainer.model), trainer.model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, torch.Tensor, Any]]:
    with trained(tmp_path_factory.mktemp("exports"), llama) as found:
        yield found


def test_a_model_is_merged_from_the_original_or_the_decoded_base(run: Any, tmp_path: Path) -> None:
    checkpoint, wanted, _ = run
    apart = []
    for name, decoded in (("original", False), ("decoded", True)):
        export_checkpoint(checkpoint, tmp_path / name, "float32", Console(), merge=True, decoded=decoded)
        found = logits(tf.AutoModelForCausalLM.from_pretrained(tmp_path / name))
        apart.append(float((found - wanted).norm() / wanted.norm()))
    assert apart[1] <= 1e-5 < 1e-3 < apart[0]
    for how, message in (({"decoded": True}, "--base decoded is for merged"), ({}, "--dtype nf4 is for merged models")):
        with pytest.raises(ConfigError, match=message):
            export_checkpoint(checkpoint, tmp_path / "x", "float32" if how else "nf4", Console(), **how)


def test_original_weights_are_not_those_that_a_checkpoint_holds(tmp_path: Path) -> None:
    """It holds them as the run computed with them."""
    with trained(tmp_path, llama, frozen="whole") as (checkpoint, wanted, _):
        with pytest.raises(ConfigError, match=r"holds .*down_proj.*as the run computed with them.* give --base decoded"):
            export_checkpoint(checkpoint, tmp_path / "original", "float32", Console(), merge=True)
        export_checkpoint(checkpoint, tmp_path / "decoded", "float32", Console(), merge=True, decoded=True)
        found = logits(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "decoded"))
        assert float((found - wanted).norm() / wanted.norm()) <= 1e-5


def test_a_merged_model_is_encoded_again(run: Any, tmp_path: Path) -> None:
    checkpoint, *_ = run
    export_checkpoint(checkpoint, tmp_path / "merged", "float32", Console(), merge=True)
    export_checkpoint(checkpoint, tmp_path / "nf4", "nf4", Console(), merge=True)
    plain = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, each in plain.named_parameters():
        if "_proj" in name:
            each.data = rounded(each.data)
    with Generator(tmp_path / "nf4", precision={"compute": "float32"}) as made:
        assert (logits(made.engine.model) - logits(plain)).norm() <= 1e-6 * logits(plain).norm()
    files = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "nf4", dtype=torch.float32)
    assert type(files.model.layers[0].self_attn.q_proj).__name__ == "Linear4bit"


def test_a_merged_gpt2_in_four_bits_is_that_of_bitsandbytes(tmp_path: Path) -> None:
    """Its linear layers have their weights transposed, which transformers turns before they are encoded."""
    build = partial(small_model, "gpt2", vocab_size=64, hidden_size=64, n_positions=32)
    with trained(tmp_path, build) as (checkpoint, *_):
        export_checkpoint(checkpoint, tmp_path / "merged", "float32", Console(), merge=True)
        export_checkpoint(checkpoint, tmp_path / "nf4", "nf4", Console(), merge=True)
    own = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    found, wanted = (
        tf.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32, **how)
        for name, how in (("nf4", {}), ("merged", {"quantization_config": tf.BitsAndBytesConfig(**own)}))
    )
    assert type(found.transformer.h[0].attn.c_attn).__name__ == "Linear4bit"
    assert torch.equal(logits(found), logits(wanted))


def of_experts(**changes: Any) -> Any:
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "vocab_size": 64}
    model = seeded(partial(small_model, "qwen3_moe", **sizes))
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_parameters=parameters, **changes)
    return peft.get_peft_model(model, config), config


def test_adapters_of_several_parameters_of_a_module_are_merged(tmp_path: Path) -> None:
    """PEFT puts them around each other. The adapter is the one that is active then."""
    model, config = of_experts()
    model.add_adapter("other", config)
    form = HubForm(model)
    model.set_adapter("other")
    found = dict(form.convert(iter([(name, each.clone()) for name, each in model.named_parameters()]), torch.float32))
    model.merge_and_unload().save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


def test_what_transformers_keeps_in_float32_is_streamed_in_it() -> None:
    """A rate of 0.001 is less than what 16 bits tell apart near 0.5, and other experts would be chosen."""
    kind, fields = TINY["deepseek"]
    with torch.device("meta"):
        model = kind(kind.config_class(**fields))
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
    found = {name: each.dtype for name, each in HubForm(model).convert(iter(tensors.items()), torch.bfloat16)}
    names = HubNames(model, {name: each.to(torch.bfloat16) for name, each in tensors.items()})
    assert found == {name: each.dtype for name, each in names.outputs.items()}
    assert {name for name, dtype in found.items() if dtype == torch.float32} == {
        name for name in found if "e_score_correction_bias" in name
    }
    assert torch.float32 in found.values()


@pytest.mark.parametrize(
    ("tied", "adapter", "refusal"),
    [
        (True, peft.LoraConfig(r=2, target_modules=["embed_tokens"]), "lm_head.weight is also the weight of a layer with adapters"),
        (False, peft.LoraConfig(r=2, target_modules=["embed_tokens"]), ""),
        (True, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]), ""),
        (True, peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2]), ""),
        (False, peft.OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj"]), "nothing shows that OFT is merged right"),
        (False, peft.LNTuningConfig(target_modules=["input_layernorm"]), "nothing shows that LN_TUNING is merged right"),
        (False, peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "PROMPT_TUNING is merged right"),
    ],
)
def test_what_nothing_merges_is_refused(tied: bool, adapter: Any, refusal: str) -> None:
    """Or is as PEFT merges it."""
    model = peft.get_peft_model(seeded(partial(small_model, "llama", vocab_size=64, tie_word_embeddings=tied)), adapter)
    weights = {**dict(model.named_parameters()), **persistent_buffers(model)}
    found = HubForm(model).convert(iter([(name, each.detach().clone()) for name, each in weights.items()]), torch.float32)
    if refusal:
        with pytest.raises(ConfigError, match=refusal):
            dict(found)
        return
    merged, made = model.merge_and_unload(), dict(found)
    assert all(torch.equal(made[name], each) for name, each in merged.named_parameters())


def test_of_several_adapters_the_trained_one_is_merged(tmp_path: Path) -> None:
    seeded(llama).save_pretrained(tmp_path / "base")
    kinds = {
        name: {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj", "v_proj"][: 1 + (name == "two")]}
        for name in ("one", "two")
    }
    model = {"source": str(tmp_path / "base"), "adapters": kinds, "trained_adapter": "two"}
    sections: dict[str, Any] = {"run": {"name": "r", "output_dir": str(tmp_path), "max_steps": 2}, "model": model}
    sections |= {"optimizer": {"lr": 0.1}, "precision": {"compute": "float32"}, "checkpoint": {"every_steps": 2}}
    with Trainer(None, sections, [{"input_ids": IDS[0], "labels": IDS[0]}] * 4) as trainer:
        trainer.fit()
        wanted = logits(trainer.model)
    export_checkpoint(tmp_path / "r/checkpoints/step-00000002", tmp_path / "merged", "float32", Console(), merge=True)
    found = logits(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def test_adapters_in_a_copy_of_a_module_are_not_merged() -> None:
    model, _ = of_experts(modules_to_save=["mlp"])
    with pytest.raises(ConfigError, match=r"experts.* has adapters in a copy of a module \(modules_to_save\)"):
        next(HubForm(model).convert(iter(()), torch.float32))
