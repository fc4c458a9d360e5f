"""Frozen experts that rest as codes, on the host or in files, and are brought for the tokens that chose them."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf

from tests.distributed.trainer.expert_cases import KINDS
from tests.support.plain import calling
from tests.support.quantized_models import loaded, written
from tests.support.tables import row, tried
from tests.support.trainer_cases import LLAMA, seeded, sentences, settings
from tests.support.workers import Workers
from zeromesh import Trainer
from zeromesh.checkpoint.io.reader import CheckpointReader
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint.export import export_checkpoint
from zeromesh.units.unit import all_buckets

FULL = pytest.mark.full
PARTLY = {"parameters": {"tier": "file", "fraction": 0.5}}
HOST, FILE = ({"parameters": tier} for tier in ("host", "file"))
test_losses_are_those_of_the_decoded_experts = pytest.mark.sampled(8)(
    tried(
        "fetch_cases",
        [
            row(1, "trained", FULL, stage=0),
            row(2, "trained", stage=3),
            row(2, "trained", FULL, stage=2, parallel={"expert": 2}),
            row(2, "trained", stage=3, parallel={"expert": 2}, kind="biased"),
            row(2, "trained", stage=3, parallel={"expert": 2}, kind="skewed"),
            row(2, "trained", FULL, stage=3, parallel={"expert": 2}, kind="skewed", offload=FILE, kept="block"),
            row(2, "trained", FULL, stage=3, parallel={"tensor": 2}, targets="attention"),
            row(1, "trained", stage=3, offload=FILE, weights=None, targets="attention"),
            row(1, "trained", FULL, stage=3, offload=FILE),
            row(1, "trained", kept="block", most=1),
            row(1, "trained", kept="selective", offload=FILE),
            row(2, "trained", FULL, stage=3, kind="latent", parallel={"expert": 2}, offload=FILE),
            row(2, "trained", FULL, stage=3, parallel={"pipeline": 2}, targets="attention", offload=FILE),
            row(2, "trained", FULL, stage=3, offload=HOST, parallel={"replicate": 2}, weights="int8", kind="mixtral"),
            row(
                2,
                "trained",
                FULL,
                stage=3,
                parallel={"replicate": 2},
                weights="fp8",
                offload={"parameters": {"tier": "file", "fraction": 0.5}},
                kind="biased",
            ),
        ],
    )
)
test_only_chosen_experts_are_read = tried(
    "fetch_cases",
    [
        row(1, "brought", kept="none", most=1 << 20, times=2),
        row(1, "brought", kept="block", most=1 << 20, times=2),
        row(1, "brought", kept="none", most=1, times=4),
    ],
)
test_experts_that_are_thawed_are_trained = tried(
    "fetch_cases", [row(1, "thawed", targets="experts"), row(1, "thawed", FULL, targets="attention")]
)
test_generation_reads_what_a_token_chose = tried(
    "fetch_cases", [row(1, "generated", zero={"stage": 3}, offload=FILE), row(1, "generated", FULL)]
)


@FULL
def test_runs_go_on_in_other_layouts(workers: Workers, tmp_path: Path) -> None:
    def losses(ranks: int, folder: str, **given: object) -> list[float]:
        return workers.run(ranks, "fetch_cases:moved", folder=str(tmp_path / folder), **given)[0]

    whole = losses(1, "whole", steps=6)
    found = losses(1, "parts", steps=2, zero={"stage": 3}, offload=FILE)
    found += losses(2, "parts", steps=4, zero={"stage": 3}, parallel={"expert": 2}, offload=FILE)
    found += losses(2, "parts", steps=6, zero={"stage": 3})
    assert found == pytest.approx(whole, rel=1e-9)


test_memory_is_what_was_predicted = tried(
    "fetch_cases",
    [
        row(1, "counted", most=1 << 20, zero={"stage": 3, "gathered_budget": 0}, offload=FILE),
        row(1, "counted", FULL, most=30_000, zero={"stage": 0}),
        row(2, "counted", most=20_000, zero={"stage": 3}, parallel={"expert": 2}, offload=FILE),
    ],
)


@FULL
def test_experts_are_plain_in_what_bitsandbytes_reads(tmp_path: Path) -> None:
    """A directory in its four bits trains with the experts that it has, and a merged export has those that were decoded."""

    def build() -> Any:
        changes = {"hidden_size": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
        return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**{**LLAMA, **changes}, num_experts=4))

    def scores(model: Any) -> Any:
        with torch.no_grad():
            return model.eval()(input_ids=sentences()[0]["input_ids"][None]).logits

    def names(source: str, name: str, **weights: Any) -> tuple[set[str], Any]:
        """The encoded parameters of experts, and the logits after a step."""
        model = {"source": str(tmp_path / source), "lora": {"rank": 2, "targets": ["q_proj"]}, **weights}
        wide = {"compute": "float32", "master": "float32", "reduce": "float32"}
        run = {"run": {"name": name, "max_steps": 1}, "checkpoint": {"every_steps": 1}, "batch": {"micro_size": 8}}
        found: set[str] = set()

        def seen(trainer: Trainer, step: int, metrics: Any) -> None:
            assert trainer.engine is not None
            slots = [slot for bucket in all_buckets(trainer.engine.units) for slot in bucket.layout.slots]
            found.update(slot.spec.fqn for slot in slots if slot.spec.codec is not None)

        config = settings(str(tmp_path), model=model, precision=wide, **run)
        with Trainer(None, config, sentences(), callbacks=[calling(on_step_end=seen)]) as trainer:
            trainer.fit()
            return found, scores(trainer.model)

    written(tmp_path / "base", build)
    loaded(tmp_path / "base").save_pretrained(tmp_path / "layers")
    found, _ = names("layers", "layers")
    assert found
    assert not {name for name in found if "experts" in name}, found
    found, wanted = names("base", "other", weights={"codec": "nf4", "cache": str(tmp_path / "cache")})
    assert {name for name in found if "experts" in name}
    checkpoint = next((tmp_path / "other/checkpoints").glob("step-*1"))
    for name, dtype in (("merged", "float32"), ("nf4", "nf4")):
        export_checkpoint(checkpoint, tmp_path / name, dtype, Console(), merge=True, decoded=True)
        model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        # Matrices of linear layers, which have been decoded and merged, are rounded again in four bits.
        assert float((scores(model) - wanted).norm() / wanted.norm()) <= (1e-5 if name == "merged" else 0.1)
        assert model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").dtype == torch.float32


def test_experts_below_several_adapters_are_named_in_their_source(tmp_path: Path) -> None:
    """A checkpoint does not hold them, and a merged export is of the original ones."""
    target = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj_bias"]}
    adapter = {"peft_type": "LORA", "r": 2, "init_lora_weights": False, **target}
    written(tmp_path / "base", lambda: seeded(KINDS["biased"]))
    model = {"source": str(tmp_path / "base"), "weights": "nf4", "adapters": {"default": adapter}}
    sections = {"run": {"max_steps": 1}, "checkpoint": {"every_steps": 1}, "zero": {"stage": 3}}
    config = settings(str(tmp_path), model={**model, "config": {"experts_implementation": "eager"}}, **sections)
    with Trainer(None, config, sentences()) as trainer:
        trainer.fit()
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step-*1")
    manifest = CheckpointReader(checkpoint).manifest
    assert not [each.name for each in manifest.tensors if "lora_" not in each.name and not manifest.is_elsewhere(each.path)]
    export_checkpoint(checkpoint, tmp_path / "merged", "float32", Console(), merge=True)
    found, plain = (tf.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("merged", "base"))
    wanted = peft.PeftModel.from_pretrained(plain, checkpoint).merge_and_unload().state_dict()
    for name, each in found.state_dict().items():
        torch.testing.assert_close(each, wanted[name], rtol=1e-6, atol=1e-6, msg=name)
