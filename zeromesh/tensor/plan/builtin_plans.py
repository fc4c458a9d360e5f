"""Plans of architectures for which transformers has none, or one that gathers where parts would do. Data alone.

A rule is a pattern of FQNs (`*` matches anything, as in a shell) and a style; see `planner.py` for what the styles mean.
"""

from collections.abc import Mapping

Rules = Mapping[str, str]


def _rules(**patterns: str) -> Rules:
    """Rules from the patterns of each style, which are separated by spaces."""
    return {pattern: style for style, joined in patterns.items() for pattern in joined.split()}


_GPT2 = _rules(qkv_stacked="*.attn.c_attn", colwise="*.mlp.c_fc", rowwise="*.attn.c_proj *.mlp.c_proj")
_BART = _rules(
    colwise="*.self_attn.[qkv]_proj *.encoder_attn.[qkv]_proj *.fc1",
    rowwise="*.self_attn.out_proj *.encoder_attn.out_proj *.fc2",
)
_VIT = _rules(
    colwise="*.attention.[qkv]_proj *.mlp.fc1 *.feed_forward.intermediate_dense",
    rowwise="*.attention.o_proj *.attention.out_proj *.mlp.fc2 *.feed_forward.output_dense",
)
_BLOOM = _rules(
    qkv_by_head="*.query_key_value",
    colwise="*.mlp.dense_h_to_4h",
    rowwise="*attention.dense *.self_attn.dense *.mlp.dense_4h_to_h",
)
_FALCON = {**_BLOOM, **_rules(qkv_falcon="*.query_key_value")}
_BERT = _rules(
    colwise="*.self.query *.self.key *.self.value *.intermediate.dense",
    rowwise_heads="*.attention.output.dense *.crossattention.output.dense",
    rowwise="*layer.*[0-9].output.dense",
)
_T5 = _rules(
    colwise="*.SelfAttention.[qkv] *.EncDecAttention.[qkv] *.DenseReluDense.wi *.DenseReluDense.wi_[01]",
    rowwise="*.SelfAttention.o *.EncDecAttention.o *.DenseReluDense.wo",
    embedding_heads="*.SelfAttention.relative_attention_bias *.EncDecAttention.relative_attention_bias",
)
_PHI3 = _rules(
    qkv_stacked="*.self_attn.qkv_proj",
    packed_colwise="*.mlp.gate_up_proj",
    rowwise="*.self_attn.o_proj *.mlp.down_proj",
)
_GPTJ = _rules(colwise="*.attn.[qkv]_proj *.mlp.fc_in", rowwise="*.attn.out_proj *.mlp.fc_out")
_GPT_NEO = _rules(colwise="*.attention.[qkv]_proj *.mlp.c_fc", rowwise="*.attention.out_proj *.mlp.c_proj")
_STABLELM = _rules(
    colwise="*.self_attn.[qkv]_proj *.mlp.gate_proj *.mlp.up_proj *.mlp.fc1",
    rowwise="*.self_attn.o_proj *.mlp.down_proj *.mlp.fc2",
)
_DEEPSEEK = _rules(
    colwise=(
        "*.self_attn.q_proj *.self_attn.q_b_proj *.self_attn.kv_b_proj *.mlp.gate_proj *.mlp.up_proj "
        "*.mlp.shared_experts.gate_proj *.mlp.shared_experts.up_proj"
    ),
    mla_kv_a_proj="*.self_attn.kv_a_proj_with_mqa",
    moe_tp_experts="*.mlp.experts",
    rowwise="*.self_attn.o_proj *.mlp.down_proj *.mlp.shared_experts.down_proj",
)
_BERT_KINDS = (
    *("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "megatron-bert", "rembert", "roformer"),
    *("data2vec-text", "bert-generation", "roberta-prelayernorm", "xlm-roberta-xl"),
    *("layoutlm", "roc_bert", "esm", "markuplm", "canine", "tapas", "mpnet"),
)
_BART_KINDS = (
    *("opt", "biogpt", "bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot", "blenderbot-small", "plbart"),
    *("whisper", "speech_to_text", "clip", "metaclip_2", "siglip", "mvp"),
)
_VIT_KINDS = (
    *("vit", "deit", "audio-spectrogram-transformer", "dinov2", "dinov2_with_registers", "ijepa", "vit_msn", "vivit"),
    *("videomae", "wav2vec2", "hubert", "unispeech", "unispeech-sat", "sew"),
)

OWN: Mapping[str, Rules] = {
    **dict.fromkeys(("gpt2", "openai-gpt"), _GPT2),
    "gpt_bigcode": {**_GPT2, "*.attn.c_attn": "qkv_falcon"},
    "mpt": _rules(qkv_stacked="*.attn.Wqkv", colwise="*.ffn.up_proj", rowwise="*.attn.out_proj *.ffn.down_proj"),
    "distilbert": _rules(colwise="*.attention.[qkv]_lin *.ffn.lin1", rowwise="*.attention.out_lin *.ffn.lin2"),
    "git": {**_BART, **_BERT},
    **dict.fromkeys(_BART_KINDS, _BART),
    **dict.fromkeys(_VIT_KINDS, _VIT),
    **dict.fromkeys(("bloom", "gpt_neox", "gpt_neox_japanese", "persimmon", "fuyu"), _BLOOM),
    "falcon": _FALCON,
    **dict.fromkeys(_BERT_KINDS, _BERT),
    **dict.fromkeys(("t5", "mt5", "umt5"), _T5),
    "phi3": _PHI3,
    "gptj": _GPTJ,
    "gpt_neo": _GPT_NEO,
    **dict.fromkeys(("stablelm", "gte", "nomic_bert", "jina_embeddings_v3", "emu3_text_model"), _STABLELM),
    "deepseek_v3": _DEEPSEEK,
}
"""By `config.model_type`. Input and output embeddings are divided by vocabulary without a rule."""
