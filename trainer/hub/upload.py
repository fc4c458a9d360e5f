"""Uploading a model to the Hub, with a model card: rank 0 does it, and the other ranks wait for what came of it.

What goes there is what `Trainer.save` writes, and a draft of a model card: nothing else of the run's directory, whose files name
paths and settings of this machine.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
from huggingface_hub import CommitInfo
from transformers import PreTrainedConfig
from transformers.modelcard import TrainingSummary

from zeromesh.environment import secret_values
from zeromesh.errors import ConfigError, StorageError
from zeromesh.files import write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.callbacks.dispatcher import arguments_of
from zeromesh.trainer.config.redact import Redaction
from zeromesh.trainer.models.adapters import is_adapted
from zeromesh.trainer.models.build import T, while_posting
from zeromesh.trainer.tracking.tracking import describe_error

FOLDER = "hub-upload"
"""The folder of the run's directory where what is uploaded lies until it is."""
_TOKEN = "give a token that may write (HF_TOKEN, or `hf auth login`)"


def _write_model_card(trainer: Any, directory: Path, values: Mapping[str, Any]) -> None:
    """Write `README.md`, transformers' own draft of a model card, for a `Trainer`.

    `values` are what the user says of the model, by transformers' names; the repository's name and the model's tags go beside them.
    """
    config, mesh = trainer.run.config, trainer.mesh
    values = {"model_name": trainer.hub_model_id.rpartition("/")[2], **values}
    tags = getattr(trainer.model, "model_tags", None)
    if tags:
        own = values.get("tags") or []
        values["tags"] = list(dict.fromkeys([*([own] if isinstance(own, str) else own), *tags]))
    described = SimpleNamespace(  # What transformers reads of a trainer for a card.
        args=arguments_of(config),
        model=trainer.model,
        state=trainer.state,
        train_dataset=trainer.inputs.train_dataset,
        eval_dataset=trainer.inputs.eval_dataset,
    )
    card = TrainingSummary.from_trainer(described, **values)
    if mesh.world_size > 1:  # What follows from the number of ranks, which transformers' arguments do not always know.
        micro = config.batch.eval_micro_size or config.batch.micro_size
        card.hyperparameters |= {
            "num_devices": mesh.world_size,
            "total_train_batch_size": config.batch.global_size,
            "total_eval_batch_size": micro * mesh.data.size,
        }
    write_whole(directory / "README.md", card.to_model_card().encode())
    if is_adapted(trainer.model):
        trainer.model.create_or_update_model_card(str(directory))


def open_repository(trainer: Any, token: str | None, private: bool | None) -> str:
    """The full name of the repository, which is made if there is none; all ranks call it.

    Raises:
        ConfigError: on all ranks, where it cannot be reached.
    """
    hub = trainer.config.hub
    name = hub.repository or trainer.config.run.name

    def make() -> str:
        chosen = hub.private if private is None else private
        return huggingface_hub.HfApi().create_repo(name, token=token, private=chosen, exist_ok=True).repo_id

    found, failure = _by_first_rank(trainer.mesh, make, token, "repository on the Hub")
    if failure:
        raise ConfigError(
            f"the repository {name!r} of the Hub cannot be written to: {failure}; {_TOKEN}", where="hub.repository"
        )
    mesh: Mesh = trainer.mesh
    return mesh.world.gather_bytes((found or "").encode(), "name of the repository")[0].decode()


def push(
    trainer: Any, message: str | None, *, token: str | None, revision: str | None, card: Mapping[str, Any]
) -> CommitInfo | None:
    """Upload the model as it is now to `trainer.hub_model_id`; all ranks call it. Returns the commit on rank 0.

    Raises:
        StorageError: on all ranks, where it cannot be saved or uploaded; what was saved stays in `hub-upload`.
    """
    directory, repository = trainer.run_directory / FOLDER, trainer.hub_model_id
    trainer.save(directory)

    def upload() -> CommitInfo:
        if isinstance(getattr(trainer.model, "config", None), PreTrainedConfig):
            _write_model_card(trainer, directory, card)
        return huggingface_hub.HfApi().upload_folder(
            repo_id=repository,
            folder_path=directory,
            commit_message=message,
            token=token,
            revision=revision or trainer.config.hub.revision,
        )

    commit, failure = _by_first_rank(trainer.mesh, upload, token, "upload to the Hub")
    if failure:
        raise StorageError(
            f"the model could not be uploaded to {repository}: {failure}. It is in {directory}: upload it with "
            f"`hf upload {repository} {directory}`"
        )
    if commit is not None:
        shutil.rmtree(directory, ignore_errors=True)
        trainer.run.console.note(f"uploaded to {commit.commit_url}")
    return commit


def _by_first_rank(mesh: Mesh, call: Callable[[], T], token: str | None, what: str) -> tuple[T | None, str]:
    """Run `call` on rank 0 alone; return its result there, and on all ranks why it failed, without secrets, empty if it did not."""
    result, failure = None, ""
    if mesh.rank == 0:
        try:
            result = while_posting(mesh, call)
        except Exception as error:  # noqa: BLE001 - a library's and the network's; all ranks have to know
            failure = describe_error(error, Redaction([*filter(None, [token]), *secret_values()]))
    return result, mesh.world.gather_bytes(failure.encode(), what)[0].decode()
