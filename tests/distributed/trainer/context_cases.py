"""Models whose sequences context ranks share, beside one process that has all of them."""

import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as tf

import zeromesh
from tests.support.architecture_cases import differences
from tests.support.plain import calling, error_of, fitted
from tests.support.trainer_cases import LLAMA, VOCABULARY, digest, lines_of, llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.attention.packed_attention import PackedAttention, padded_batch
from zeromesh.trainer.models.small_copy import InFloat64

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}


def _eager_experts(config: Any) -> Any:
    config._experts_implementation = "eager"  # Others are not there in float64.
    return config


def _sinks() -> Any:
    sizes = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5}
    return tf.GptOssForCausalLM(_eager_experts(tf.GptOssConfig(**sizes)))


def _windows() -> Any:
    sizes = {**LLAMA, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 5, "use_cache": False}
    kinds = ["sliding_attention", "full_attention"]
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**sizes, layer_types=kinds))


def _capped() -> Any:
    sizes = {**LLAMA, "head_dim": 8, "sliding_window": 5, "use_cache": False, "attn_logit_softcapping": 2.0}
    return tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes))


def _latent() -> Any:
    sizes = {**LLAMA, **LATENT, **EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "first_k_dense_replace": 1}
    return tf.DeepseekV3ForCausalLM(_eager_experts(tf.DeepseekV3Config(**sizes)))


def _adapted() -> Any:
    model = seeded(llama)
    torch.manual_seed(12)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


class Keywords(tf.LlamaForCausalLM):  # type: ignore[misc]  # transformers' types are skipped.
    """A model that names no positions, and hands on those among its further keywords."""

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        return super().forward(input_ids=input_ids, labels=labels, **named)


def _keywords() -> Any:
    return Keywords(tf.LlamaConfig(**{**LLAMA, "use_cache": False}))


class Aside(torch.nn.Module):
    """An MLP, and beside it one that is called for rare tokens alone, which many shares of a batch do not have."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp, self.rare = mlp, torch.nn.Linear(LLAMA["hidden_size"], LLAMA["hidden_size"])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out, rare = self.mlp(rows), rows[..., 0] > 0
        return torch.index_put(out, (rare,), out[rare] + self.rare(rows[rare])) if rare.any() else out


def _asides() -> Any:
    model = llama(num_hidden_layers=6)
    for layer in model.model.layers:
        layer.mlp = Aside(layer.mlp)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = torch.where(torch.arange(VOCABULARY) < VOCABULARY - 2, -20.0, 20.0)
    return model


KINDS = {
    "asides": _asides,
    "llama": llama,
    "keywords": _keywords,
    "sinks": _sinks,
    "windows": _windows,
    "capped": _capped,
    "latent": _latent,
    "lora": _adapted,
}


def packed(count: int = 23) -> list[dict[str, torch.Tensor]]:
    """Sequences of 22 tokens of two or three documents each, whose positions begin anew."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        ids = torch.randint(1, VOCABULARY, (22,), generator=generator)
        lengths = (9, 13) if number % 2 else (4, 11, 7)
        labels = ids.clone()
        labels[torch.tensor(lengths).cumsum(0)[:-1]] = -100  # Nothing predicts the first token of a document.
        positions = torch.cat([torch.arange(length) for length in lengths])
        found.append({"input_ids": ids, "labels": labels, "position_ids": positions})
    return found


def exact(mesh: Mesh, folder: str, kind: str, axes: Mapping[str, Any], stage: int = 3, **sections: Any) -> None:
    """A model trains on shares of packed and of ragged sequences as on whole ones."""
    bound = 1e-6 if kind == "sinks" else 1e-9  # It chooses experts in float32.
    for name, data in (("packed", packed()), ("ragged", sentences())):
        pair = seeded(KINDS[kind]), seeded(KINDS[kind])
        how = {"zero": {"stage": stage}, "parallel": dict(axes), **sections}
        if name == "packed":
            pair[1].forward = partial(_alone, pair[1].forward)
        found = differences(folder, f"{kind}-{name}", pair, data, **how)
        assert all(value <= bound for value in found.values()), (name, found)


def _alone(forward: Any, **batch: Any) -> Any:
    """The forward of a model on whole sequences, of which some models of transformers see the documents as one."""
    with PackedAttention(batch).in_force():
        return forward(**batch)


def bytes_told(mesh: Mesh, folder: str, method: str) -> None:
    """What ranks send each other in a step is what the design says, to the byte."""
    rows, length, heads, keys, width = 2, 32, 4, 2, 8
    data = [{"input_ids": torch.arange(length) + 1, "labels": torch.arange(length) + 1} for _ in range(8)]
    axes = {"context": mesh.world_size, "context_method": method}
    config = settings(folder, parallel=axes, run={"max_steps": 1, "log_every": 1}, batch={"global_size": rows, "micro_size": rows})
    fitted(seeded(llama), config, data)
    told = lines_of(Path(folder) / "run")[-1]["communication"]["context"]
    ranks = mesh.world_size
    layers, token = LLAMA["num_hidden_layers"], rows * length * width * 8
    away = (ranks - 1) / ranks
    if method == "gather":  # Keys and values, in backward again, and their gradients.
        assert told["all-gather"]["bytes"] == 2 * layers * 2 * keys * token * away
        assert told["reduce-scatter"]["bytes"] == layers * 2 * keys * token * away
    else:  # Queries and results, keys and values, of this rank's share.
        assert told["all-to-all"]["bytes"] == 2 * layers * (2 * heads + 2 * keys) * token / ranks * away
        assert set(told) == {"all-to-all"}


