"""Models with layers of bitsandbytes, handed over as they are: they train as bitsandbytes and PEFT alone, and rest as codes."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from torch import nn

import zeromesh
from tests.support.quantized_models import NF4, adapted, loaded, written
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.trainer.models.quantized_layers import codec_of_layers, codes_of, make_plain
from zeromesh.trainer.shard import placed_of
from zeromesh.weight_init.weight_sources import BuiltSource

bnb = pytest.importorskip("bitsandbytes")
IDS = torch.arange(48).view(4, 12)
FORMS = {
    "nested": NF4,
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "as floats": {**NF4, "bnb_4bit_quant_storage": torch.bfloat16},
    "in part": {**NF4, "llm_int8_skip_modules": ["q_proj", "lm_head"]},
    "head too": {**NF4, "llm_int8_skip_modules": ["nothing"]},
    "8 bits": {"load_in_8bit": True},
}
ENCODED = {"in part": 12, "8 bits": 0}
"""The matrices that are kept encoded, where they are not all of 2 layers."""
METHODS = [
    peft.LoraConfig(task_type="CAUSAL_LM", r=3, use_dora=True, use_rslora=True, modules_to_save=["lm_head"]),
    peft.IA3Config(task_type="CAUSAL_LM", init_ia3_weights=False),
    peft.AdaLoraConfig(task_type="CAUSAL_LM", total_step=9, init_lora_weights=False),
    *(
        kind(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"])
        for kind in (peft.HiraConfig, peft.RandLoraConfig, peft.RoadConfig, peft.OFTConfig)
    ),
]


def trained(model: Any, optimizer: Any) -> list[float]:
    torch.manual_seed(5)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def require_alike(plain: Any, mine: Any) -> Any:
    """Assert that both learn the same; the second is partitioned and returned."""
    wanted = trained(plain, torch.optim.AdamW([each for each in plain.parameters() if each.requires_grad], lr=1e-2))
    mine, optimizer = zeromesh.shard(mine, torch.optim.AdamW(mine.parameters(), lr=1e-2), stage=3)
    assert trained(mine, optimizer) == pytest.approx(wanted, abs=2e-6)
    learnt = {name: each.detach() for name, each in plain.named_parameters() if each.requires_grad}
    found = {name: value.clone() for name, value in zeromesh.state_dict(mine) if name in learnt}
    assert found.keys() == learnt.keys()
    for name, value in learnt.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4, msg=name)
    return mine


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_trains_as_bitsandbytes_does(tmp_path: Path, form: str) -> None:
    plain, mine = (adapted(loaded(tmp_path / "base", **FORMS[form])) for _ in range(2))
    mine = require_alike(plain, mine)
    assert len(placed_of(mine).engine.checkpoint_state.encoded()) == ENCODED.get(form, 14)
    assert mine.base_model.model.is_gradient_checkpointing
    zeromesh.unshard(mine)
    mine.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(loaded(tmp_path / "base", **FORMS[form]), tmp_path / "adapter").train()
    torch.testing.assert_close(again(input_ids=IDS).logits, mine(input_ids=IDS).logits, rtol=0, atol=1e-5)
    assert mine.generate(IDS[:1], max_new_tokens=3).shape == (1, 15)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", METHODS, ids=lambda each: type(each).__name__)
def test_methods_of_peft_around_such_layers(tmp_path: Path, settings: Any) -> None:
    require_alike(*(adapted(loaded(tmp_path / "base"), settings) for _ in range(2)))


@pytest.mark.parametrize("form", ["nested", "fp4", "as floats", "8 bits"])
def test_values_and_codes_are_those_of_bitsandbytes(tmp_path: Path, form: str) -> None:
    model = loaded(tmp_path / "base", dtype=torch.bfloat16, **FORMS[form])
    name, layer = "model.layers.1.mlp.up_proj.weight", model.model.layers[1].mlp.up_proj.train()
    with torch.no_grad():
        wanted = layer(torch.eye(64)).T.reshape(-1)  # In the dtype of its input.
    codes = layer.weight.detach().reshape(-1).view(torch.uint8)
    make_plain(model)
    source, weights = BuiltSource(model), codec_of_layers(model)
    near = {"rtol": 0, "atol": 1e-4} if form == "8 bits" else {"rtol": 0, "atol": 0}  # Products of float16.
    torch.testing.assert_close(source.read(name, 0, 128 * 64).float(), wanted.float(), **near)
    torch.testing.assert_close(source.read(name, 70, 333).float(), wanted[70:333].float(), **near)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.bfloat16
    if weights is None:
        assert form == "8 bits"
        return
    found = source.encoded(name, weights.codec, torch.bfloat16)
    assert found is not None
    assert torch.equal(found.codes, codes)
    source.release(name)
    assert not hasattr(layer.weight, "stored")


def test_a_model_says_that_it_is_plain_and_is_merged_so(tmp_path: Path) -> None:
    loaded(tmp_path / "first").save_pretrained(tmp_path / "small")
    model = adapted(type(loaded(tmp_path / "first")).from_pretrained(tmp_path / "small"))
    mine = require_alike(adapted(loaded(tmp_path / "first")), model)
    base, placed = mine.get_base_model(), placed_of(mine)
    assert not hasattr(base.config, "quantization_config")
    assert not getattr(base, "is_quantized", False)
    merged = dict(placed.hub_form.convert(placed.engine.state.stored(), torch.float32))
    zeromesh.unshard(mine)
    wanted = mine.merge_and_unload().state_dict()
    assert merged.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6, msg=name)


def test_layers_that_were_transposed_train_and_are_not_merged(tmp_path: Path) -> None:
    config = tf.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64, bos_token_id=None, eos_token_id=None)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn", "c_proj"])
    written(tmp_path / "base", lambda: tf.GPT2LMHeadModel(config))
    models = [adapted(loaded(tmp_path / "base"), settings) for _ in range(2)]
    for each in (part for model in models for part in model.modules() if isinstance(part, nn.Dropout)):
        each.p = 0.0
    placed = placed_of(require_alike(*models))
    with pytest.raises(ConfigError, match="transposed"):
        next(placed.hub_form.convert(placed.engine.state.stored(), torch.float32))


def test_a_refused_model_can_be_handed_over_again(tmp_path: Path) -> None:
    plain, mine = (adapted(loaded(tmp_path / "base")) for _ in range(2))
    with pytest.raises(ConfigError, match=r"parallel\.pipeline"):
        zeromesh.shard(mine, torch.optim.AdamW, parallel={"pipeline": 2})
    require_alike(plain, mine)


def test_codes_stay_through_an_evaluation_before_training(tmp_path: Path) -> None:
    plain, mine = (adapted(loaded(tmp_path / "base")) for _ in range(2))
    mine, _ = zeromesh.shard(mine)
    zeromesh.unshard(mine, keep_codes=True)
    assert [len(each.tensors()) for each in codes_of(mine).values()] == [4] * 14
    mine = require_alike(plain, mine)
    assert len(placed_of(mine).engine.checkpoint_state.encoded()) == 14


class Packed(nn.Module):
    """A linear layer whose weight is packed in integers, as GPTQ and AWQ have it."""

    in_features = 64

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(8, 64, dtype=torch.int32))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Parameter(torch.zeros(2, 64, 32, dtype=torch.uint8), requires_grad=False)


@pytest.mark.parametrize("kind", [Packed, Experts, lambda: bnb.nn.Embedding4bit(64, 64).to("cpu")])
def test_what_others_have_quantized_is_refused(kind: Any) -> None:
    model = nn.Sequential(bnb.nn.Linear4bit(64, 64).to("cpu"), nn.ModuleDict({"inner": kind()}), nn.Linear(64, 4))
    name = type(model[1]["inner"]).__name__
    with pytest.raises(ConfigError, match=rf"1\.inner is quantized as .*{name}.*16 bits.*a buffer"):
        zeromesh.shard(model, torch.optim.SGD(model[2].parameters(), lr=0.1))
    assert isinstance(model[0], bnb.nn.Linear4bit)


def test_layers_without_codes_are_refused() -> None:
    model = nn.Sequential(bnb.nn.Linear4bit(64, 64), nn.Linear(64, 4))
    with pytest.raises(LayoutError, match=r"0\.weight has no codes"):
        zeromesh.shard(model, torch.optim.SGD(model[1].parameters(), lr=0.1))
