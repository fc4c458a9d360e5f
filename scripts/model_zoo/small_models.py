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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import nn
from transformers.models.auto import modeling_auto

from zeromesh.trainer.config.sections.model import AUTO_CLASSES, Head
from zeromesh.trainer.losses.trial import InFloat64
from zeromesh.trainer.verification.shrink import without_dropout

LARGEST = 8_000_000
"""Parameters of a small model."""
LENGTH = 12
SAMPLES = 8
_VOCABULARY = 96
_IGNORED = -100
_FEWEST_IDS = 3
"""The first ids are those of padding, and the beginning and end of a text."""

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
        (
            "bart",
            "mbart",
            "pegasus",
            "marian",
            "blenderbot",
            "blenderbot-small",
            "plbart",
            "mvp",
            "bigbird_pegasus",
            "prophetnet",
        ),
        "seq2seq_lm",
    )
    | dict.fromkeys(
        (
            *(
                "bert",
                "roberta",
                "camembert",
                "electra",
                "megatron-bert",
                "data2vec-text",
                "rembert",
                "roformer",
                "xlm-roberta",
            ),
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
    (r"vocab_size|.*_vocab_size|vocab_size_or_config_json_file", _VOCABULARY),
    (r"(num_)?(text_|image_|audio_)?image_size|.*image_size|input_size", 32),
    (r"(\w+_)?patch_size|patch_stride", 8),
    (r"num_key_value_heads|multi_query_group_num|num_kv_heads|n_head_kv|(swa_|\w+_)?num_key_value_heads", 2),
    (r"n_heads?|num_heads|num_attention_heads|(encoder|decoder)_attention_heads|\w*num_attention_heads|attention_heads", 4),
    (r"(\w+_)?head_dim|d_kv|kv_channels|key_length|(qk|v)_head_dim|attention_head_dim|\w*(key|value)_head_dim", 8),
    (r"qk_nope_head_dim|qk_rope_head_dim|rotary_dim", 8),
    (r"(q|kv|o)_lora_rank|\w*lora_rank", 8),
    (r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|num_(encoder|decoder|hidden)_layers|\w*_num_hidden_layers|depth|num_blocks|n_encoder_layers|(encoder|decoder)_num_layers", 4),
    (r"hidden_size|d_model|n_embd|(\w+_)?embed_dim|embedding_size|word_embed_proj_dim|\w*_?hidden_(size|dim)|dim|d_embed|emb_dim|d_text|attention_hidden_size|embedding_dim|projection_dim|width|(encoder|decoder)_hidden_size|conv_dim_out|lru_width|out_hidden_size|output_dim|model_dim", 32),
    (r"intermediate_size|ffn_dim|(encoder|decoder)_ffn_dim|d_ff|n_inner|ffn_hidden_size|d_inner|intermediate_dim|\w*intermediate_size(_mlp)?|feedforward_size|mlp_dim|inner_dim|ffn_intermediate_size|dim_feedforward", 48),
    (r"moe_\w*intermediate_size|shared_expert_intermediate_size|moe_hidden_size|expert_ffn_hidden_size|expert_dim", 16),
    (r"num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_moe_experts|num_routed_experts", 4),
    (r"num_experts_per_tok|moe_k|top_k_experts|moe_topk|num_selected_experts|num_experts_per_token|moe_top_k", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|num_nextn_predict_layers", 1),
    (r"max_position_embeddings|max_target_positions|n_positions|max_seq_len|seq_length|max_sequence_length|max_source_positions|n_ctx|context_length|max_seq_length", 64),
    (r"(ssm_|mamba_)?(d_)?state(_size|_dim)?|mamba_d_state|ssm_state_size|mamba_d_head|mamba_head_dim", 8),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_n_groups|n_groups|mamba_dt_rank|time_step_rank", 2),
    (r"\w*chunk_size|chunk_length|attention_chunk_size", 8),
    (r"num_mel_bins|feature_size|input_feat_per_channel", 8),
    (r"type_vocab_size", 2),
    (r"num_labels", 5),
    (r"mm_tokens_per_image", 16),
    (r"num_frames", 4),
    (r"num_queries|num_query_tokens|num_learnable_queries", 4),
    (r"num_codebook_vectors|codebook_size|num_embeddings", 32),
    (r"sliding_window|local_attention|attention_window|block_size", 4),
    (r"linear_num_(key|value)_heads|linear_attn_num_heads", 2),
)  # fmt: skip
_LISTS: Mapping[str, int] = {"hidden_sizes": 32, "embed_dims": 32, "encoder_hidden_sizes": 32, "decoder_hidden_sizes": 32,
    "depths": 1, "layer_depths": 1}  # fmt: skip
"""Lists of which each element becomes at most so large; of widths the i-th is (i + 1) times so wide."""


def _rule(name: str) -> int | None:
    return next((value for pattern, value in _RULES if re.fullmatch(pattern, name)), None)


def _changes(config: Any, layers: int, skipped: str) -> dict[str, Any]:
    """The small values of a configuration's own fields."""
    found: dict[str, Any] = {}
    whole = {name: value for name, value in config.to_dict().items() if not isinstance(value, dict)}
    depth = next(
        (whole[each] for each in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(whole.get(each), int)), 0
    )
    for name, value in whole.items():
        small = _rule(name)
        if isinstance(value, bool) or (skipped and re.fullmatch(skipped, name)):
            continue
        if isinstance(value, int) and small is not None:
            if small == 4 and "layer" in name or name in ("depth", "num_blocks"):
                small = layers
            found[name] = min(value, small) if value > 0 else value
        elif isinstance(value, list) and name in _LISTS:
            size = _LISTS[name]
            found[name] = [size if size == 1 else size * (index + 1) for index in range(len(value))]
        elif isinstance(value, list) and value and len(value) == depth > layers:
            found[name] = value[:layers]
        elif name.endswith("token_id") and isinstance(value, int) and value >= _VOCABULARY:
            found[name] = 1
        elif name.endswith(("dropout", "dropout_prob", "pdrop", "layerdrop", "drop_path_rate", "dropout_rate")):
            found[name] = 0.0 if isinstance(value, float) else value
    return found


_AS_HEADS = {"num_key_value_heads": 4}
_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_OF_TYPES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minicpm3", "axk1", "axk2", "kimi_k2"), _AS_HEADS
    ),
    **dict.fromkeys(("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl"), _ROTARY),
    "mamba2": {"num_heads": 8},
    "esm": {"vocab_size": _VOCABULARY, "pad_token_id": 0, "mask_token_id": 1},
    "dots1": {"n_routed_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "longt5": {"decoder_start_token_id": 0},
}
"""What some types need beside: numbers that follow from others, and such as have no value by default."""

_PICTURE_TOKENS = {"image_token_id": 80, "image_token_index": 80, "video_token_id": 82, "video_token_index": 82}
_PICTURE_TOKENS |= {"boi_token_index": 81, "eoi_token_index": 83, "audio_token_id": 84, "audio_token_index": 84}
_PICTURE_TOKENS |= {
    "vision_start_token_id": 85,
    "vision_end_token_id": 86,
    "image_start_token_id": 85,
    "image_end_token_id": 86,
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
    samples: list[dict[str, torch.Tensor]]
    note: str
    """What the samples lack of what the type is fed with; empty where they have all."""

    def build(self) -> Any:
        """The model in float64, without dropout, always with the same values."""
        return _built(self.config, self.head)


def _built(config: Any, head: Head) -> Any:
    torch.manual_seed(11)
    made = getattr(tf, AUTO_CLASSES[head]).from_config(
        copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False
    )
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
                    config = _without_fused(_small_config(whole, layers, skipped, anew=anew))
                    type(config).from_dict(config.to_dict())  # It is read again from a directory.
                    with torch.device("meta"):
                        size = sum(
                            p.numel()
                            for p in getattr(tf, AUTO_CLASSES[head]).from_config(copy.deepcopy(config)).parameters()
                        )
                    if size > LARGEST:
                        failures.append(f"{head}: {size:,} parameters")
                        continue
                    model = _built(config, head).train()
                    samples, note = _samples_with_loss(model, head)
                except ERRORS as error:
                    failures.append(
                        f"{head}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                    )
                    continue
            return SmallModel(kind=kind, head=head, config=config, samples=samples, note=note)
    raise NotBuiltError("; ".join(dict.fromkeys((failures or ["it has no task"])[:: max(1, len(failures) - 1)])))


def _without_fused(config: Any) -> Any:
    """The same with the experts and attentions that have float64, and with what only a directory of weights would say."""
    config.architectures = []
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


Samples = list[dict[str, torch.Tensor]]


def _samples_with_loss(model: Any, head: Head) -> tuple[Samples, str]:
    """The first of the possible samples that the model has a finite loss and gradients for."""
    failures: list[Exception] = []
    for samples, note in _possible_samples(model, head):
        try:
            _require_loss(model, samples[:2])
        except ERRORS as error:
            wanted = re.search(r"features:? (\d+)", str(error)) or re.search(r"features (\d+)", str(error))
            if wanted and "pixel_values" in samples[0] and 0 < int(wanted[1]) // 2 <= 64 and "input_ids" in samples[0]:
                again = _with_picture_tokens(model, samples, int(wanted[1]) // 2)
                try:
                    _require_loss(model, again[:2])
                except ERRORS as second:
                    failures.append(second)
                    continue
                return again, note
            failures.append(error)
            continue
        return samples, note
    raise failures[0]


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


def _possible_samples(model: Any, head: Head) -> Iterator[tuple[Samples, str]]:
    generator = torch.Generator().manual_seed(1)
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    vocabulary = min(int(getattr(text, "vocab_size", None) or _VOCABULARY), 76)

    def tokens(length: int = LENGTH) -> torch.Tensor:
        return torch.randint(_FEWEST_IDS, max(vocabulary, _FEWEST_IDS + 1), (length,), generator=generator)

    def each(make: Callable[[int], dict[str, torch.Tensor]]) -> Samples:
        return [make(index) for index in range(SAMPLES)]

    def classes(index: int) -> torch.Tensor:
        return torch.tensor(index % max(1, int(getattr(model.config, "num_labels", 2))))

    def pictures(channels: int, size: int) -> torch.Tensor:
        return torch.randn(channels, size, size, generator=generator, dtype=torch.float64)

    vision = getattr(model.config, "vision_config", None) or model.config
    size = getattr(vision, "image_size", None) or 32
    size = size if isinstance(size, int) else list(size)[0]
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    if head in ("causal_lm", "masked_lm"):
        yield each(lambda index: (lambda ids: {"input_ids": ids, "labels": ids.clone()})(tokens())), ""
    elif head == "seq2seq_lm":
        yield (
            each(
                lambda index: {
                    "input_ids": tokens(),
                    "attention_mask": torch.ones(LENGTH, dtype=torch.long),
                    "labels": tokens(LENGTH - 2),
                }
            ),
            "",
        )
    elif head == "sequence_classification":
        yield (
            each(
                lambda index: {
                    "input_ids": tokens(),
                    "attention_mask": torch.ones(LENGTH, dtype=torch.long),
                    "labels": classes(index),
                }
            ),
            "",
        )
    elif head == "image_text_to_text":
        yield (
            _with_picture_tokens(
                model, each(lambda index: {"input_ids": tokens(), "pixel_values": pictures(channels, size)}), 16
            ),
            "",
        )
        yield (
            _with_picture_tokens(
                model, each(lambda index: {"input_ids": tokens(), "pixel_values": pictures(channels, size)}), 0
            ),
            "",
        )
        yield each(lambda index: (lambda ids: {"input_ids": ids, "labels": ids.clone()})(tokens())), "text alone"
        yield (
            each(
                lambda index: (
                    lambda ids: {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
                )(tokens())
            ),
            "text alone",
        )
        yield (
            each(
                lambda index: (
                    lambda ids: {"input_ids": ids, "mm_token_type_ids": torch.zeros_like(ids), "labels": ids.clone()}
                )(tokens())
            ),
            "text alone",
        )
    elif head in ("image_classification", "semantic_segmentation"):
        for wide in (size, 64, 224):
            if head == "image_classification":
                yield (
                    each(lambda index, wide=wide: {"pixel_values": pictures(channels, wide), "labels": classes(index)}),
                    "",
                )
            else:
                yield (
                    each(
                        lambda index, wide=wide: {
                            "pixel_values": pictures(channels, wide),
                            "labels": torch.randint(0, 2, (wide, wide), generator=generator),
                        }
                    ),
                    "",
                )
    elif head == "video_classification":
        frames = int(getattr(model.config, "num_frames", None) or getattr(model.config, "frames_per_clip", None) or 4)
        yield (
            each(
                lambda index: {
                    "pixel_values": torch.stack([pictures(channels, size) for _ in range(frames)]),
                    "labels": classes(index),
                }
            ),
            "",
        )
        yield (
            each(
                lambda index: {
                    "pixel_values_videos": torch.stack([pictures(channels, size) for _ in range(frames)]),
                    "labels": classes(index),
                }
            ),
            "",
        )
    else:
        yield from _sounds(model, head, tokens, classes, generator, each)


def _sounds(
    model: Any, head: Head, tokens: Any, classes: Any, generator: torch.Generator, each: Any
) -> Iterator[tuple[Samples, str]]:
    bins = next((int(value) for name in ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim", "input_dim")
        if (value := getattr(model.config, name, None) or getattr(getattr(model.config, "encoder_config", None), name, None))), 8)  # fmt: skip
    length = 2 * int(getattr(model.config, "max_source_positions", None) or 32)

    def labels(index: int) -> torch.Tensor:
        return tokens(LENGTH - 4) if head != "audio_classification" else classes(index)

    def spectrum(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    yield each(lambda index: {"input_features": spectrum(bins, length), "labels": labels(index)}), ""
    yield each(lambda index: {"input_features": spectrum(length, bins), "labels": labels(index)}), ""
    yield (
        each(
            lambda index: {
                "input_features": spectrum(length, bins),
                "attention_mask": torch.ones(length, dtype=torch.long),
                "labels": labels(index),
            }
        ),
        "",
    )
    yield each(lambda index: {"input_values": spectrum(6400), "labels": labels(index)}), ""
    yield (
        each(
            lambda index: {
                "input_values": spectrum(int(getattr(model.config, "max_length", 64) or 64), bins),
                "labels": labels(index),
            }
        ),
        "",
    )


def _with_picture_tokens(model: Any, samples: Samples, count: int) -> Samples:
    """The samples with `count` tokens of a picture before their text."""
    token = next(
        (
            value
            for name in ("image_token_id", "image_token_index")
            if isinstance(value := getattr(model.config, name, None), int)
        ),
        80,
    )
    found = []
    for sample in samples:
        text = sample["input_ids"][sample["input_ids"] != token]
        ids = torch.cat([torch.full((count,), token), text])
        more = {"token_type_ids": (ids == token).long()} if "gemma3" in model.config.model_type else {}
        found.append(
            {
                **sample,
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "labels": ids.masked_fill(ids == token, _IGNORED),
                **more,
            }
        )
    return found


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters by name."""
    return {name: each.detach().clone() for name, each in model.named_parameters()}
