"""Cases in which a rank dies, stops, errs or does something else than its peers."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.conformance.cases import Run
from tests.conformance.models import Stack, stack
from tests.conformance.recipe import Layout, Problem
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.zero.engine import ZeroEngine

PROBLEM = Problem(model="stack", decay=False, steps=4, samples=12)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What goes wrong, on which rank and where: in forward or backward of a block. `step` counts from 0."""

    kind: str
    rank: int = 1
    step: int = 1
    where: str = "forward"
    block: int = 1
    seconds: float = 0.0


def train(mesh: Mesh, layout: dict[str, Any], fault: dict[str, Any], marker: str) -> dict[str, Any]:
    """Train a stack of three blocks. The rank at fault writes the time into the file `marker` just before."""
    event = Fault(**fault)
    torch.manual_seed(2)
    model = stack()
    options = Layout(**layout)
    engine = ZeroEngine.build(model, mesh, options.options(PROBLEM))
    run = Run(mesh=mesh, problem=PROBLEM, layout=options, model=model, engine=engine)
    now = {"step": -1}
    if mesh.rank == event.rank:
        _arm(model, event, now, marker)
    for step in range(PROBLEM.steps):
        now["step"] = step
        run.step(step)
        if event.kind == "swap" and mesh.rank == event.rank and step + 1 == event.step:
            model.order = [0, 2, 1]
            note(marker)
    return {"losses": run.losses, "digest": run.digest()}


def note(marker: str) -> None:
    Path(marker).write_text(str(time.monotonic()))


def _arm(model: Stack, event: Fault, now: dict[str, int], marker: str) -> None:
    def strike() -> None:
        if now["step"] == event.step:
            note(marker)
            _ACTS[event.kind](event)

    def slow(*_: object) -> None:
        if now["step"] == event.step:
            time.sleep(event.seconds)

    if event.kind == "slow":
        for block in model.blocks:
            block.up.register_forward_hook(slow)
            block.up.register_full_backward_hook(slow)
    elif event.kind != "swap":
        inner: nn.Module = model.blocks[event.block].up  # type: ignore[assignment]
        hook = inner.register_forward_hook if event.where == "forward" else inner.register_full_backward_hook
        hook(lambda *_: strike())


def _raise(event: Fault) -> None:
    raise ValueError("sample 17 is bad")


_ACTS: dict[str, Callable[[Fault], None]] = {
    "kill": lambda event: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda event: os._exit(0),
    "stop": lambda event: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": lambda event: time.sleep(event.seconds),
    "raise": _raise,
    "none": lambda event: None,
}


def mismatch(mesh: Mesh, kind: str, transport: str, stage: int) -> None:
    other = mesh.rank == mesh.world_size - 1
    torch.manual_seed(2)
    layers = 4 if other and kind == "layers" else 3
    model = stack(layers=layers, size=48 if other and kind == "width" else 32)
    if other and kind == "frozen":
        model.blocks[1].requires_grad_(False)
    if other and kind == "stage":
        stage = 5 - stage
    layout = Layout(stage=stage, transport=transport, slots=3 if other and kind == "slots" else 2)
    engine = ZeroEngine.build(model, mesh, layout.options(PROBLEM))
    Run(mesh=mesh, problem=PROBLEM, layout=layout, model=model, engine=engine).step(0)
