"""A small run whose states are on files that outlive it, and instants of it at which something happens."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh.offload import DurableTier, Transfer
from zeromesh.offload.io.durable_tier import DurableSlot
from zeromesh.trainer import Trainer

STEPS = 6


class Loss(nn.Sequential):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (super().forward(x) - y).square().mean()
        return found


def build() -> Loss:
    torch.manual_seed(0)
    return Loss(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 1))


def points() -> list[dict[str, torch.Tensor]]:
    drawn = torch.randn(48, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [{"x": x, "y": x[:1]} for x in drawn]


def settings(folder: Path, asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "zero": {"stage": 3},
        "precision": {"compute": "float64", "master": "float64", "reduce": "float64"},
        "batch": {"global_size": 12, "micro_size": 2},
        "optimizer": {"lr": 0.01},
        "run": {"name": "run", "output_dir": str(folder), "max_steps": STEPS, "clip_norm": 0.5, "eval_every": 2},
        "offload": {"optimizer": "file", "durable": True},
        "checkpoint": {"every_steps": 0},
    }
    for name, section in asked.items():
        found.setdefault(name, {}).update(section)
    return found


def train(folder: Path, asked: Any, model: Any = build, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
    """Train the run, or go on with it; returns losses by step, all weights, and lines on evaluations."""
    data: dict[str, Any] = {"train_dataset": points(), "eval_dataset": points()[:12]}
    with Trainer(model, settings(folder, asked), **data, callbacks=callbacks) as trainer:
        losses = trainer.fit().losses
        end: dict[str, Any] = {"weights": [each.double().flatten().tolist() for _, each in sorted(trainer.state_dict())]}
    end["losses"] = dict(zip(range(STEPS, 0, -1), reversed(losses), strict=False))
    return end


def at(when: str, strike: Callable[[], None]) -> Callable[[], None]:
    """Call `strike` once at an instant: `update N`, where some second moments are written, `before commit N`, when the states are
    on their way, or `after commit N`. Returns what takes that back."""
    what, _, step = when.rpartition(" ")
    write, commit = DurableSlot.write, DurableTier._commit
    struck = False

    def reached(what_now: str, step_now: int) -> None:
        nonlocal struck
        if not struck and (what, int(step)) == (what_now, step_now):
            struck = True
            strike()

    def writes(self: DurableSlot, begin: int, data: torch.Tensor) -> Transfer:
        found = write(self, begin, data)
        if self.tier.apart and "exp_avg_sq" in self.label:
            found.wait()
            reached("update", self.tier._number + 1)  # Commits and steps have the same numbers here.
        return found

    def commits(self: DurableTier, step: int, content: bytes) -> None:
        reached("before commit", step)
        commit(self, step, content)
        reached("after commit", step)

    def restore() -> None:
        DurableSlot.write, DurableTier._commit = write, commit  # type: ignore[method-assign]

    DurableSlot.write, DurableTier._commit = writes, commits  # type: ignore[method-assign]
    return restore


def main() -> None:
    """The script of a rank: a folder, and what is asked for: an instant, its rank, whether all processes are killed then."""
    folder, asked, rank = Path(sys.argv[1]), json.loads(sys.argv[2]), int(os.environ["RANK"])
    mark = folder / "struck"

    def strike() -> None:
        if not mark.exists():
            mark.touch()
            if asked["all"]:
                time.sleep(60)  # Until all processes are killed from outside.
            os.kill(os.getpid(), signal.SIGKILL)

    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if asked.get("rank") == rank:
        at(asked["when"], strike)
    end = train(folder, asked["settings"], build() if asked.get("given") else build)
    (folder / f"end-{rank}").write_text(json.dumps({**end, "pid": os.getpid()}))


if __name__ == "__main__":
    main()
