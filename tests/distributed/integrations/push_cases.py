"""Cases of uploads to the Hub that workers run, with an `HfApi` that keeps what it is given."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub
import transformers as tf
from transformers import TrainerCallback

from tests.distributed.integrations.callback_cases import model, quiet, whole
from tests.support.trainer_cases import digest
from zeromesh import Callback, Trainer
from zeromesh.errors import ConfigError, StorageError
from zeromesh.mesh.process_mesh import Mesh

TOKEN = "planted-token-of-nobody"
KEYS: dict[str, Any] = {
    "run": {"name": "run", "max_steps": 2},
    "batch": {"micro_size": 2, "global_size": 2},
    "checkpoint": {"every_steps": 0},
    "hub": {"push": True, "repository": "tiny", "private": True, "revision": "dev"},
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
def hub(root: Path, broken: str = "") -> Iterator[Hub]:
    """Inside the block there is no other."""
    made = Hub(root, broken)
    with (
        patch("huggingface_hub.HfApi", lambda *given, **named: made),
        patch("transformers.modelcard.is_offline_mode", lambda: True),
    ):
        yield made


class Beginning(TrainerCallback):
    """Counts uploads."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(state.global_step)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def loaded(folder: Path) -> str:
    """What plain transformers makes of a directory."""
    return digest(dict(tf.AutoModelForCausalLM.from_pretrained(folder).named_parameters()))


def _trainer(folder: str, **inputs: Any) -> Trainer:
    made = model()
    made.add_model_tags("made-by-hand")
    return Trainer(made, {**KEYS, "run": {**KEYS["run"], "output_dir": folder}}, whole(8), **inputs)


def pushed(mesh: Mesh, folder: str) -> dict[str, Any]:
    """A training with hub.push, and a call of one's own: the calls, and what was uploaded last."""
    root, beginning = Path(folder), Beginning()
    with hub(root / "hub") as api, quiet() as out, _trainer(folder, callbacks=[beginning]) as trainer:
        trainer.fit()
        commit = trainer.push_to_hub(tags="tried", dataset="sentences", token=TOKEN)
        trainer.save(root / "saved")
        found = {"calls": api.calls, "began": beginning.seen, "model": trainer.hub_model_id}
    found["commit"] = commit and commit.commit_url
    if mesh.rank == 0:
        last = root / "hub" / str(len(api.calls))
        found |= {"files": files(last), "loaded": loaded(last), "card": (last / "README.md").read_text()}
    return {**found, "said": out.getvalue()}


def failed(mesh: Mesh, folder: str) -> dict[str, Any]:
    """A training whose upload fails: what is said and left, and what a call of one's own raises."""
    found: dict[str, Any] = {}
    with hub(Path(folder) / "hub", "upload_folder"), quiet() as out, _trainer(folder) as trainer:
        found["steps"] = trainer.fit().final_step
        try:
            trainer.push_to_hub(token=TOKEN)
        except StorageError as error:
            found["error"] = str(error)
        found["after"] = len(list(trainer.state_dict()))
        trainer.save(Path(folder) / "run" / "saved")
    return {**found, "said": out.getvalue()}


def refused(mesh: Mesh, folder: str) -> str:
    """A training whose repository cannot be made."""
    with hub(Path(folder), "create_repo"), quiet(), _trainer(folder) as trainer:
        try:
            trainer.fit()
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
