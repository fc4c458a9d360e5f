"""Fifteen architectures of transformers, tiny, each with a task and data whose samples have different numbers of targets; and a
table of models for tests that divide them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf

from zeromesh.trainer.config.sections.model import AUTO_CLASSES, Head

VOCABULARY = 96
LENGTH = 10
LABELS = 5
_IGNORED = -100
Samples = list[dict[str, torch.Tensor]]


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_of(config: Mapping[str, Any], head: Head = "causal_lm", dtype: torch.dtype = torch.float32) -> Any:
    """The model of a configuration that names its `model_type`, with weights drawn from torch's generator."""
    made = tf.AutoConfig.for_model(config["model_type"], **{key: config[key] for key in config if key != "model_type"})
    return getattr(tf, AUTO_CLASSES[head]).from_config(made, dtype=dtype, trust_remote_code=False)


def small_model(kind: str, head: Head = "causal_lm", dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model of the sizes `SIZES`, where `fields` have no others."""
    return model_of({"model_type": kind, **SIZES, **fields}, head, dtype)


def on_meta(kind: str, head: Head = "causal_lm", **fields: Any) -> Any:
    with torch.device("meta"):
        return small_model(kind, head, **fields)


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A configuration, its task, and `samples(count)`, always the same."""

    config: dict[str, Any]
    head: Head
    samples: Callable[[int], Samples]

    def build(self, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        """The model, with weights drawn from torch's generator."""
        return model_of({**self.config, **changes}, self.head, dtype)


def _ids(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (length,), generator=generator)


def sentences(count: int) -> Samples:
    """For causal models: padded on the right by up to half, labels masked at the beginning too."""
    generator, found = torch.Generator().manual_seed(1), []
    for index in range(count):
        ids, length, begin = _ids(generator), LENGTH - index % (LENGTH // 2), index % 3
        places = torch.arange(LENGTH)
        labels = ids.masked_fill((places >= length) | (places < begin), _IGNORED)
        found.append({"input_ids": ids, "attention_mask": (places < length).long(), "labels": labels})
    return found


def gaps(count: int) -> Samples:
    """For masked models: between none and three labels in a sample."""
    generator, found = torch.Generator().manual_seed(2), []
    for index in range(count):
        ids, length = _ids(generator), LENGTH - index % 4
        labels = torch.full_like(ids, _IGNORED)
        labels[: index % 4] = ids[: index % 4]
        mask = (torch.arange(LENGTH) < length).long()
        found.append({"input_ids": ids.masked_fill(labels != _IGNORED, 1), "attention_mask": mask, "labels": labels})
    return found


def _transcript(generator: torch.Generator, index: int) -> torch.Tensor:
    labels = _ids(generator, LENGTH - 2)
    labels[3 + index % 5 :] = _IGNORED
    return labels


def pairs(count: int) -> Samples:
    """Texts, and other texts to be made of them."""
    generator, found = torch.Generator().manual_seed(3), []
    for index in range(count):
        mask = (torch.arange(LENGTH) < LENGTH - index % 4).long()
        labels = _transcript(generator, index)
        found.append({"input_ids": _ids(generator), "attention_mask": mask, "labels": labels})
    return found


def pictures(count: int) -> Samples:
    """Pictures, some without a label."""
    generator = torch.Generator().manual_seed(4)
    return [
        {
            "pixel_values": torch.randn(3, 16, 16, generator=generator, dtype=torch.float64),
            "labels": torch.tensor(_IGNORED if index % 5 == 3 else index % LABELS),
        }
        for index in range(count)
    ]


def recordings(count: int) -> Samples:
    generator = torch.Generator().manual_seed(5)
    return [
        {"input_features": torch.randn(8, 24, generator=generator, dtype=torch.float64), "labels": _transcript(generator, index)}
        for index in range(count)
    ]


_TEXT = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES = SIZES
_GROUPS = {"num_key_value_heads": 2}
_MASKED = {**_SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 32}
_SIZES_OF_OPT = {
    "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 16
}  # fmt: skip
_SMALL_T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
_WHISPER = {
    "model_type": "whisper", "d_model": 32, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": 0, "decoder_start_token_id": 0, "begin_suppress_tokens": None,
}  # fmt: skip


def _causal(kind: str, **config: Any) -> Architecture:
    return Architecture(config={"model_type": kind, **_TEXT, **config}, head="causal_lm", samples=sentences)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _causal("llama", **_SIZES, **_GROUPS, tie_word_embeddings=False),
    "qwen3": _causal("qwen3", **_SIZES, **_GROUPS, head_dim=8),
    "gemma": _causal("gemma", **_SIZES, **_GROUPS, head_dim=8),
    "mistral": _causal("mistral", **_SIZES, **_GROUPS, sliding_window=4),
    "phi": _causal("phi", **_SIZES),
    "gpt2": _causal("gpt2", n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "gpt-neox": _causal("gpt_neox", **_SIZES),
    "opt": _causal("opt", **_SIZES_OF_OPT, dropout=0.0),
    "mixtral": _causal(
        "mixtral",
        **_SIZES,
        **_GROUPS,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",  # fused experts have no float64
    ),
    "bert": Architecture(
        config={"model_type": "bert", **_MASKED, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        head="masked_lm",
        samples=gaps,
    ),
    "modernbert": Architecture(
        config={"model_type": "modernbert", **_MASKED, "num_hidden_layers": 3, "local_attention": 4}, head="masked_lm", samples=gaps
    ),
    "t5": Architecture(config=_SMALL_T5, head="seq2seq_lm", samples=pairs),
    "vit": Architecture(
        config={"model_type": "vit", **_SIZES, "image_size": 16, "patch_size": 8, "num_labels": LABELS},
        head="image_classification",
        samples=pictures,
    ),
    "whisper": Architecture(config=_WHISPER, head="speech_seq2seq", samples=recordings),
    "mamba": _causal("mamba", hidden_size=32, state_size=8, num_hidden_layers=2),
}


TINY_VOCABULARY = 67
"""An odd number, so that ranks have shares of different sizes."""
_TINY = {
    "hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "head_dim": 8, "vocab_size": TINY_VOCABULARY, "max_position_embeddings": 32,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
_GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": TINY_VOCABULARY,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_BIGCODE = {**_GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_DISTILBERT = {
    "dim": 32, "hidden_dim": 44, "n_heads": 4, "n_layers": 2, "vocab_size": TINY_VOCABULARY, "dropout": 0.0,
    "attention_dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
_T5 = {
    "d_model": 32, "d_kv": 6, "d_ff": 44, "num_layers": 2, "num_heads": 4, "vocab_size": TINY_VOCABULARY,
    "decoder_start_token_id": 1, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


def tiny_without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in _TINY.items() if name not in names}


_OPT = {**tiny_without("intermediate_size"), "pad_token_id": 1, "ffn_dim": 44}
_DEEPSEEK = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 22,
    "first_k_dense_replace": 1,
}  # fmt: skip
_FALCON = {**tiny_without("head_dim", "num_key_value_heads", "intermediate_size"), "ffn_hidden_size": 44}


_PADDED = {**_TINY, "pad_token_id": 0}
_QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
TINY: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (tf.LlamaForCausalLM, {**_TINY, "attention_bias": True, "mlp_bias": True}),
    "llama-1kv": (tf.LlamaForCausalLM, {**_TINY, "num_key_value_heads": 1}),
    "llama-9-3": (tf.LlamaForCausalLM, {**_TINY, **_NINE_HEADS, "tie_word_embeddings": True}),
    "qwen3": (tf.Qwen3ForCausalLM, _TINY),
    "gemma": (tf.GemmaForCausalLM, _TINY),
    "gemma2": (tf.Gemma2ForCausalLM, {**_TINY, "sliding_window": 4, "final_logit_softcapping": 0.5, "attn_logit_softcapping": 0.5}),
    "gemma3": (tf.Gemma3ForCausalLM, {**_PADDED, "sliding_window": 4}),
    "gpt2": (tf.GPT2LMHeadModel, _BIGCODE),
    "opt": (tf.OPTForCausalLM, {**_OPT, "dropout": 0.0, "word_embed_proj_dim": 24}),
    "falcon": (
        tf.FalconForCausalLM,
        {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False, "bias": True},
    ),
    "falcon-mq": (
        tf.FalconForCausalLM,
        {**_FALCON, "new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "alibi": False},
    ),
    "falcon-alibi": (tf.FalconForCausalLM, {**_FALCON, "new_decoder_architecture": False, "multi_query": False, "alibi": True}),
    "deepseek": (tf.DeepseekV3ForCausalLM, {**tiny_without("head_dim", "num_key_value_heads"), **_DEEPSEEK}),
    "apertus": (tf.ApertusForCausalLM, _PADDED),
    "bloom": (tf.BloomForCausalLM, {**tiny_without("num_attention_heads", "num_hidden_layers"), "n_head": 4, "n_layer": 2}),
    "bert": (tf.BertForMaskedLM, {**_PADDED, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": False}),
    "openai-gpt": (tf.OpenAIGPTLMHeadModel, _BIGCODE),
    "bigcode": (tf.GPTBigCodeForCausalLM, {**_BIGCODE, "multi_query": True}),
    "bigcode-heads": (tf.GPTBigCodeForCausalLM, {**_BIGCODE, "multi_query": False}),
    "mpt": (tf.MptForCausalLM, {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "vocab_size": TINY_VOCABULARY}),
    "gpt_neox_japanese": (
        tf.GPTNeoXJapaneseForCausalLM,
        {**tiny_without("intermediate_size"), "intermediate_multiple_size": 2, **_QUIET},
    ),
    "distilbert": (tf.DistilBertForMaskedLM, _DISTILBERT),
    "t5": (tf.T5ForConditionalGeneration, {**_T5, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}),
    "gpt_neox": (tf.GPTNeoXForCausalLM, {**_TINY, **_QUIET}),
    "phi3": (tf.Phi3ForCausalLM, _PADDED),
    "phi3-1kv": (tf.Phi3ForCausalLM, {**_PADDED, "num_key_value_heads": 1}),
    "olmo2": (tf.Olmo2ForCausalLM, _TINY),
    "mixtral": (
        tf.MixtralForCausalLM,
        {**_TINY, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    "qwen3_moe": (
        tf.Qwen3MoeForCausalLM,
        {**_TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 22, "mlp_only_layers": [1]},
    ),
}
"""Models of four query heads or another number that may be divided among four ranks, by name: a class and its configuration."""


def tiny(name: str, **changes: Any) -> Any:
    """A model of `TINY`, with weights drawn from torch's generator."""
    kind, values = TINY[name]
    values = {**values, **changes}
    config = kind.config_class(**values)
    if any("experts" in name for name in values):
        config._experts_implementation = "eager"
    return kind(config)
