"""The tasks of `model.head`: for each a tiny model, and a batch whose samples have different numbers of targets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.architectures import ARCHITECTURES, SIZES
from tests.support.plain import stacked
from zeromesh.trainer.config.sections.model import Head

SAMPLES, LENGTH, VOCABULARY = 7, 8, 60
BERT = {"model_type": "bert", **SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "num_labels": 3}
_PICTURE = {"image_size": 16, "patch_size": 8}
SPEECH = {
    "model_type": "wav2vec2", **SIZES, "vocab_size": VOCABULARY, "conv_dim": [16, 16], "conv_stride": [4, 2],
    "conv_kernel": [8, 4], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_labels": 3,
    "classifier_proj_size": 16,
}  # fmt: skip
_LLAVA = {
    "model_type": "llava",
    "image_token_index": VOCABULARY - 1,
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
    "text_config": {"model_type": "llama", **SIZES, "vocab_size": VOCABULARY},
    "vision_config": {"model_type": "clip_vision_model", **SIZES, **_PICTURE},
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


@dataclass(frozen=True, slots=True)
class Task:
    """A model for a head, a batch, and the loss that is expected to be found for it."""

    head: Head
    config: dict[str, Any]
    batch: Callable[[], dict[str, torch.Tensor]]
    kind: str = "labels"
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


def labelled(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**text(), "labels": labels}


LLAMA = {"model_type": "llama", **SIZES, "vocab_size": VOCABULARY, "pad_token_id": 0, "num_labels": 3}
VIT = {"model_type": "vit", **SIZES, **_PICTURE, "num_labels": 3}
VIDEO = {**VIT, "model_type": "videomae", "num_frames": 4, "tubelet_size": 2}
SEGFORMER = {
    "model_type": "segformer", "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "num_labels": 3,
    "hidden_sizes": [16, 32], "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    "decoder_hidden_size": 32,
}  # fmt: skip
BART = {
    "model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
}  # fmt: skip
WHISPER = ARCHITECTURES["whisper"]
CTC = {kind: {**SPEECH, "ctc_loss_reduction": kind} for kind in ("sum", "mean")}
TASKS: dict[str, Task] = {
    "speech": Task("speech_seq2seq", WHISPER.config, lambda: stacked(WHISPER.samples(SAMPLES), range(SAMPLES))),
    "sequence": Task("sequence_classification", BERT, lambda: labelled(classes())),
    "regression": Task("sequence_classification", {**BERT, "num_labels": 1}, lambda: labelled(noise(SAMPLES))),
    "several labels": Task("sequence_classification", BERT, lambda: labelled((noise(SAMPLES, 3) > 0).double())),
    "decoder": Task("sequence_classification", LLAMA, lambda: labelled(classes())),
    "token": Task("token_classification", BERT, lambda: labelled(ragged(LENGTH, 3))),
    "question": Task("question_answering", {**BERT, "num_labels": 2}, spans, "answers"),
    "choice": Task("multiple_choice", BERT, lambda: {"input_ids": ids(SAMPLES, 3, LENGTH), "labels": classes()}),
    "next": Task("next_sentence_prediction", BERT, lambda: labelled(classes(2))),
    "image": Task("image_classification", VIT, lambda: {"pixel_values": noise(SAMPLES, 3, 16, 16), "labels": classes()}),
    "video": Task("video_classification", VIDEO, lambda: {"pixel_values": noise(SAMPLES, 4, 3, 16, 16), "labels": classes()}),
    "pixels": Task("semantic_segmentation", SEGFORMER, bounded),
    "picture and text": Task("image_text_to_text", _LLAVA, seen),
    "sound": Task("audio_classification", SPEECH, lambda: {"input_values": noise(SAMPLES, 240), "labels": classes()}),
    "transcript sum": Task("ctc", CTC["sum"], spoken, "transcripts", lambda loss, count: loss / count),
    "transcript mean": Task("ctc", CTC["mean"], spoken, "transcripts"),
    "translation": Task("seq2seq_lm", BART, lambda: labelled(ragged(LENGTH, VOCABULARY))),
}
