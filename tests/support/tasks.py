"""The tasks of `model.head`: for each a tiny model, and a batch whose samples have different numbers of targets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.architectures import ARCHITECTURES
from tests.support.plain import stacked
from zeromesh.trainer.config.sections.model import Head

SAMPLES, LENGTH, VOCABULARY = 7, 8, 60
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {"model_type": "bert", **_SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "num_labels": 3}
_PICTURE = {"image_size": 16, "patch_size": 8}
SPEECH = {
    "model_type": "wav2vec2", **_SIZES, "vocab_size": VOCABULARY, "conv_dim": [16, 16], "conv_stride": [4, 2],
    "conv_kernel": [8, 4], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_labels": 3,
    "classifier_proj_size": 16,
}  # fmt: skip
_LLAVA = {
    "model_type": "llava",
    "image_token_index": VOCABULARY - 1,
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
    "text_config": {"model_type": "llama", **_SIZES, "vocab_size": VOCABULARY},
    "vision_config": {"model_type": "clip_vision_model", **_SIZES, **_PICTURE},
}


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY - 1, shape, generator=torch.Generator().manual_seed(0))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def ragged(length: int, classes: int) -> torch.Tensor:
    """Labels of which each sample masks another number, the fourth all."""
    labels = torch.randint(0, classes, (SAMPLES, length), generator=torch.Generator().manual_seed(2))
    for sample in range(SAMPLES):
        labels[sample, : (3 * sample) % length] = -100
    labels[3] = -100
    return labels


def classes(count: int = 3) -> torch.Tensor:
    """A label for each sample but one."""
    labels = torch.arange(SAMPLES) % count
    labels[2] = -100
    return labels


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model for a head, a batch, and the loss that is expected to be found for it."""

    head: Head
    config: dict[str, Any]
    batch: Callable[[], dict[str, torch.Tensor]]
    kind: str
    mean: Callable[[torch.Tensor, int], torch.Tensor] = lambda loss, count: loss
    """The mean over a batch of so many samples, of what the model gives for it."""


def text() -> dict[str, torch.Tensor]:
    mask = (torch.arange(LENGTH) < torch.arange(LENGTH - SAMPLES + 1, LENGTH + 1)[:, None]).long()
    return {"input_ids": ids(SAMPLES, LENGTH), "attention_mask": mask}


def spans() -> dict[str, torch.Tensor]:
    """Answers, one of which lies beyond its sequence."""
    starts = torch.tensor([0, 1, 5, LENGTH, 2, 3, 0])
    return {**text(), "start_positions": starts, "end_positions": (starts + 2).clamp(max=LENGTH)}


def bounded() -> dict[str, torch.Tensor]:
    """Pixels, of which the ignored ones have label 255."""
    labels = torch.randint(0, 3, (SAMPLES, 32, 32), generator=torch.Generator().manual_seed(3))
    labels[:, :5] = 255
    labels[1, 7:] = 255
    return {"pixel_values": noise(SAMPLES, 3, 32, 32), "labels": labels}


def seen() -> dict[str, torch.Tensor]:
    """A picture of four tokens and a class, then text."""
    tokens = ids(SAMPLES, 5 + LENGTH)
    tokens[:, :5] = VOCABULARY - 1
    labels = tokens.clone()
    labels[:, :6] = -100
    labels[2, 9:] = -100
    return {"input_ids": tokens, "pixel_values": noise(SAMPLES, 3, 16, 16), "labels": labels}


def spoken() -> dict[str, torch.Tensor]:
    """Sounds and transcripts, which are short."""
    labels = ids(SAMPLES, 4).clone()
    for sample in range(SAMPLES):
        labels[sample, 1 + sample % 4 :] = -100
    return {"input_values": noise(SAMPLES, 240), "labels": labels}


TASKS: dict[str, Task] = {
    "speech": Task(
        head="speech_seq2seq",
        config=ARCHITECTURES["whisper"].config,
        batch=lambda: stacked(ARCHITECTURES["whisper"].samples(SAMPLES), range(SAMPLES)),
        kind="labels",
    ),
    "sequence": Task(
        head="sequence_classification", config=BERT, batch=lambda: {**text(), "labels": classes()}, kind="labels"
    ),
    "regression": Task(
        head="sequence_classification",
        config={**BERT, "num_labels": 1},
        batch=lambda: {**text(), "labels": noise(SAMPLES)},
        kind="labels",
    ),
    "several labels": Task(
        head="sequence_classification",
        config=BERT,
        batch=lambda: {**text(), "labels": (noise(SAMPLES, 3) > 0).double()},
        kind="labels",
    ),
    "decoder": Task(
        head="sequence_classification",
        config={"model_type": "llama", **_SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": 3},
        batch=lambda: {**text(), "labels": classes()},
        kind="labels",
    ),
    "token": Task(
        head="token_classification", config=BERT, batch=lambda: {**text(), "labels": ragged(LENGTH, 3)}, kind="labels"
    ),
    "question": Task(head="question_answering", config={**BERT, "num_labels": 2}, batch=spans, kind="answers"),
    "choice": Task(
        head="multiple_choice",
        config=BERT,
        batch=lambda: {"input_ids": ids(SAMPLES, 3, LENGTH), "labels": classes()},
        kind="labels",
    ),
    "next": Task(
        head="next_sentence_prediction", config=BERT, batch=lambda: {**text(), "labels": classes(2)}, kind="labels"
    ),
    "image": Task(
        head="image_classification",
        config={"model_type": "vit", **_SIZES, **_PICTURE, "num_labels": 3},
        batch=lambda: {"pixel_values": noise(SAMPLES, 3, 16, 16), "labels": classes()},
        kind="labels",
    ),
    "video": Task(
        head="video_classification",
        config={"model_type": "videomae", **_SIZES, **_PICTURE, "num_frames": 4, "tubelet_size": 2, "num_labels": 3},
        batch=lambda: {"pixel_values": noise(SAMPLES, 4, 3, 16, 16), "labels": classes()},
        kind="labels",
    ),
    "pixels": Task(
        head="semantic_segmentation",
        config={
            "model_type": "segformer",
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "num_labels": 3,
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 32,
        },
        batch=bounded,
        kind="labels",
    ),
    "picture and text": Task(head="image_text_to_text", config=_LLAVA, batch=seen, kind="labels"),
    "sound": Task(
        head="audio_classification",
        config=SPEECH,
        batch=lambda: {"input_values": noise(SAMPLES, 240), "labels": classes()},
        kind="labels",
    ),
    "transcript sum": Task(
        head="ctc",
        config={**SPEECH, "ctc_loss_reduction": "sum"},
        batch=spoken,
        kind="transcripts",
        mean=lambda loss, count: loss / count,
    ),
    "transcript mean": Task(
        head="ctc", config={**SPEECH, "ctc_loss_reduction": "mean"}, batch=spoken, kind="transcripts"
    ),
    "translation": Task(
        head="seq2seq_lm",
        config={
            "model_type": "bart",
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 32,
            "decoder_start_token_id": 2,
        },
        batch=lambda: {**text(), "labels": ragged(LENGTH, VOCABULARY)},
        kind="labels",
    ),
}
