"""Models whose experts are spread over ranks, beside one process that has all of them."""

import copy
import pickle
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import torch
import transformers as tf
from safetensors.torch import load_file

import zeromesh
from tests.distributed.trainer.context_cases import EXPERTS, LATENT, gone_on
from tests.distributed.trainer.lora_cases import _with_experts
from tests.support.architecture_cases import differences
from tests.support.plain import after_steps, error_of, fitted
from tests.support.trainer_cases import LLAMA, digest, lines_of, llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.comm.transport import GatherBuffer
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.models.small_copy import InFloat64

SIZES = {**LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "use_cache": False}


def _eager(config: Any) -> Any:
    config._experts_implementation = "eager"  # Others are not there in float64.
    return config


def _mixtral(**changes: Any) -> Any:
    return tf.MixtralForCausalLM(_eager(tf.MixtralConfig(**{**SIZES, **changes}, num_local_experts=4)))


def _qwen() -> Any:
    return tf.Qwen3MoeForCausalLM(_eager(tf.Qwen3MoeConfig(**SIZES, num_experts=8, head_dim=8, decoder_sparse_step=1)))


def _biased() -> Any:
    return tf.GptOssForCausalLM(_eager(tf.GptOssConfig(**SIZES, num_local_experts=4, head_dim=8, sliding_window=5)))


def _latent() -> Any:
    sizes = {**LLAMA, **LATENT, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "first_k_dense_replace": 1}
    return tf.DeepseekV3ForCausalLM(_eager(tf.DeepseekV3Config(**sizes)))


def _skewed() -> Any:
    """All tokens go to the first two experts, so that other ranks have none."""
    model = _mixtral()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.zero_()
    return model


def _deep() -> Any:
    """Ten layers, in the last of which a rank's experts have no token."""
    model = _mixtral(num_hidden_layers=10)
    with torch.no_grad():
        model.model.layers[9].mlp.gate.weight.zero_()
    return model


def _square() -> Any:
    """Two experts, of matrices that one may take for their transposes."""
    sizes = {**SIZES, "intermediate_size": SIZES["hidden_size"]}
    return tf.GptOssForCausalLM(_eager(tf.GptOssConfig(**sizes, num_local_experts=2, head_dim=8, sliding_window=5)))


def _losing() -> Any:
    """With an auxiliary loss of the tokens of a microbatch."""
    return _mixtral(output_router_logits=True, router_aux_loss_coef=0.1)


def _tied() -> Any:
    """Two layers have the same experts."""
    model = _mixtral()
    for leaf in ("gate_up_proj", "down_proj"):
        setattr(model.model.layers[1].mlp.experts, leaf, getattr(model.model.layers[0].mlp.experts, leaf))
    return model


class _Apart(tf.MixtralForCausalLM):
    """With experts to which no token of text goes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.others = copy.deepcopy(self.model.layers[0].mlp.experts)


KINDS = {
    "mixtral": _mixtral,
    "losing": _losing,
    "qwen": _qwen,
    "biased": _biased,
    "latent": _latent,
    "skewed": _skewed,
    "deep": _deep,
    "square": _square,
    "tied": _tied,
}


def adapters(mesh: Mesh, folder: str, stage: int, axes: Mapping[str, Any]) -> None:
    """PEFT's adapters of experts, beside those of attention, with which they are spread."""
    pair = _with_experts(), _with_experts()
    found = differences(folder, "adapters", pair, sentences(), zero={"stage": stage}, parallel=dict(axes))
    assert all(value <= 1e-9 for value in found.values()), found


def adapters_alone(mesh: Mesh, folder: str, kind: str, matrices: Sequence[str], axes: Mapping[str, Any]) -> None:
    """Adapters of experts alone, of which a rank may have one, or get no token."""

    def adapted() -> Any:
        config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=[], target_parameters=list(matrices))
        model = seeded(KINDS[kind])
        torch.manual_seed(13)
        return peft.get_peft_model(model, config)

    found = differences(folder, "alone", (adapted(), adapted()), sentences(), parallel=dict(axes))
    assert all(value <= 1e-9 for value in found.values()), found


