"""Models by name, with a cache of the Hub that a test has made, and directories with code of their own."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.trainer_cases import digest, llama, seeded, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError
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
    with (
        patch("huggingface_hub.constants.HF_HUB_CACHE", cache),
        patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
    ):
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
                loss = trainer.fit().final_loss
                return {"class": type(trainer.model).__name__, "calls": trainer.model.calls, "loss": loss}
        except ConfigError as error:
            return {"error": str(error)}


def with_code(directory: Path) -> None:
    """A tiny Llama whose class is its directory's own."""
    model = seeded(llama)
    model.save_pretrained(directory)
    (directory / "own.py").write_text(CODE)
    values = json.loads((directory / "config.json").read_text())
    values |= {"model_type": "own-llama", "architectures": ["OwnModel"]}
    values["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (directory / "config.json").write_text(json.dumps(values))
