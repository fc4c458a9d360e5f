"""Models of transformers whose layers are containers, or whose weights are read by other modules, with units of their own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as tf

from tests.contract.harness import Batch, Case

VOCABULARY, LENGTH = 128, 8
Samples = list[dict[str, Any]]


def texts(count: int = 23) -> Samples:
    generator, found = torch.Generator().manual_seed(5), []
    for index in range(count):
        ids = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        places = (torch.arange(LENGTH) % 4) == index % 4
        found.append({"input_ids": ids, "labels": ids.masked_fill(~places, -100)})
    return found


def masked(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    logits = model(input_ids=batch["input_ids"]).logits
    count = int((batch["labels"] != -100).sum())
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return losses, count


def pictures(count: int = 23) -> Samples:
    generator = torch.Generator().manual_seed(6)
    return [
        {
            "pixel_values": torch.randn(3, 32, 32, generator=generator, dtype=torch.float64),
            "labels": torch.tensor(index % 3),
            "depths": torch.rand(32, 32, generator=generator, dtype=torch.float64),
        }
        for index in range(count)
    ]


def classified(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    logits = model(pixel_values=batch["pixel_values"]).logits
    return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="sum"), len(batch["labels"])


def depths(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    found = model(pixel_values=batch["pixel_values"]).predicted_depth
    wanted = torch.nn.functional.interpolate(batch["depths"][:, None], found.shape[-2:])[:, 0]
    return (found - wanted).pow(2).mean(dim=(1, 2)).sum(), len(batch["depths"])


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
STAGES: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": [2, 1],
    "sr_ratios": [4, 2],
    "hidden_sizes": [32, 48],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    "drop_path_rate": 0.0,
    **NO_DROPOUT,
}


def deberta() -> Any:
    """Its decoder of masks reads the last layer's attention again."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False, "legacy": False}
    return tf.DebertaV2ForMaskedLM(tf.DebertaV2Config(**TEXT, **sizes, **relative, **NO_DROPOUT))


def deberta_v1(*, legacy: bool) -> Any:
    """The first version; `legacy`: with the head of its first release."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    return tf.DebertaForMaskedLM(tf.DebertaConfig(**TEXT, **sizes, **NO_DROPOUT, type_vocab_size=0, legacy=legacy))


def funnel() -> Any:
    """Layers lie in lists in a list."""
    sizes = {"block_sizes": [2, 1], "d_model": 48, "n_head": 4, "d_head": 12, "d_inner": 64, "num_decoder_layers": 1}
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return tf.FunnelForMaskedLM(tf.FunnelConfig(vocab_size=VOCABULARY, **sizes, **rates))


def pvt() -> Any:
    """The same, of stages of pictures."""
    settings = {**STAGES, "patch_sizes": [4, 2], "sequence_reduction_ratios": [4, 1], "num_labels": 3, "image_size": 32}
    settings.pop("sr_ratios")
    return tf.PvtForImageClassification(tf.PvtConfig(**settings))


def glpn() -> Any:
    """The same, for depths; it has batch norms, so that a microbatch has to be the whole batch."""
    return tf.GLPNForDepthEstimation(tf.GLPNConfig(**STAGES, decoder_hidden_size=32))


def of_texts(name: str, build: Callable[[], Any]) -> Case:
    return Case(name=name, build=build, loss=masked, dataset=texts, config=STEADY)


STEADY = {"optimizer": {"eps": 1e-6}}
"""Some gradients are zero but for rounding, as those of keys' biases are; AdamW's usual epsilon makes them visible."""

CASES = [
    of_texts("DeBERTa-v2", deberta),
    of_texts("DeBERTa", partial(deberta_v1, legacy=False)),
    of_texts("DeBERTa with its first head", partial(deberta_v1, legacy=True)),
    of_texts("Funnel", funnel),
    Case(name="Pvt", build=pvt, loss=classified, dataset=pictures, config=STEADY),
    Case(name="GLPN", build=glpn, loss=depths, dataset=pictures, config={**STEADY, "batch": {"micro_size": 8}}),
]
