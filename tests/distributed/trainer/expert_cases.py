"""Models whose experts are spread over ranks, beside one process that has all of them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import zeromesh
from tests.distributed.trainer.context_cases import EXPERTS, LATENT, gone_on
from tests.distributed.trainer.lora_cases import _with_experts
from tests.support.architecture_cases import differences
from tests.support.plain import after_steps, error_of, fitted
from tests.support.trainer_cases import LLAMA, digest, lines_of, llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.models.small_copy import InFloat64

SIZES = {**LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "use_cache": False}


def _eager(config: Any) -> Any:
    config._experts_implementation = "eager"  # Others are not there in float64.
    return config


def _mixtral(**changes: Any) -> Any:
    return tf.MixtralForCausalLM(_eager(tf.MixtralConfig(**SIZES, num_local_experts=4, **changes)))


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


def _losing() -> Any:
    """With an auxiliary loss of the tokens of a microbatch."""
    return _mixtral(output_router_logits=True, router_aux_loss_coef=0.1)


KINDS = {"mixtral": _mixtral, "losing": _losing, "qwen": _qwen, "biased": _biased, "latent": _latent, "skewed": _skewed}


def adapters(mesh: Mesh, folder: str, stage: int, axes: Mapping[str, Any]) -> None:
    """PEFT's adapters of experts, beside those of attention, with which they are spread."""
    pair = _with_experts(), _with_experts()
    found = differences(folder, "adapters", pair, sentences(), zero={"stage": stage}, parallel=dict(axes))
    assert all(value <= 1e-9 for value in found.values()), found


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


def balanced(mesh: Mesh, folder: str, axes: Mapping[str, Any]) -> dict[str, Any]:
    """The biases of routers after four steps, and the loads that they follow."""
    config = settings(folder, parallel=dict(axes), optimizer={"expert_bias_rate": 0.01}, run={"log_every": 1})
    with Trainer(seeded(_latent), config, sentences()) as trainer:
        losses = trainer.fit().losses
        biases = [each.tolist() for name, each in trainer.model.named_buffers() if name.endswith("correction_bias")]
        assert not any(each._forward_pre_hooks for each in trainer.model.modules())
    loads = [line["expert_load"] for line in lines_of(Path(folder) / "run")] if mesh.rank == 0 else []
    return {"losses": losses, "biases": biases, "loads": loads}


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
    times = 4 + 2 * (
        recompute == "block"
    )  # Rows go and come back, in forward, in backward, and when it is computed again.
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
    assert "optimizer.expert_bias_rate: the routers of MixtralForCausalLM have no buffer" in said(
        _mixtral(), optimizer={"expert_bias_rate": 0.1}
    )
    assert "needs whole tensors" in said(_mixtral(), optimizer={"name": "muon"})
    spread = _mixtral()
    spread.model.layers[0].mlp.experts._is_expert_parallel = True
    assert "transformers has spread its experts over ranks" in said(spread, parallel={"expert": 1})
