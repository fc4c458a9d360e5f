"""Models whose frozen weights are kept encoded, against plain ones with the values that the codes stand for."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as tf

from tests.distributed.trainer.lora_cases import adapted, base_of, in_peft, logits, require_like
from tests.support import quantized_models
from tests.support.architecture_cases import EPSILON, differences
from tests.support.plain import apart, compare, error_of, plain_fit
from tests.support.trainer_cases import digest, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.errors import ZeromeshError
from zeromesh.flat.codec import CODECS, Codec
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose
from zeromesh.settings.keys import CodecName
from zeromesh.zero.memory_model import MemoryModel

OPTIONS = {"use_dora": True, "use_rslora": True, "modules_to_save": ["embed_tokens"]}


def rounded(model: Any, name: CodecName, *, nested: bool = True) -> Any:
    """The model with the values of a codec in the frozen matrices of its linear layers, but the head's."""
    codec = Codec(name=name, block=CODECS[name].block, nested=nested and name != "fp8")
    for key, parameter in model.named_parameters():
        linear = hasattr(model.get_submodule(key.rpartition(".")[0]), "in_features")
        if parameter.requires_grad or not linear or "lm_head" in key or not key.endswith("weight"):
            continue
        parameter.data = codec.rounded(parameter.data)
    return model


def trained(
    mesh: Mesh,
    folder: str,
    stage: int,
    weights: CodecName = "nf4",
    axes: Mapping[str, int] | None = None,
    offload: Mapping[str, Any] | None = None,
    **model: Any,
) -> None:
    """Losses, gradients' norms, adapters and evaluation, as of a plain loop over the decoded values."""
    sections = {
        "zero": {"stage": stage, "gathered_budget": 0},
        "parallel": axes or {},
        "model": {"weights": weights, **model},
        "offload": offload or {},
    }
    found = differences(folder, "encoded", (adapted(), rounded(adapted(), weights)), sentences(), **sections)
    assert all(value <= 1e-9 for value in found.values()), found


class Peak(Callback):
    """The peak of the ledger after each step, and what was predicted but for the gradients of adapters, and with them."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        engine = trainer.engine
        assert engine is not None
        layouts = [[bucket.layout for bucket in unit.buckets] for unit in engine.units]
        found = MemoryModel(layouts, engine.options, engine.mesh.shard.size, engine.groups[0].transport.name)
        assert found.total - found.terms.get(Purpose.GRADIENTS, 0) <= engine.ledger.peak() <= found.total


def counted(mesh: Mesh, folder: str, stage: int, offload: Mapping[str, Any] | None = None, prefetch: int = 1) -> None:
    """What is decoded and on its way is in the ledger as it was predicted; the embedding and the head are larger than a block."""
    sections = {"zero": {"stage": stage, "gathered_budget": 0, "prefetch": prefetch}, "offload": offload or {}}
    config = settings(folder, model={"weights": "nf4"}, run={"max_steps": 3}, **sections)
    with Trainer(adapted({"vocab_size": 4096}), config, sentences(), callbacks=[Peak()]) as trainer:
        assert trainer.fit().losses


def moved(
    mesh: Mesh, folder: str, steps: int, stage: int, axes: Mapping[str, int] | None = None, frozen: str = "auto"
) -> dict[str, Any]:
    """A run over a directory of weights, on from the last checkpoint of another layout."""
    base = base_of(mesh, folder, torch.bfloat16)
    config = settings(
        folder,
        model={"source": str(base), "weights": "nf4", "lora": {"rank": 2, "options": OPTIONS}},
        run={"name": "moved", "max_steps": steps},
        schedule={"name": "constant_with_warmup"},
        checkpoint={"every_steps": 2, "resume": "auto", "frozen": frozen},
        zero={"stage": stage},
        parallel=axes or {},
    )
    with Trainer(None, config, sentences()) as trainer:
        losses = trainer.fit().losses
        return {"losses": losses, "digest": digest(dict(trainer.state_dict()))}


def beside_bitsandbytes(
    mesh: Mesh,
    folder: str,
    stage: int,
    adapter: Mapping[str, Any] | None = None,
    start: int = 0,
    batch: Mapping[str, int] | None = None,
    **sections: Any,
) -> None:
    """Losses of twenty steps in float32, or of those after `start` of a run in another layout, and what is trained, beside a plain
    loop with PEFT on bitsandbytes' own layers. DoRA begins with norms of what is quantized, so that it is given these layers."""
    if mesh.rank == 0:
        quantized_models.written(Path(folder) / "base")
    mesh.world.barrier("base")
    # Adapters that do something from the first step on, and little enough that rounding does not grow in twenty steps.
    lora = peft.LoraConfig(
        **{"r": 3, "lora_alpha": 1, "target_modules": "all-linear", "init_lora_weights": False, **(adapter or {})}
    )
    build = partial(quantized_models.adapted, settings=lora, use_gradient_checkpointing=False)
    config = settings(
        folder,
        precision={"compute": "float32", "master": "float32", "reduce": "float32"},
        run={"max_steps": 20, "name": f"on-{mesh.world_size}-{start}"},
        optimizer={"lr": 1e-3, "eps": EPSILON, "betas": [0.9, 0.95], "weight_decay": 0.1},
        batch={"global_size": 8, "micro_size": 2, **(batch or {})},
        checkpoint={"every_steps": 10, "resume": f"{folder}/on-4-0/checkpoints/step-0000{start:04}" if start else "never"},
        zero={"stage": stage, "gathered_budget": 0},
        **{**sections, "model": {"weights": None if lora.use_dora else "nf4", **sections.get("model", {})}},
    )
    plain = plain_fit(build(quantized_models.loaded(Path(folder) / "base")), sentences(), config, dtype=torch.float32)
    load = quantized_models.loaded if lora.use_dora else tf.AutoModelForCausalLM.from_pretrained
    mine = build(load(Path(folder) / "base"))
    trained = {name for name, parameter in mine.named_parameters() if parameter.requires_grad}
    with Trainer(mine, config, sentences()) as trainer:
        losses = trainer.fit().losses
        state = {name: value for name, value in trainer.state_dict() if name in trained}
    assert apart(losses, plain.losses[start:]) <= 1e-6, apart(losses, plain.losses[start:])
    found = {name: float((state[name] - plain.states[-1][name]).abs().max()) for name in trained}
    assert max(found.values()) <= 1e-6, found


