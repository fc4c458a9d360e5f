"""Samples for a model of any task, always the same; several forms where types of one task are fed differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Sample = dict[str, Tensor]
Samples = list[Sample]
Forms = Iterator[tuple[Samples, str]]
"""Samples, and what they lack of what the type is fed with; empty where they have all."""

LENGTH = 12
COUNT = 8
IGNORED = -100
LARGEST_ID = 76
"""Ids of text are below it, and those of pictures above."""
_FEWEST_IDS = 3
"""The first ids are those of padding, and of the beginning and end of a text."""


class Maker:
    """Draws what samples are made of."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.generator = torch.Generator().manual_seed(1)
        text = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        self.vocabulary = max(min(int(getattr(text, "vocab_size", None) or LARGEST_ID), LARGEST_ID), _FEWEST_IDS + 1)
        vision = getattr(self.config, "vision_config", None) or self.config
        size = getattr(vision, "image_size", None) or 32
        self.size = size if isinstance(size, int) else next(iter(size))
        self.channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3

    def tokens(self, length: int = LENGTH) -> Tensor:
        return torch.randint(_FEWEST_IDS, self.vocabulary, (length,), generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def a_class(self, index: int) -> Tensor:
        return torch.tensor(index % max(1, int(getattr(self.config, "num_labels", 2))))

    def text(self, index: int, **more: Callable[[Tensor], Tensor]) -> Sample:
        ids = self.tokens()
        return {"input_ids": ids, "labels": ids.clone()} | {name: make(ids) for name, make in more.items()}

    def pictures(self, size: int, frames: int = 0) -> Tensor:
        shape = (self.channels, size, size)
        return self.normal(frames, *shape) if frames else self.normal(*shape)

    def first_of(self, *names: str, default: int) -> int:
        inside = getattr(self.config, "encoder_config", None)
        found = (getattr(self.config, name, None) or getattr(inside, name, None) for name in names)
        return next((int(value) for value in found if value), default)


def _every(make: Callable[[int], Sample]) -> Samples:
    return [make(index) for index in range(COUNT)]


def _texts(maker: Maker) -> Forms:
    yield _every(maker.text), ""


def _pairs(maker: Maker) -> Forms:
    def pair(index: int) -> Sample:
        return {**maker.text(index, attention_mask=torch.ones_like), "labels": maker.tokens(LENGTH - 2)}

    yield _every(pair), ""


def _classified(maker: Maker) -> Forms:
    def text(index: int) -> Sample:
        return {**maker.text(index, attention_mask=torch.ones_like), "labels": maker.a_class(index)}

    yield _every(text), ""


def _pictures_with_text(maker: Maker) -> Forms:
    def both(index: int) -> Sample:
        return {"input_ids": maker.tokens(), "pixel_values": maker.pictures(maker.size)}

    for count in (16, 0):
        yield with_picture_tokens(maker.config, _every(both), count), ""
    yield _every(maker.text), "text alone"
    yield _every(lambda index: maker.text(index, attention_mask=torch.ones_like)), "text alone"
    yield _every(lambda index: maker.text(index, mm_token_type_ids=torch.zeros_like)), "text alone"


def _classified_pictures(maker: Maker) -> Forms:
    for size in (maker.size, 64, 224):

        def picture(index: int, size: int = size) -> Sample:
            return {"pixel_values": maker.pictures(size), "labels": maker.a_class(index)}

        yield _every(picture), ""


def _segments(maker: Maker) -> Forms:
    for size in (maker.size, 64, 224):

        def picture(index: int, size: int = size) -> Sample:
            labels = torch.randint(0, 2, (size, size), generator=maker.generator)
            return {"pixel_values": maker.pictures(size), "labels": labels}

        yield _every(picture), ""


def _videos(maker: Maker) -> Forms:
    frames = maker.first_of("num_frames", "frames_per_clip", default=4)
    for name in ("pixel_values", "pixel_values_videos"):

        def video(index: int, name: str = name) -> Sample:
            return {name: maker.pictures(maker.size, frames), "labels": maker.a_class(index)}

        yield _every(video), ""


_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "feature_projection_input_dim", "input_dim")


def _sounds(maker: Maker, label: Callable[[int], Tensor]) -> Forms:
    bins, length = maker.first_of(*_BINS, default=8), 2 * maker.first_of("max_source_positions", default=32)
    heard = torch.ones(length, dtype=torch.long)
    most = maker.first_of("max_length", default=64)
    forms: list[Callable[[], Sample]] = [
        lambda: {"input_features": maker.normal(bins, length)},
        lambda: {"input_features": maker.normal(length, bins)},
        lambda: {"input_features": maker.normal(length, bins), "attention_mask": heard},
        lambda: {"input_values": maker.normal(6400)},
        lambda: {"input_values": maker.normal(most, bins)},
    ]
    for form in forms:
        yield _every(lambda index, form=form: {**form(), "labels": label(index)}), ""  # type: ignore[misc]


def _spoken(maker: Maker) -> Forms:
    return _sounds(maker, lambda index: maker.tokens(LENGTH - 4))


def _classified_sounds(maker: Maker) -> Forms:
    return _sounds(maker, maker.a_class)


FORMS: dict[str, Callable[[Maker], Forms]] = {
    "causal_lm": _texts,
    "masked_lm": _texts,
    "seq2seq_lm": _pairs,
    "sequence_classification": _classified,
    "image_text_to_text": _pictures_with_text,
    "image_classification": _classified_pictures,
    "semantic_segmentation": _segments,
    "video_classification": _videos,
    "speech_seq2seq": _spoken,
    "ctc": _spoken,
    "audio_classification": _classified_sounds,
}
"""By task."""


def with_picture_tokens(config: Any, samples: Samples, count: int) -> Samples:
    """The samples with `count` tokens of a picture before their text."""
    named = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    token = next((value for value in named if isinstance(value, int)), 80)
    found = []
    for sample in samples:
        ids = torch.cat([torch.full((count,), token), sample["input_ids"][sample["input_ids"] != token]])
        mine = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(ids == token, IGNORED)}
        more = {"token_type_ids": (ids == token).long()} if "gemma3" in config.model_type else {}
        found.append({**sample, **mine, **more})
    return found


def documents(samples: Samples) -> tuple[Samples, Samples]:
    """Each sample as two documents in one sequence, and the documents alone."""
    packed, alone = [], []
    for sample in samples:
        ids = sample["input_ids"]
        half = len(ids) // 2
        labels = ids.clone()
        labels[half] = IGNORED
        packed.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(half).repeat(2)})
        alone += [{"input_ids": part, "labels": part.clone()} for part in (ids[:half], ids[half:])]
    return packed, alone
