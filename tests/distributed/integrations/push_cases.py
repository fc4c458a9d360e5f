"""Cases of uploads to the Hub that workers run, with an `HfApi` that keeps what it is given."""

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub
import transformers as tf
from callback_cases import model, quiet, whole
from trainer_cases import digest
from transformers import TrainerCallback

from zeromesh import Callback, Trainer
from zeromesh.errors import ConfigError, StorageError
from zeromesh.mesh.process_mesh import Mesh

TOKEN = "planted-token-of-nobody"
FIELDS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "train_sampling_strategy": "sequential",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "push_to_hub": True,
    "hub_strategy": "end",
    "hub_model_id": "tiny",
    "hub_token": TOKEN,
    "hub_private_repo": True,
    "hub_revision": "dev",
}


class Hub:
    """Stands for `HfApi`; `broken` is the method that fails."""

    def __init__(self, root: Path, broken: str = "") -> None:
        self.root, self.broken = root, broken
        self.calls: list[list[Any]] = []

    def create_repo(self, repo_id: str, *, token: str, private: bool, exist_ok: bool) -> Any:
        self._note("create_repo", repo_id, token, private, exist_ok)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/me/{repo_id}")

    def upload_folder(self, **given: Any) -> Any:
        self._note("upload_folder", given["repo_id"], given["token"], given["commit_message"], given["revision"])
        shutil.copytree(given["folder_path"], self.root / str(len(self.calls)), ignore=shutil.ignore_patterns("_*"))
        return huggingface_hub.CommitInfo(
            commit_url=f"https://huggingface.co/{given['repo_id']}/commit/0",
            commit_message=given["commit_message"],
            commit_description="",
            oid="0",
        )

    def _note(self, *call: Any) -> None:
        self.calls.append(list(call))
        if call[0] == self.broken:
            raise ConnectionError(f"403 for token {call[2]}\nand more")


@contextlib.contextmanager
def hub(root: Path, broken: str = "", *, theirs: bool = False) -> Iterator[Hub]:
    """Inside the block there is no other, for zeromesh or for transformers' Trainer."""
    made = Hub(root, broken)
    with (
        patch("transformers.trainer.hf_api", lambda: made)
        if theirs
        else patch("huggingface_hub.HfApi", lambda *given, **named: made),
        patch("transformers.modelcard.is_offline_mode", lambda: True),
    ):
        yield made


class Beginning(TrainerCallback):
    """Counts uploads."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(state.global_step)


def program(kind: Any, folder: Path, fields: Mapping[str, Any], callback: Any) -> Any:
    """What a script does that shares its model."""
    arguments = tf.TrainingArguments(output_dir=str(folder / "run"), **{**FIELDS, **fields})
    made = model()
    made.add_model_tags("made-by-hand")
    trainer = kind(model=made, args=arguments, train_dataset=whole(8), callbacks=[callback])
    trainer.train()
    trainer.save_model()
    commit = trainer.push_to_hub(tags="tried", dataset="sentences", blocking=kind is not Trainer)
    return trainer, commit


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def loaded(folder: Path) -> str:
    """What plain transformers makes of a directory."""
    return digest(dict(tf.AutoModelForCausalLM.from_pretrained(folder).named_parameters()))


def pushed(mesh: Mesh, folder: str, theirs: bool = False) -> dict[str, Any]:
    """The program with push_to_hub, under transformers' Trainer or zeromesh's: the calls, and what was uploaded last."""
    root, beginning = Path(folder), Beginning()
    with hub(root / "hub", theirs=theirs) as api, quiet() as out:
        trainer, commit = program(tf.Trainer if theirs else Trainer, root, {}, beginning)
        found = {"calls": api.calls, "began": beginning.seen, "model": trainer.hub_model_id}
        if not theirs:
            found["commit"] = commit and commit.result(timeout=0).commit_url
            trainer.save(root / "saved")
            trainer.close()
    if mesh.rank == 0:
        last = root / "hub" / str(len(api.calls))
        found |= {"files": files(last), "loaded": loaded(last), "card": (last / "README.md").read_text()}
    return {**found, "said": out.getvalue()}


def failed(mesh: Mesh, folder: str) -> dict[str, Any]:
    """A training whose upload fails: what is said and left, and what a call of one's own raises."""
    found: dict[str, Any] = {}
    root = Path(folder)
    arguments = tf.TrainingArguments(output_dir=str(root / "run"), **FIELDS)
    with hub(root / "hub", "upload_folder"), quiet() as out, Trainer(model(), arguments, whole(8)) as trainer:
        found["steps"] = trainer.train().final_step
        trainer.save_model()
        try:
            trainer.push_to_hub()
        except StorageError as error:
            found["error"] = str(error)
        found["after"] = len(list(trainer.state_dict()))
    return {**found, "said": out.getvalue()}


def refused(mesh: Mesh, folder: str) -> str:
    """A training whose repository cannot be made."""
    arguments = tf.TrainingArguments(output_dir=f"{folder}/run", **FIELDS)
    with hub(Path(folder), "create_repo"), quiet(), Trainer(model(), arguments, whole(8)) as trainer:
        try:
            trainer.train()
        except ConfigError as error:
            return str(error)
    return ""


class Steps(Callback):
    """Counts uploads too."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_push_begin(self, trainer: Any) -> None:
        self.seen.append(trainer.state.step)


def configured(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Uploads that a configuration asks for, and one in the middle of a training, of a module that is none of transformers'."""
    import torch

    def loss(module: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return module(batch["input"]).square().sum(), len(batch["input"])

    steps = Steps()
    config: dict[str, Any] = {
        "hub": {"push": True, "private": False},
        "run": {"output_dir": folder, "name": "plain", "max_steps": 2},
        "checkpoint": {"every_steps": 0},
    }
    data = [{"input": torch.ones(3)} for _ in range(16)]
    with (
        hub(Path(folder) / "hub") as api,
        quiet(),
        Trainer(torch.nn.Linear(3, 1), config, data, compute_loss=loss, callbacks=[steps]) as trainer,
    ):
        trainer.push_to_hub("before", revision="first", token="another")
        trainer.fit()
    return {
        "calls": api.calls,
        "seen": steps.seen,
        "files": files(Path(folder) / "hub" / "2") if mesh.rank == 0 else [],
    }