def another_base(mesh: Mesh, folder: str) -> str:
    """The error of a checkpoint that is continued over other weights."""
    if mesh.rank == 0:
        torch.manual_seed(99)
        model = tf.AutoModelForCausalLM.from_pretrained(Path(folder) / "base")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model.save_pretrained(Path(folder) / "base")
    mesh.world.barrier("other base")
    return error_of(lambda: moved(mesh, folder, 6, 3, frozen="whole"), ZeromeshError)


def alike(
    mesh: Mesh,
    folder: str,
    stage: int,
    adapter: Mapping[str, Any],
    axes: Mapping[str, int] | None = None,
    weights: CodecName | None = "nf4",
) -> None:
    """Adapters by configuration over a directory, and PEFT's own of the same settings over the values of the codec."""
    base, start, end = base_of(mesh, folder), Path(folder) / "start", Path(folder) / "end"
    sections = {"zero": {"stage": stage, "gathered_budget": 0}, "parallel": axes or {}}
    config = settings(folder, model={"source": str(base), "adapters": {"default": adapter}, "weights": weights}, **sections)
    with Trainer(None, {**config, "run": {**config["run"], "name": "start"}}, sentences()) as trainer:
        trainer.save(start)
        drawn = {name: each.clone() for name, each in trainer.state_dict()}

    changing = adapter.get("init_lora_weights") in ("pissa", "olora")

    def plain() -> Any:
        model = tf.AutoModelForCausalLM.from_pretrained(base)
        return model if weights is None or changing else rounded(model.requires_grad_(False), weights)

    own = peft.get_peft_model(plain(), peft.LoraConfig(**adapter))
    loaded = peft.PeftModel.from_pretrained(plain(), start, is_trainable=True)
    if weights is not None and changing:  # What is left of the base is encoded.
        own, loaded = rounded(own, weights), rounded(loaded, weights)
    for name, each in loaded.named_parameters():
        assert (drawn[name] - each).norm() <= 1e-6 * each.norm(), name
        assert not (changing or "magnitude" in name) or torch.allclose(own.get_parameter(name), each, rtol=1e-6), name
    found, _ = compare(None, config, sentences(), plain_fit(loaded, sentences(), config), after=lambda t: t.save(end))
    assert all(value <= (1e-6 if changing else 1e-9) for value in found.values()), found
    if weights is None or not changing:
        require_like(in_peft(plain(), end, logits(loaded.double())), near=1e-6)
