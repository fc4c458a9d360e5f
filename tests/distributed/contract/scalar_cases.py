"""Cases of scalars of the user's own, which workers run."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.distributed.contract.sameness_cases import Counting, samples
from tests.support.trainer_cases import settings
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh


class Adding(Callback):
    """Logs in each of the ways that a callback has."""

    def on_optimizer_step(self, trainer: Trainer, step: int) -> None:
        trainer.log(rank=trainer.mesh.rank, of_a_step=10.0 * step)
        if trainer.mesh.rank == 1:
            trainer.log(only_one=torch.tensor(7.0))

    def on_step_end(self, trainer: Trainer, step: int, metrics: Any) -> None:
        metrics["added"] = step


class Parts(nn.Module):
    """Returns its loss in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Counting()

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        loss = self.inside(x).square().mean()
        return {"loss": loss, "auxiliary": x.sum(), "half": 0.5, "outputs": x}


def logged(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Lines of a run whose `compute_loss` gives scalars, and of one whose model returns some."""

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int, dict[str, Any]]:
        return model(batch["x"]).square().sum(), len(batch["x"]), {"mean_x": batch["x"].mean(), "reward/total": 2}

    found: dict[str, Any] = {}
    data = samples(16)
    ways: dict[str, tuple[nn.Module, Any, Any]] = {
        "loss": (Counting().double(), loss, [Adding()]),
        "outputs": (Parts().double(), None, []),
    }
    for name, (model, compute, callbacks) in ways.items():
        config = settings(folder, run={"name": name, "max_steps": 4, "log_every": 2}, data={"shuffle": False})
        with Trainer(model, config, data, compute_loss=compute, callbacks=callbacks) as trainer:
            trainer.fit()
            if name == "loss":
                try:
                    trainer.log(loss=1.0)
                except ValueError as error:
                    found["taken"] = str(error)
        lines = (Path(folder) / name / "metrics.jsonl").read_text().splitlines() if mesh.rank == 0 else []
        found[name] = [json.loads(line) for line in lines]
    found["x"] = [float(each["x"].mean()) for each in data]
    return found
