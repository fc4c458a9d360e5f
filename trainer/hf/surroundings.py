"""What callbacks of transformers are given beside arguments, state and control: data loaders, the optimizer and its scheduler.

The real ones are partitioned, or do not exist. These stand for them, and can be read: what they cannot do is an error, and not
silence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.optim.sharded import GroupRules, OptimizerSettings
from zeromesh.trainer.step import Feed
from zeromesh.trainer.streamed import StreamedDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Stands for a data loader: the batches of one rank in a pass over a dataset, each a microbatch, on the rank's device.

    All ranks have as many, so that all can run the model on each: one that is out of samples gets some again, as with accelerate.
    """

    feed: Feed
    rank: int
    """Along the data axes."""
    device: torch.device
    first: int = 0
    """The step that the pass begins with."""

    @property
    def dataset(self) -> Any:
        """What it is a pass over."""
        return self.feed.dataset

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self.feed.plan.micro_size

    def __len__(self) -> int:
        """Batches of a pass. Raises `TypeError` for a stream, as a data loader does."""
        if isinstance(self.feed.dataset, StreamedDataset):
            raise TypeError("a stream has no length")
        return self.feed.plan.rounds_per_epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        plan = self.feed.plan
        for step in self._steps():
            for microbatch in plan.microbatches(step, self.rank)[: plan.rounds_of(step)]:
                batch = self.feed.fetch(microbatch)
                yield {name: self._moved(value) for name, value in batch.items()}

    def _steps(self) -> Iterable[int]:
        plan = self.feed.plan
        if isinstance(self.feed.dataset, StreamedDataset):
            return itertools.count(self.first)
        if plan.epoch_size is None:  # An evaluation is one step.
            return range(1)
        return range(self.first, self.first + (plan.steps_per_epoch or math.ceil(plan.epoch_size / plan.global_size)))

    def _moved(self, value: Any) -> Any:
        return value.to(self.device) if isinstance(value, Tensor) else value


class OptimizerView:
    """Stands for the optimizer, whose states are partitioned: its groups of parameters, to be read."""

    def __init__(self, settings: OptimizerSettings, model: nn.Module) -> None:
        rules = GroupRules(settings)
        self.defaults: Mapping[str, Any] = MappingProxyType(
            {"betas": settings.betas, "eps": settings.eps, "momentum": settings.momentum}
        )
        parameters: list[list[nn.Parameter]] = [[] for _ in rules.groups]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameters[rules.group_of(name)].append(parameter)
        self._groups = [
            {**self.defaults, "weight_decay": group.weight_decay, "initial_lr": group.lr, "params": tuple(members)}
            for group, members in zip(rules.groups, parameters, strict=True)
            if members
        ]
        self.param_groups: Sequence[Mapping[str, Any]] = ()
        """Decayed parameters, and those that are not; a mapping that is not to be written to for each."""

    def at(self, rate: float) -> OptimizerView:
        """The same at another learning rate."""
        self.param_groups = tuple(MappingProxyType({"lr": rate, **group}) for group in self._groups)
        return self


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Stands for the scheduler, after `last_epoch` steps."""

    rates: Sequence[float]
    """Of each group of parameters, in the step that comes next."""
    last_epoch: int

    def get_last_lr(self) -> list[float]:
        """As in torch."""
        return list(self.rates)
