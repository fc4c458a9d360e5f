"""Verifications that workers run: of examples, of architectures, of what was made wrong on purpose."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import transformers as tf
from torch import nn

from tests.support.architectures import ARCHITECTURES
from tests.support.trainer_cases import llama, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.setup import model as setup

ROOT = Path(__file__).resolve().parents[3]
SINGLE = {"compute": "float32", "master": "float32", "reduce": "float32"}


def example(mesh: Mesh, folder: str, name: str) -> None:
    """A file of `configs/`, with a directory of this machine in place of a model of the Hub."""
    source = Path(folder, "source")
    words = [f"run.output_dir={folder}"]
    if "HuggingFaceTB" in (ROOT / "configs" / name).read_text(encoding="utf-8"):
        if mesh.rank == 0:
            sizes = {"hidden_size": 72, "intermediate_size": 192, "num_hidden_layers": 3}
            heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 2000}
            tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads)).save_pretrained(source)
        mesh.meet("the source")
        words += [f"model.source={source}", "data.tokenizer=bytes"]
    with Trainer(config=load_config(ROOT / "configs" / name, words, ranks=mesh.world_size)) as trainer:
        certificate = trainer.verify()
    assert certificate.passed or mesh.rank, certificate.located
    assert certificate.seconds < 120


def architecture(mesh: Mesh, folder: str, name: str, **sections: Any) -> None:
    """One of the fifteen, as it is and with its own data."""
    subject = ARCHITECTURES[name]
    config = settings(folder, precision=SINGLE, **sections)
    with Trainer(subject.build(), config, subject.samples(17)) as trainer:
        certificate = trainer.verify()
    assert certificate.passed or mesh.rank, certificate.located


def right(mesh: Mesh, folder: str) -> None:
    """A tiny Llama in a right layout, and the certificate's file."""
    with Trainer(llama(), settings(folder, precision=SINGLE), sentences()) as trainer:
        certificate = trainer.verify(checks=["resume"])
    if mesh.rank:
        return
    assert certificate.passed, certificate.located
    assert sum(each.outputs for each in certificate.passes.values()) > 100
    assert len(certificate.passes["exact"].gradients) == 21
    written = json.loads(Path(folder, "run/certificate.json").read_text())
    assert written["passed"]
    assert written["layout"]["layout"] == "2 ranks: shard 2"
    assert set(written["digests"]) == {"config", "weights", "data"}


def wrong(mesh: Mesh, folder: str, fault: str, kind: str, name: str) -> None:
    """What is wrong in the layout alone is found and named."""
    own_divide, own_count = setup.divide, Stepper._count_targets

    def divide(model: Any, *arguments: Any) -> Any:
        divided = own_divide(model, *arguments)
        layer: nn.Module = model.model.layers[1].mlp
        forward = layer.forward
        layer.forward = lambda *args: forward(*args) * (1.001 if mesh.rank == 1 else 1.0)  # type: ignore[method-assign]
        return divided

    def count(self: Stepper, *arguments: Any) -> Any:
        found, shares = own_count(self, *arguments)
        return 2 * (found or 0), shares

    def fail(self: Stepper, plan: Any, *arguments: Any) -> Any:
        if mesh.rank == 1:
            raise RuntimeError("shapes do not fit")
        return own_count(self, plan, *arguments)

    faults: dict[str, Any] = {
        "a module": {"target": setup, "attribute": "divide", "new": divide},
        "a scale": {"target": Stepper, "attribute": "_count_targets", "new": count},
        "an error": {"target": Stepper, "attribute": "_count_targets", "new": fail},
    }
    config = settings(folder, precision=SINGLE)
    with Trainer(llama(), config, sentences()) as trainer, patch.object(**faults[fault]):
        certificate = trainer.verify()
    if mesh.rank:
        return
    assert not certificate.passed
    first, located = certificate.differences[0], certificate.located
    assert (first.kind, first.step) == (kind, 1)
    if kind == "error":
        assert located.startswith("the run ends in step 1, and rank 0 says: ")
        assert "shapes do not fit" in located
    if name:
        assert (first.name, list(first.ranks)) == (name, [1])
        assert f"{name} in step 1, microbatch 1 on rank 1" in located


def refused(mesh: Mesh, folder: str) -> None:
    """A model that is large and none of transformers."""
    model = nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 10))
    why = "" if mesh.rank else "Sequential has 2,266,510 parameters"
    with Trainer(model, settings(folder), sentences()) as trainer, pytest.raises(ConfigError, match=why):
        trainer.verify()