def merged(mesh: Mesh, folder: str, axes: Mapping[str, Any]) -> None:
    """Streamed weights have the adapters of experts merged as PEFT does it, several in one module, wherever the experts are."""
    models = [_with_experts() for _ in range(2)]
    for model in models:
        torch.manual_seed(14)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    path = Path(folder) / "plain"
    models[1].double().merge_and_unload().save_pretrained(path)
    mesh.world.barrier("plain files")
    with Trainer(models[0], settings(folder, parallel=dict(axes)), sentences()) as trainer:
        found = {name: each.clone() for name, each in trainer.stream_weights()}
    wanted = load_file(path / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each, rtol=1e-12, atol=1e-12, msg=name)


def loop(mesh: Mesh, folder: str, kind: str) -> None:
    """A loop of one's own over `zeromesh.shard` trains spread experts, whose call without gradients is right too."""
    model, plain = (seeded(KINDS[kind]).double() for _ in range(2))
    made = partial(torch.optim.SGD, lr=0.5)
    model, optimizer = zeromesh.shard(model, made, stage=2, parallel={"expert": mesh.world_size})
    reference = made(plain.parameters())
    samples = sentences(4 * mesh.world_size)
    for step in range(4):
        rows = samples[step * mesh.world_size : (step + 1) * mesh.world_size]
        batches = [{name: each[None] for name, each in row.items()} for row in rows]
        with InFloat64():
            loss = model(**batches[mesh.rank]).loss
            wanted = torch.stack([plain(**batch).loss for batch in batches]).mean()
        loss.backward()
        wanted.backward()
        mean = mesh.world.all_reduce(loss.detach().clone(), "losses") / mesh.world_size
        assert abs(float(mean - wanted)) <= 1e-9, (step, mean, wanted)
        for update in (optimizer, reference):
            update.step()
            update.zero_grad()
    with torch.no_grad():
        ids = samples[mesh.rank]["input_ids"][None]
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-9, atol=1e-9)
    wanted_state = plain.state_dict()
    for name, found in zeromesh.state_dict(model):
        torch.testing.assert_close(found, wanted_state[name], rtol=1e-9, atol=1e-9, msg=name)


