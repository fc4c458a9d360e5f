"""A run with or without a seeded bug, and what it left."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.support.seeded_bugs import BUGS, plant
from tests.support.trainer_cases import sentences
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh


class _Steps(Callback):
    """Notes the loss and the norm of each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        self.seen.append((metrics["loss"], metrics["grad_norm"]))


@contextmanager
def _planted(bug: str, planted: bool) -> Iterator[None]:
    """Plant the bug behind the trial of tensor plans, which would find some of them before training."""
    with plant(bug) if planted else nullcontext(), patch("zeromesh.trainer.setup.model.require_equal_when_divided"):
        yield


def trained_with(mesh: Mesh, *, bug: str, planted: bool, folder: str) -> dict[str, Any]:
    """Train in the layout in which a bug bites; returns losses and norms, and leaves rank 0's weights in `folder`."""
    seeded = {each.name: each for each in BUGS}[bug]
    steps = _Steps()
    config = seeded.config(run__output_dir=folder, run__name=f"{bug}-{planted}")
    with _planted(bug, planted), Trainer(None, config, sentences(), callbacks=[steps]) as trainer:
        trainer.fit()
        weights = trainer.state_dict(ema="ema.decay" in seeded.layout)
        found = {name: tensor.clone() for name, tensor in weights}
    if mesh.rank == 0:
        torch.save(found, Path(folder, f"{bug}-{planted}.pt"))
    return {"steps": steps.seen}


def verified(mesh: Mesh, *, bug: str, planted: bool, folder: str) -> list[str]:
    """Verify the layout in which a bug bites; returns what differs from the exact result, the nearest to its cause first."""
    seeded = {each.name: each for each in BUGS}[bug]
    config = seeded.config(run__output_dir=folder, run__name=f"{bug}-{planted}-verified")
    checks = ("dropout",) if "dropout" in bug else ()
    with _planted(bug, planted), Trainer(None, config) as trainer:
        return [each.sentence() for each in trainer.verify(checks=checks).differences]
