"""Models by name, with a cache of the Hub that a test has made, directories with code of their own, and uploads to the Hub, with an
`HfApi` that keeps what it is given."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub
import pytest
import torch
import transformers as tf
from transformers import TrainerCallback

from tests.distributed.integrations.callback_cases import model, quiet, whole
from tests.support.plain import calling
from tests.support.trainer_cases import digest, llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError, StorageError
from zeromesh.mesh.process_mesh import Mesh

COMMIT = "0123456789abcdef0123456789abcdef01234567"

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(*args, **kwargs)
"""


def cached(cache: Path, name: str) -> Any:
    """Put a model into a cache as `huggingface_hub` would have; returns it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    model = seeded(llama)
    model.save_pretrained(repository / "snapshots" / COMMIT)
    return model


def named(mesh: Mesh, folder: str, cache: str, source: str, revision: str | None = None) -> dict[str, Any]:
    """Train one step from a model of the Hub: what its weights were, or the error."""
    config = settings(folder, model={"source": source, "revision": revision}, run={"max_steps": 1})
    with patch("huggingface_hub.constants.HF_HUB_CACHE", cache), patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        try:
            with Trainer(None, config, sentences()) as trainer:
                weights = digest({name: tensor.clone() for name, tensor in trainer.state_dict()})
                trainer.fit()
        except ConfigError as error:
            return {"error": str(error)}
    return {"weights": weights}


def own_code(mesh: Mesh, folder: str, source: str, modules: str, trust: bool) -> dict[str, Any]:
    """Train one step of a model whose code lies beside its weights."""
    config = settings(folder, model={"source": source, "trust_remote_code": trust}, run={"max_steps": 1})
    with patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules):
        try:
            with Trainer(None, config, sentences()) as trainer:
                trainer.fit()
                return {"class": type(trainer.model).__name__, "calls": trainer.model.calls}
        except ConfigError as error:
            return {"error": str(error)}


def with_code(directory: Path) -> None:
    """A tiny Llama whose class is its directory's own."""
    seeded(llama).save_pretrained(directory)
    (directory / "own.py").write_text(CODE)
    values = json.loads((directory / "config.json").read_text())
    values |= {"model_type": "own-llama", "architectures": ["OwnModel"]}
    values["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (directory / "config.json").write_text(json.dumps(values))


# Uploads

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


def pushed(mesh: Mesh, folder: str) -> None:
    """A training with hub.push, and a call of one's own: what is uploaded, and that no token is written or said."""
    root, beginning, ranks = Path(folder), Beginning(), mesh.world_size
    with hub(root / "hub") as api, quiet() as out, _trainer(folder, callbacks=[beginning]) as trainer:
        trainer.fit()
        commit = trainer.push_to_hub(tags="tried", dataset="sentences", token=TOKEN)
        trainer.save(root / "saved")
        assert (trainer.hub_model_id, beginning.seen) == ("me/tiny", [2, 2])
    if mesh.rank:
        assert (api.calls, commit) == ([], None)
        return
    assert api.calls == [
        ["create_repo", "tiny", None, True, True],
        ["upload_folder", "me/tiny", None, "End of training", "dev"],
        ["upload_folder", "me/tiny", TOKEN, "End of training", "dev"],
    ]
    assert commit.commit_url == "https://huggingface.co/me/tiny/commit/0"
    last = root / "hub" / str(len(api.calls))
    assert files(last) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert loaded(last) == loaded(root / "saved")
    card = (last / "README.md").read_text()
    for line in ("- made-by-hand", "- tried", "sentences", "# tiny", "- learning_rate: 0.0003"):
        assert line in card
    assert (f"- num_devices: {ranks}" in card) == (ranks > 1)
    assert "uploaded to https://huggingface.co/me/tiny/commit/0" in out.getvalue()
    assert TOKEN not in out.getvalue()
    for path in root.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path
    assert not (root / "run" / "hub-upload").exists()


def failed(mesh: Mesh, folder: str) -> None:
    """An upload that fails loses nothing: after a training it is a warning, and an error where it was asked for."""
    root = Path(folder)
    left = root / "run" / "hub-upload"
    why = f"the model could not be uploaded to me/tiny: ConnectionError: 403 for token <redacted>. It is in {left}: "
    with hub(root / "hub", "upload_folder"), quiet() as out, _trainer(folder) as trainer:
        assert trainer.fit().final_step == 2
        with pytest.raises(StorageError, match=f"^{re.escape(why)}"):
            trainer.push_to_hub(token=TOKEN)
        assert len(list(trainer.state_dict())) == 21
        trainer.save(root / "run" / "saved")
    said = out.getvalue().replace("\n", " ")
    assert TOKEN not in said
    if mesh.rank == 0:
        assert said.count("WARNING: the model could not be uploaded") == 1
        assert loaded(left) == loaded(root / "run" / "saved")


def refused(mesh: Mesh, folder: str) -> None:
    """A repository that cannot be made is found before training."""
    why = "^hub.repository: the repository 'tiny' of the Hub cannot be written to: ConnectionError: 403"
    with hub(Path(folder), "create_repo"), quiet(), _trainer(folder) as trainer, pytest.raises(ConfigError, match=why) as caught:
        trainer.fit()
    assert TOKEN not in str(caught.value)
    assert not (Path(folder) / "run" / "metrics.jsonl").exists()


def configured(mesh: Mesh, folder: str) -> None:
    """Uploads that a configuration asks for, and one in the middle of a training, with what a call says in place of its keys; a
    module that is none of transformers' has no card."""

    def loss(module: Any, batch: Any) -> tuple[torch.Tensor, int]:
        return module(batch["input"]).square().sum(), len(batch["input"])

    steps: list[int] = []
    counting = calling(on_push_begin=lambda trainer: steps.append(trainer.state.step))
    config: dict[str, Any] = {
        "hub": {"push": True, "private": False},
        "run": {"output_dir": folder, "name": "plain", "max_steps": 2},
        "checkpoint": {"every_steps": 0},
    }
    data = [{"input": torch.ones(3)} for _ in range(16)]
    with (
        hub(Path(folder) / "hub") as api,
        quiet(),
        Trainer(torch.nn.Linear(3, 1), config, data, compute_loss=loss, callbacks=[counting]) as trainer,
    ):
        trainer.push_to_hub("before", revision="first", token="another")
        trainer.fit()
    assert steps == [0, 2]
    if mesh.rank == 0:
        assert api.calls == [
            ["create_repo", "plain", "another", False, True],
            ["upload_folder", "me/plain", "another", "before", "first"],
            ["upload_folder", "me/plain", None, "End of training", None],
        ]
        assert files(Path(folder) / "hub" / "2") == ["model.safetensors"]