def penalties(mesh: Mesh, folder: str, kind: str, axes: Mapping[str, Any], stage: int) -> None:
    """Losses of parameters of which ranks have or see a part are refused, in a loop and in a trainer; other reads are not. So are
    copies of a model of which a rank has a part."""
    (batch,) = [{name: each[None] for name, each in sample.items()} for sample in sentences(1)]
    build = seeded(KINDS.get(kind, llama))
    names = ["experts."] if "expert" in axes else ["q_proj", "q_norm"]

    def penalty(model: Any) -> torch.Tensor:
        part = [each for name, each in model.named_parameters() if any(map(name.__contains__, names))]
        return torch.stack([each.square().sum() for each in part]).sum()

    def first(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        added = penalty(model)
        return model(**batch).loss + added, 1

    def after(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return model(**batch).loss + penalty(model), 1

    for loss in (first, after) if "context" not in axes else ():  # There losses of one's own are refused by name.
        config = settings(folder, parallel=dict(axes), zero={"stage": stage}, run={"name": loss.__name__})
        said = error_of(partial(fitted, seeded(KINDS.get(kind, llama)), config, sentences(), compute_loss=loss), ZeromeshError)
        assert "was used outside of the model's modules, as by a penalty" in said, (loss.__name__, said)
    model, optimizer = zeromesh.shard(build, partial(torch.optim.SGD, lr=0.5), stage=stage, parallel=dict(axes))
    for copied in (copy.deepcopy, pickle.dumps) if stage < 3 and "context" not in axes else ():
        assert "of which each rank has a part (parallel.tensor, parallel.expert)" in error_of(partial(copied, model), ZeromeshError)
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = model(**batch).loss
    with torch.no_grad():
        assert float(penalty(model)) > 0
    said = error_of(lambda: loss + penalty(model), ZeromeshError)
    assert "was used outside of the model's modules, as by a penalty" in said, said
    loss.backward()
    optimizer.step()


def uneven_reads(mesh: Mesh, folder: str, kind: str, axes: Mapping[str, Any]) -> None:
    """Reads of parameters end at once on even ranks, and on odd ones not before their values are needed."""
    poll = GatherBuffer.poll

    def at_once(buffer: GatherBuffer) -> None:
        while buffer._queue and (reading := buffer._queue[0]._reading) is not None and not reading.done():
            time.sleep(0)
        poll(buffer)

    with patch.object(GatherBuffer, "poll", (lambda buffer: None) if mesh.rank % 2 else at_once):
        files = {"transport": "gloo", "timeout_seconds": 5, **axes}
        exact(mesh, folder, kind, files, offload={"parameters": "file"}, batch={"micro_size": 1})


def _padded(sample: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    """The sample with padding up to 12 tokens, which a mask or a document of its own tells."""
    length, places = len(sample["input_ids"]), torch.arange(12)
    found = {
        name: torch.nn.functional.pad(sample[name], (0, 12 - length), value=value)
        for name, value in (("input_ids", 0), ("labels", -100))
    }
    told = {"mask": {"attention_mask": (places < length).long()}, "document": {"position_ids": places % length}}
    return found | told[how]


def balanced(
    mesh: Mesh, folder: str, axes: Mapping[str, Any], length: int = 99, ragged: str = "", **sections: Any
) -> dict[str, Any]:
    """The biases of routers after four steps on samples of at most `length` tokens, and the loads that they follow. Those that are
    `ragged` have different lengths, and padding if that says how it is told."""
    rate = {"expert_bias_rate": 0.01}
    config = settings(folder, parallel=dict(axes), optimizer=rate, run={"log_every": 1}, **sections)
    samples = [{name: each[:length] for name, each in sample.items()} for sample in sentences()]
    for at, sample in enumerate(samples if ragged else ()):
        samples[at] = {name: sample["input_ids"][: 6 + 5 * at % 7].clone() for name in sample}
    samples = [_padded(sample, ragged) for sample in samples] if ragged not in ("", "alone") else samples
    with Trainer(seeded(_latent), config, samples) as trainer:
        losses = trainer.fit().losses
        biases = [each.tolist() for name, each in trainer.model.named_buffers() if name.endswith("correction_bias")]
        assert not any(each._forward_pre_hooks for each in trainer.model.modules())
    loads = [line["expert_load"] for line in lines_of(Path(folder) / "run")] if mesh.rank == 0 else []
    return {"losses": losses, "biases": biases, "loads": loads}


class _OwnExperts(torch.nn.Module):
    """A user's experts, whose weights come first; a number below 0 stands for no expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.up = 4, torch.nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, hidden_states: torch.Tensor, weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        chosen = (weights.unsqueeze(-1) * (numbers.unsqueeze(-1) == torch.arange(4))).sum(-2)
        return torch.einsum("th,ehd,te->td", hidden_states, self.up, chosen)


class _Own(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.experts, self.head = torch.nn.Embedding(64, 16), _OwnExperts(), torch.nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, flat = self.embed(input_ids), input_ids.reshape(-1, 1)
        numbers = torch.cat([flat % 3, torch.full_like(flat, -1)], 1)
        out = self.experts(hidden.flatten(0, 1), torch.ones_like(numbers, dtype=hidden.dtype), numbers)
        logits = self.head(out.view_as(hidden))
        return {"loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def own_form(mesh: Mesh, folder: str) -> None:
    """The numbers of a user's experts are found behind the weights, and tokens without an expert are not counted."""
    samples = [{name: each[:6] for name, each in sample.items()} for sample in sentences(2 * mesh.world_size)]
    batch = {"global_size": 2 * mesh.world_size, "micro_size": 2}
    fitted(_Own(), settings(folder, batch=batch, run={"max_steps": 1, "log_every": 1}), samples)
    (line,) = lines_of(Path(folder) / "run")
    each = torch.cat([sample["input_ids"] for sample in samples]) % 3
    wanted = (each.bincount(minlength=4) * 4 / len(each)).tolist()
    assert [*line["expert_load"]["experts"].values()] == [round(value, 3) for value in wanted]


def narrow_biases(mesh: Mesh, folder: str) -> None:
    """A rate that a model's bfloat16 would round away moves its biases, which become float32."""
    model = tf.MiniMaxM2ForCausalLM(_eager(tf.MiniMaxM2Config(**SIZES, num_local_experts=4, head_dim=8)))
    model.to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.e_score_correction_bias.fill_(0.5)
    precision = {"compute": "bfloat16", "master": "float32", "reduce": "float32"}
    fitted(model, settings(folder, optimizer={"expert_bias_rate": 0.001}, precision=precision), sentences())
    biases = [layer.mlp.e_score_correction_bias for layer in model.model.layers]
    assert {each.dtype for each in biases} == {torch.float32}
    assert all(float((each - 0.5).abs().max()) >= 0.0009 for each in biases), biases


def biases_of_adapters(mesh: Mesh, folder: str) -> None:
    """Biases move where an adapter saves them, and PEFT loads them; else the rate is refused."""

    def made(modules: list[str]) -> Any:
        settings_of_it = peft.LoraConfig(r=2, target_modules=["kv_b_proj"], modules_to_save=modules)
        return peft.get_peft_model(seeded(_latent).double(), settings_of_it)

    config, target = settings(folder, optimizer={"expert_bias_rate": 0.3}), Path(folder) / "adapter"
    assert "e_score_correction_bias that is saved with adapters" in error_of(
        partial(fitted, made(["experts"]), config, sentences()), ZeromeshError
    )
    ids = torch.arange(1, 17)[None]
    with Trainer(made(["gate", "experts"]), config, sentences()) as trainer:
        trainer.fit()
        trainer.save(target)
    with InFloat64(), torch.no_grad():
        wanted = trainer.model.eval()(input_ids=ids).logits
        found = peft.PeftModel.from_pretrained(seeded(_latent).double(), target).eval()(input_ids=ids).logits
    biases = [each for name, each in trainer.model.named_buffers() if name.endswith("default.e_score_correction_bias")]
    assert biases
    assert all(map(torch.any, biases))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def implementations(mesh: Mesh, folder: str, kind: str) -> None:
    """Each of transformers' ways to compute experts, in float32, also on a rank without a token."""
    losses = []
    for how in ("eager", "grouped_mm", "batched_mm"):
        model = seeded(KINDS[kind])
        model.config._experts_implementation = how
        axes = {"expert": mesh.world_size}
        config = settings(folder, precision={"compute": "float32"}, parallel=axes, run={"name": how, "max_steps": 3})
        with Trainer(model, config, sentences()) as trainer:
            losses.append(trainer.fit().losses)
    for found in losses[1:]:
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses[0]), rtol=1e-4, atol=1e-4)


def exact(mesh: Mesh, folder: str, kind: str, axes: Mapping[str, Any], stage: int = 3, **sections: Any) -> None:
    """A model trains with spread experts as with all of them in one process."""
    bound = 1e-6 if kind == "biased" else 1e-9  # It chooses experts in float32.
    pair = seeded(KINDS[kind]), seeded(KINDS[kind])
    found = differences(folder, kind, pair, sentences(), zero={"stage": stage}, parallel=dict(axes), **sections)
    assert all(value <= bound for value in found.values()), found


def stages_alike(mesh: Mesh, folder: str, axes: Mapping[str, Any]) -> None:
    """The stages give the same bits with spread experts, without accumulation and clipping (docs/numerics.md)."""
    digests = []
    for stage in range(4):
        sections = {"parallel": dict(axes), "batch": {"micro_size": 8}, "zero": {"stage": stage}}
        config = settings(folder, **sections, run={"name": str(stage), "clip_norm": 0.0})
        digests.append(digest(fitted(seeded(_mixtral), config, sentences())))
    assert len({*digests}) == 1, digests


def resumed(mesh: Mesh, folder: str, axes: Mapping[str, Any], steps: int) -> list[float]:
    """Steps of one run, on other axes each time it goes on."""
    return gone_on(_mixtral, sentences(), folder, axes, steps)


def saved(mesh: Mesh, folder: str, axes: Mapping[str, Any]) -> None:
    """A directory of transformers' own names and fused tensors, which transformers loads; generation on spread experts."""
    target = Path(folder) / "saved"
    model, ids = seeded(_mixtral), torch.arange(1, 7)[None]
    config = settings(folder, parallel=dict(axes), run={"name": f"run{mesh.world_size}"})
    with Trainer(model, config, sentences()) as trainer:
        before = seeded(_mixtral).state_dict()
        trainer.fit()
        trainer.save(target)
        whole = dict(trainer.state_dict())
    if mesh.rank == 0:
        loaded = tf.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).state_dict()
        assert loaded.keys() == before.keys()
        for name, value in whole.items():
            torch.testing.assert_close(loaded[name], value, rtol=0, atol=0, msg=name)
    mesh.world.barrier("reading of the directory")
    with zeromesh.Generator(target, {"parallel": dict(axes), "precision": {"compute": "float32"}}) as generator:
        found = generator.generate([ids[0].tolist()], max_new_tokens=5)
    plain = tf.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    wanted = plain.generate(ids, max_new_tokens=5, do_sample=False)[0, 6:].tolist()
    assert [each.tokens for each in found] == [wanted]


