"""Builds a small model of any type of transformers that can be built small, with samples on which it has a loss.

Every number of a configuration whose name tells what it is the size of becomes small, in the configurations inside it too. Types
differ in how sizes depend on each other, so several ways are tried in turn, until one can be built and has a finite loss.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from transformers.models.auto import modeling_auto

from model_zoo.samples import FORMS, Maker, Samples, with_picture_tokens
from zeromesh.trainer.config.sections.model import AUTO_CLASSES, Head
from zeromesh.trainer.models.small_copy import InFloat64
from zeromesh.trainer.verification.shrink import without_dropout

LARGEST = 8_000_000
"""Parameters of a small model."""
_VOCABULARY = 96

_MAPPINGS: Mapping[Head, str] = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image_text_to_text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "speech_seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "semantic_segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "video_classification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "audio_classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
}
"""The tasks, the first that a type has is that in which it is trained."""
_FIRST: Mapping[str, Head] = (
    dict.fromkeys(
        ("bart", "mbart", "pegasus", "marian", "blenderbot", "blenderbot-small", "plbart", "mvp", "bigbird_pegasus", "prophetnet"),
        "seq2seq_lm",
    )
    | dict.fromkeys(
        (
            *("bert", "roberta", "camembert", "electra", "megatron-bert", "data2vec-text", "rembert", "roformer", "xlm-roberta"),
            *("xlm-roberta-xl", "xmod", "ernie", "big_bird", "roberta-prelayernorm", "xlm", "xlnet", "modernbert"),
        ),
        "masked_lm",
    )
    | {"whisper": "speech_seq2seq", "xlnet": "sequence_classification"}
)
"""Types of which the first task is not that for which they were made."""


def heads_of_types() -> dict[str, tuple[Head, ...]]:
    """The tasks of every type of transformers that has one with a loss of its own, in the order in which they are tried."""
    found: dict[str, list[Head]] = {}
    for head, mapping in _MAPPINGS.items():
        for kind in getattr(modeling_auto, mapping):
            found.setdefault(kind, []).append(head)
    for kind, head in _FIRST.items():
        if head in found.get(kind, ()):
            found[kind] = [head, *(each for each in found[kind] if each != head)]
    return {kind: tuple(heads) for kind, heads in sorted(found.items())}


_RULES: tuple[tuple[str, int], ...] = (
    (r"vocab_size \w+_vocab_size", _VOCABULARY),
    (r"\w*image_size input_size", 32),
    (r"(\w+_)?patch_size patch_stride", 8),
    (r"(\w+_)?num_key_value_heads multi_query_group_num num_kv_heads n_head_kv", 2),
    (r"n_heads? num_heads attention_heads \w*num_attention_heads (encoder|decoder)_attention_heads", 4),
    (r"(\w+_)?head_dim d_kv kv_channels key_length \w*(key|value)_head_dim rotary_dim \w*lora_rank", 8),
    (r"n_layers? \w*num_hidden_layers num_layers num_(encoder|decoder|hidden)_layers depth num_blocks", 4),
    (r"n_encoder_layers (encoder|decoder)_(num_)?layers", 4),
    (r"\w*hidden_(size|dim) d_model n_embd (\w+_)?embed_dim embedding_size word_embed_proj_dim dim d_embed emb_dim d_text", 32),
    (r"embedding_dim projection_dim width conv_dim_out lru_width output_dim model_dim", 32),
    (r"\w*intermediate_size(_mlp)? ffn_dim (encoder|decoder)_ffn_dim d_ff n_inner ffn_hidden_size d_inner", 48),
    (r"intermediate_dim feedforward_size mlp_dim inner_dim dim_feedforward", 48),
    (r"moe_\w*intermediate_size shared_expert_intermediate_size moe_hidden_size expert_ffn_hidden_size expert_dim", 16),
    (r"num_local_experts num_experts n_routed_experts moe_num_experts num_moe_experts num_routed_experts", 4),
    (r"num_experts_per_tok moe_k top_k_experts moe_top_?k num_selected_experts num_experts_per_token", 2),
    (r"n_group topk_group n_shared_experts num_shared_experts num_nextn_predict_layers", 1),
    (r"max_position_embeddings max_(target|source)_positions n_positions max_seq_len(gth)? max_sequence_length", 64),
    (r"seq_length n_ctx context_length", 64),
    (r"(ssm_|mamba_)?(d_)?state(_size|_dim)? mamba_d_state ssm_state_size mamba_d_head mamba_head_dim", 8),
    (r"mamba_n_heads mamba_num_heads n_mamba_heads \w*chunk_size chunk_length num_mel_bins feature_size", 8),
    (r"input_feat_per_channel", 8),
    (r"mamba_n_groups n_groups mamba_dt_rank time_step_rank type_vocab_size linear_num_(key|value)_heads", 2),
    (r"num_labels", 5),
    (r"mm_tokens_per_image", 16),
    (r"num_frames num_queries num_query_tokens sliding_window local_attention attention_window block_size", 4),
    (r"num_codebook_vectors codebook_size num_embeddings", 32),
)
"""Patterns of names, and what such a number is at most; the first one counts that fits."""
_LISTS: Mapping[str, int] = {"hidden_sizes": 32, "embed_dims": 32, "encoder_hidden_sizes": 32, "decoder_hidden_sizes": 32,
    "depths": 1, "layer_depths": 1}  # fmt: skip
"""Lists of which each element becomes at most so large; of widths the i-th is (i + 1) times so wide."""


def _rule(name: str) -> int | None:
    fits = (value for patterns, value in _RULES if any(re.fullmatch(each, name) for each in patterns.split()))
    return next(fits, None)


def _changes(config: Any, layers: int, skipped: str) -> dict[str, Any]:
    """The small values of a configuration's own fields."""
    found: dict[str, Any] = {}
    whole = {name: value for name, value in config.to_dict().items() if not isinstance(value, dict)}
    depths = (whole.get(each) for each in ("num_hidden_layers", "n_layer", "num_layers"))
    depth = next((each for each in depths if isinstance(each, int)), 0)
    for name, value in whole.items():
        small = _rule(name)
        if isinstance(value, bool) or (skipped and re.fullmatch(skipped, name)):
            continue
        if isinstance(value, int) and small is not None:
            if (small == 4 and "layer" in name) or name in ("depth", "num_blocks"):
                small = layers
            if name == "num_key_value_heads" and "kv_lora_rank" in whole:
                small = 4  # Heads of latent attention have a key and a value each.
            found[name] = min(value, small) if value > 0 else value
        elif isinstance(value, list) and name in _LISTS:
            size = _LISTS[name]
            found[name] = [size if size == 1 else size * (index + 1) for index in range(len(value))]
        elif isinstance(value, list) and value and len(value) == depth > layers:
            found[name] = value[:layers]
        elif name.endswith("token_id") and isinstance(value, int) and value >= _VOCABULARY:
            found[name] = 1
        elif (
            "jitter" in name
            or name.startswith("mask_")
            or name.endswith(("dropout", "dropout_prob", "pdrop", "layerdrop", "drop_path_rate", "dropout_rate"))
        ):
            found[name] = 0.0 if isinstance(value, float) else value
    return found


