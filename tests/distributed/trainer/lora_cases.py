"""Models with adapters of PEFT that workers train: given to the trainer, or made by `model.lora`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from tests.support.architecture_cases import differences
from tests.support.architectures import SIZES
from tests.support.input_cases import command
from tests.support.plain import after_steps, error_of, fitted
from tests.support.trainer_cases import LLAMA, digest, llama, seeded, sentences, settings
from zeromesh import Callback, Generator, Trainer
from zeromesh.errors import ConfigError, ZeromeshError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.sections.model import ModelSection
from zeromesh.trainer.generation.adapter_rows import BASE
from zeromesh.trainer.models.adapters import add_adapters
from zeromesh.weight_init.weight_sources import wrap_passed_model

TARGETS = ["q_proj", "down_proj"]
RANK = 3
ADAPTER = ["adapter_config.json", "adapter_model.safetensors"]
IDS = sentences()[1]["input_ids"][None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found.clone()


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def in_peft(base: Any, adapter: Path, wanted: torch.Tensor) -> dict[str, float]:
    """How far from `wanted` the logits of a base model are, and those of plain PEFT's model of it and of a saved adapter."""
    change = _apart(logits(base), wanted)
    loaded = peft.PeftModel.from_pretrained(base, adapter).to(wanted.dtype)
    return {"change": change, "difference": _apart(logits(loaded), wanted)}


def require_like(found: dict[str, float], far: float = 1e-3, near: float = 1e-9) -> None:
    """Assert that an adapter changes a model, and into what was wanted."""
    assert found["difference"] <= near, found
    assert found["change"] > far, found


def base_of(mesh: Mesh, folder: str, dtype: torch.dtype = torch.float32, **how: Any) -> Path:
    """The directory of a model that all ranks see."""
    path = Path(folder) / "base"
    if mesh.rank == 0 and not path.exists():
        seeded(llama).to(dtype).save_pretrained(path, **how)
    mesh.world.barrier("base")
    return path


def adapted(base: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """A tiny Llama with adapters that already do something."""
    model = seeded(lambda: llama(**(base or {})))
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": RANK, "lora_alpha": 5, "target_modules": TARGETS, **changes})
    torch.manual_seed(12)
    made = peft.get_peft_model(model, config)
    for name, parameter in made.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return made


def _with_experts() -> Any:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    config = tf.Qwen3MoeConfig(**{**LLAMA, **sizes})
    config._experts_implementation = "eager"  # Others are not there in float64.
    model = seeded(lambda: tf.Qwen3MoeForCausalLM(config))
    matrices = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
    torch.manual_seed(12)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=matrices))


def of_experts(mesh: Mesh, folder: str, stage: int) -> None:
    """Adapters of experts and routers, which PEFT adds to their weights by parametrizations, against a plain loop."""
    found = differences(folder, "experts", (_with_experts(), _with_experts()), sentences(), zero={"stage": stage})
    assert all(value <= 1e-7 for value in found.values()), found


def variant(
    mesh: Mesh, folder: str, stage: int, base: Mapping[str, Any], changes: Mapping[str, Any], axes: Mapping[str, int] | None = None
) -> None:
    """One of PEFT's kinds of adapters: against a plain loop, and what plain PEFT makes of what is saved."""
    path, mine, other = Path(folder) / "adapter", adapted(base, **changes), adapted(base, **changes)
    sections = {"zero": {"stage": stage, "gathered_budget": 0}, "parallel": axes or {}}
    training = differences(folder, "variant", (mine, other), sentences(), after=lambda t: t.save(path), **sections)
    plain = seeded(lambda: llama(**base)).double()
    assert all(value <= 1e-9 for value in training.values()), training
    require_like(in_peft(plain, path, logits(mine.double())))


METHODS: dict[str, dict[str, Any]] = {
    **{key: {"r": 4} for key in ("LORA", "HRA", "MISS", "DELORA", "GRALORA", "HIRA", "GLORA", "PEANUT")},
    **{key: {"r": 4} for key in ("LOHA", "LOKR", "VERA", "RANDLORA", "SHIRA", "DEFT", "TINYLORA")},
    **{key: {} for key in ("BEFT", "FROD", "SUPERTUNING", "UNILORA")},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "OFT": {"oft_block_size": 4, "r": 0},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "ROAD": {"group_size": 4},
    "VBLORA": {"vector_length": 16, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 50},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "TRAINABLE_TOKENS": {"token_indices": IDS[0, :2].tolist(), "target_modules": ["embed_tokens"]},
}
"""Settings of PEFT's methods that suit a tiny model."""


