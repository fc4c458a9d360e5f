"""Cases whose runs say something about the model before they begin."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from trainer_cases import gpt2, sentences, settings

from zeromesh import Trainer
from zeromesh.mesh.groups import Mesh


class Redrawn(nn.Module):
    """Its `__init__` draws a weight otherwise than the layer's `reset_parameters` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)
        nn.init.normal_(self.second.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).square().mean()


def vectors() -> list[dict[str, torch.Tensor]]:
    """Inputs of four numbers."""
    return [{"x": x} for x in torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)]


def on_meta(build: Callable[[], Any]) -> Any:
    """What `build` builds, without memory."""
    with torch.device("meta"):
        return build()


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "built": (Redrawn, vectors),
    "callable": (lambda: Redrawn, vectors),
    "meta": (lambda: on_meta(Redrawn), vectors),
    "library on meta": (lambda: on_meta(gpt2), sentences),
}


def said(mesh: Mesh, folder: str, name: str) -> list[str]:
    """The lines that a run prints."""
    model, data = MODELS[name]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), Trainer(model(), settings(folder), data()) as trainer:
        trainer.fit()
    return out.getvalue().splitlines()
