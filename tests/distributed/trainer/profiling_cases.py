"""Cases of runs whose steps are profiled, or that run out of memory; and the machine is measured."""

import contextlib
import io
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.trainer_cases import gpt2, llama, sentences, settings
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.trainer.planning.measure import TINY_SIZES, measure_machine


class SlowData(list[Any]):
    """Samples that take a while to come."""

    seconds = 0.004

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Greedy(Callback):
    """Asks for more memory than there is, on one rank after the backward of a step."""

    def __init__(self, rank: int, kind: str) -> None:
        self._rank = rank
        self._kind = kind

    def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
        if trainer.mesh.rank == self._rank and step == 2:
            if self._kind == "python":
                raise MemoryError
            torch.empty(1 << 55, dtype=torch.uint8)


def profiled(mesh: Mesh, *, folder: str, sections: Mapping[str, Any], kind: str = "llama") -> dict[str, Any]:
    """Train 4 steps; what the console said, and the losses."""
    torch.manual_seed(3)
    said = io.StringIO()
    config = settings(folder, **sections)
    with (
        contextlib.redirect_stdout(said),
        Trainer(llama() if kind == "llama" else gpt2(), config, sentences()) as trainer,
    ):
        report = trainer.fit()
    return {"losses": list(report.losses), "said": said.getvalue()}


def timed(mesh: Mesh, *, folder: str, late: int = -1) -> list[dict[str, Any]]:
    """Train 4 steps with slow data; rank `late` takes long before its updates. The lines of metrics, of any rank."""
    lines: list[dict[str, Any]] = []

    class Watching(Callback):
        def on_pre_optimizer_step(self, trainer: Trainer, step: int) -> None:
            if mesh.rank == late:
                time.sleep(0.1)

        def on_step_end(self, trainer: Trainer, step: int, metrics: Mapping[str, Any]) -> None:
            lines.append(dict(metrics))

    torch.manual_seed(3)
    data: Any = SlowData(sentences())
    with Trainer(llama(), settings(folder), data, callbacks=[Watching()]) as trainer:
        trainer.fit()
    return lines


def exhausted(mesh: Mesh, *, folder: str, kind: str, rank: int) -> None:
    """Train until memory runs out on a rank in the second step."""
    torch.manual_seed(3)
    with Trainer(llama(), settings(folder), sentences(), callbacks=[Greedy(rank, kind)]) as trainer:
        trainer.fit()


def measured(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Measure this machine with tiny sizes."""
    told: list[str] = []
    machine = measure_machine(mesh, Path(folder), told.append, TINY_SIZES)
    return {
        "machine": machine.to_yaml(),
        "told": told,
        "left": [name for name in mesh.process_sets if name.startswith(("shared", "gloo"))],
    }
