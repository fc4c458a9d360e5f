"""Models with adapters of PEFT that workers train: given to the trainer, or made by `model.lora`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as tf
from safetensors.torch import load_file

from tests.support.architecture_cases import differences
from tests.support.input_cases import command
from tests.support.trainer_cases import LLAMA, digest, llama, seeded, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.errors import ConfigError, ZeromeshError
from zeromesh.mesh.process_mesh import Mesh

TARGETS = ["q_proj", "down_proj"]


def adapted(base: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """A tiny Llama with adapters that already do something."""
    model = seeded(lambda: llama(**(base or {})))
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 3, "lora_alpha": 5, "target_modules": TARGETS, **changes})
    torch.manual_seed(12)
    made = peft.get_peft_model(model, config)
    for name, parameter in made.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def as_plain(mesh: Mesh, folder: str, stage: int) -> dict[str, float]:
    """Training a model with adapters against a plain loop over the same."""
    return differences(folder, "lora", (adapted(), adapted()), sentences(), zero={"stage": stage})


def _with_experts() -> Any:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config = tf.Qwen3MoeConfig(**{**LLAMA, **sizes})
    config._experts_implementation = "eager"  # Others are not there in float64.
    model = seeded(lambda: tf.Qwen3MoeForCausalLM(config))
    matrices = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
    torch.manual_seed(12)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=matrices))


def of_experts(mesh: Mesh, folder: str, stage: int) -> dict[str, float]:
    """Adapters of experts and routers, which PEFT adds to their weights by parametrizations, against a plain loop."""
    return differences(folder, "experts", (_with_experts(), _with_experts()), sentences(), zero={"stage": stage})


def variant(mesh: Mesh, folder: str, base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """One of PEFT's kinds of adapters at stage 3: against a plain loop, and what plain PEFT makes of what is saved."""
    root, mine = Path(folder), adapted(base, **changes)
    found: dict[str, Any] = {
        "training": differences(
            folder,
            "variant",
            (mine, adapted(base, **changes)),
            sentences(),
            after=lambda trainer: trainer.save(root / "adapter"),
            zero={"stage": 3, "gathered_budget": 0},
        )
    }
    ids, plain = sentences()[1]["input_ids"][None], seeded(lambda: llama(**base)).double().eval()
    with torch.no_grad():
        before, wanted = plain(input_ids=ids).logits.clone(), mine.double().eval()(input_ids=ids).logits
        loaded = peft.PeftModel.from_pretrained(plain, root / "adapter").double().eval()
        found["difference"] = _apart(loaded(input_ids=ids).logits, wanted)
    found["change"] = _apart(before, wanted)
    found["tensors"] = sorted(load_file(root / "adapter/adapter_model.safetensors"))
    return found


