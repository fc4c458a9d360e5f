"""Verifications that workers run: of examples, of architectures, of what was made wrong on purpose."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

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
from zeromesh.trainer.verification.certificate import Certificate

ROOT = Path(__file__).resolve().parents[3]


def _said(certificate: Certificate) -> dict[str, Any]:
    return {
        "passed": certificate.passed,
        "located": certificate.located,
        "found": [[each.kind, each.name, each.step, list(each.ranks)] for each in certificate.differences],
        "outputs": sum(each.outputs for each in certificate.passes.values()),
        "gradients": len(certificate.passes["exact"].gradients) if "exact" in certificate.passes else 0,
        "checks": dict(certificate.checks),
        "seconds": certificate.seconds,
    }


def example(mesh: Mesh, folder: str, name: str, overrides: list[str]) -> dict[str, Any]:
    """A file of `configs/`, with a directory of this machine in place of a model of the Hub."""
    source = Path(folder, "source")
    words = [f"run.output_dir={folder}", *overrides]
    if "HuggingFaceTB" in (ROOT / "configs" / name).read_text(encoding="utf-8"):
        if mesh.rank == 0:
            sizes = {"hidden_size": 72, "intermediate_size": 192, "num_hidden_layers": 3}
            heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 2000}
            tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads)).save_pretrained(source)
        mesh.meet("the source")
        words += [f"model.source={source}", "data.tokenizer=bytes"]
    with Trainer(config=load_config(ROOT / "configs" / name, words, ranks=mesh.world_size)) as trainer:
        return _said(trainer.verify())


def architecture(mesh: Mesh, folder: str, name: str, **sections: Any) -> dict[str, Any]:
    """One of the fifteen, as it is and with its own data."""
    subject = ARCHITECTURES[name]
    config = settings(folder, precision={"compute": "float32", "master": "float32", "reduce": "float32"}, **sections)
    with Trainer(subject.build(), config, subject.samples(17)) as trainer:
        return _said(trainer.verify())


def small_llama(mesh: Mesh, folder: str, fault: str, checks: list[str], **sections: Any) -> dict[str, Any]:
    """A tiny Llama, with or without something that is wrong in the layout alone."""
    config = settings(folder, precision={"compute": "float32", "master": "float32", "reduce": "float32"}, **sections)
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
        "": {},
        "output": {"target": setup, "attribute": "divide", "new": divide},
        "scale": {"target": Stepper, "attribute": "_count_targets", "new": count},
        "error": {"target": Stepper, "attribute": "_count_targets", "new": fail},
    }
    with Trainer(llama(), config, sentences()) as trainer:
        if not fault:
            return _said(trainer.verify(checks=checks))
        with patch.object(**faults[fault]):
            return _said(trainer.verify(checks=checks))


def refused(mesh: Mesh, folder: str) -> str:
    """A model that is large and none of transformers."""
    model = nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 10))
    with Trainer(model, settings(folder), sentences()) as trainer:
        try:
            trainer.verify()
        except ConfigError as error:
            return str(error)
    return ""