def between_steps(mesh: Mesh, folder: str, axes: Mapping[str, Any], stage: int) -> None:
    """A callback saves the whole model, and generates more tokens on some ranks than on others; so do evaluations and a generator,
    of whose answers some end early."""
    target, ids = Path(folder) / "saved", sentences()[mesh.rank]["input_ids"][None, :4]
    fields = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": list(range(20, 45)), "pad_token_id": 0}
    own, told = {**fields, "max_new_tokens": 2 + 5 * mesh.rank, "eos_token_id": None}, dict[str, Any]()

    def look(trainer: Trainer, step: int) -> None:
        if step == 2:
            trainer.model.save_pretrained(target)
            told.update(whole={name: each.clone() for name, each in trainer.state_dict()})
            told.update(tokens=trainer.generate(ids, **own)[0].tolist())
            told.update(predicted=trainer.predict(sentences(4)[1:], predict_with_generate=True, **fields).predictions)

    config = settings(folder, parallel=dict(axes), zero={"stage": stage})
    fitted(seeded(_qwen), config, sentences(), callbacks=[after_steps(look)])
    mesh.world.barrier("writing of the directory")
    plain = tf.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64, experts_implementation="eager")
    with InFloat64():
        wanted = plain.generate(ids, **own)[0].tolist()
    saved = plain.state_dict()
    for name, value in told["whole"].items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0, msg=name)
    assert told["tokens"] == wanted
    assert len(told["predicted"]) == 3
    prompts, sections = [[3, 7, 11, 5], [1, 2], [9] * 7, [4, 4, 8], [5]], {"precision": {"compute": "float32"}}
    patient = {**axes, "timeout_seconds": 10}
    with zeromesh.Generator(target, {"parallel": patient, "zero": {"stage": stage}, **sections}) as generator:
        found = [each.tokens for each in generator.generate(prompts, **fields)]
    plain = plain.float()
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == plain.generate(torch.tensor([prompt]), **fields)[0, len(prompt) :].tolist()
    assert len({*map(len, found)}) > 1, "all prompts ended at once"