class Look(Callback):
    """What the engine has of frozen and of trained parameters, and an adapter saved amid training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {}

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        if step != 2 or trainer.engine is None:
            return
        trainer.save(self.folder / "during")
        ids = sentences()[1]["input_ids"][None]
        with torch.no_grad():
            self.found["logits"] = trainer.model(input_ids=ids).logits.clone()
        buckets = [bucket for unit in trainer.engine.units for bucket in unit.buckets]
        self.found["frozen"] = sum(not bucket.trainable for bucket in buckets)
        self.found["optimized"] = sum(
            b.layout.padded for b in buckets if trainer.engine.optimizer_step.optimizer_of(b) is not None
        )
        self.found["shares"] = {bucket.layout.padded // bucket.interval.length for bucket in buckets}
        self.found["trained"] = sum(slot.spec.numel for b in buckets if b.trainable for slot in b.layout.slots)


def saved(mesh: Mesh, folder: str) -> dict[str, Any]:
    """At stage 3: what is saved amid training and after it, loaded by PEFT onto the base model that there was."""
    root, model = Path(folder), adapted()
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "lora_" not in name}
    look, data = Look(root), sentences()
    with Trainer(model, settings(folder), data, callbacks=[look]) as trainer:
        trainer.fit()
        trainer.save(root / "after")
        ids = data[1]["input_ids"][None]
        with torch.no_grad():
            after = trainer.model.eval()(input_ids=ids).logits
    found: dict[str, Any] = {key: look.found[key] for key in ("frozen", "optimized", "trained")}
    found["shares"] = sorted(look.found["shares"])
    found["base"] = all(
        torch.equal(dict(model.named_parameters())[name].float(), value) for name, value in base.items()
    )
    found["parameters"] = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    found["generated"] = list(model.generate(input_ids=ids[:, :3], max_new_tokens=2, do_sample=False).shape)
    for name, wanted in (("during", look.found["logits"]), ("after", after)):
        found[f"{name} files"] = sorted(path.name for path in (root / name).iterdir())
        found[f"{name} tensors"] = sorted(load_file(root / name / "adapter_model.safetensors"))
        plain = seeded(llama).double().eval()
        with torch.no_grad():
            before = plain(input_ids=ids).logits.clone()
            loaded = peft.PeftModel.from_pretrained(plain, root / name).double().eval()
            logits = loaded(input_ids=ids).logits
        found[f"{name} difference"] = float((logits - wanted).norm() / wanted.norm())
        found[f"{name} change"] = float((before - wanted).norm() / wanted.norm())
    return found


def added(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Adapters that were added to a Hugging Face model itself, trained in bfloat16, saved, and loaded by PEFT."""
    root, model = Path(folder), seeded(llama)
    if mesh.rank == 0:
        model.save_pretrained(root / "base")
    mesh.world.barrier("base")
    model.add_adapter(peft.LoraConfig(r=3, target_modules=TARGETS, init_lora_weights=False))
    precision = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
    with Trainer(model, settings(folder, precision=precision), sentences()) as trainer:
        losses = trainer.fit().losses
        trainer.save(root / "adapter")
    ids = sentences()[1]["input_ids"][None]
    found: dict[str, Any] = {"files": sorted(path.name for path in (root / "adapter").iterdir()), "losses": losses}
    with torch.no_grad():
        wanted = model.float().eval()(input_ids=ids).logits
        # Frozen weights are what the run computes with.
        plain = tf.AutoModelForCausalLM.from_pretrained(root / "base").bfloat16().float().eval()
        before = plain(input_ids=ids).logits.clone()
        found["peft"] = _apart(
            peft.PeftModel.from_pretrained(plain, root / "adapter").eval()(input_ids=ids).logits, wanted
        )
    found["change"] = _apart(before, wanted)
    return found


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def configured(mesh: Mesh, folder: str, stage: int, **lora: Any) -> dict[str, Any]:
    """A configuration with `model.lora` over a directory of weights."""
    root = Path(folder)
    if mesh.rank == 0 and not (root / "base").exists():
        seeded(llama).save_pretrained(root / "base")
    mesh.world.barrier("base")
    model = {"source": str(root / "base"), "lora": {"rank": 2, **lora}}
    config = settings(folder, model=model, zero={"stage": stage})
    base = tf.AutoModelForCausalLM.from_pretrained(root / "base").double().eval()
    ids = sentences()[1]["input_ids"][None]
    with Trainer(None, config, sentences()) as trainer, torch.no_grad():
        before, wanted = trainer.model(input_ids=ids).logits, base(input_ids=ids).logits
        state = {name: tensor.clone() for name, tensor in trainer.state_dict()}
        losses = trainer.fit().losses
        trainer.save(root / "adapter")
        settings_written = json.loads((root / "adapter/adapter_config.json").read_text())
    drawn = [tensor for name, tensor in state.items() if "lora_A" in name]
    return {
        "unchanged": float((before - wanted).norm() / wanted.norm()),
        "weights": digest(state),
        "adapters": len(drawn),
        "spread": min(float(tensor.std()) for tensor in drawn),
        "losses": losses,
        "config": {key: settings_written[key] for key in ("r", "lora_alpha", "task_type", "base_model_name_or_path")},
        "notes": type(trainer.config.model.lora).__name__,
    }


