"""Random samples for a verification, each with another number of targets."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import ConfigError
from zeromesh.trainer.config.sections.model import AUTO_CLASSES, Head
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import IGNORED_LABEL
from zeromesh.trainer.models.adapters import pretrained_of
from zeromesh.trainer.models.user_model import ForwardInputs, integer, text_part

Sample = dict[str, Tensor]
_HEADS = (
    "causal_lm",
    "masked_lm",
    "seq2seq_lm",
    "token_classification",
    "sequence_classification",
    "question_answering",
)


def make_samples(model: nn.Module, config: TrainerConfig, count: int, length: int) -> list[Sample]:
    """Return `count` deterministic, distinct samples of `length` tokens for a model of transformers.

    Raises:
        ConfigError: for a task whose inputs are not known.
    """
    inside = pretrained_of(model)
    head = None if inside is None else _head_of(inside)
    vocabulary = ForwardInputs.of(model, users_loss=False).vocab_size
    if inside is None or head not in _HEADS or vocabulary is None:
        raise ConfigError(
            f"nothing is known of what {type(model).__name__} is fed with; give train_dataset to Trainer, with a model that is "
            "small enough to be taken as it is, and call verify()",
            where="verify",
        )
    separates = config.data.separates and "position_ids" in (ForwardInputs.of(model, users_loss=False).fields or ())
    classes = integer(inside.config, "num_labels") or 2
    generator, found = torch.Generator().manual_seed(1), []
    for index in range(count):
        sample: Sample = {"input_ids": torch.randint(3, vocabulary, (length,), generator=generator)}
        if separates:
            first = 3 + index % (length - 5)
            sample["position_ids"] = torch.cat((torch.arange(first), torch.arange(length - first)))
        found.append({**sample, **_labels(head, sample["input_ids"], index, classes, generator)})
    return found


def _head_of(model: Any) -> Head | None:
    """The class name of a model ends with that of its automatic class."""
    name = type(model).__name__
    if name.endswith("LMHeadModel"):
        return "causal_lm"
    if name.endswith("ForConditionalGeneration") and text_part(model.config).is_encoder_decoder:
        return "seq2seq_lm"
    endings: Mapping[str, Head] = {each.removeprefix("AutoModel"): head for head, each in AUTO_CLASSES.items()}
    return next((head for ending, head in endings.items() if ending and name.endswith(ending)), None)


def _labels(head: Head, ids: Tensor, index: int, classes: int, generator: torch.Generator) -> Sample:
    """Return the labels of a sample. Its first tokens have none: all of every eighth sample, and a few of the others."""
    length = len(ids)
    if head == "sequence_classification":
        return {"labels": torch.tensor(index % classes)}
    if head == "question_answering":
        return {"start_positions": torch.tensor(index % (length - 2)), "end_positions": torch.tensor(length - 1)}
    chosen = (
        torch.randint(0, classes, ids.shape, generator=generator) if head == "token_classification" else ids.clone()
    )
    left_out = length if index % 8 == 5 else index % (length - 2)
    return {"labels": chosen.masked_fill(torch.arange(length) < left_out, IGNORED_LABEL)}
