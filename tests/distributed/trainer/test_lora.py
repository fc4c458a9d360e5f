"""Adapters of PEFT: trained alone over frozen weights that are shared out, saved alone, and loaded by PEFT."""

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import save_file
from torch import nn

import zeromesh
from tests.distributed.trainer.expert_cases import KINDS
from tests.distributed.trainer.lora_cases import METHODS, TARGETS, adapted
from tests.support.tables import row, tried
from tests.support.trainer_cases import LLAMA, llama, seeded, sentences, settings
from tests.support.workers import Workers
from zeromesh import Trainer
from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.trainer.cli.main import main
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.config.sections.model import LoraSection, ModelSection, WeightsSection
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models.adapters import (
    _METHODS,
    _SHARED,
    _excluded_modules,
    adapter_names,
    add_adapters,
    is_adapted,
    pretrained_of,
    require_adapters_fit,
)
from zeromesh.trainer.models.build import build_model
from zeromesh.trainer.models.small_copy import InFloat64
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint.export import export_checkpoint
from zeromesh.weight_init.weight_sources import BuiltModel, wrap_passed_model

FULL = pytest.mark.full
EXPERT = ("gate_proj", "up_proj", "down_proj")
TIED = {"tie_word_embeddings": True}


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear layers": ({}, {}),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, {}),
    "magnitudes of rows": ({"use_dora": True}, {}),
    "head of a tied embedding": ({"target_modules": ["q_proj", "lm_head"]}, TIED),
    "magnitudes": ({"target_modules": ["q_proj", "lm_head"], "use_dora": True}, {}),
    "whole modules": ({"modules_to_save": ["lm_head", "norm"]}, {}),
    "whole tied embedding": ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, TIED),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, {}),
    "tied embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, TIED),
    "tokens": ({"trainable_token_indices": [1, 2]}, {}),
    "tokens of a tied head": ({"trainable_token_indices": [1, 2]}, TIED),
    "biases": ({"bias": "lora_only"}, {"attention_bias": True}),
    "all biases": ({"bias": "all"}, {"attention_bias": True, "mlp_bias": True}),
    "one layer": ({"layers_to_transform": [1]}, {}),
    "rank-stabilised": ({"use_rslora": True, "rank_pattern": {"q_proj": 2}}, {}),
}
"""Changes of adapters, and of the model below them."""
SHORT = ("linear layers", "whole tied embedding")


def variant(name: str, stage: int, **axes: int) -> Any:
    changes, base = VARIANTS[name]
    marks = () if name in SHORT and stage == 3 else (FULL,)
    given = {"stage": stage, "base": base, "changes": changes, "axes": axes}
    words = [f"{axis} {size}" for axis, size in axes.items()]
    return pytest.param(max(prod(axes.values()), 2), "variant", given, marks=marks, id=" ".join([name, str(stage), *words]))


test_kinds_of_adapters_train_as_in_one_process_and_load_in_peft = pytest.mark.sampled(2)(
    tried(
        "lora_cases",
        [
            variant("linear layers", 1),
            *(variant(name, 3) for name in VARIANTS),
            *(variant(name, 3, **axes) for name in VARIANTS for axes in ({"tensor": 2}, {"pipeline": 2})),
            variant("linear layers", 2, tensor=2, pipeline=2),
        ],
    )
)
test_adapters_on_ranks = pytest.mark.sampled(4)(
    tried(
        "lora_cases",
        [
            row(2, "of_experts", pytest.mark.full, stage=2),
            row(2, "of_experts", stage=3),
            *(row(2, case) for case in ("saved", "added", "exported", "edited", "resumed")),
            row(2, "prompted", stage=3),
            *(row(2, "generated", axes=axes, zero={"stage": 3}) for axes in ({"tensor": 2}, {"pipeline": 2}, {"shard": 2})),
            *(row(2, "mixed", axes=axes) for axes in ({"tensor": 2}, {"pipeline": 2}, {"shard": 2})),
            row(4, "mixed", FULL, axes={"tensor": 2, "pipeline": 2}),
            *(row(2, "method", *([] if name == "VERA" else [FULL]), name=name, stage=3) for name in METHODS),
            *(row(2, "method", FULL, name=n, stage=1, axes={"pipeline": 2}) for n in METHODS if n not in _SHARED),
            *(row(2, "classified", kind=kind) for kind in ("sequence", "image")),
        ],
    )
)