def exported(mesh: Mesh, folder: str) -> dict[str, Any]:
    """What PEFT and transformers make of a checkpoint with adapters, and of its exports, against the trained model."""
    root, ids = Path(folder), sentences()[1]["input_ids"][None]
    if mesh.rank == 0:
        seeded(llama).save_pretrained(root / "base")
    mesh.world.barrier("base")
    model = {"source": str(root / "base"), "lora": {"rank": 2, "targets": ["q_proj", "down_proj"]}}
    config = settings(
        folder, model=model, run={"name": "a", "max_steps": 3}, checkpoint={"every_steps": 3}, optimizer={"lr": 0.1}
    )
    with Trainer(None, config, sentences()) as trainer, torch.no_grad():
        trainer.fit()
        wanted = trainer.model.eval()(input_ids=ids).logits
    if mesh.rank:
        return {}
    checkpoint = root / "a/checkpoints/step-00000003"
    found: dict[str, Any] = {"files": sorted(path.name for path in checkpoint.iterdir())}
    for name, words in {
        "adapter": ["--dtype", "keep"],
        "merged": ["--merge", "--dtype", "keep"],
        "small": ["--merge"],
    }.items():
        found[f"{name} said"] = command(mesh, ["checkpoint", "export", str(root / "a"), str(root / name), *words])
        found[f"{name} files"] = sorted(path.name for path in (root / name).iterdir())
    found["verify"] = command(mesh, ["checkpoint", "verify", str(root / "a")])["code"]
    plain = tf.AutoModelForCausalLM.from_pretrained(root / "base").double().eval()
    with torch.no_grad():
        found["change"] = _apart(plain(input_ids=ids).logits, wanted)
        for name, directory in (("checkpoint", checkpoint), ("adapter", root / "adapter")):
            base = tf.AutoModelForCausalLM.from_pretrained(root / "base").double()
            loaded = peft.PeftModel.from_pretrained(base, directory).double().eval()
            found[name] = _apart(loaded(input_ids=ids).logits, wanted)
            by_name = tf.AutoModelForCausalLM.from_pretrained(directory).double().eval()
            found[f"{name} by name"] = _apart(by_name(input_ids=ids).logits, wanted)
        for name in ("merged", "small"):
            merged, report = tf.AutoModelForCausalLM.from_pretrained(root / name, output_loading_info=True)
            found[f"{name} report"] = [key for key, problems in report.items() if problems]
            found[f"{name} dtype"] = str(merged.dtype)
            found[name] = _apart(merged.double().eval()(input_ids=ids).logits, wanted)
    return found


def prompted(mesh: Mesh, folder: str, stage: int) -> dict[str, bool]:
    """Adapters that learn prompts: by kind whether what is saved is what plain PEFT saves of the model that is whole again."""
    sizes = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    kinds = {
        "prompt": peft.PromptTuningConfig(**sizes),
        "prefix": peft.PrefixTuningConfig(**sizes),
        "projected prefix": peft.PrefixTuningConfig(**sizes, prefix_projection=True, encoder_hidden_size=16),
        "p-tuning": peft.PromptEncoderConfig(**sizes, encoder_hidden_size=16),
    }

    def loss(model: Any, inputs: Any, **_: Any) -> tuple[torch.Tensor, int]:
        return model(**inputs).loss, 1

    found = {}
    for number, (kind, config) in enumerate(kinds.items()):
        model = peft.get_peft_model(seeded(llama), config)
        start = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
        made = settings(folder, zero={"stage": stage}, run={"name": str(number), "max_steps": 2})
        made["checkpoint"] = {"every_steps": 1}
        with Trainer(model, made, sentences(), compute_loss=loss) as trainer:
            trainer.fit()
            trainer.save(Path(folder) / f"{number}-saved")
        saved = load_file(Path(folder) / f"{number}-saved/adapter_model.safetensors")
        own = peft.get_peft_model_state_dict(model)
        moved = not all(torch.equal(dict(model.named_parameters())[name], each) for name, each in start.items())
        found[kind] = moved and saved.keys() == own.keys() and all(torch.equal(own[n], saved[n]) for n in own)
    return found


def referring(mesh: Mesh, folder: str, steps: int = 2, **checkpoint: Any) -> dict[str, Any]:
    """A run with adapters over a directory of bfloat16 weights, computed in float32: its first two steps, or on from them."""
    root, stage = Path(folder), 3 if mesh.world_size > 1 else 1
    if mesh.rank == 0 and not (root / "base").exists():
        seeded(llama).bfloat16().save_pretrained(root / "base", max_shard_size="40KB")
    mesh.world.barrier("base")
    run = {"name": checkpoint.get("frozen", "auto"), "max_steps": steps}
    config = settings(
        folder,
        model={"source": str(root / "base"), "lora": {"rank": 2}},
        run=run,
        checkpoint={"every_steps": 2, "resume": "auto", **checkpoint},
        zero={"stage": stage},
        precision={"compute": "float32", "master": "float32", "reduce": "float32"},
    )
    said: list[str] = []
    try:
        with Trainer(None, config, sentences()) as trainer:
            if steps > 2:
                trainer.load_weights(root / run["name"] / "checkpoints/step-00000002")
            else:
                said = [str(loss) for loss in trainer.fit().losses]
            found = digest(dict(trainer.state_dict()))
        if steps > 2:
            with Trainer(None, config, sentences()) as trainer:
                said = [str(loss) for loss in trainer.fit().losses]
    except ZeromeshError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"digest": found, "losses": said}


