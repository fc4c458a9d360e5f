"""The batches of a run: its training and evaluation data as feeds, and a first look at them before anything large is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from zeromesh.errors import ConfigError, DataError
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.collate import Collate, MapDataset, check_first_batch
from zeromesh.trainer.data.packing import PackedDataset
from zeromesh.trainer.data.sampler import BatchPlan, SampleOrder
from zeromesh.trainer.data.streaming import StreamedDataset
from zeromesh.trainer.loop.prediction import PreprocessLogits
from zeromesh.trainer.loop.train_step import Feed
from zeromesh.trainer.losses.losses import ComputeLoss, LabelLoss, Loss
from zeromesh.trainer.models.forward_inputs import ForwardInputs
from zeromesh.trainer.setup.build import Data
from zeromesh.trainer.torch_lr_scheduler import MakeScheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class UserInputs:
    """What was handed to the trainer beside its configuration."""

    model: nn.Module | Callable[[], nn.Module] | None = None
    train_dataset: MapDataset | None = None
    eval_dataset: MapDataset | Mapping[str, MapDataset] | None = None
    collate: Collate | None = None
    compute_loss: ComputeLoss | None = None
    compute_metrics: Callable[[Any], Mapping[str, Any]] | None = None
    preprocess_logits_for_metrics: PreprocessLogits | None = None
    lr_scheduler: MakeScheduler | None = None
    processing_class: Any = None
    of_transformers: bool = False
    """Whether transformers' `TrainingArguments` are among it."""

    def names(self) -> dict[str, str]:
        """Which of these were given: that much of them can be compared between ranks."""
        return {each.name: "given" if getattr(self, each.name) is not None else "not given" for each in fields(self)}


class Feeds:
    """Of one run."""

    def __init__(
        self, config: TrainerConfig, given: UserInputs, data: Data, takes: ForwardInputs, loss: Loss, plan: BatchPlan
    ) -> None:
        self._config, self._given, self._data = config, given, data
        self._takes, self._loss, self._plan = takes, loss, plan
        self._checked: dict[int, PackedDataset] = {}
        """Those whose token ids have been looked at."""

    def check(self) -> list[str]:
        """Look at the first batch of each dataset; returns notes.

        Raises:
            ConfigError, DataError: for what cannot be trained on.
        """
        if self._config.optimizer.in_backward and self._given.compute_loss is not None:
            raise ConfigError(
                "optimizer.in_backward needs the number of targets before forward, and compute_loss tells it after; "
                "set optimizer.in_backward: false"
            )
        if self._config.batch.average == "samples" and self._given.compute_loss is not None:
            raise ConfigError(
                "batch.average: samples needs the number of targets before forward, and compute_loss tells it after; "
                "set it to tokens"
            )
        fields = self._takes.fields
        if self._config.data.separate_documents and fields is not None and "position_ids" not in fields:
            raise ConfigError(
                f"data.separate_documents: {self._takes.model} takes no position_ids, by which documents are told apart; "
                "set it to false"
            )
        if self._data.loaded is not None:
            self._takes.check_length(self._config.data.sequence_length, "lower data.sequence_length")
            if self._given.collate is None and isinstance(self._loss, LabelLoss) and not self._loss.causal:
                raise ConfigError(
                    f"{self._takes.model} does not predict the next token, so plain text has no labels for it; "
                    "give train_dataset, or a data_collator that makes labels, or set model.head: causal_lm"
                )
        notes = notes_on(self._data.train, self._plan)
        found = self.train()
        feeds = {} if found is None else {"train_dataset": found}
        feeds |= {name: self.evaluation(dataset) for name, dataset in self._data.evaluated().items()}
        for name, feed in feeds.items():
            batch = check_first_batch(
                feed.dataset,
                feed.order,
                feed.plan,
                collate=feed.collate,
                kept=feed.kept,
                vocab_size=feed.vocab_size,
                causal=feed.causal,
            )
            self._takes.check(batch)
            self._check_shares(batch)
            self._loss.count(batch)
            left_out = self._takes.left_out(batch)
            if left_out:
                takes = f"{self._takes.model}.forward does not take"
                notes.append(f"{name}: left out {', '.join(left_out)}, which {takes}")
        return notes

    def _check_shares(self, batch: Mapping[str, Any]) -> None:
        """Raise `DataError` for sequences that tensor ranks cannot share out, before one stage of a pipeline finds out."""
        parallel, ids = self._config.parallel, batch.get("input_ids")
        if parallel.sequence and isinstance(ids, torch.Tensor) and ids.ndim > 1 and ids.shape[1] % parallel.tensor:
            raise DataError(
                f"sequences of {ids.shape[1]} tokens cannot be shared out to {parallel.tensor} tensor ranks "
                f"(parallel.sequence); pad them to a multiple of {parallel.tensor}, or set parallel.sequence: false"
            )

    def train(self) -> Feed | None:
        """The training data, one global batch after the other; None where there is none."""
        if self._data.train is None:
            return None
        shuffle = self._config.data.shuffle
        return self._feed(self._data.train, self._plan, shuffle=shuffle)

    def evaluation(self, dataset: MapDataset) -> Feed:
        """A dataset as one global batch, in its own order."""
        batch = self._config.batch
        micro = min(batch.eval_micro_size or batch.micro_size, len(dataset))
        plan = BatchPlan(global_size=len(dataset), micro_size=micro, data_ranks=self._plan.data_ranks)
        return self._feed(dataset, plan, shuffle=False)

    def _feed(self, dataset: MapDataset | StreamedDataset, plan: BatchPlan, *, shuffle: bool) -> Feed:
        """Batches in the order of global sample indices. Raises `DataError` for ids that the vocabulary does not have."""
        if (
            isinstance(dataset, PackedDataset)
            and self._takes.vocab_size is not None
            and id(dataset) not in self._checked
        ):
            dataset.check_vocabulary(self._takes.vocab_size)
            self._checked[id(dataset)] = dataset
        own = self._config.data.seed
        seed = self._config.run.seed if own is None else own
        endless = isinstance(dataset, StreamedDataset)
        length = dataset.block if isinstance(dataset, StreamedDataset) else len(dataset)
        order = SampleOrder(length=length, seed=seed, shuffle=shuffle, endless=endless)
        return Feed(
            dataset=dataset,
            order=order,
            plan=plan,
            collate=self._given.collate,
            vocab_size=self._takes.vocab_size,
            causal=self._loss.causal,
            fields=self._takes.fields,
            kept=self._takes.named if self._config.data.remove_unused else None,
        )


def notes_on(dataset: MapDataset | StreamedDataset | None, plan: BatchPlan) -> list[str]:
    """What a person may not have meant."""
    if dataset is None or isinstance(dataset, StreamedDataset) or len(dataset) >= plan.global_size:
        return []
    return [
        f"train_dataset: {len(dataset)} samples are fewer than a global batch of {plan.global_size}: they come again in it"
    ]