def test_adapters_by_configuration(workers: Workers, tmp_path: Path) -> None:
    found = {}
    for name, size, stage in (("one", 1, 0), ("two", 2, 3)):
        each = workers.run(size, "lora_cases:configured", folder=str(tmp_path / name), stage=stage)[0]
        found[name] = each
        assert each["unchanged"] <= 1e-12  # B is zero at first
        assert each["adapters"] == 4  # PEFT's own targets for Llama: q_proj and v_proj of two layers
        assert each["spread"] > 0.05
        config = {"r": 2, "lora_alpha": 4.0, "task_type": "CAUSAL_LM"}
        assert each["config"] == {**config, "base_model_name_or_path": str(tmp_path / name / "base")}
    assert found["one"]["weights"] == found["two"]["weights"]
    assert found["one"]["losses"] == pytest.approx(found["two"]["losses"], rel=1e-9)


def test_checkpoints_name_frozen_weights_in_their_source(workers: Workers, tmp_path: Path) -> None:
    """Two ranks at stage 3 write a checkpoint without the frozen weights; one rank at stage 1, and three, go on from it."""

    def run(ranks: int, **how: Any) -> dict[str, Any]:
        return workers.run(ranks, "lora_cases:referring", folder=str(tmp_path), **how)[0]

    first, whole = run(2), run(2, frozen="whole")
    assert first == whole
    sizes = {
        name: sum(path.stat().st_size for path in (tmp_path / name / "checkpoints").rglob("model-*.safetensors"))
        for name in ("auto", "whole")
    }
    assert sizes["auto"] < 10_000 < 40_000 < sizes["whole"]  # bytes: of 20,096 parameters 448 are trained
    on = [run(ranks, steps=4, **how) for ranks, how in ((1, {}), (1, {"frozen": "whole"}), (3, {}))]
    assert [each["digest"] for each in on] == [first["digest"]] * 3
    assert on[0]["losses"] == on[1]["losses"]
    for words, code in ((["verify"], 0), (["export", str(tmp_path / "merged"), "--merge"], 0)):
        words.insert(1, str(tmp_path / "auto"))
        assert main(["checkpoint", *words]) == code

    # A source that has changed, at the same size, and one that is gone.
    file = sorted((tmp_path / "base").glob("*.safetensors"))[0]
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    said = run(1, steps=6)["error"]
    assert said.startswith("CheckpointError")
    assert f"{file}: bytes [0, " in said
    assert "put the file back as it was" in said
    assert main(["checkpoint", "verify", str(tmp_path / "auto")]) == 1
    file.unlink()
    checkpoint = tmp_path / "auto/checkpoints/step-00000004"
    with pytest.raises(CheckpointError, match=f"{file} cannot be read.*put the file back"):
        export_checkpoint(checkpoint, tmp_path / "none", "keep", Console(), merge=True)


@pytest.mark.parametrize("frozen", ["auto", "whole"])
def test_the_checkpoints_of_a_loop_name_frozen_weights_as_those_of_a_run_do(tmp_path: Path, frozen: str) -> None:
    llama().save_pretrained(tmp_path / "base")

    def sharded(seed: int) -> Any:
        torch.manual_seed(seed)
        inside = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model = peft.get_peft_model(inside, peft.LoraConfig(r=2, target_modules=TARGETS))
        return zeromesh.shard(model, torch.optim.AdamW(model.parameters()), checkpoint={"frozen": frozen})

    model, optimizer = sharded(1)
    wanted = {name: each.clone() for name, each in zeromesh.state_dict(model)}
    manifest = json.loads((zeromesh.save(tmp_path / "saved", model, optimizer) / "manifest.json").read_text())
    named = {name for name, row in manifest["tensors"]["model"].items() if row[0].startswith("source/")}
    trained = {name for name in manifest["tensors"]["model"] if "lora_" in name}
    assert named == (set(manifest["tensors"]["model"]) - trained if frozen == "auto" else set())
    other, optimizer = sharded(2)
    assert zeromesh.load(tmp_path / "saved", other, optimizer) == {}
    assert all(torch.equal(each, wanted[name]) for name, each in zeromesh.state_dict(other))


