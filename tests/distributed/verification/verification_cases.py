"""Runs and verifications that workers do: of examples, of architectures, and with bugs planted on purpose."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as tf
from torch import nn

from tests.support.architectures import ARCHITECTURES
from tests.support.plain import calling, error_of
from tests.support.seeded_bugs import BUGS, plant
from tests.support.trainer_cases import llama, sentences, settings
from zeromesh import Trainer
from zeromesh.errors import ConfigError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.config.load import load_config
from zeromesh.trainer.loop.train_step import Stepper
from zeromesh.trainer.setup import model as setup
from zeromesh.trainer.verification.certificate import Certificate

ROOT = Path(__file__).resolve().parents[3]
_NARROW = {"compute": "float32", "master": "float32", "reduce": "float32"}


def _said(certificate: Certificate) -> dict[str, Any]:
    return {
        "passed": certificate.passed,
        "located": certificate.located,
        "found": [[each.kind, each.name, each.step, list(each.ranks)] for each in certificate.differences],
        "outputs": sum(each.outputs for each in certificate.passes.values()),
        "gradients": len(certificate.passes["exact"].gradients) if "exact" in certificate.passes else 0,
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
        mesh.wait_for_all_ranks("the source")
        words += [f"model.source={source}", "data.tokenizer=bytes"]
    with Trainer(config=load_config(ROOT / "configs" / name, words, ranks=mesh.world_size)) as trainer:
        return _said(trainer.verify())


def architecture(mesh: Mesh, folder: str, name: str, **sections: Any) -> dict[str, Any]:
    """One of the fifteen, as it is and with its own data."""
    subject = ARCHITECTURES[name]
    config = settings(folder, precision=_NARROW, **sections)
    with Trainer(subject.build(), config, subject.samples(17)) as trainer:
        return _said(trainer.verify())


def small_llama(mesh: Mesh, folder: str, fault: str, checks: list[str], **sections: Any) -> dict[str, Any]:
    """A tiny Llama, with or without something that is wrong in the layout alone."""
    config = settings(folder, precision=_NARROW, **sections)
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
        "output": (setup, "divide", divide),
        "scale": (Stepper, "_count_targets", count),
        "error": (Stepper, "_count_targets", fail),
    }
    with Trainer(llama(), config, sentences()) as trainer, patch.object(*faults[fault]) if fault else nullcontext():
        return _said(trainer.verify(checks=checks))


def users_loss(mesh: Mesh, folder: str) -> dict[str, Any]:
    """A tiny Llama with a loss of the user's own, which is a mean over samples and not over labels."""

    def compute(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        count = len(batch["input_ids"])
        return model(**batch).logits.square().mean() * count, count

    with Trainer(llama(), settings(folder), sentences(), compute_loss=compute) as trainer:
        return _said(trainer.verify())


def refused(mesh: Mesh, folder: str) -> str:
    """A model that is large and none of transformers."""
    model = nn.Sequential(nn.Linear(1500, 1500), nn.Linear(1500, 10))
    with Trainer(model, settings(folder), sentences()) as trainer:
        return error_of(trainer.verify, ConfigError)


# Seeded bugs


@contextmanager
def _planted(bug: str, planted: bool) -> Iterator[None]:
    """Plant the bug behind the trial of tensor plans, which would find some of them before training."""
    with plant(bug) if planted else nullcontext(), patch("zeromesh.trainer.setup.model.require_equal_when_divided"):
        yield


def trained_with(mesh: Mesh, *, bug: str, planted: bool, folder: str) -> dict[str, Any]:
    """Train in the layout in which a bug bites; returns losses and norms, and leaves rank 0's weights in `folder`."""
    seeded, steps = BUGS[bug], list[tuple[float, float]]()
    config = seeded.config(run__output_dir=folder, run__name=f"{bug}-{planted}")
    noting = calling(on_step_end=lambda _trainer, _step, now: steps.append((now["loss"], now["grad_norm"])))
    with _planted(bug, planted), Trainer(None, config, sentences(), callbacks=[noting]) as trainer:
        trainer.fit()
        found = {name: tensor.clone() for name, tensor in trainer.state_dict(ema="ema.decay" in seeded.layout)}
    if mesh.rank == 0:
        torch.save(found, Path(folder, f"{bug}-{planted}.pt"))
    return {"steps": steps}


def verified(mesh: Mesh, *, bug: str, planted: bool, folder: str) -> list[str]:
    """Verify the layout in which a bug bites; returns what differs from the exact result, the nearest to its cause first."""
    config = BUGS[bug].config(run__output_dir=folder, run__name=f"{bug}-{planted}-verified")
    checks = ("dropout",) if "dropout" in bug else ()
    with _planted(bug, planted), Trainer(None, config) as trainer:
        return [each.sentence() for each in trainer.verify(checks=checks).differences]
