"""Models that bitsandbytes has quantized in trainers over the engine, beside the same trainers alone."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers as tf
from datasets import Dataset
from safetensors.torch import load_file
from torch import nn

import zeromesh
from tests.distributed.integrations.accelerate_cases import fresh_state
from tests.distributed.integrations.hf_trainer_cases import TRAINS_ALONE, history, losses_of, trainer_of
from tests.distributed.trainer.encoded_cases import rounded
from tests.support.architecture_cases import differences
from tests.support.plain import like
from tests.support.quantized_models import adapted, loaded, written
from tests.support.trainer_cases import sentences
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.integrations.trl import _tokenizer
from zeromesh.trainer.shard import engine_of
from zeromesh.transformers import on_zeromesh

ALONE = {**TRAINS_ALONE, "gradient_checkpointing": True}


def handed(mesh: Mesh, folder: str, **build: Any) -> Any:
    if mesh.rank == 0:
        written(Path(folder) / "base", **build)
    mesh.world.barrier("base")
    return loaded(Path(folder) / "base")


def require_same_adapters(mesh: Mesh, root: Path, far: float) -> None:
    if mesh.rank == 0:
        mine, plain = (load_file(root / each / "adapter_model.safetensors") for each in ("mine", "plain"))
        like({name: mine[name].float() for name in plain}, dict(plain), rel=0, abs_=far)
        again = peft.PeftModel.from_pretrained(loaded(root / "base"), root / "mine")
        assert all(each.isfinite().all() for each in again.parameters() if each.is_floating_point())


def as_original(mesh: Mesh, folder: str, stage: int) -> None:
    """transformers' trainer, which evaluates before it trains, and goes on from a checkpoint."""
    root, config, found = Path(folder), {"zero": {"stage": stage}}, list[Any]()
    for name, given in (("plain", None), ("mine", config)):
        with trainer_of(tf.Trainer, adapted(handed(mesh, folder)), root / name, given, **ALONE) as trainer:
            # Without the engine, an evaluation on a CPU packs weights and rounds their scales.
            assert given is None or trainer.evaluate()["eval_loss"] > 0
            trainer.train()
            found.append(history(trainer))
            trainer.save_model(root / name)
    assert len(engine_of(trainer.model).checkpoint_state.encoded()) == 14
    like(found[1], found[0], rel=0, abs_=1e-5)
    require_same_adapters(mesh, root, 1e-5)
    saves = {**ALONE, "save_strategy": "steps"}
    losses = []
    for resumed in (None, str(root / "saved/checkpoint-3")):
        with trainer_of(tf.Trainer, adapted(handed(mesh, folder)), root / "saved", config, **saves) as trainer:
            trainer.train(resume_from_checkpoint=resumed)
            losses.append(losses_of(trainer))
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


def over_trl(mesh: Mesh, folder: str, kind: str, stage: int) -> None:
    """TRL's trainer of this kind puts LoRA on the model itself, with float32 in place of the bfloat16 that it casts it to."""
    import trl

    words = [f"the number {number} is before {number + 1}, " for number in range(16)]
    rows = {"text": words}
    if kind == "DPO":
        rows = {"prompt": words, "chosen": [f"yes {each}" for each in words], "rejected": [each[:9] for each in words]}
    losses = []
    for name in ("plain", "mine"):
        with fresh_state():
            trainer_class, own = getattr(trl, f"{kind}Trainer"), dict[str, Any]()
            if name == "mine":
                trainer_class, own = on_zeromesh(trainer_class), {"zeromesh": {"zero": {"stage": stage}}}
            arguments = getattr(trl, f"{kind}Config")(
                str(Path(folder) / name), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
                save_strategy="no", report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=True, disable_tqdm=True,
            )  # fmt: skip
            tokenizer = _tokenizer("bytes")
            sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
            config = tf.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, **sizes)
            model = handed(mesh, folder, build=partial(tf.LlamaForCausalLM, config))
            lora = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear")
            torch.manual_seed(3)
            trainer = trainer_class(
                model, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer, peft_config=lora, **own
            )
            for each in trainer.model.parameters():
                each.data = each.data.float() if each.requires_grad else each.data
            trainer.train()
            losses.append(losses_of(trainer))
            trainer.save_model(Path(folder) / name)
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    if mesh.rank == 0:
        mine, plain = (load_file(Path(folder) / each / "adapter_model.safetensors") for each in ("mine", "plain"))
        like({key: mine[key].float() for key in plain}, dict(plain), rel=0, abs_=1e-5)
        peft.PeftModel.from_pretrained(loaded(Path(folder) / "base"), Path(folder) / "mine")


def in_layout(mesh: Mesh, folder: str, stage: int, axes: Mapping[str, int] | None = None) -> None:
    """`Trainer` on a model of bitsandbytes, beside a plain loop over the values that its codes stand for."""
    mine = adapted(handed(mesh, folder), use_gradient_checkpointing=False)
    mine.get_base_model().name_or_path = mine.get_base_model().config.name_or_path = ""  # As if it was not to be tuned.
    base = tf.AutoModelForCausalLM.from_pretrained(Path(folder) / "base")
    plain = rounded(adapted(base, use_gradient_checkpointing=False), "nf4")
    sections = {"zero": {"stage": stage}, "parallel": axes or {}}
    found = differences(folder, "handed", (mine, plain), sentences(), **sections)
    assert all(value <= 1e-9 for value in found.values()), found


def other_values_elsewhere(mesh: Mesh, folder: str) -> None:
    """Every rank begins with the codes, the scales and their means of rank 0."""
    make = partial(bnb.nn.Linear4bit, 64, 256, quant_type="nf4")
    torch.manual_seed(0)
    wanted, layer = make().to("cpu"), make().to("cpu") if mesh.rank else None
    layer = wanted if layer is None else layer
    values = bnb.functional.dequantize_4bit(wanted.weight.data, wanted.weight.quant_state)
    model, _ = zeromesh.shard(nn.Sequential(layer), stage=3)
    assert torch.equal(dict(zeromesh.state_dict(model))["0.weight"], values)
