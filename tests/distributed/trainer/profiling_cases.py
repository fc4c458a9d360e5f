"""Cases of runs that say something of their model, are profiled, run out of memory, or measure their machine."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.plain import calling, fitted
from tests.support.trainer_cases import gpt2, llama, sentences, settings
from zeromesh import Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.planning.measure import TINY_SIZES, measure_machine


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
        folder, precision=dict.fromkeys(("compute", "master", "reduce"), "float32"), checkpoint={"every_steps": every_steps}
    )
    with contextlib.redirect_stdout(out), Trainer(model(), config, data()) as trainer:
        trainer.fit()
    return out.getvalue().splitlines()


class SlowData(list[Any]):
    """Samples that take a while to come."""

    seconds = 0.004

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


def profiled(mesh: Mesh, *, folder: str, sections: Mapping[str, Any], kind: str = "llama") -> dict[str, Any]:
    """Train 4 steps; what the console said, and the losses."""
    torch.manual_seed(3)
    said = io.StringIO()
    config = settings(folder, **sections)
    with contextlib.redirect_stdout(said), Trainer(llama() if kind == "llama" else gpt2(), config, sentences()) as trainer:
        report = trainer.fit()
    return {"losses": list(report.losses), "said": said.getvalue()}


def timed(mesh: Mesh, *, folder: str, late: int = -1) -> list[dict[str, Any]]:
    """Train 4 steps with slow data; rank `late` takes long before its updates. The lines of metrics, of any rank."""
    lines: list[dict[str, Any]] = []

    watching = calling(
        on_pre_optimizer_step=lambda *_: mesh.rank == late and time.sleep(0.1),
        on_step_end=lambda _trainer, _step, metrics: lines.append(dict(metrics)),
    )
    torch.manual_seed(3)
    fitted(llama(), settings(folder), SlowData(sentences()), callbacks=[watching])
    return lines


def exhausted(mesh: Mesh, *, folder: str, kind: str, rank: int) -> None:
    """Train until one rank asks for more memory than there is, after the backward of the second step."""

    def ask(trainer: Trainer, step: int) -> None:
        if mesh.rank == rank and step == 2:
            if kind == "python":
                raise MemoryError
            torch.empty(1 << 55, dtype=torch.uint8)

    torch.manual_seed(3)
    fitted(llama(), settings(folder), sentences(), callbacks=[calling(on_pre_optimizer_step=ask)])


def measured(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Measure this machine with tiny sizes."""
    told: list[str] = []
    return {
        "machine": measure_machine(mesh, Path(folder), told.append, TINY_SIZES).model_dump_json(exclude_defaults=True),
        "told": told,
        "left": [name for name in mesh.process_sets if name.startswith(("shared", "gloo"))],
    }
