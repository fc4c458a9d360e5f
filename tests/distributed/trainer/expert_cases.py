"""Models whose experts are spread over ranks, beside one process that has all of them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import zeromesh
from tests.distributed.trainer.context_cases import EXPERTS, LATENT
from tests.distributed.trainer.lora_cases import _with_experts
from tests.support.architecture_cases import differences
from tests.support.trainer_cases import LLAMA, lines_of, seeded, sentences, settings
from zeromesh import Trainer
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
