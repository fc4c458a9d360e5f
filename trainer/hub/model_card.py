"""Model cards: transformers' own draft, of what a run knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from transformers.modelcard import TrainingSummary

from zeromesh.files import write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.callbacks.transformers_callbacks import arguments_of
from zeromesh.trainer.config.trainer_config import TrainerConfig
from zeromesh.trainer.models.adapters import is_adapted


class DescribedTrainer(Protocol):
    """What a model card is made from."""

    @property
    def training_arguments(self) -> Any: ...

    @property
    def run_config(self) -> TrainerConfig: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def model(self) -> Any: ...

    @property
    def state(self) -> Any: ...

    @property
    def train_dataset(self) -> Any: ...

    @property
    def eval_dataset(self) -> Any: ...


def write_model_card(trainer: DescribedTrainer, directory: Path, values: Mapping[str, Any]) -> None:
    """Write `README.md`. `values` are what the user says of the model, by transformers' names."""
    described = SimpleNamespace(  # What transformers reads of a trainer for a card.
        args=trainer.training_arguments or arguments_of(trainer.run_config),
        model=trainer.model,
        state=trainer.state,
        train_dataset=trainer.train_dataset,
        eval_dataset=trainer.eval_dataset,
    )
    summary = TrainingSummary.from_trainer(described, **values)
    summary.hyperparameters |= _over_ranks(trainer)
    path = directory / "README.md"
    write_whole(path, summary.to_model_card().encode())
    if is_adapted(trainer.model):
        model: Any = trainer.model
        model.create_or_update_model_card(str(directory))


def _over_ranks(trainer: DescribedTrainer) -> dict[str, int]:
    """What follows from the number of ranks, which transformers' arguments do not always know."""
    config, mesh = trainer.run_config, trainer.mesh
    if mesh.world_size == 1:
        return {}
    micro = config.batch.eval_micro_size or config.batch.micro_size
    return {
        "num_devices": mesh.world_size,
        "total_train_batch_size": config.batch.global_size,
        "total_eval_batch_size": micro * mesh.data.size,
    }