def method(mesh: Mesh, folder: str, name: str, stage: int, axes: Mapping[str, int] | None = None) -> None:
    """One of PEFT's methods by configuration against a plain loop, and what plain PEFT makes of what is saved."""
    given = {"peft_type": name, "target_modules": TARGETS, **METHODS[name]}
    section, path = (ModelSection(config={"model_type": "llama", **LLAMA}, adapters={"default": given}), Path(folder, "a"))
    pair = []
    for _ in range(2):
        made = add_adapters(wrap_passed_model(seeded(llama), 3), section, 3, torch.float64).model
        torch.manual_seed(12)
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn(parameter.shape), alpha=0.05)
        pair.append(made)
    sections = {"zero": {"stage": stage, "gathered_budget": 0}, "parallel": axes or {}}
    found = differences(folder, "method", (pair[0], pair[1]), sentences(), after=lambda t: t.save(path), **sections)
    assert all(value <= 1e-9 for value in found.values()), found
    require_like(in_peft(seeded(llama).double(), path, logits(pair[0].double())), far=1e-9)


class Look(Callback):
    """What the engine has of frozen and of trained parameters, and an adapter saved amid training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, Any] = {}

    def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
        if step != 2 or trainer.engine is None:
            return
        trainer.save(self.folder / "during")
        with torch.no_grad():
            self.found["logits"] = trainer.model(input_ids=IDS).logits.clone()
        buckets = [bucket for unit in trainer.engine.units for bucket in unit.buckets]
        self.found["frozen"] = sum(not bucket.trainable for bucket in buckets)
        self.found["optimized"] = sum(b.layout.padded for b in buckets if trainer.engine.optimizer_step.optimizer_of(b) is not None)
        self.found["shares"] = {bucket.layout.padded // bucket.interval.length for bucket in buckets}
        self.found["trained"] = sum(slot.spec.numel for b in buckets if b.trainable for slot in b.layout.slots)


def saved(mesh: Mesh, folder: str) -> None:
    """At stage 3: what is saved amid training and after it, loaded by PEFT onto the base model that there was."""
    root, model = Path(folder), adapted()
    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "lora_" not in name}
    look = Look(root)
    with Trainer(model, settings(folder), sentences(), callbacks=[look]) as trainer:
        trainer.fit()
        trainer.save(root / "after")
        after = logits(trainer.model)
    parameters, trained = dict(model.named_parameters()), look.found["trained"]
    assert all(torch.equal(parameters[name].float(), value) for name, value in base.items())
    assert sum(parameters[name].numel() for name in parameters if "lora_" in name) == trained
    assert trained == 2 * (RANK * (32 + 32) + RANK * (48 + 32))
    assert trained <= look.found["optimized"] <= 2 * trained  # padding of tiny adapters
    assert look.found["frozen"] >= 3
    assert look.found["shares"] == {2}
    assert model.generate(input_ids=IDS[:, :3], max_new_tokens=2, do_sample=False).shape == (1, 5)
    for name, wanted in (("during", look.found["logits"]), ("after", after)):
        assert sorted(path.name for path in (root / name).iterdir()) == ["README.md", *ADAPTER]
        tensors = list(load_file(root / name / "adapter_model.safetensors"))
        assert len(tensors) == 4 * len(TARGETS)  # a pair in each of two layers
        assert all("lora_" in tensor for tensor in tensors)
        require_like(in_peft(seeded(llama).double(), root / name, wanted))


def added(mesh: Mesh, folder: str) -> None:
    """Adapters that were added to a Hugging Face model itself, trained in bfloat16, saved, and loaded by PEFT."""
    base, path, model = base_of(mesh, folder), Path(folder) / "adapter", seeded(llama)
    model.add_adapter(peft.LoraConfig(r=3, target_modules=TARGETS, init_lora_weights=False))
    precision = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
    with Trainer(model, settings(folder, precision=precision), sentences()) as trainer:
        assert len(trainer.fit().losses) == 4
        trainer.save(path)
    # Frozen weights are what the run computes with.
    plain = tf.AutoModelForCausalLM.from_pretrained(base).bfloat16().float()
    require_like(in_peft(plain, path, logits(model.float())), far=1e-2, near=1e-5)
    assert {*ADAPTER} <= {each.name for each in path.iterdir()}
    assert not (path / "model.safetensors").exists()


def configured(mesh: Mesh, folder: str, stage: int, **lora: Any) -> dict[str, Any]:
    """A configuration with `model.lora` over a directory of weights."""
    base, path = base_of(mesh, folder), Path(folder) / "adapter"
    config = settings(folder, model={"source": str(base), "lora": {"rank": 2, **lora}}, zero={"stage": stage})
    wanted = logits(tf.AutoModelForCausalLM.from_pretrained(base).double())
    with Trainer(None, config, sentences()) as trainer:
        with torch.no_grad():
            unchanged = _apart(trainer.model(input_ids=IDS).logits, wanted)
        state = {name: tensor.clone() for name, tensor in trainer.state_dict()}
        losses = trainer.fit().losses
        trainer.save(path)
        written = json.loads((path / "adapter_config.json").read_text())
    drawn = [tensor for name, tensor in state.items() if "lora_A" in name]
    return {
        "unchanged": unchanged,
        "weights": digest(state),
        "adapters": len(drawn),
        "spread": min(float(tensor.std()) for tensor in drawn),
        "losses": losses,
        "config": {key: written[key] for key in ("r", "lora_alpha", "task_type", "base_model_name_or_path")},
    }


def exported(mesh: Mesh, folder: str) -> None:
    """What PEFT and transformers make of a checkpoint with adapters, and of its exports, against the trained model."""
    root, base = Path(folder), base_of(mesh, folder)
    model = {"source": str(base), "lora": {"rank": 2, "targets": TARGETS}}
    config = settings(folder, model=model, run={"name": "a", "max_steps": 3}, checkpoint={"every_steps": 3}, optimizer={"lr": 0.1})
    with Trainer(None, config, sentences()) as trainer:
        trainer.fit()
        wanted = logits(trainer.model)
    if mesh.rank:
        return
    checkpoint = root / "a/checkpoints/step-00000003"
    assert {*ADAPTER} <= {path.name for path in checkpoint.iterdir()}
    for name, words in {"adapter": ["--dtype", "keep"], "merged": ["--merge", "--dtype", "keep"], "small": ["--merge"]}.items():
        said = command(mesh, ["checkpoint", "export", str(root / "a"), str(root / name), *words])
        assert said["code"] == 0, said
    files = {name: sorted(path.name for path in (root / name).iterdir()) for name in ("adapter", "merged")}
    assert "adapter_model.safetensors" in files["adapter"]
    assert "base_model" not in files["adapter"]
    assert files["merged"] == ["config.json", "generation_config.json", "model.safetensors"]
    assert command(mesh, ["checkpoint", "verify", str(root / "a")])["code"] == 0
    for directory in (checkpoint, root / "adapter"):
        require_like(in_peft(tf.AutoModelForCausalLM.from_pretrained(base).double(), directory, wanted))
        # transformers loads the base model, and with it the adapter, in float32
        assert _apart(logits(tf.AutoModelForCausalLM.from_pretrained(directory).double()), wanted) <= 1e-6
    for name, dtype, near in (("merged", torch.float64, 1e-9), ("small", torch.float32, 1e-5)):
        merged, report = tf.AutoModelForCausalLM.from_pretrained(root / name, output_loading_info=True)
        assert [key for key, problems in report.items() if problems] == []
        assert merged.dtype == dtype
        assert _apart(logits(merged.double()), wanted) <= near


def prompted(mesh: Mesh, folder: str, stage: int) -> None:
    """What is saved of adapters that learn prompts is what plain PEFT saves of the model that is whole again."""
    sizes = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    kinds = {
        "prompt": peft.PromptTuningConfig(**sizes),
        "prefix": peft.PrefixTuningConfig(**sizes),
        "projected prefix": peft.PrefixTuningConfig(**sizes, prefix_projection=True, encoder_hidden_size=16),
        "p-tuning": peft.PromptEncoderConfig(**sizes, encoder_hidden_size=16),
    }

    def loss(model: Any, inputs: Any, **_: Any) -> tuple[torch.Tensor, int]:
        return model(**inputs).loss, 1

    for number, (kind, config) in enumerate(kinds.items()):
        model = peft.get_peft_model(seeded(llama), config)
        start = {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}
        made = settings(folder, zero={"stage": stage}, run={"name": str(number), "max_steps": 2})
        made["checkpoint"] = {"every_steps": 2}
        with Trainer(model, made, sentences(), compute_loss=loss) as trainer:
            trainer.fit()
            trainer.save(Path(folder) / f"{number}-saved")
        saved = load_file(Path(folder) / f"{number}-saved/adapter_model.safetensors")
        own = peft.get_peft_model_state_dict(model)
        assert not all(torch.equal(dict(model.named_parameters())[name], each) for name, each in start.items()), kind
        assert saved.keys() == own.keys(), kind
        assert all(torch.equal(own[name], saved[name]) for name in own), kind


def referring(mesh: Mesh, folder: str, steps: int = 2, **checkpoint: Any) -> dict[str, Any]:
    """A run with adapters over a directory of bfloat16 weights, computed in float32: its first two steps, or on from them."""
    root, stage = Path(folder), 3 if mesh.world_size > 1 else 1
    base = base_of(mesh, folder, torch.bfloat16, max_shard_size="40KB")
    run = {"name": checkpoint.get("frozen", "auto"), "max_steps": steps}
    config = settings(
        folder,
        model={"source": str(base), "lora": {"rank": 2}},
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
                assert trainer.state.epoch == pytest.approx(2 * 8 / 23)
            else:
                said = [str(loss) for loss in trainer.fit().losses]
            found = digest(dict(trainer.state_dict()))
        if steps > 2:
            with Trainer(None, config, sentences()) as trainer:
                said = [str(loss) for loss in trainer.fit().losses]
    except ZeromeshError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"digest": found, "losses": said}


def edited(mesh: Mesh, folder: str) -> None:
    """A frozen weight that the user has changed after the model was loaded, and one that changes while it is trained."""
    model = tf.AutoModelForCausalLM.from_pretrained(base_of(mesh, folder))
    model.get_parameter("model.norm.weight").data.mul_(2)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=TARGETS))

    def change(trainer: Trainer, step: int) -> None:
        if step == 2:
            engine = trainer.run.model.require_engine()
            with engine.loading(averaged_updates=0):
                engine.checkpoint_state.fill({"base_model.model.lm_head.weight": torch.zeros(64, 32)})

    config = settings(folder, run={"max_steps": 2}, checkpoint={"every_steps": 1}, zero={"stage": 3})
    fitted(model, config, sentences(), callbacks=[after_steps(change)])
    manifests = [json.loads(path.read_text()) for path in sorted(Path(folder, "run/checkpoints").glob("*/manifest.json"))]
    written = [{name for name, row in m["tensors"]["model"].items() if "source/" not in row[0]} for m in manifests]
    norm, head = "base_model.model.model.norm.weight", "base_model.model.lm_head.weight"
    assert [{name for name in names if "lora_" not in name} for names in written] == [{norm}, {head, norm}]


def classified(mesh: Mesh, folder: str, kind: str) -> None:
    """A classifier by configuration, whose new head is trained and saved with the adapters."""
    text, path = kind == "sequence", Path(folder) / "adapter"
    config: dict[str, Any] = {**SIZES, "num_labels": 3, "attention_probs_dropout_prob": 0.0}
    config |= {"model_type": "bert", "vocab_size": 64} if text else {"model_type": "vit", "image_size": 8, "patch_size": 4}
    model = {
        "config": {**config, "hidden_dropout_prob": 0.0},
        "head": f"{kind}_classification",
        "lora": {"rank": 2, "targets": "all-linear" if text else ["q_proj", "query"]},
    }
    rows = sentences()
    pixels = torch.randn(len(rows), 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = [{"input_ids": row["input_ids"]} for row in rows] if text else [{"pixel_values": each} for each in pixels]
    data = [{**each, "labels": torch.tensor(n % 3)} for n, each in enumerate(inputs)]
    with Trainer(None, settings(folder, model=model), data) as trainer:
        start = {name: tensor.double().clone() for name, tensor in trainer.state_dict()}
        trainer.fit()
        trainer.save(path)
        changed = [name for name, each in trainer.state_dict() if not torch.equal(each.double(), start[name])]
    heads, prefix = [name for name in changed if "lora_" not in name], "base_model.model.classifier"
    assert sorted(heads) == [f"{prefix}.modules_to_save.default.{leaf}" for leaf in ("bias", "weight")]
    assert len(changed) > len(heads)
    assert {f"{prefix}.bias", f"{prefix}.weight"} < {*load_file(path / "adapter_model.safetensors")}


def resumed(mesh: Mesh, folder: str) -> None:
    """Two steps and a checkpoint, then on to four; against four at once."""
    digests = []
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        for count in steps:
            run = {"name": name, "max_steps": count}
            schedule = {"name": "constant", "warmup_steps": 0}
            config = settings(folder, run=run, checkpoint={"every_steps": 2}, schedule=schedule)
            model = adapted()
            fitted(model, config, sentences())
        digests.append(digest(dict(model.named_parameters())))
    checkpoint = Path(folder) / "parts/checkpoints/step-00000004"
    assert digests[0] == digests[1]
    said = error_of(lambda: Trainer(adapted(lora_alpha=7), config, sentences()).fit(), ConfigError)
    assert "adapter.default.lora_alpha: 5 then, 7 now" in said
    assert error_of(lambda: tf.AutoModelForCausalLM.from_pretrained(checkpoint), (OSError, ValueError))
    assert not (checkpoint / "config.json").exists()
    assert (checkpoint / "adapter_config.json").exists()


def several(mesh: Mesh, folder: str, steps: int, stage: int, axes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Two adapters over a directory, of which the second is trained and the first, a saved one, stays as it is."""
    base, style = base_of(mesh, folder), Path(folder) / "style"
    if mesh.rank == 0 and not style.exists():
        adapted(target_modules=["v_proj"]).save_pretrained(style)
    mesh.world.barrier("style")
    adapters = {"style": str(style), "task": {"r": 2, "target_modules": TARGETS, "use_dora": True}}
    config = settings(
        folder,
        model={"source": str(base), "adapters": adapters, "trained_adapter": "task", "weights": "nf4"},
        run={"name": "several", "max_steps": steps},
        schedule={"name": "constant", "warmup_steps": 0},
        checkpoint={"every_steps": 2},
        zero={"stage": stage},
        parallel=axes or {},
    )
    with Trainer(None, config, sentences()) as trainer:
        losses = trainer.fit().losses
        state = {name: tensor.clone() for name, tensor in trainer.state_dict()}
        found = {"losses": losses, "logits": logits(trainer.model)[0, -1].tolist()}
    saved = load_file(style / "adapter_model.safetensors")
    kept = {name.replace(".weight", ".style.weight"): each for name, each in saved.items()}
    assert kept
    assert all(torch.equal(state[name].float(), each) for name, each in kept.items())
    return found


