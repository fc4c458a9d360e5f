"""Cases on tensor parallelism without the engine: a model divided among ranks against the whole one, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import transformers as tf

from zeromesh.mesh.exchange import Exchange, Pending
from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.select import open_exchange
from zeromesh.tensor.apply import Parallelized, load_parts, parallelize
from zeromesh.tensor.plan import plan_tensor
from zeromesh.trainer.hf.loss_check import InFloat64

_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "vocab_size": 67,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
_GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 67,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 6, "d_ff": 44, "num_layers": 2, "num_heads": 4, "vocab_size": 67,
    "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _SMALL.items() if name not in names}


_FALCON = {**_without("head_dim", "num_key_value_heads", "intermediate_size"), "ffn_hidden_size": 44}


def _experts(config: Any) -> Any:
    config._experts_implementation = "eager"
    return config


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_SMALL, attention_bias=True, mlp_bias=True)),
    "llama-1kv": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**{**_SMALL, "num_key_value_heads": 1})),
    "llama-9-3": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**{**_SMALL, **_NINE_HEADS}, tie_word_embeddings=True)
    ),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_SMALL)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**_SMALL)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**_SMALL, sliding_window=4, final_logit_softcapping=0.5, attn_logit_softcapping=0.5)
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**{**_SMALL, "pad_token_id": 0}, sliding_window=4)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**_GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(**_without("intermediate_size", "pad_token_id"), pad_token_id=1, ffn_dim=44, dropout=0.0, word_embed_proj_dim=24)
    ),
    "falcon": lambda: tf.FalconForCausalLM(
        tf.FalconConfig(**_FALCON, num_kv_heads=2, new_decoder_architecture=True, alibi=False, bias=True)
    ),
    "falcon-mq": lambda: tf.FalconForCausalLM(
        tf.FalconConfig(**_FALCON, new_decoder_architecture=False, multi_query=True, parallel_attn=True, alibi=False)
    ),
    "bloom": lambda: tf.BloomForCausalLM(
        tf.BloomConfig(**_without("num_attention_heads", "num_hidden_layers"), n_head=4, n_layer=2)
    ),
    "bert": lambda: tf.BertForMaskedLM(
        tf.BertConfig(
            **{**_SMALL, "pad_token_id": 0}, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, is_decoder=False
        )
    ),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**_T5, dropout_rate=0.0, feed_forward_proj="gated-gelu")),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_SMALL, hidden_dropout=0.0, attention_dropout=0.0)),
    "phi3": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**{**_SMALL, "pad_token_id": 0})),
    "phi3-1kv": lambda: tf.Phi3ForCausalLM(tf.Phi3Config(**{**_SMALL, "pad_token_id": 0, "num_key_value_heads": 1})),
    "olmo2": lambda: tf.Olmo2ForCausalLM(tf.Olmo2Config(**_SMALL)),
    "mixtral": lambda: tf.MixtralForCausalLM(
        _experts(tf.MixtralConfig(**_SMALL, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5))
    ),
    "qwen3_moe": lambda: tf.Qwen3MoeForCausalLM(
        _experts(
            tf.Qwen3MoeConfig(
                **_SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=22, mlp_only_layers=[1]
            )
        )
    ),
}  # fmt: skip


class Counting:
    """An exchange that notes the most elements that one call was given or gave."""

    def __init__(self, inner: Exchange) -> None:
        self._inner = inner
        self.size, self.index = inner.size, inner.index
        self.most = 0
        self.calls: list[str] = []

    def _note(self, what: str, tensor: torch.Tensor, pending: Pending) -> Pending:
        self.calls.append(what)
        self.most = max(self.most, tensor.numel() * (self.size if what == "gather" else 1))
        return pending

    def sum(self, tensor: torch.Tensor) -> Pending:
        return self._note("sum", tensor, self._inner.sum(tensor))

    def maximum(self, tensor: torch.Tensor) -> Pending:
        return self._note("maximum", tensor, self._inner.maximum(tensor))

    def gather(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        return self._note("gather", tensor, self._inner.gather(tensor, dim, sizes=sizes))

    def scatter_sum(self, tensor: torch.Tensor, dim: int, *, sizes: Sequence[int] | None = None) -> Pending:
        return self._note("scatter_sum", tensor, self._inner.scatter_sum(tensor, dim, sizes=sizes))


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model whose biases and norms are random too."""
    torch.manual_seed(7)
    model = MODELS[name]().to(dtype)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype) * 0.1)
    return model.train()


def batch(length: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(2, 67, (2, length), generator=generator)
    labels = torch.randint(2, 67, (2, length), generator=generator)
    labels[0, :3] = -100
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    labels[1, -2:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def divided(
    name: str, exchange: Exchange, *, sequence: bool = False, model: Any = None, rules: dict[str, str] | None = None
) -> tuple[Any, Parallelized]:
    """The model with this rank's part of it."""
    model = model or build(name)
    whole = {key: value.detach().clone() for key, value in model.named_parameters()}
    parallel = parallelize(model, exchange, plan_tensor(model, exchange.size, rules), sequence=sequence)
    load_parts(model, parallel.parts, whole)
    return model, parallel


def assembled(model: Any, parallel: Parallelized, exchange: Exchange) -> dict[str, torch.Tensor]:
    """Every whole gradient. One that is in `parts` is put together from all ranks, all others are this rank's."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        part = parallel.parts.get(name)
        if part is None:
            found[name] = gradient
            continue
        whole = gradient.new_zeros(part.region.shape)
        if part.partial or part.holders[0] == exchange.index:
            index = torch.arange(whole.numel()).view(whole.shape)
            for dim, intervals in enumerate(part.region.dims):
                index = torch.cat([index.narrow(dim, one.start, one.length) for one in intervals], dim)
            whole.view(-1)[index.reshape(-1)] = gradient.reshape(-1)
        found[name] = exchange.sum(whole).wait()
    return found


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest relative difference of each tensor, where it is above the tolerance; NaN counts as one."""
    assert expected.keys() == found.keys()
    result = {}
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max()) / max(1e-3, float(tensor.abs().max()))
        if not error <= 1e-9:
            result[name] = error
    return result


def equals(mesh: Mesh, models: list[str], sequence: bool = False, checkpointing: bool = False) -> dict[str, Any]:
    """Loss, logits and every gradient of the divided models against the whole ones; what differs, by model."""
    exchange = open_exchange(mesh.shard, mesh.device, "auto")
    wrong: dict[str, Any] = {}
    for name in models:
        inputs = batch()
        with InFloat64():
            whole = build(name)
            expected = whole(**inputs)
            expected.loss.backward()
            model, parallel = divided(name, exchange, sequence=sequence)
            if checkpointing:
                model.gradient_checkpointing_enable(
                    {"use_reentrant": False, "context_fn": lambda: (nullcontext(), InFloat64())}
                )
            found = model(**inputs)
            found.loss.backward()
        reference = {key: parameter.grad for key, parameter in whole.named_parameters()}
        reference = {
            key: torch.zeros_like(p) if reference[key] is None else reference[key]
            for key, p in whole.named_parameters()
        }
        problems = differences(reference, assembled(model, parallel, exchange))
        problems |= differences(
            {"loss": expected.loss, "logits": expected.logits}, {"loss": found.loss, "logits": found.logits}
        )
        problems |= {key: 1.0 for key in parallel.parts if key not in reference}
        if problems:
            wrong[name] = problems
    return wrong
