"""Uploads to the Hub: what goes there, when, with which token, and what is left where they fail."""

from pathlib import Path

import pytest
from push_cases import TOKEN, loaded
from workers import Workers

CASES = "push_cases"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_is_uploaded_as_by_transformers(workers: Workers, tmp_path: Path, ranks: int) -> None:
    """By the first rank: what `save` writes, and a card. `fit` uploads too, which transformers does only while it saves."""
    theirs = workers.run(1, f"{CASES}:pushed_by_transformers", folder=str(tmp_path / "theirs"))[0]
    found = workers.run(ranks, f"{CASES}:pushed", folder=str(tmp_path / "ours"))
    mine = found[0]
    assert mine["calls"] == [
        ["create_repo", "tiny", None, True, True],
        ["upload_folder", "me/tiny", None, "End of training", "dev"],
        ["upload_folder", "me/tiny", TOKEN, "End of training", "dev"],
    ]
    assert mine["calls"][2] == theirs["calls"][-1]
    assert (mine["model"], mine["began"], theirs["began"]) == ("me/tiny", [2, 2], [2])
    assert mine["commit"] == "https://huggingface.co/me/tiny/commit/0"
    assert [(each["calls"], each["commit"]) for each in found[1:]] == [([], None)] * (ranks - 1)
    assert set(theirs["files"]) - set(mine["files"]) == {"training_args.bin"}
    assert set(mine["files"]) <= set(theirs["files"])
    assert mine["loaded"] == loaded(tmp_path / "ours" / "saved")
    heads = [card.partition("# tiny")[0] for card in (mine["card"], theirs["card"])]
    assert heads[0] == heads[1]
    assert "- made-by-hand" in heads[0]


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