def judged(mesh: Mesh, folder: str, axes: Mapping[str, Any]) -> None:
    """A spike is not laid to a machine where ranks compute each other's tokens, and an audit is refused."""
    recovery: dict[str, Any] = {"spike_factor": 1.0001, "spike_window": 2, "on_spike": "accept"}
    config = settings(folder, parallel=dict(axes), recovery=recovery, optimizer={"lr": 0.3}, run={"max_steps": 8})
    with Trainer(seeded(_mixtral), config, sentences()) as trainer:
        assert len(trainer.fit().losses) == 8
    if mesh.rank == 0:
        assert any("judged" in line for line in lines_of(Path(folder) / "run")), "no step was suspicious"
    refusing = settings(folder, parallel=dict(axes), recovery={"audit_steps": 2}, run={"name": "audited"})
    said = error_of(partial(fitted, seeded(_mixtral), refusing, sentences()))
    assert "recovery.audit_steps: a microbatch with experts on other data ranks (parallel.expert)" in said


def bytes_told(mesh: Mesh, folder: str, recompute: str) -> None:
    """What ranks send each other for experts in a step is what the design says, to the byte."""
    rows, length, ranks = 2, 32, mesh.world_size
    data = [{"input_ids": torch.arange(length) + 1, "labels": torch.arange(length) + 1} for _ in range(8 * ranks)]
    config = settings(
        folder,
        parallel={"expert": ranks},
        model={"activation_checkpointing": recompute},
        run={"max_steps": 1, "log_every": 1},
        batch={"global_size": rows * ranks, "micro_size": rows},
    )
    fitted(seeded(_mixtral), config, data)
    (line,) = lines_of(Path(folder) / "run")
    told = line["communication"]["expert"]
    times = 4 + 2 * (recompute == "block")  # Rows go and come back, in forward, in backward, and when it is computed again.
    # Two ranks with equal samples send each other all rows of one of them.
    sent = rows * length * SIZES["num_experts_per_tok"] * (ranks - 1) / ranks * LLAMA["num_hidden_layers"]
    assert told["all-to-all"]["bytes"] == times * sent * LLAMA["hidden_size"] * 8
    assert "all-gather" not in line["communication"].get("shard of experts", {})