@pytest.mark.parametrize(("frozen", "away"), [("auto", False), ("reference", True)])
def test_weights_that_requires_grad_freezes_are_named_where_that_is_asked_for(tmp_path: Path, frozen: str, away: bool) -> None:
    llama().save_pretrained(tmp_path / "base")
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.model.layers[0].requires_grad_(False)
    checkpoint = {"every_steps": 1, "frozen": frozen}
    with Trainer(model, settings(str(tmp_path), checkpoint=checkpoint, run={"max_steps": 1}), sentences()) as trainer:
        trainer.fit()
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000001/manifest.json").read_text())
    named = {name for name, row in manifest["tensors"]["model"].items() if row[0].startswith("source/")}
    assert named == ({name for name, _ in model.named_parameters() if ".layers.0." in name} if away else set())
    assert manifest["schema"] == (2 if away else 1)
    if away:
        config = settings(str(tmp_path), checkpoint=checkpoint, run={"name": "other"})
        with (
            pytest.raises(ConfigError, match=r"checkpoint\.frozen: reference needs a model that came from a directory"),
            Trainer(adapted(), config, sentences()) as trainer,
        ):
            trainer.fit()


# Without processes


def built(**changes: Any) -> BuiltModel:
    return build_model(ModelSection(config={"model_type": "llama", **LLAMA, **changes}), 3)


def lora(**settings: Any) -> ModelSection:
    return ModelSection(lora=LoraSection(**settings))


def test_adapters_over_weights_that_are_nowhere_yet() -> None:
    plain = built()
    values = {name: plain.source.read(name, 3, 30).clone() for name, _ in plain.model.named_parameters()}
    made = add_adapters(built(), lora(rank=2, targets=("o_proj",)), 3)
    inside = [name for name, parameter in made.model.named_parameters() if parameter.is_meta]
    assert len(inside) == len(values)
    for name in inside:
        original = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert torch.equal(made.source.read(name, 3, 30), values[original]), name
    trained = {name: p for name, p in made.model.named_parameters() if p.requires_grad}
    assert sorted(name.split(".")[-3] for name in trained) == ["lora_A", "lora_A", "lora_B", "lora_B"]
    for name, parameter in trained.items():
        assert torch.equal(made.source.read(name, 0, parameter.numel()), parameter.detach().reshape(-1))
        assert bool(parameter.eq(0).all()) == ("lora_B" in name)
    assert adapter_names(made.model) == set(trained)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_weights_that_are_read_are_not_changed_ones(compute: torch.dtype) -> None:
    given, codes = {"use_dora": True, "target_modules": ["q_proj"]}, WeightsSection(codec="nf4")
    made = add_adapters(built(), ModelSection(adapters={"default": given}, weights=codes), 3, compute)
    assert not made.notes
    assert all(each.is_meta or "lora_" in name for name, each in made.model.named_parameters())
    given = {"init_lora_weights": "pissa", "r": 2, "target_modules": ["q_proj"]}
    (note,) = add_adapters(built(), ModelSection(adapters={"default": given}, weights=codes), 3, compute).notes
    assert "changes 2 weights of the base" in note


