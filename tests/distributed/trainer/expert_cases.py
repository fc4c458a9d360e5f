"""Models whose experts are spread over ranks, beside one process that has all of them."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers as tf

from tests.distributed.trainer.context_cases import EXPERTS, LATENT
from tests.support.architecture_cases import differences
from tests.support.trainer_cases import LLAMA, seeded, sentences
from zeromesh.mesh.process_mesh import Mesh

SIZES = {**LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "use_cache": False}


def _eager(config: Any) -> Any:
    config._experts_implementation = "eager"  # Others are not there in float64.
    return config


def _mixtral() -> Any:
    return tf.MixtralForCausalLM(_eager(tf.MixtralConfig(**SIZES, num_local_experts=4)))


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


KINDS = {"mixtral": _mixtral, "qwen": _qwen, "biased": _biased, "latent": _latent, "skewed": _skewed}


def exact(mesh: Mesh, folder: str, kind: str, axes: Mapping[str, Any], stage: int = 3, **sections: Any) -> None:
    """A model trains with spread experts as with all of them in one process."""
    bound = 1e-6 if kind == "biased" else 1e-9  # It chooses experts in float32.
    pair = seeded(KINDS[kind]), seeded(KINDS[kind])
    found = differences(folder, kind, pair, sentences(), zero={"stage": stage}, parallel=dict(axes), **sections)
    assert all(value <= bound for value in found.values()), found