def edited(mesh: Mesh, folder: str) -> dict[str, Any]:
    """A frozen weight that the user has changed after the model was loaded, and one that changes while it is trained."""
    root = Path(folder)
    if mesh.rank == 0 and not (root / "base").exists():
        seeded(llama).save_pretrained(root / "base")
    mesh.world.barrier("base")
    model = tf.AutoModelForCausalLM.from_pretrained(root / "base")
    model.get_parameter("model.norm.weight").data.mul_(2)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=TARGETS))

    class Change(Callback):
        def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
            if step == 2:
                engine = trainer.run.model.require_engine()
                with engine.loading(averaged_updates=0):
                    engine.checkpoint_state.fill({"base_model.model.lm_head.weight": torch.zeros(64, 32)})

    config = settings(folder, run={"max_steps": 2}, checkpoint={"every_steps": 1}, zero={"stage": 3})
    with Trainer(model, config, sentences(), callbacks=[Change()]) as trainer:
        trainer.fit()
    manifests = [json.loads(path.read_text()) for path in sorted((root / "run/checkpoints").glob("*/manifest.json"))]
    written = [{name for name, row in m["tensors"]["model"].items() if "source/" not in row[0]} for m in manifests]
    return {"written": [sorted(name for name in names if "lora_" not in name) for names in written]}


def classified(mesh: Mesh, folder: str, kind: str) -> dict[str, Any]:
    """A classifier by configuration, whose new head is trained and saved with the adapters."""
    root = Path(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"model_type": "bert", **sizes, "vocab_size": 64, "hidden_dropout_prob": 0.0, "num_labels": 3}
    vit = {"model_type": "vit", **sizes, "image_size": 8, "patch_size": 4, "num_labels": 3}
    config: dict[str, Any] = {**(text if kind == "sequence" else vit), "attention_probs_dropout_prob": 0.0}
    lora = {"rank": 2, "targets": "all-linear" if kind == "sequence" else ["q_proj", "query"]}
    head = f"{kind}_classification"
    rows = sentences()
    pixels = torch.randn(len(rows), 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = [
        {
            "labels": torch.tensor(n % 3),
            **({"input_ids": row["input_ids"]} if kind == "sequence" else {"pixel_values": p}),
        }
        for n, (row, p) in enumerate(zip(rows, pixels, strict=True))
    ]
    with Trainer(None, settings(folder, model={"config": config, "head": head, "lora": lora}), data) as trainer:
        start = {name: tensor.clone() for name, tensor in trainer.state_dict()}
        trainer.fit()
        trainer.save(root / "adapter")
        changed = [
            name for name, tensor in trainer.state_dict() if not torch.equal(tensor.double(), start[name].double())
        ]
    return {"changed": changed, "saved": sorted(load_file(root / "adapter/adapter_model.safetensors"))}


def resumed(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Two steps and a checkpoint, then on to four; against four at once."""
    digests, said = [], []
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        for count in steps:
            run = {"name": name, "max_steps": count}
            config = settings(
                folder, run=run, checkpoint={"every_steps": 2}, schedule={"name": "constant", "warmup_steps": 0}
            )
            model = adapted()
            with Trainer(model, config, sentences()) as trainer:
                trainer.fit()
        digests.append(digest(dict(model.named_parameters())))
    try:
        with Trainer(adapted(lora_alpha=7), config, sentences()) as trainer:
            trainer.fit()
    except ConfigError as error:
        said.append(str(error))
    checkpoint = Path(folder) / "parts/checkpoints/step-00000004"
    try:
        tf.AutoModelForCausalLM.from_pretrained(checkpoint)
    except (OSError, ValueError) as error:
        said.append(type(error).__name__)
    return {"digests": digests, "said": said, "files": sorted(path.name for path in checkpoint.iterdir())}


def divided(mesh: Mesh, folder: str) -> str:
    """What is said about adapters under tensor parallelism."""
    try:
        with Trainer(adapted(), settings(folder, parallel={"tensor": 2}), sentences()) as trainer:
            trainer.fit()
    except ConfigError as error:
        return str(error)
    return str(LLAMA)
