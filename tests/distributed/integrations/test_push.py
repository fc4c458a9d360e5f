"""Uploads to the Hub: what goes there, when, with which token, and what is left where they fail."""

from pathlib import Path

import pytest

from tests.distributed.integrations.push_cases import TOKEN, loaded
from tests.support.workers import Workers

CASES = "push_cases"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_is_uploaded(workers: Workers, tmp_path: Path, ranks: int) -> None:
    """By the first rank, after the training and when asked for: what `save` writes, and a card."""
    found = workers.run(ranks, f"{CASES}:pushed", folder=str(tmp_path))
    mine = found[0]
    assert mine["calls"] == [
        ["create_repo", "tiny", None, True, True],
        ["upload_folder", "me/tiny", None, "End of training", "dev"],
        ["upload_folder", "me/tiny", TOKEN, "End of training", "dev"],
    ]
    assert (mine["model"], mine["began"]) == ("me/tiny", [2, 2])
    assert mine["commit"] == "https://huggingface.co/me/tiny/commit/0"
    assert [(each["calls"], each["commit"]) for each in found[1:]] == [([], None)] * (ranks - 1)
    assert mine["files"] == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert mine["loaded"] == loaded(tmp_path / "saved")
    for line in ("- made-by-hand", "- tried", "sentences", "# tiny", "- learning_rate: 0.0003"):
        assert line in mine["card"], line
    assert (f"- num_devices: {ranks}" in mine["card"]) == (ranks > 1)


def test_no_token_is_written_or_said(workers: Workers, tmp_path: Path) -> None:
    said = workers.run(1, f"{CASES}:pushed", folder=str(tmp_path))[0]["said"]
    assert "uploaded to https://huggingface.co/me/tiny/commit/0" in said
    assert TOKEN not in said
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or TOKEN.encode() not in path.read_bytes(), path
    assert not (tmp_path / "run" / "hub-upload").exists()


def test_an_upload_that_fails_loses_nothing(workers: Workers, tmp_path: Path) -> None:
    """After a training it is a warning, and an error where it was asked for."""
    found = workers.run(2, f"{CASES}:failed", folder=str(tmp_path))
    left = tmp_path / "run" / "hub-upload"
    why = f"the model could not be uploaded to me/tiny: ConnectionError: 403 for token <redacted>. It is in {left}: "
    for each in found:
        assert (each["steps"], each["after"]) == (2, 21)
        assert each["error"].startswith(why)
        assert TOKEN not in each["said"]
    assert found[0]["said"].replace("\n", " ").count("WARNING: the model could not be uploaded") == 1
    assert loaded(left) == loaded(tmp_path / "run" / "saved")


def test_a_repository_that_cannot_be_made_is_found_before_training(workers: Workers, tmp_path: Path) -> None:
    for said in workers.run(2, f"{CASES}:refused", folder=str(tmp_path)):
        assert said.startswith(
            "hub.repository: the repository 'tiny' of the Hub cannot be written to: ConnectionError: 403"
        )
        assert TOKEN not in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_configuration_may_ask_for_it(workers: Workers, tmp_path: Path) -> None:
    """With what a call says in place of its keys; a module that is none of transformers' has no card."""
    found = workers.run(2, f"{CASES}:configured", folder=str(tmp_path))
    assert found[0]["calls"] == [
        ["create_repo", "plain", "another", False, True],
        ["upload_folder", "me/plain", "another", "before", "first"],
        ["upload_folder", "me/plain", None, "End of training", None],
    ]
    assert found[0]["files"] == ["model.safetensors"]
    assert [each["seen"] for each in found] == [[0, 2], [0, 2]]