def generated(mesh: Mesh, folder: str, axes: Mapping[str, int], **sections: Mapping[str, Any]) -> None:
    """What a base with a saved adapter generates in a layout, as PEFT's model in one process does."""
    base, path, prompt = base_of(mesh, folder), Path(folder) / "saved", IDS[0, :4].tolist()
    wanted = adapted(use_dora=True)
    if mesh.rank == 0:
        wanted.save_pretrained(path)
    mesh.world.barrier("saved")
    keys = [f"model.source={base}", "precision.compute=float64"]
    with Generator(path, overrides=keys, parallel=axes, **sections) as made:
        (found,) = made.generate([prompt], max_new_tokens=6)
    tokens = list(prompt)
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(wanted.double().eval()(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    assert found.tokens == tokens[4:]


def mixed(mesh: Mesh, folder: str, axes: Mapping[str, int]) -> None:
    """Prompts with several adapters and with none in one running batch, each as by PEFT's model with its adapter in one process."""
    base, paths = base_of(mesh, folder), {name: Path(folder) / name for name in ("style", "task", "magnitudes")}
    models: dict[str, Any] = {BASE: seeded(lambda: llama())}
    for seed, (name, changes) in enumerate(_MIXED.items()):
        models[name] = adapted(**changes)
        with torch.no_grad():
            torch.manual_seed(seed)
            for parameter in models[name].parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn_like(parameter) * 0.3)
        if mesh.rank == 0:
            models[name].save_pretrained(paths[name])
    mesh.world.barrier("saved")
    names = ["task", BASE, "style", "task", "magnitudes", BASE, "style", "magnitudes", "task"]
    prompts = [IDS[index % len(IDS), : 2 + index % 5].tolist() for index in range(len(names))]
    keys = [*(f"model.adapters.{name}={path}" for name, path in paths.items()), "precision.compute=float64"]
    with Generator(base, overrides=keys, parallel=axes, zero={"stage": 3}) as made:
        given = [{"input_ids": prompt, "adapter": name} for prompt, name in zip(prompts, names, strict=True)]
        # Fewer rows than prompts: rows of one adapter take the place of another's.
        found = made.generate(given, batch=4, max_new_tokens=6, eos_token_id=None)
    for name, prompt, each in zip(names, prompts, found, strict=True):
        tokens, model = list(prompt), models[name].double().eval()
        for token, logprob in zip(each.tokens, each.logprobs or [], strict=True):
            with torch.no_grad():
                scores = model(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            assert token == int(scores.argmax()), (name, prompt)
            assert abs(logprob - float(scores[token])) < 1e-9
            tokens.append(token)
        assert len(tokens) == len(prompt) + 6


_MIXED: dict[str, dict[str, Any]] = {
    "style": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    "task": {"target_modules": ["v_proj", "up_proj", "o_proj"], "r": 2},
    "magnitudes": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
}
