"""What callbacks and loops do to parameters outside of passes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from contract.cases_units import Stack
from contract.harness import Case, Layout, cross_entropy, plain_loop, samples
from torch import nn
from trainer_cases import distance, seeded

from zeromesh import Trainer
from zeromesh.errors import ZeromeshError
from zeromesh.mesh.groups import Mesh
from zeromesh.trainer.callbacks import Callback

NAMES = ["stem.weight", "blocks.1.up.weight"]


class Look(Callback):
    """Looks at whole parameters after each step, and catches what goes wrong meanwhile."""

    def __init__(self, look: Callable[[Any, int], None]) -> None:
        self.look = look

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        self.look(trainer, step)


def train(
    layout: Layout, callbacks: list[Any], build: Callable[[], nn.Module] = Stack, **sections: Any
) -> dict[str, Any]:
    """Train as the contract's cases do; the difference from the plain loop."""
    case = Case(name="own", build=build)
    with tempfile.TemporaryDirectory() as folder:
        config = {**case.settings(folder, layout), **sections}
        with Trainer(
            seeded(build).double(), config, samples(), compute_loss=cross_entropy, callbacks=callbacks
        ) as trainer:
            trainer.fit()
            found = {name: value.detach().clone() for name, value in trainer.state_dict()}
    return {"difference": distance(found, plain_loop(case).states[-1])}


def caught_in_gathered(mesh: Mesh, layout: dict[str, Any]) -> dict[str, Any]:
    """Errors inside `gathered` that the user catches: on one rank alone, on all, in a call of the model, and of a write."""
    seen: list[str] = []

    def look(trainer: Any, step: int) -> None:
        if step == 1 and mesh.rank == 0:
            with_error(trainer, lambda: 1 / 0)
        elif step == 1:
            with_error(trainer, lambda: None)
        elif step == 2:
            with_error(trainer, lambda: trainer.model(torch.ones(1, 7, dtype=torch.float64)))
        elif step == 3:
            with_error(trainer, lambda: trainer.model.stem.weight.data.mul_(2))
            with_error(trainer, lambda: torch.nn.init.zeros_(trainer.model.blocks[1].up.weight))

    def with_error(trainer: Any, act: Callable[[], Any]) -> None:
        try:
            with trainer.gathered(NAMES), torch.no_grad():
                assert all(bool(trainer.model.get_parameter(name).isfinite().all()) for name in NAMES)
                act()
        except (ZeroDivisionError, RuntimeError, ZeromeshError) as error:
            seen.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")

    return {**train(Layout(**layout), [Look(look)]), "seen": seen}