def refused(mesh: Mesh, folder: str) -> None:
    """What cannot be spread is refused by name before training."""

    def said(model: Any, **sections: Any) -> str:
        axes = {"expert": mesh.world_size, **sections.pop("parallel", {})}
        return error_of(partial(fitted, model, settings(folder, parallel=axes, **sections), sentences()), ZeromeshError)

    assert "LlamaForCausalLM has no modules of experts" in said(llama())
    three = tf.MixtralForCausalLM(_eager(tf.MixtralConfig(**SIZES, num_local_experts=3)))
    assert "2 ranks cannot have equally many experts: model.layers.0.mlp.experts has 3" in said(three)
    assert "parallel.expert: 3 does not divide parallel.shard (2) x parallel.context (1)" in said(
        _mixtral(), parallel={"expert": 3}
    )
    apart = _Apart(_eager(tf.MixtralConfig(**SIZES, num_local_experts=4)))
    assert "others, a MixtralExperts, was not called, as where some tokens alone go to it" in said(apart)
    assert "optimizer.expert_bias_rate: the routers of MixtralForCausalLM have no buffer" in said(
        _mixtral(), optimizer={"expert_bias_rate": 0.1}
    )
    assert "parallel.tensor does not divide experts that adapters change" in said(
        _with_experts(), parallel={"tensor": 2, "expert": 1}
    )
    assert "Muon with AdamW needs whole tensors" in said(_mixtral(), optimizer={"name": "muon"})
    spread = _mixtral()
    spread.model.layers[0].mlp.experts._is_expert_parallel = True
    assert "transformers has spread its experts over ranks" in said(spread, parallel={"expert": 1})
    divided = _mixtral()
    divided.lm_head.weight.placements = ("Shard(0)",)  # As parameters of `from_pretrained(distributed_config=...)` have.
    assert "lm_head.weight is divided over ranks already (a DTensor)" in said(divided, parallel={"expert": 1})
