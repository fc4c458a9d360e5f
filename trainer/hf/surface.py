"""The names by which users of `transformers.Trainer` know what a trainer does, so that a changed import is all that they change."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, TrainingArguments

from zeromesh.trainer.collate import Collate
from zeromesh.trainer.hf.losses import ComputeLoss
from zeromesh.trainer.report import FitReport

if TYPE_CHECKING:
    from zeromesh.trainer.config import TrainerConfig
    from zeromesh.trainer.trainer import Trainer


class TransformersNames:
    """Of `Trainer`."""

    training_arguments: TrainingArguments | None = None
    """What the trainer was given in place of a configuration."""

    @property
    def args(self) -> TrainingArguments | TrainerConfig:
        """The arguments or the configuration that the trainer was given."""
        return self.training_arguments or self._self.config

    @property
    def _self(self) -> Trainer:
        return cast("Trainer", self)

    def train(self, resume_from_checkpoint: str | PathLike[str] | bool | None = None) -> FitReport:
        """`Trainer.fit`."""
        return self._self.fit(resume_from_checkpoint)

    def add_callback(self, callback: Any) -> None:
        """One more callback, an object, or a class of transformers. Raises `ConfigError` for what is none."""
        self._self.events.add(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Take a callback out, given itself or its class; returns it, or None where there is none."""
        return self._self.events.take_out(callback)

    def remove_callback(self, callback: Any) -> None:
        """Take a callback out, given itself or its class."""
        self._self.events.take_out(callback)

    def save_model(self, output_dir: str | PathLike[str] | None = None) -> None:
        """`Trainer.save`, by default into the run's directory."""
        self._self.save(output_dir if output_dir is not None else self._self.run_directory)

    def save_state(self) -> None:
        """Nothing is left to do: the state is in the run's checkpoints and in `metrics.jsonl`."""

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._self.mesh.rank == 0

    def is_local_process_zero(self) -> bool:
        """Whether this is the first rank of its host."""
        return self._self.mesh.environment.local_rank == 0

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print values, one a line; rank 0 does."""
        if self.is_world_process_zero():
            lines = "\n".join(f"  {name} = {value}" for name, value in sorted(metrics.items()))
            self._self.note(f"{split} metrics\n{lines}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write values to `SPLIT_results.json` in the run's directory, and to `all_results.json`; rank 0 does."""
        if not self.is_world_process_zero():
            return
        directory = self._self.run_directory
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / f"{split}_results.json", metrics)
        if combined:
            path = directory / "all_results.json"
            earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            _write(path, {**earlier, **metrics})


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(values), indent=4, sort_keys=True) + "\n", encoding="utf-8")


def collator_of(given: Collate | None, processing_class: Any, *, datasets: bool) -> Collate | None:
    """What makes a batch of samples: as transformers does, samples of given datasets are padded by a tokenizer if there is one."""
    if given is None and datasets and isinstance(processing_class, PreTrainedTokenizerBase):
        return cast("Collate", DataCollatorWithPadding(processing_class))
    return given


def loss_of(
    trainer: TransformersNames, compute_loss: ComputeLoss | None, mean: Callable[..., Tensor] | None
) -> ComputeLoss | None:
    """The loss that a user has written: `compute_loss`, transformers' `compute_loss_func`, or `compute_loss` of a subclass, as
    transformers calls it. The latter two give the mean over a microbatch's targets."""
    if compute_loss is not None:
        return compute_loss
    own: Any = getattr(trainer, "compute_loss", None)
    if mean is None and own is None:
        return None

    def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
        count, inputs = _targets(batch), dict(batch)
        if mean is None:
            return own(model, inputs, return_outputs=False, num_items_in_batch=count) * count, count
        labels = inputs.pop("labels", None)
        return mean(model(**inputs), labels, num_items_in_batch=count) * count, count

    return loss


def _targets(batch: Mapping[str, Any]) -> int:
    """Labels that are not -100; samples where there are none."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor):
        return int((labels != -100).sum()) if not labels.is_floating_point() else labels.numel()
    return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 0)