class Router(nn.Linear):
    """It returns more than a product."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), x


def test_adapters_are_on_what_multiplies_alone() -> None:
    """A router that is a linear layer, and blocks with a number for a name as linear layers of a sequence have one."""
    model = llama()
    model.model.layers[0].mlp.up_proj = Router(32, 48)
    model.model.extra = nn.Sequential(nn.Linear(32, 32))
    assert _excluded_modules(model) == ["model.layers.0", "model.layers.0.mlp.up_proj"]
    made = add_adapters(wrap_passed_model(model, 3), lora(rank=2, targets="all-linear"), 3)
    adapted_layers = {name.partition(".lora_")[0] for name in adapter_names(made.model)}
    assert "base_model.model.model.extra.0" in adapted_layers
    assert "base_model.model.model.layers.0.mlp.up_proj" not in adapted_layers
    assert "base_model.model.model.layers.1.mlp.up_proj" in adapted_layers
    assert "no adapters on model.layers.0.mlp.up_proj" in made.notes
    model = llama()
    model.model.layers[0].mlp.up_proj = Router(32, 48)
    section = lora(rank=2, targets=("up_proj",))
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj cannot have adapters, as a Router does more"):
        add_adapters(wrap_passed_model(model, 3), section, 3)


def test_adapters_do_not_depend_on_how_the_model_was_built() -> None:
    section = lora(rank=2, targets="all-linear")
    deferred = add_adapters(built(), section, 3).model
    whole = add_adapters(wrap_passed_model(llama(), 3), section, 3).model
    found = {name: p for name, p in deferred.named_parameters() if p.requires_grad}
    wanted = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_else_is_trained_belongs_to_the_adapter() -> None:
    config = tf.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=60)
    model = peft.get_peft_model(tf.BertModel(config), peft.LoraConfig(bias="all", target_modules=["query"]))
    names = adapter_names(model)
    assert {name.rpartition(".")[2] for name in names if "lora_" not in name} == {"bias"}
    assert names == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.base_model.set_requires_grad("default", requires_grad=False)
    assert {name for name in names if "lora_" in name} <= adapter_names(model)


def test_the_model_inside_says_what_the_loss_is() -> None:
    model = adapted()
    assert is_adapted(model)
    assert type(pretrained_of(model)).__name__ == "LlamaForCausalLM"
    loss = make_loss(model)
    assert loss.kind == "labels"
    assert "in chunks of tokens" in str(loss.notes)
    assert not is_adapted(llama())
    assert pretrained_of(nn.Linear(1, 1)) is None


@pytest.mark.parametrize(
    ("name", "chunked"),
    [("head", False), ("magnitudes", False), ("whole modules", True), ("tokens of a tied head", False), ("tied embedding", True)],
)
def test_the_loss_is_that_of_the_adapted_head(name: str, chunked: bool) -> None:
    """A trial of the model's class knows nothing of what PEFT has made of its head."""
    changes, base = VARIANTS[name]
    model = adapted(base, **changes).double()
    batch = {name: value[None] for name, value in sentences()[1].items()}
    loss = make_loss(model)
    assert loss.kind == "labels"
    assert ("in chunks of tokens" in str(loss.notes)) == chunked, loss.notes
    with InFloat64():
        own = model(**batch).loss
        found = loss(model, batch, seed=1.0 / loss.count(batch)) / loss.count(batch)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        wanted = torch.autograd.grad(own, trained, allow_unused=True)
        gradients = torch.autograd.grad(found, trained, allow_unused=True)
    torch.testing.assert_close(found, own, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-12)


def from_directory(path: Path, **others: Any) -> ModelSection:
    return ModelSection(config={"model_type": "llama", **LLAMA}, adapters={"default": str(path), **others})


@pytest.mark.parametrize("name", ["linear layers", "whole modules", "magnitudes", "tokens", "biases", "head of a tied embedding"])
def test_an_adapter_is_gone_on_from(name: str, tmp_path: Path) -> None:
    changes, base = VARIANTS[name]
    model = adapted(base, **changes)
    wanted = {name: each.detach().clone() for name, each in model.named_parameters()}
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    model.save_pretrained(tmp_path / "saved")
    plain = seeded(lambda: llama(**base))
    # PEFT saves an adapted head's own weights too, which are not those of another base.
    for base_model in (
        wrap_passed_model(plain, 3),
        *([] if name in ("magnitudes", "head of a tied embedding") else [built(**base)]),
    ):
        made = add_adapters(base_model, from_directory(tmp_path / "saved"), 3)
        found = dict(made.model.named_parameters())
        assert {name for name, each in found.items() if each.requires_grad} == trained
        for key in trained:
            assert torch.equal(made.source.read(key, 0, found[key].numel()), wanted[key].reshape(-1)), key


