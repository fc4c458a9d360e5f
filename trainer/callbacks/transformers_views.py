"""The arguments, the state, and the views of loaders, optimizer and scheduler that callbacks of transformers get.

The real loaders, optimizer and scheduler are partitioned, or do not exist. The views stand for them, and can be read: what they
cannot do is an error, and not silence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments

from zeromesh.optim.fused_optimizer import GroupRules
from zeromesh.options import OptimizerSettings
from zeromesh.trainer.callbacks.control import RunState, TrainerControl
from zeromesh.trainer.checkpoints.best_metric import goal_of
from zeromesh.trainer.checkpoints.transformers_links import link_of
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.data.feed import Feed
from zeromesh.trainer.data.streaming import StreamedDataset


class ObservedTrainer(Protocol):
    """The part of a trainer that callbacks of transformers see."""

    @property
    def training_arguments(self) -> TrainingArguments | None: ...

    @property
    def config(self) -> TrainerConfig: ...

    @property
    def run_config(self) -> TrainerConfig: ...

    @property
    def inputs(self) -> Any: ...

    @property
    def control(self) -> TrainerControl: ...

    @property
    def state(self) -> RunState: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def processing_class(self) -> Any: ...

    @property
    def run(self) -> Any: ...

    def get_train_dataloader(self) -> Batches | None:
        """This rank's batches of the present epoch."""
        ...

    def batches_of(self, feed: Feed | None, first: int = 0) -> Batches | None:
        """This rank's batches of a feed from step `first` on."""
        ...


def arguments_of(config: TrainerConfig) -> TrainingArguments:
    """Arguments that say what a configuration says, as far as they have words for it."""

    intervals: dict[str, Any] = {}
    for kind, every in (
        ("logging", config.run.log_every),
        ("eval", config.run.eval_every),
        ("save", config.checkpoint.every_steps),
    ):
        by_epoch = isinstance(every, str)
        intervals[f"{kind}_strategy"] = "epoch" if by_epoch else "steps" if every else "no"
        intervals[f"{kind}_steps"] = 1 if by_epoch else every or 1
    known = config.schedule.name in transformers.SchedulerType._value2member_map_
    arguments = TrainingArguments(
        output_dir=f"{config.run.output_dir}/{config.run.name}",
        run_name=config.run.name,
        per_device_train_batch_size=config.batch.micro_size,
        per_device_eval_batch_size=config.batch.eval_micro_size or config.batch.micro_size,
        max_steps=config.run.max_steps,
        num_train_epochs=config.run.epochs or 1,
        learning_rate=config.optimizer.lr,
        weight_decay=config.optimizer.weight_decay,
        adam_beta1=config.optimizer.betas[0],
        adam_beta2=config.optimizer.betas[1],
        adam_epsilon=config.optimizer.eps,
        max_grad_norm=config.run.clip_norm,
        lr_scheduler_type=config.schedule.name if known else "cosine",
        warmup_steps=config.schedule.warmup_steps,
        logging_first_step=config.run.log_first_step,
        save_total_limit=config.checkpoint.keep_last,
        metric_for_best_model=config.run.metric,
        greater_is_better=goal_of(config.run.metric, config.run.metric_goal) == "highest",
        seed=config.run.seed % 2**32,
        label_smoothing_factor=config.run.label_smoothing,
        push_to_hub=config.hub.push,
        hub_model_id=config.hub.repository,
        hub_private_repo=config.hub.private,
        hub_revision=config.hub.revision,
        hub_strategy="end",
        report_to=[],
        use_cpu=True,
        disable_tqdm=False,
        **intervals,
    )
    # Not checked against the strategies: the run judges by every evaluation, and saves when one is best.
    arguments.load_best_model_at_end = config.run.load_best
    return arguments


def bring_up_to_date(state: TrainerState, trainer: ObservedTrainer, arguments: TrainingArguments | None) -> None:
    """Have `state` say where the run is now. It has the run's own list of what was logged."""
    now = trainer.state
    state.global_step, state.max_steps, state.epoch = now.step, now.max_steps, now.epoch
    state.num_train_epochs = max(1, math.ceil(now.epochs))
    state.num_input_tokens_seen, state.total_flos = now.tokens, now.total_flos
    state.is_world_process_zero = state.is_local_process_zero = now.is_world_process_zero
    state.train_batch_size = trainer.run_config.batch.micro_size
    history: Any = now.log_history
    state.log_history = history
    if arguments is None:
        return
    state.compute_steps(arguments, now.max_steps)
    if arguments.metric_for_best_model is not None and now.best_metric is not None:
        state.best_metric, state.best_global_step = now.best_metric, now.best_step
        state.best_model_checkpoint = None if now.best_checkpoint is None else str(link_of(Path(now.best_checkpoint)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """Stands for a data loader: the batches of one rank in a pass over a dataset, each a microbatch, on the rank's device.

    All ranks have as many, so that all can run the model on each: one that is out of samples gets some again, as with accelerate.
    """

    feed: Feed
    rank: int
    """The index of this rank along the data axes."""
    device: torch.device
    first: int = 0
    """The step that the pass begins with."""

    @property
    def dataset(self) -> Any:
        """The dataset that the batches are from."""
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
        """This view, at another learning rate."""
        self.param_groups = tuple(MappingProxyType({"lr": rate, **group}) for group in self._groups)
        return self


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Stands for the scheduler, after `last_epoch` steps."""

    rates: Sequence[float]
    """The learning rate of each group of parameters in the step that comes next."""
    last_epoch: int

    def get_last_lr(self) -> list[float]:
        """The learning rates, as schedulers of torch return them."""
        return list(self.rates)
