"""Checks of the first batch of each dataset, before anything large is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.feed import Feeds
from zeromesh.trainer.data.streaming import StreamedDataset
from zeromesh.trainer.loop.context import UserInputs
from zeromesh.trainer.losses.losses import LabelLoss, Loss
from zeromesh.trainer.models.forward_inputs import ForwardInputs


def check_first_batches(
    feeds: Feeds, config: TrainerConfig, forward: ForwardInputs, loss: Loss, inputs: UserInputs
) -> list[str]:
    """Check the first batch of each dataset before anything large is allocated; returns notes for the start of the run.

    Raises:
        ConfigError, DataError: for settings and data that cannot be trained with.
    """
    _check_settings(config, forward, loss, inputs, text=feeds.data.loaded is not None)
    notes, train = [], feeds.data.train
    size = feeds.plan.global_size
    if train is not None and not isinstance(train, StreamedDataset) and len(train) < size:
        samples = f"{len(train)} samples are fewer than a global batch of {size}"
        notes.append(f"train_dataset: {samples}: they come again in it")
    for name, feed in feeds.named().items():
        batch = feed.first_batch()
        forward.check(batch)
        _check_sequence_shards(config, batch)
        loss.count(batch)
        left_out = forward.left_out(batch)
        if left_out:
            notes.append(f"{name}: left out {', '.join(left_out)}, which {forward.model}.forward does not take")
    return notes


def _check_settings(
    config: TrainerConfig, forward: ForwardInputs, loss: Loss, inputs: UserInputs, *, text: bool
) -> None:
    """Raise `ConfigError` for settings that do not go with the model, its loss or the user's inputs. `text`: the data is text that
    the configuration names."""
    if inputs.compute_loss is not None:
        late = "needs the number of targets before forward, and compute_loss counts them after it"
        if config.optimizer.in_backward:
            raise ConfigError(f"optimizer.in_backward {late}; set optimizer.in_backward: false")
        if config.batch.average == "samples":
            raise ConfigError(f"batch.average: samples {late}; set it to tokens")
    if config.data.separate_documents and forward.fields is not None and "position_ids" not in forward.fields:
        raise ConfigError(
            f"data.separate_documents: {forward.model} takes no position_ids, which separate documents; set it to false"
        )
    if text:
        forward.check_length(config.data.sequence_length, "lower data.sequence_length")
        if inputs.collate is None and isinstance(loss, LabelLoss) and not loss.causal:
            raise ConfigError(
                f"{forward.model} does not predict the next token, so plain text has no labels for it; "
                "give train_dataset, or a data_collator that makes labels, or set model.head: causal_lm"
            )


def _check_sequence_shards(config: TrainerConfig, batch: Mapping[str, Any]) -> None:
    """Raise `DataError` for sequences that tensor ranks cannot share out, before one stage of a pipeline finds out."""
    parallel, ids = config.parallel, batch.get("input_ids")
    if parallel.sequence and isinstance(ids, torch.Tensor) and ids.ndim > 1 and ids.shape[1] % parallel.tensor:
        raise DataError(
            f"sequences of {ids.shape[1]} tokens cannot be shared out to {parallel.tensor} tensor ranks "
            f"(parallel.sequence); pad them to a multiple of {parallel.tensor}, or set parallel.sequence: false"
        )
