"""Upload to the Hub by rank 0: the files of `Trainer.save` and a card, as other files of a run name this machine's paths."""

import shutil
from collections.abc import Mapping
from functools import partial
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
from zeromesh.trainer.callbacks.dispatcher import arguments_of
from zeromesh.trainer.config.redact import Redaction
from zeromesh.trainer.models.adapters import is_adapted
from zeromesh.trainer.models.build import while_posting
from zeromesh.trainer.monitoring.tracking import describe_error

FOLDER = "hub-upload"  # The folder in the run's directory that holds the files until they are uploaded.
_TOKEN = "give a token that may write (HF_TOKEN, or `hf auth login`)"


def _write_model_card(trainer: Any, directory: Path, values: Mapping[str, Any]) -> None:
    """Write transformers' draft of a model card; `values` are the user's fields, by transformers' names."""
    config, mesh = trainer.run.config, trainer.mesh
    values = {"model_name": trainer.hub_model_id.rpartition("/")[2], **values}
    if tags := getattr(trainer.model, "model_tags", None):
        own = values.get("tags") or []
        values["tags"] = list(dict.fromkeys([*([own] if isinstance(own, str) else own), *tags]))
    # The attributes that transformers reads for a card.
    data = {"train_dataset": trainer.inputs.train_dataset, "eval_dataset": trainer.inputs.eval_dataset}
    described = SimpleNamespace(args=arguments_of(config), model=trainer.model, state=trainer.state, **data)
    card = TrainingSummary.from_trainer(described, **values)
    if mesh.world_size > 1:  # transformers' arguments may lack numbers that follow from the number of ranks.
        card.hyperparameters |= {
            "num_devices": mesh.world_size,
            "total_train_batch_size": config.batch.global_size,
            "total_eval_batch_size": (config.batch.eval_micro_size or config.batch.micro_size) * mesh.data.size,
        }
    write_whole(directory / "README.md", card.to_model_card().encode())
    if is_adapted(trainer.model):
        trainer.model.create_or_update_model_card(str(directory))


def open_repository(trainer: Any, token: str | None, private: bool | None) -> str:
    """Return the full name of the repository, created if missing; all ranks call it. Raises `ConfigError` if it is not reached."""
    hub, mesh = trainer.config.hub, trainer.mesh
    name, private = hub.repository or trainer.config.run.name, hub.private if private is None else private

    def make() -> str:
        create = partial(huggingface_hub.HfApi().create_repo, name, token=token, private=private, exist_ok=True)
        try:
            return while_posting(mesh, create).repo_id
        except Exception as error:  # noqa: BLE001 - a library's and the network's
            problem = f"the repository {name!r} of the Hub cannot be written to: {_described(error, token)}; {_TOKEN}"
            raise ConfigError(problem, where="hub.repository") from None

    return str(mesh.world.all_or_raise("repository on the Hub", make, ConfigError, first=True)[0])


def push(
    trainer: Any, message: str | None, *, token: str | None, revision: str | None, card: Mapping[str, Any]
) -> CommitInfo | None:
    """Upload the model; all ranks call it. Returns rank 0's commit. Raises `StorageError`; saved files stay in `hub-upload`."""
    directory, repository = trainer.run_directory / FOLDER, trainer.hub_model_id
    commits: list[CommitInfo] = []
    trainer.save(directory)

    def upload() -> CommitInfo:
        if isinstance(getattr(trainer.model, "config", None), PreTrainedConfig):
            _write_model_card(trainer, directory, card)
        keys: Any = {"commit_message": message, "token": token, "revision": revision or trainer.config.hub.revision}
        commit: CommitInfo = huggingface_hub.HfApi().upload_folder(repo_id=repository, folder_path=directory, **keys)
        return commit

    def work() -> None:
        try:
            commits.append(while_posting(trainer.mesh, upload))
        except Exception as error:  # noqa: BLE001 - a library's and the network's
            why = f"the model could not be uploaded to {repository}: {_described(error, token)}"
            raise StorageError(f"{why}. It is in {directory}: upload it with `hf upload {repository} {directory}`") from None

    trainer.mesh.world.all_or_raise("upload to the Hub", work, StorageError, first=True)
    if not commits:
        return None
    shutil.rmtree(directory, ignore_errors=True)
    trainer.run.console.note(f"uploaded to {commits[0].commit_url}")
    return commits[0]


def _described(error: Exception, token: str | None) -> str:
    return describe_error(error, Redaction([*filter(None, [token]), *secret_values()]))