def loop(mesh: Mesh, folder: str, kind: str) -> None:
    """A loop of one's own over `zeromesh.shard`: losses of labels, of logits, and a call that goes round the model's own."""
    model, plain = (seeded(KINDS[kind]).double() for _ in range(2))
    made = partial(torch.optim.SGD, lr=0.5)
    model, optimizer = zeromesh.shard(model, made, stage=3, parallel={"context": mesh.world_size})
    reference = made(plain.parameters())
    for number, sample in enumerate(sentences(4)):
        batch = {name: each[None] for name, each in sample.items()}
        labels = batch["labels"] if number % 2 else None
        losses = []
        for each, update in ((model, optimizer), (plain, reference)):
            given = {"input_ids": batch["input_ids"], **({} if labels is None else {"labels": labels})}
            with InFloat64():
                out = each(**given)
            losses.append(out.loss if labels is not None else out.logits.square().mean())
            losses[-1].backward()
            update.step()
            update.zero_grad()
        assert abs(float(losses[0] - losses[1])) <= 1e-9, (number, losses)
    with torch.no_grad():
        ids = sentences()[1]["input_ids"][None]
        torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=1e-9, atol=1e-9)
    said = error_of(
        lambda: model.get_base_model().model(input_ids=ids) if kind == "lora" else model.model(input_ids=ids), ZeromeshError
    )
    assert "a part of it" in said, said
    wanted = plain.state_dict()
    for name, found in zeromesh.state_dict(model):
        torch.testing.assert_close(found, wanted[name], rtol=1e-9, atol=1e-9, msg=name)


def refused(mesh: Mesh, folder: str) -> None:
    """What cannot be computed on shares is refused by name before training."""
    axes = {"context": mesh.world_size}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    recurrent = tf.MambaForCausalLM(tf.MambaConfig(**sizes, state_size=4))
    masked = tf.BertForMaskedLM(tf.BertConfig(**sizes, num_attention_heads=4, intermediate_size=48))
    offset = tf.RobertaForCausalLM(tf.RobertaConfig(**sizes, num_attention_heads=4, intermediate_size=48, is_decoder=True))

    def said(model: Any, data: Any = None, loss: Any = None, **sections: Any) -> str:
        config = settings(folder, parallel={**axes, **sections.pop("parallel", {})}, **sections)
        return error_of(partial(fitted, model, config, data or sentences(), compute_loss=loss), ZeromeshError)

    assert "mixer, a MambaMixer" in said(recurrent)
    assert "no loss of next tokens" in said(masked)
    assert "parallel.context" in said(offset)
    assert "compute_loss" in said(llama(), loss=lambda model, batch: (model(**batch).loss, 1))
    assert "equally many of 3 query heads" in said(
        llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=24), parallel={"context_method": "heads"}
    )
    pictures = {"input_ids": torch.ones(2, 8), "pixel_values": torch.zeros(2, 3, 4, 4)}
    assert "pixel_values has shape [2, 3, 4, 4]" in error_of(partial(padded_batch, pictures, 4), ZeromeshError)


def resumed(mesh: Mesh, folder: str, axes: Mapping[str, Any], steps: int) -> list[float]:
    """Steps of one run, on other axes each time it goes on."""
    return gone_on(llama, packed(), folder, axes, steps)


def gone_on(build: Any, data: Any, folder: str, axes: Mapping[str, Any], steps: int) -> list[float]:
    """The losses of a run up to this step, which goes on where it has ended before."""
    config = settings(
        folder,
        parallel=dict(axes),
        schedule={"name": "constant_with_warmup"},
        run={"max_steps": steps},
        checkpoint={"every_steps": 2, "resume": "auto"},
    )
    with Trainer(seeded(build), config, data) as trainer:
        return list(trainer.fit().losses)


def lost(mesh: Mesh, folder: str, how: str) -> None:
    """The second rank ends, stops or lacks memory in a step."""

    def strike(trainer: Trainer, step: int) -> None:
        if step != 2 or mesh.rank != 1:
            return
        if how == "memory":
            raise MemoryError("the machine has no memory left")
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    config = settings(folder, parallel={"context": mesh.world_size, "timeout_seconds": 3})
    fitted(seeded(llama), config, sentences(), callbacks=[calling(on_step_begin=strike)])


def evaluated(mesh: Mesh, folder: str, axes: Mapping[str, Any]) -> dict[str, Any]:
    """Predictions and texts of a model on shares, which are of whole sequences."""
    model = seeded(llama)
    config = settings(folder, parallel=dict(axes))
    with Trainer(model, config, sentences(), sentences(7, seed=4)) as trainer:
        trainer.fit()
        found = trainer.predict(sentences(5, seed=6))
    return {"predictions": found.predictions.flatten()[::37].tolist(), "loss": found.metrics["test_loss"]}


def stages_alike(mesh: Mesh, folder: str) -> None:
    """The stages give the same bits on shares of sequences, without accumulation and clipping (docs/numerics.md)."""
    digests = []
    for stage in range(4):
        sections = {"parallel": {"context": mesh.world_size}, "batch": {"micro_size": 8}, "zero": {"stage": stage}}
        config = settings(folder, **sections, run={"name": str(stage), "clip_norm": 0.0})
        digests.append(digest(fitted(seeded(llama), config, packed())))
    assert len({*digests}) == 1, digests
