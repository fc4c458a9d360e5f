"""Plans of architectures for which transformers has none, or one that gathers where parts would do. Data alone.

A rule is a pattern of FQNs (`*` matches anything, as in a shell) and a style; see `planner.py` for what the styles mean.
"""

from __future__ import annotations

from collections.abc import Mapping

Rules = Mapping[str, str]

_GPT2: Rules = {
    "*.attn.c_attn": "qkv_stacked",
    "*.attn.c_proj": "rowwise",
    "*.mlp.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise",
}
_OPT: Rules = {
    "*.self_attn.[qkv]_proj": "colwise",
    "*.self_attn.out_proj": "rowwise",
    "*.fc1": "colwise",
    "*.fc2": "rowwise",
}
_BLOOM: Rules = {
    "*.self_attention.query_key_value": "qkv_by_head",
    "*.self_attention.dense": "rowwise",
    "*.mlp.dense_h_to_4h": "colwise",
    "*.mlp.dense_4h_to_h": "rowwise",
}
_FALCON: Rules = {**_BLOOM, "*.self_attention.query_key_value": "qkv_falcon"}
_GPT_NEOX: Rules = {
    "*.attention.query_key_value": "qkv_by_head",
    "*.attention.dense": "rowwise",
    "*.mlp.dense_h_to_4h": "colwise",
    "*.mlp.dense_4h_to_h": "rowwise",
}
_BERT: Rules = {
    "*.self.query": "colwise",
    "*.self.key": "colwise",
    "*.self.value": "colwise",
    "*.attention.output.dense": "rowwise_heads",
    "*.crossattention.output.dense": "rowwise_heads",
    "*.intermediate.dense": "colwise",
    "*layer.*[0-9].output.dense": "rowwise",
}
_T5: Rules = {
    "*.SelfAttention.[qkv]": "colwise",
    "*.SelfAttention.o": "rowwise",
    "*.SelfAttention.relative_attention_bias": "embedding_heads",
    "*.EncDecAttention.[qkv]": "colwise",
    "*.EncDecAttention.o": "rowwise",
    "*.EncDecAttention.relative_attention_bias": "embedding_heads",
    "*.DenseReluDense.wi": "colwise",
    "*.DenseReluDense.wi_[01]": "colwise",
    "*.DenseReluDense.wo": "rowwise",
}
_PHI3: Rules = {
    "*.self_attn.qkv_proj": "qkv_stacked",
    "*.self_attn.o_proj": "rowwise",
    "*.mlp.gate_up_proj": "packed_colwise",
    "*.mlp.down_proj": "rowwise",
}
_GPTJ: Rules = {
    "*.attn.[qkv]_proj": "colwise",
    "*.attn.out_proj": "rowwise",
    "*.mlp.fc_in": "colwise",
    "*.mlp.fc_out": "rowwise",
}
_GPT_NEO: Rules = {
    "*.attention.[qkv]_proj": "colwise",
    "*.attention.out_proj": "rowwise",
    "*.mlp.c_fc": "colwise",
    "*.mlp.c_proj": "rowwise",
}
_STABLELM: Rules = {
    "*.self_attn.[qkv]_proj": "colwise",
    "*.self_attn.o_proj": "rowwise",
    "*.mlp.gate_proj": "colwise",
    "*.mlp.up_proj": "colwise",
    "*.mlp.down_proj": "rowwise",
}
_PERSIMMON: Rules = {
    "*.self_attn.query_key_value": "qkv_by_head",
    "*.self_attn.dense": "rowwise",
    "*.mlp.dense_h_to_4h": "colwise",
    "*.mlp.dense_4h_to_h": "rowwise",
}
_DEEPSEEK: Rules = {
    "*.self_attn.q_proj": "colwise",
    "*.self_attn.q_b_proj": "colwise",
    "*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "*.self_attn.kv_b_proj": "colwise",
    "*.self_attn.o_proj": "rowwise",
    "*.mlp.experts": "moe_tp_experts",
    "*.mlp.gate_proj": "colwise",
    "*.mlp.up_proj": "colwise",
    "*.mlp.down_proj": "rowwise",
    "*.mlp.shared_experts.gate_proj": "colwise",
    "*.mlp.shared_experts.up_proj": "colwise",
    "*.mlp.shared_experts.down_proj": "rowwise",
}

OWN: Mapping[str, Rules] = {
    "gpt2": _GPT2,
    "opt": _OPT,
    "bloom": _BLOOM,
    "falcon": _FALCON,
    "gpt_neox": _GPT_NEOX,
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "phi3": _PHI3,
    "gptj": _GPTJ,
    "gpt_neo": _GPT_NEO,
    "stablelm": _STABLELM,
    "persimmon": _PERSIMMON,
    "biogpt": _OPT,
    "ernie": _BERT,
    "megatron-bert": _BERT,
    "rembert": _BERT,
    "roformer": _BERT,
    "data2vec-text": _BERT,
    "bert-generation": _BERT,
    "roberta-prelayernorm": _BERT,
    "xlm-roberta-xl": _BERT,
    "deepseek_v3": _DEEPSEEK,
}
"""By `config.model_type`. Input and output embeddings are divided by vocabulary without a rule."""
