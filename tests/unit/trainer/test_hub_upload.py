"""Uploads to the Hub from one process: whose words stand in the card, which repository is opened, and what an error says."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch

from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError, StorageError
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.hub import upload
from zeromesh.trainer.hub.upload import FOLDER, open_repository, push


class Hub:
    """Stands for `HfApi`."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None

    def create_repo(self, name: str, **given: Any) -> Any:
        self.calls.append((name, given))
        if self.error:
            raise self.error
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, folder_path: Path, **given: Any) -> Any:
        self.calls.append((sorted(path.name for path in folder_path.iterdir()), given))
        if self.error:
            raise self.error
        return SimpleNamespace(commit_url="https://hub/commit/0")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


def trainer_of(folder: Path, notes: list[str], **hub: Any) -> Any:
    """What uploads read of a trainer of one rank, whose model has no configuration of transformers."""
    mesh = Mesh(MeshShape(), read_environment({}), device=torch.device("cpu"), timeout_seconds=5)
    config = load_config({"run": {"name": "mine"}, "hub": hub})

    def save(directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "model.safetensors").touch()

    run = SimpleNamespace(config=config, console=SimpleNamespace(note=notes.append))
    made = {"config": config, "mesh": mesh, "run": run, "run_directory": folder, "hub_model_id": "me/mine"}
    return SimpleNamespace(model=torch.nn.Linear(1, 1), save=save, **made)


@pytest.mark.parametrize(
    ("hub", "private", "name", "wanted"),
    [
        ({}, None, "mine", None),
        ({"push": True, "private": True}, None, "mine", True),
        ({"push": True, "private": True}, False, "mine", False),
        ({"push": True, "repository": "you/theirs"}, True, "you/theirs", True),
    ],
)
def test_the_repository_is_that_of_the_call_or_else_of_the_configuration(
    tmp_path: Path, api: Hub, hub: dict[str, Any], private: bool | None, name: str, wanted: bool | None
) -> None:
    trainer = trainer_of(tmp_path, [], **hub)
    wanted = trainer.config.hub.private if wanted is None else wanted
    assert open_repository(trainer, "a-token", private) == f"me/{name}"
    assert api.calls == [(name, {"token": "a-token", "private": wanted, "exist_ok": True})]


def test_an_upload_says_what_was_asked_for_and_leaves_nothing(tmp_path: Path, api: Hub) -> None:
    notes: list[str] = []
    trainer = trainer_of(tmp_path, notes, push=True, revision="dev")
    for revision, wanted in ((None, "dev"), ("own", "own")):
        commit = push(trainer, "words", token="a-token", revision=revision, card={})
        assert commit is not None
        named = {"repo_id": "me/mine", "commit_message": "words", "token": "a-token", "revision": wanted}
        assert api.calls.pop() == (["model.safetensors"], named)
        assert not (tmp_path / FOLDER).exists()
    assert notes == ["uploaded to https://hub/commit/0"] * 2


def test_an_upload_that_fails_keeps_its_files_and_no_secret(tmp_path: Path, api: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "token-of-the-environment")
    notes: list[str] = []
    trainer, api.error = trainer_of(tmp_path, notes), ConnectionError("403 a-token token-of-the-environment\nmore")
    said = "ConnectionError: 403 <redacted> <redacted>"
    with pytest.raises(StorageError, match=rf"^the model could not be uploaded to me/mine: {said}\. It is in {tmp_path}"):
        push(trainer, None, token="a-token", revision=None, card={})
    assert (tmp_path / FOLDER / "model.safetensors").exists()
    assert notes == []
    with pytest.raises(ConfigError, match=rf"'mine' of the Hub cannot be written to: {said}; give a token that may write"):
        open_repository(trainer, "a-token", None)


@pytest.mark.parametrize(
    ("own", "tags"), [(None, ["made", "twice"]), ("tried", ["tried", "made", "twice"]), (["twice", "x"], ["twice", "x", "made"])]
)
def test_tags_of_the_user_come_first_and_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: Any, tags: list[str]
) -> None:
    seen: list[Any] = []

    def drawn(described: Any, **values: Any) -> Any:
        seen.append(values)
        return SimpleNamespace(to_model_card=lambda: "# words")

    monkeypatch.setattr(upload.TrainingSummary, "from_trainer", drawn)
    trainer = trainer_of(tmp_path, [])
    trainer.state, trainer.inputs = None, SimpleNamespace(train_dataset=None, eval_dataset=None)
    trainer.model.model_tags = ["made", "twice"]
    upload._write_model_card(trainer, tmp_path, {} if own is None else {"tags": own})
    assert seen == [{"model_name": "mine", "tags": tags}]
    assert (tmp_path / "README.md").read_text() == "# words"
    del trainer.model.model_tags
    upload._write_model_card(trainer, tmp_path, {"model_name": "other"})
    assert seen[1] == {"model_name": "other"}
