"""Trials on a small copy: packed documents that stay apart, and models divided by the shapes of their layers, compute the same."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from tests.support.architectures import SIZES, on_meta
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.tensor.plan.planner import plan_tensor
from zeromesh.trainer.losses.trial import require_separate_documents
from zeromesh.trainer.models.small_copy import deviation
from zeromesh.trainer.models.tensor_trial import require_equal_when_divided

KV = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip

LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def packed(kind: str, **fields: Any) -> Any:
    return on_meta(kind, **{"vocab_size": 96, **fields})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", KV),
        ("gpt2", {}),
        ("gemma2", {**KV, "sliding_window": 4}),
        ("mixtral", {**KV, **EXPERTS}),
        ("gpt_oss", {**KV, **EXPERTS, "sliding_window": 4}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),  # hands no position_ids to its masks
        ("bloom", {}),  # takes no position_ids, and needs none
        ("deepseek_v3", {**LATENT, **EXPERTS}),
        ("llama4_text", {**KV, **EXPERTS, "attention_chunk_size": 4, "intermediate_size_mlp": 32}),
    ],
)
def test_what_keeps_documents_apart_passes(kind: str, fields: dict[str, Any]) -> None:
    require_separate_documents(packed(kind, **fields))


@pytest.mark.parametrize(
    ("kind", "fields", "module"),
    [
        ("roberta", {"is_decoder": True}, "first in roberta.embeddings, a RobertaEmbeddings"),  # Its positions begin at 2.
        ("openai-gpt", {}, "first in transformer.h.0.attn, a Attention"),
        ("qwen3_next", {**KV, **EXPERTS, **LINEAR}, "first in model.layers.0.linear_attn, a Qwen3NextGatedDeltaNet"),
        ("jamba", {**KV, **EXPERTS, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}, "a JambaMambaMixer"),
    ],
)
def test_what_mixes_documents_is_refused_by_name(kind: str, fields: dict[str, Any], module: str) -> None:
    with pytest.raises(ConfigError, match=r"data.separate_documents: .* set it to false") as error:
        require_separate_documents(packed(kind, **fields))
    assert module in str(error.value)


def test_what_cannot_be_tried_is_refused() -> None:
    class Own(nn.Linear):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(ConfigError, match="no small copy of it runs with them"):
        require_separate_documents(Own(2, 2))


def test_masked_logits_hide_no_difference() -> None:
    """Some models give tokens that are none the lowest number of the dtype, whose square is infinite."""
    masked = torch.tensor([torch.finfo(torch.float64).min, 1.0, 2.0], dtype=torch.float64)
    other = masked + torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    assert deviation(masked, masked, 1.0) == 0.0
    assert deviation(other, masked, 1.0) == pytest.approx(1 / (1 + 5**0.5))
    assert deviation(-masked, masked, 1.0) == float("inf")


BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 44),
    "max_position_embeddings": 32, "pad_token_id": 1,
}  # fmt: skip
VIT = {**SIZES, "intermediate_size": 44, "image_size": 32}


def _model(kind: str, head: Any = "causal_lm", **fields: Any) -> nn.Module:
    """A model on the meta device; the library's plans of some divide their head alone."""
    made: nn.Module = on_meta(kind, head, **{"intermediate_size": 44, "vocab_size": 67, **fields})
    return made


def _trocr() -> nn.Module:
    decoder = tf.TrOCRConfig(
        d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=44, vocab_size=67, cross_attention_hidden_size=32
    )  # fmt: skip
    encoder = tf.ViTConfig(**VIT, patch_size=8)
    return tf.VisionEncoderDecoderModel(tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder))


class WholeGate(nn.Module):
    """What comes before the down projection, made by a layer of which no plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.down_proj = nn.Linear(32, 44), nn.Linear(44, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.widen(hidden))


class SoftMLP(nn.Module):
    """An MLP by its shape, whose activation sees all features at once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden).softmax(-1))


