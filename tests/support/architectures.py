"""Fifteen architectures of transformers, tiny, each with a task and data whose samples have different numbers of targets."""

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
    """The same, without values."""
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
        {
            "input_features": torch.randn(8, 24, generator=generator, dtype=torch.float64),
            "labels": _transcript(generator, index),
        }
        for index in range(count)
    ]


_TEXT = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES = SIZES
_GROUPS = {"num_key_value_heads": 2}
_MASKED = {**_SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0, "max_position_embeddings": 32}


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
    "opt": _causal(
        "opt",
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=16,
        dropout=0.0,
    ),
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
        config={"model_type": "modernbert", **_MASKED, "num_hidden_layers": 3, "local_attention": 4},
        head="masked_lm",
        samples=gaps,
    ),
    "t5": Architecture(
        config={
            "model_type": "t5",
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
        },
        head="seq2seq_lm",
        samples=pairs,
    ),
    "vit": Architecture(
        config={"model_type": "vit", **_SIZES, "image_size": 16, "patch_size": 8, "num_labels": LABELS},
        head="image_classification",
        samples=pictures,
    ),
    "whisper": Architecture(
        config={
            "model_type": "whisper",
            "d_model": 32,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "vocab_size": VOCABULARY,
            "max_target_positions": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
            "begin_suppress_tokens": None,
        },
        head="speech_seq2seq",
        samples=recordings,
    ),
    "mamba": _causal("mamba", hidden_size=32, state_size=8, num_hidden_layers=2),
}