@pytest.mark.parametrize("kind", ["mixtral", "qwen"])
def test_an_adapter_of_transformers_4_has_one_for_each_expert(kind: str, tmp_path: Path) -> None:
    names, block, wide = (("w1", "w3", "w2"), "block_sparse_moe", 48) if kind == "mixtral" else (EXPERT, "mlp", 16)
    values = dict[str, torch.Tensor]()
    sizes = {"self_attn.q_proj": (32, 32)}
    for expert in range(4 if kind == "mixtral" else 8):
        layers = [f"{block}.experts.{expert}.{name}" for name in names]
        sizes |= dict(zip(layers, [(32, wide), (32, wide), (wide, 32)], strict=True))
    for layer, (given, out) in sizes.items():
        for number in range(2):
            name = f"base_model.model.model.layers.{number}.{layer}.lora_"
            values |= {f"{name}A.weight": torch.randn(2, given), f"{name}B.weight": torch.randn(out, 2)}
    save_file(values, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", *names]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    found = add_adapters(wrap_passed_model(seeded(KINDS[kind]), 3), from_directory(tmp_path), 3).model
    wanted = peft.PeftModel.from_pretrained(seeded(KINDS[kind]), tmp_path)
    with torch.no_grad(), InFloat64():
        ids = torch.arange(12)[None]
        assert torch.equal(found.double()(input_ids=ids).logits, wanted.double()(input_ids=ids).logits)
    (tmp_path / "adapter_model.safetensors").unlink()
    fewer = {name: each for name, each in values.items() if ".experts.1." not in name}
    save_file(fewer, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"another base: it has .*experts.*lora_A.weight of \["):
        add_adapters(wrap_passed_model(seeded(KINDS[kind]), 3), from_directory(tmp_path), 3)


def test_several_adapters_of_which_one_is_trained(tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path / "saved")
    for trained in ("default", "new"):
        section = from_directory(tmp_path / "saved", new={"r": 2, "target_modules": ["q_proj"]})
        model = add_adapters(built(), section.model_copy(update={"trained_adapter": trained}), 3).model
        learnt = [name for name, each in model.named_parameters() if each.requires_grad]
        assert learnt
        assert all(f".{trained}." in name for name in learnt)
        assert model.active_adapters == [trained]
    with pytest.raises(ConfigError, match=r"trained_adapter is 'x', and the adapters are \['a', 'b'\]"):
        load_config({"model": {"adapters": {"a": {}, "b": {}}, "trained_adapter": "x"}})


@pytest.mark.full
def test_one_of_several_adapters_is_trained_resumed_generated_with_and_merged(workers: Workers, tmp_path: Path) -> None:
    whole = workers.run(1, "lora_cases:several", folder=str(tmp_path / "whole"), steps=4, stage=0)[0]
    parts = {"folder": str(tmp_path / "parts")}
    first = workers.run(2, "lora_cases:several", steps=2, stage=1, axes={"tensor": 2}, **parts)[0]
    second = workers.run(2, "lora_cases:several", steps=4, stage=3, **parts)[0]
    assert [*first["losses"], *second["losses"]] == pytest.approx(whole["losses"], rel=1e-9)
    checkpoint = tmp_path / "parts/several/checkpoints/step-00000004"
    assert (checkpoint / "style/adapter_config.json").is_file()
    ids = sentences()[1]["input_ids"][None]
    wanted = torch.tensor(second["logits"], dtype=torch.float64)
    with zeromesh.Generator(tmp_path / "parts/several", precision={"compute": "float64"}) as made, torch.no_grad():
        torch.testing.assert_close(made.engine.model(input_ids=ids).logits[0, -1], wanted)
    export_checkpoint(checkpoint, tmp_path / "merged", "keep", Console(), merge=True, decoded=True)
    with torch.no_grad():
        merged = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
        torch.testing.assert_close(merged(input_ids=ids).logits[0, -1], wanted)


def test_adapters_of_another_base_are_refused(tmp_path: Path) -> None:
    adapted({"hidden_size": 64}).save_pretrained(tmp_path / "wide")
    with pytest.raises(ConfigError, match=r"another base: it has .*lora_A.weight of \[3, 64\], and LlamaForCausalLM.* \[3, 32\]"):
        add_adapters(built(), from_directory(tmp_path / "wide"), 3)
    adapted({"num_hidden_layers": 3}).save_pretrained(tmp_path / "deep")
    with pytest.raises(ConfigError, match=r"it has .*layers\.2.*, for which LlamaForCausalLM has no place"):
        add_adapters(built(), from_directory(tmp_path / "deep"), 3)
    adapted(target_modules=["lm_head"]).save_pretrained(tmp_path / "head")
    with pytest.raises(ConfigError, match=r"lm_head\.base_layer\.weight, for which .* has no place, or other values"):
        add_adapters(built(), from_directory(tmp_path / "head"), 3)
    with pytest.raises(ConfigError, match=r"model\.adapters\.default: .* is no directory with adapter_config\.json"):
        add_adapters(built(), from_directory(tmp_path), 3)


ONE = {"target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_dorra": True}, r"use_dorra is not a field of LoraConfig; nearest: use_dora"),
        ({"r": "8"}, r"r: got '8'; Input should be a valid integer"),
        ({"r": 0}, r"model\.adapters\.default: .*r.* should be a positive integer"),
        ({"peft_type": "ADALORA"}, r"peft_type ADALORA: its ranks are chosen anew after each step"),
        ({"peft_type": "XLORA"}, r"peft_type XLORA: nothing shows that .* there are BEFT, BOFT"),
        ({"peft_type": "LORRA"}, r"peft_type LORRA"),
        ({"init_lora_weights": "eva"}, r"init_lora_weights: eva is refused, as PEFT computes it from batches"),
        ({"layer_replication": [[0, 2], [1, 2]]}, r"layer_replication is refused, as it changes more"),
        ({"init_lora_weights": "corda"}, r"init_lora_weights: corda is refused"),
        ({"peft_type": "IA3", "target_modules": ["x"], "feedforward_modules": ["y"]}, "feedforward_modules"),
        ({**ONE, "rank_pattern": {"k_proj": 2}}, "rank_pattern: 'k_proj' matches no module with adapters of the model"),
        ({**ONE, "alpha_pattern": {"(self_attn|x).q_pro": 2}}, r"alpha_pattern: '.*q_pro' matches no module with adapters"),
        ({**ONE, "target_parameters": ["mlp.nope"]}, "target_parameters: 'mlp.nope' matches no parameter with adapters"),
        ({**ONE, "modules_to_save": ["norm", "lm_heda"]}, "modules_to_save: 'lm_heda' matches no module .*nearest: lm_head"),
        ({**ONE, "exclude_modules": ["v_pro"]}, "exclude_modules: 'v_pro' matches no module of the model; nearest: v_proj"),
    ],
)
def test_settings_of_peft_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_adapters(built(), ModelSection(adapters={"default": given}), 3)