_AS_HEADS = {"num_key_value_heads": 4}
_DECODER = {"is_decoder": True}
_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_OF_TYPES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa"), _AS_HEADS),
    "deepseek_v2": {**_AS_HEADS, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **dict.fromkeys(("minicpm3", "axk1", "axk2"), _AS_HEADS),
    **dict.fromkeys(("ministral", "hunyuan_v1_dense", "hunyuan_vl"), _ROTARY),
    "hunyuan_v1_moe": {**_ROTARY, "num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "bailing_hybrid": {"first_k_dense_replace": 1, "num_expert_group": 2, "topk_group": 1},
    **dict.fromkeys(("bert-generation", "roc_bert"), _DECODER),
    "mamba2": {"num_heads": 8},
    "esm": {"vocab_size": _VOCABULARY, "pad_token_id": 0, "mask_token_id": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _VOCABULARY,
        "pad_token_id": 0,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "longt5": {"decoder_start_token_id": 0},
}
"""Fields that some types need besides: numbers that follow from others, and those without a default."""

_PICTURE_TOKENS = {
    **dict.fromkeys(("image_token_id", "image_token_index"), 80),
    **dict.fromkeys(("video_token_id", "video_token_index"), 82),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), 84),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id"), 85),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id"), 86),
    "boi_token_index": 81,
    "eoi_token_index": 83,
}


def _small_config(config: Any, layers: int, skipped: str, *, anew: bool) -> Any:
    """A small copy; `anew`: made by its class from small numbers, so that fields that follow from others do."""
    changes = _changes(config, layers, skipped)
    for name, value in _PICTURE_TOKENS.items():
        if isinstance(getattr(config, name, None), int):
            changes[name] = value
    changes |= _OF_TYPES.get(config.model_type, {})
    inside = {
        name: _small_config(value, layers, skipped, anew=anew)
        for name, value in vars(config).items()
        if isinstance(value, tf.PreTrainedConfig)
    }
    if anew:
        inner = {name: {**value.to_diff_dict(), "model_type": value.model_type} for name, value in inside.items()}
        derived = {"layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type"}
        derived -= _OF_TYPES.get(config.model_type, {}).keys()
        named = {name: value for name, value in changes.items() if name not in derived}
        return type(config)(**named, **inner)
    small = copy.deepcopy(config)
    for name, value in {**changes, **inside}.items():
        with contextlib.suppress(AttributeError, NotImplementedError):
            setattr(small, name, value)
    return small


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallModel:
    """A model that can be built again with the same values, and its samples."""

    kind: str
    head: Head
    config: Any
    samples: Samples
    note: str
    """The inputs of the type that the samples lack; empty where they have all."""

    def build(self) -> Any:
        """The model in float64, without dropout, always with the same values."""
        return _built(self.config, self.head)


