"""Packed documents are tried on a small copy of a model: what keeps them apart passes, what mixes them is refused by name."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.architectures import on_meta
from zeromesh.errors import ConfigError
from zeromesh.trainer.losses.trial import require_separate_documents
from zeromesh.trainer.models.small_copy import apart

KV = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip


def model(kind: str, **fields: Any) -> Any:
    return on_meta(kind, **{"vocab_size": 96, **fields})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", KV),
        ("gpt2", {}),
        ("gemma2", {**KV, "sliding_window": 4}),
        ("mixtral", {**KV, **EXPERTS}),
    ],
)
def test_what_keeps_documents_apart_passes(kind: str, fields: dict[str, Any]) -> None:
    require_separate_documents(model(kind, **fields))


@pytest.mark.parametrize(
    ("kind", "fields", "module"),
    [
        ("gpt_oss", {**KV, **EXPERTS}, "by model.layers.0.self_attn, a GptOssAttention"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "by model.decoder.layers.0.self_attn, a OPTAttention"),
        ("bert", {"is_decoder": True}, "a BertSelfAttention"),
        ("qwen3_next", {**KV, **EXPERTS, **LINEAR}, "by model.layers.0.linear_attn, a Qwen3NextGatedDeltaNet"),
        (
            "jamba",
            {**KV, **EXPERTS, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
            "a JambaMambaMixer",
        ),
    ],
)
def test_what_mixes_documents_is_refused_by_name(kind: str, fields: dict[str, Any], module: str) -> None:
    with pytest.raises(ConfigError, match=r"data.separate_documents: .* set it to false") as error:
        require_separate_documents(model(kind, **fields))
    assert module in str(error.value)


def test_what_cannot_be_tried_is_refused() -> None:
    class Own(nn.Linear):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(ConfigError, match="takes no position_ids"):
        require_separate_documents(model("bloom"))
    with pytest.raises(ConfigError, match="no small copy of it runs with them"):
        require_separate_documents(Own(2, 2))


def test_masked_logits_hide_no_difference() -> None:
    """Some models give tokens that are none the lowest number of the dtype, whose square is infinite."""
    masked = torch.tensor([torch.finfo(torch.float64).min, 1.0, 2.0], dtype=torch.float64)
    other = masked + torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    assert apart(masked, masked, 1.0) == 0.0
    assert apart(other, masked, 1.0) == pytest.approx(1 / (1 + 5**0.5))
    assert apart(-masked, masked, 1.0) == float("inf")