class First(nn.Module):
    """The first of the features: of those of a rank, under tensor parallelism."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[..., :1]


class ScaledMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.first, self.down = nn.Linear(32, 48), First(), nn.Linear(48, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.up(hidden).relu()
        return self.down(hidden) * (1 + self.first(hidden))


def _of(base: Any, mlp: type[nn.Module] | None, like: nn.Module) -> nn.Module:
    """A model of a class, or of one of its own with other MLPs."""

    class OtherMLPs(base):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for block in [each for each in self.modules() if hasattr(each, "mlp")]:
                block.mlp = mlp()

    with torch.device("meta"):
        return OtherMLPs(like.config) if mlp else base(like.config)


def _gpt2(mlp: type[nn.Module] | None = None) -> nn.Module:
    return _of(tf.GPT2LMHeadModel, mlp, _model("gpt2", num_hidden_layers=3, bos_token_id=0, eos_token_id=0))


def _llama(mlp: type[nn.Module] | None = None) -> nn.Module:
    return _of(tf.LlamaForCausalLM, mlp, _model("llama", num_key_value_heads=2))


def _big_bird() -> nn.Module:
    return _model("big_bird", "masked_lm", block_size=4, max_position_embeddings=64)


LAYERS = {"num_key_value_heads": 2, "layer_types": ["full_attention"] * 2, "block_auto_adjust_ff_dim": False}
RECURRENT = {"lru_width": 32, "intermediate_size": 88, "num_hidden_layers": 3}
"""A block of this model keeps the state of its last forward, which cannot be copied; it cannot share the sequence out."""


@pytest.mark.parametrize(
    ("model", "divided"),
    [
        (lambda: _model("mbart", "seq2seq_lm", **BART), 4 * 2 + 2 * 2 + 4 * 2 + 2 * 2 + 4 * 2 + 1),
        (lambda: _model("vit", "base", **VIT), (4 + 2) * 2),
        (_trocr, (4 + 2) * 2 + (8 + 2) * 2 + 1),
        (_gpt2, (2 + 2) * 3 + 2),
        (lambda: _model("lfm2", **LAYERS), (4 + 2 + 3) * 2 + 2),
        (lambda: _model("recurrent_gemma", **RECURRENT), 4 + 3 * 3),
    ],
    ids=["mbart", "vit", "trocr", "gpt2", "lfm2", "keeps states"],
)  # fmt: skip
def test_attention_and_mlps_are_recognised_and_equal(model: Any, divided: int) -> None:
    made = model()
    assert len(plan_tensor(made, 2).layers) >= divided - 1  # Scaled embeddings may be whole.
    for sequence in (False, True):
        require_equal_when_divided(made, {}, sequence=sequence)


def test_a_cache_in_the_results_is_no_difference() -> None:
    """Each rank has those of its own heads; published directories ask for them, and Llava's `forward` names no option."""
    vision = {"image_size": 8, "patch_size": 4, **SIZES}
    text = {"model_type": "llama", "vocab_size": 90, "use_cache": True, **KV, **SIZES}
    model = on_meta("llava", "image_text_to_text", vision_config={"model_type": "clip_vision_model", **vision}, text_config=text)
    assert model.config.text_config.use_cache
    require_equal_when_divided(model, {}, sequence=False)


@pytest.mark.parametrize(
    ("model", "rules", "message"),
    [
        (lambda: _gpt2(SoftMLP), {}, r"parallel\.tensor: .*transformer\.h\.0\.mlp\.down, a Linear, computes something"),
        (lambda: _gpt2(ScaledMLP), {}, r"transformer\.h\.0\.mlp\.first, a First, computes something else"),
        (_llama, {"*.gate_proj": "replicate"}, r"parallel\.plan: .*layers\.0\.mlp, a LlamaMLP, cannot compute its part \("),
        (_llama, {"*.input_layernorm": "replicated_with_grad_allreduce"}, r"input_layernorm, .* another gradient of its weight"),
        (_big_bird, {}, r"forward puts a BigBirdSelfAttention in the place of bert\.encoder\.layer\.\*\.attention\.self"),
        (lambda: _model("ctrl", dff=44), {}, r"multi_head_attention\.Wk, a RowParallelLinear, cannot compute its part"),
        (lambda: _llama(WholeGate), {}, r"mlp\.down_proj, a RowParallelLinear, .* has 22 of them here, and gets 44"),
    ],
    ids=[
        "softmax", "right on one rank", "one of two", "a sum of whole gradients", "other modules in forward", "names of its own",
        "a library's plan",
    ],
)  # fmt: skip
def test_what_computes_something_else_is_refused_by_its_module(model: Any, rules: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_equal_when_divided(model(), rules, sequence=False)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"*.up_proj": "mla_kv_a_proj"}, r"rule '\*\.up_proj': mla_kv_a_proj does not fit .*mlp\.up_proj, a Linear"),
        ({"*.mlp.up_proj": "qkv_stacked"}, r"does not fit .*layers\.0\.mlp\.up_proj, a Linear with weight \[44, 32\]"),
        ({"*.up_proj": "embedding_heads"}, r"embedding_heads does not fit .* \[44, 32\] .*or is no embedding"),
        ({"*.down_proj": "local_params"}, r"local_params does not fit model\.layers\.0\.mlp\.down_proj, a Linear .* is not known"),
    ],
)  # fmt: skip
def test_a_rule_that_does_not_fit_its_module_says_what_that_is(rules: dict[str, str], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_tensor(_llama(), 2, rules)


def test_a_gradient_of_another_shape_is_another_gradient() -> None:
    assert not deviation(torch.ones(2), torch.ones(3), 1.0) < 1
    assert deviation(torch.ones(2), torch.ones(2), 1.0) == 0
