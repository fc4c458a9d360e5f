"""Models by their names on the Hub, from a cache that the tests make; code that models bring along; and uploads."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from tests.distributed.integrations.hub_cases import COMMIT, cached, with_code
from tests.support.tables import row, tried
from tests.support.trainer_cases import digest
from tests.support.workers import Workers
from zeromesh.environment import read_environment
from zeromesh.errors import ConfigError
from zeromesh.mesh.mesh_shape import MeshShape
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.models.build import MODEL_FILES, TOKENIZER_FILES, directory_of, pin_sources


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_a_model_is_taken_from_the_cache_of_the_hub(workers: Workers, tmp_path: Path, revision: str | None) -> None:
    model = cached(tmp_path / "cache", "someone/tiny")
    cases = {"folder": str(tmp_path), "cache": str(tmp_path / "cache"), "revision": revision}
    found = workers.run(2, "hub_cases:named", source="someone/tiny", **cases)
    wanted = digest({name: parameter.double() for name, parameter in model.named_parameters()})
    assert [each.get("weights") for each in found] == [wanted, wanted], found
    resolved = load_config(tmp_path / "run" / "config.resolved.yaml")
    assert (resolved.model.source, resolved.model.revision) == ("someone/tiny", COMMIT)


def test_what_was_tried_is_said(workers: Workers, tmp_path: Path) -> None:
    cases = {"folder": str(tmp_path), "cache": str(tmp_path / "cache")}
    outcomes = workers.pool(2).outcomes("hub_cases:named", source="someone/else", **cases)
    said = outcomes[0].result["error"]
    assert "model.source: 'someone/else' is neither a directory here (" in said
    assert f"{Path('someone/else').absolute()}" in said
    assert f"the cache {tmp_path / 'cache'} or from the Hub (HF_HUB_OFFLINE is set, so that it was not asked)" in said
    assert "LocalEntryNotFoundError" in said
    assert "'someone/else' is neither a directory here" in outcomes[1].message


def one_rank() -> Mesh:
    """A mesh of this process alone."""
    return Mesh(MeshShape(), read_environment({}), device=torch.device("cpu"), timeout_seconds=5)


class Hub:
    """Stands for `huggingface_hub.snapshot_download`: notes how it is called, and answers with a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[dict[str, Any]] = []

    def __call__(self, source: str, **arguments: Any) -> str:
        self.calls.append({"source": source, **arguments})
        if "missing" in source:
            raise ConnectionError("no route to host\nand more")
        path = self.root / source.replace("/", "--") / COMMIT
        path.mkdir(parents=True, exist_ok=True)
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made)
    return made


def test_what_is_downloaded_is_pinned(hub: Hub) -> None:
    config = load_config({"model": {"source": "someone/model", "revision": "v2"}, "data": {"tokenizer": "someone/words"}})
    pinned = pin_sources(config, one_rank(), model_given=False)
    assert (pinned.model.source, pinned.model.revision) == ("someone/model", COMMIT)
    assert pinned.data.tokenizer == str(hub.root / "someone--words" / COMMIT)
    assert [(call["source"], call["revision"], call["local_files_only"]) for call in hub.calls] == [
        ("someone/model", "v2", False), ("someone/words", None, False), ("someone/words", COMMIT, True)
    ]  # fmt: skip
    assert hub.calls[0]["allow_patterns"] == list(MODEL_FILES)
    assert hub.calls[1]["allow_patterns"] == list(TOKENIZER_FILES)
    assert all(call["ignore_patterns"] == ["*/*"] for call in hub.calls)
    assert directory_of("someone/model", COMMIT) == hub.root / "someone--model" / COMMIT
    assert hub.calls[-1]["local_files_only"] is True


def test_nothing_is_asked_that_is_not_needed(hub: Hub, tmp_path: Path) -> None:
    for settings in ({}, {"model": {"source": str(tmp_path)}, "data": {"tokenizer": str(tmp_path)}}):
        config = load_config(settings)
        assert pin_sources(config, one_rank(), model_given=False) == config
    given = load_config({"model": {"source": "someone/model"}})
    assert pin_sources(given, one_rank(), model_given=True) == given
    assert hub.calls == []


def test_a_connection_that_fails_is_named(hub: Hub) -> None:
    config = load_config({"model": {"source": "someone/missing"}})
    with pytest.raises(ConfigError, match=r"had from the cache .* or from the Hub: ConnectionError: no route to host"):
        pin_sources(config, one_rank(), model_given=False)


def test_a_revision_is_of_a_repository(tmp_path: Path) -> None:
    config = load_config({"model": {"source": str(tmp_path), "revision": "main"}})
    with pytest.raises(ConfigError, match=r"model\.revision: 'main' is of a repository, and .* is a directory"):
        pin_sources(config, one_rank(), model_given=False)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        *(
            ({"source": source}, r"model\.source: .* does not exist.*; give a local directory")
            for source in ("./model", "/no/model", "~/no/model", "a/b/c", "../model", "a/", "a//b")
        ),
        ({"revision": "main"}, r"model\.revision: is about model\.source, and that is null"),
        ({"trust_remote_code": True}, r"model\.trust_remote_code: is about model\.source, and that is null"),
    ],
)
def test_what_cannot_be_a_name_is_refused_at_once(model: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config({"model": model})


@pytest.mark.parametrize("source", ["gpt2", "someone/model", "Some-One/a.b_c-1"])
def test_what_may_be_a_name_is_looked_up_later(source: str) -> None:
    assert load_config({"model": {"source": source}}).model.source == source


def test_code_of_a_model_is_run_when_it_is_trusted(workers: Workers, tmp_path: Path) -> None:
    with_code(tmp_path / "own")
    cases = {"folder": str(tmp_path), "source": str(tmp_path / "own"), "modules": str(tmp_path / "modules")}
    found = workers.run(2, "hub_cases:own_code", trust=True, **cases)
    assert [each["class"] for each in found] == ["OwnModel"] * 2
    assert found[0]["calls"] > 0
    refused = workers.pool(2).outcomes("hub_cases:own_code", trust=False, **cases)
    assert all("config.json" in (each.message or each.result["error"]) for each in refused)


test_uploads = tried("hub_cases", [row(1, "pushed"), *(row(2, case) for case in ("pushed", "failed", "refused", "configured"))])
