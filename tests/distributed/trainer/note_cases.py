"""Cases whose runs say something about the model before they begin."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.trainer_cases import gpt2, sentences, settings
from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh


class Redrawn(nn.Module):
    """Its `__init__` draws a weight otherwise than the layer's `reset_parameters` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)
        nn.init.normal_(self.second.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


class Normed(nn.Module):
    """Batch normalisation in training, beside some that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.frozen = nn.BatchNorm1d(1)

    def train(self, mode: bool = True) -> Normed:
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.layers(x)).square().mean()


def frozen() -> nn.Module:
    """A model whose first layer is not trained."""
    model = Redrawn()
    model.first.requires_grad_(False)
    return model


def vectors() -> list[dict[str, torch.Tensor]]:
    """Inputs of four numbers."""
    return [{"x": x} for x in torch.randn(16, 4, generator=torch.Generator().manual_seed(1))]


def on_meta(build: Callable[[], Any]) -> Any:
    """What `build` builds, without memory."""
    with torch.device("meta"):
        return build()


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "built": (Redrawn, vectors),
    "frozen": (frozen, vectors),
    "callable": (lambda: Redrawn, vectors),
    "meta": (lambda: on_meta(Redrawn), vectors),
    "normed": (Normed, vectors),
    "library on meta": (lambda: on_meta(gpt2), sentences),
}


def said(mesh: Mesh, folder: str, name: str, every_steps: int) -> list[str]:
    """The lines that a run prints, with a checkpoint after so many steps."""
    model, data = MODELS[name]
    out = io.StringIO()
    config = settings(
        folder,
        precision=dict.fromkeys(("compute", "master", "reduce"), "float32"),
        checkpoint={"every_steps": every_steps},
    )
    with contextlib.redirect_stdout(out), Trainer(model(), config, data()) as trainer:
        trainer.fit()
    return out.getvalue().splitlines()