def _built(config: Any, head: Head) -> Any:
    torch.manual_seed(11)
    automatic = getattr(tf, AUTO_CLASSES[head])
    made = automatic.from_config(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False)
    without_dropout(made)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.is_floating_point() and parameter.numel() and bool((parameter == parameter.view(-1)[0]).all()):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return made.double()


class NotBuiltError(ValueError):
    """A type of which no small model could be made; the text says why."""


ERRORS = (Exception,)
"""Whatever a type of somebody else's raises about numbers that nobody gave it before."""
_WAYS: tuple[tuple[int, str, bool], ...] = (
    (4, "", False),
    (4, "", True),
    (4, r".*head_dim|d_kv", True),
    (4, r".*head_dim|d_kv", False),
    (2, "", True),
    (8, "", True),
    (8, "", False),
    (4, r".*(head_dim|hidden_size|embed_dim|heads)", False),
    (4, r".*(patch|image).*", False),
)
"""Numbers of layers, names of fields that are left as they are, and whether the configuration is made anew; tried in turn."""


def small_model(kind: str, heads: tuple[Head, ...]) -> SmallModel:
    """The first small model of a type that has a loss.

    Raises:
        NotBuiltError: where there is none, with the reason of the first and of the last way.
    """
    failures: list[str] = []
    for head in heads:
        for layers, skipped, anew in _WAYS:
            with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    whole = tf.AutoConfig.for_model(kind)
                    config = _as_of_a_directory(_small_config(whole, layers, skipped, anew=anew))
                    type(config).from_dict(config.to_dict())  # It is read again from a directory.
                    _require_size(config, head)
                    samples, note = _samples_with_loss(_built(config, head).train(), head)
                except ERRORS as error:
                    text = str(error).strip().partition("\n")[0]
                    failures.append(f"{head}: {type(error).__name__}: {text}")
                    continue
            return SmallModel(kind=kind, head=head, config=config, samples=samples, note=note)
    raise NotBuiltError("; ".join(dict.fromkeys((failures or ["it has no task"])[:: max(1, len(failures) - 1)])))


def _require_size(config: Any, head: Head) -> None:
    with torch.device("meta"):
        made = getattr(tf, AUTO_CLASSES[head]).from_config(copy.deepcopy(config))
    size = sum(each.numel() for each in made.parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")


def _as_of_a_directory(config: Any) -> Any:
    """The same with the experts and attentions that have float64, and with what only a directory of weights would say."""
    config.architectures = []
    if hasattr(config, "ctc_loss_reduction"):
        config.ctc_loss_reduction = "mean"  # A sum of a batch is no mean of its microbatches' sums.
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    for each in (config, *(value for value in vars(config).values() if isinstance(value, tf.PreTrainedConfig))):
        each._experts_implementation = "eager"
        if hasattr(each, "use_cache"):
            with contextlib.suppress(AttributeError, NotImplementedError):
                each.use_cache = False
        for name in ("use_mambapy", "use_mamba_kernels"):
            if hasattr(each, name):
                setattr(each, name, False)
    return config


def _samples_with_loss(model: Any, head: Head) -> tuple[Samples, str]:
    """The first of the possible samples that the model has a finite loss and gradients for."""
    failures: list[Exception] = []
    for samples, note in FORMS[head](Maker(model)):
        try:
            _require_loss(model, samples[:2])
        except ERRORS as error:
            failures.append(error)
            wanted = re.search(r"features:? (\d+)", str(error))
            count = int(wanted[1]) // 2 if wanted else 0
            if not (0 < count <= _MOST_PICTURE_TOKENS and {"pixel_values", "input_ids"} <= samples[0].keys()):
                continue
            samples = with_picture_tokens(model.config, samples, count)
            with contextlib.suppress(*ERRORS):
                _require_loss(model, samples[:2])
                return samples, note
            continue
        return samples, note
    raise failures[0]


_MOST_PICTURE_TOKENS = 64


def _require_loss(model: Any, samples: Samples) -> None:
    batch = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
    with InFloat64():
        loss = model(**batch).loss
        if loss is None or not bool(torch.isfinite(loss)):
            raise ValueError("its loss is not finite" if loss is not None else "it has no loss of its own")
        trained = [each for each in model.parameters() if each.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    if not any(each is not None and bool(each.isfinite().all()) and bool(each.any()) for each in gradients):
        raise ValueError("its loss has no gradients")