def test_a_name_that_peft_would_lose_is_refused() -> None:
    with pytest.raises(ConfigError, match="Adapter name 'lora' should not be contained in the prefix"):
        add_adapters(built(), ModelSection(adapters={"lora": {"target_modules": TARGETS}}), 3)
    with pytest.raises(ConfigError, match=r"model\.adapters: \['a\.b'\] are no names"):
        load_config({"model": {"adapters": {"a.b": {}}}})
    with pytest.raises(ConfigError, match=r"\['__base__'\] are no names; .* but not __base__"):
        load_config({"model": {"adapters": {"__base__": {}}}})
    with pytest.raises(ConfigError, match=r"model\.adapters\.default is not the adapter that is trained"):
        load_config({"model": {"adapters": {"x": {}, "default": {}}}})


def test_methods_whose_layers_share_tensors_are_refused_on_a_pipeline() -> None:
    assert METHODS.keys() | _SHARED <= _METHODS
    section = ModelSection(adapters={"default": {"peft_type": "VERA", "r": 2, "target_modules": TARGETS}})
    model = add_adapters(built(), section, 3).model
    require_adapters_fit(model, 1)
    with pytest.raises(ConfigError, match=r"parallel\.pipeline: the layers of VERA share tensors"):
        require_adapters_fit(model, 2)


def test_what_cannot_have_adapters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    section = lora(targets=("no_such_layer",))
    with pytest.raises(ConfigError, match=r"model\.lora: no adapters can be added: .*no_such_layer"):
        add_adapters(built(), section, 0)
    with pytest.raises(ConfigError, match="adapters are for models of transformers, and this is a Linear"):
        add_adapters(wrap_passed_model(nn.Linear(2, 2), 0), section, 0)
    twice = llama()
    twice.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for model in (adapted(), twice):
        with pytest.raises(ConfigError, match=r"model\.lora: the model has adapters already; leave this out"):
            add_adapters(wrap_passed_model(model, 0), lora(rank=2), 0)
    prompts = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ConfigError, match="adapters that learn prompts make targets of their own"):
        make_loss(prompts)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"adapters need the package peft: pip install peft"):
        add_adapters(built(), section, 0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rank": 0}, r"model\.lora\.rank: got 0; allowed is an integer >= 1"),
        ({"ranks": 4}, r"model\.lora\.ranks: unknown key \(got 4\); did you mean model\.lora\.rank\?"),
        ({"dropout": 1.0}, r"model\.lora\.dropout"),
        ({"targets": []}, r"model\.lora\.targets"),
        ({"options": {"r": 4}}, r"model\.lora\.options: \['r'\] are keys of model\.lora"),
    ],
)
def test_settings_of_adapters_are_checked(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"model": {"lora": section}})
