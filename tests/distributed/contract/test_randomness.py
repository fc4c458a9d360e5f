"""Random numbers of a step: fresh wherever they are drawn, whatever the layout, and the same when a block is recomputed."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.plain import fitted
from tests.support.trainer_cases import settings
from tests.support.workers import Workers
from zeromesh.mesh.process_mesh import Mesh

WIDTH = 72
"""A block is then a unit of its own."""


class Book:
    """What was drawn in forward; what recomputation draws comes while autograd runs, and is left out."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def draw(self) -> float:
        found = float(torch.rand((), dtype=torch.float64)) + random.random() + float(np.random.rand())
        if torch._C._current_graph_task_id() == -1:
            self.numbers.append(found)
        return found


class Block(nn.Module):
    def __init__(self, book: Book) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.book = (book,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(torch.tanh(self.linear(x)), 0.3, self.training) * self.book[0].draw()


class Drawing(nn.Module):
    """Draws before, between and after its blocks, the first of which runs twice. `recomputed`: by the model itself."""

    def __init__(self, book: Book, recomputed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(book) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.book, self.recomputed = (book,), recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        book = self.book[0]
        x = x * book.draw()
        for block in (self.blocks[0], self.blocks[0], self.blocks[1]):
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
            x = x + 0.1 * torch.randn_like(x) * book.draw() if block is self.blocks[1] else x
        return self.head(F.dropout(x, 0.2, self.training))


def _train(folder: str, name: str, *, steps: int = 2, recomputed: bool = False, evaluate: bool = False, **sections: Any) -> Any:
    torch.manual_seed(0)
    book = Book()
    model = Drawing(book, recomputed).double()
    generator = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(WIDTH, generator=generator, dtype=torch.float64)} for _ in range(16)]
    evaluated: list[float] = []

    def loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        first = len(book.numbers)
        x = (batch["x"] + torch.randn_like(batch["x"]) * book.draw()).requires_grad_()
        total = (model(x) - model(x) * 0.5 + book.draw()).square().sum()
        if not torch.is_grad_enabled():
            evaluated.append(float(total))
            del book.numbers[first:]
        return total, len(x)

    every = {"eval_every": 1, "eval_at_end": False} if evaluate else {"eval_every": 0, "eval_at_end": False}
    run = {"name": name, "max_steps": steps, **every}
    config = settings(folder, run=run, schedule={"name": "constant", "warmup_steps": 0}, **sections)
    found = fitted(model, config, data, data[:4] if evaluate else None, compute_loss=loss)
    return found, book.numbers, evaluated


def fresh_numbers(mesh: Mesh, folder: str) -> dict[str, Any]:
    """Train by each layout and each way to recompute; how far parameters are from those of the first one."""
    released = {"zero": {"stage": 3, "gathered_budget": 0}}
    ways: dict[str, dict[str, Any]] = {
        "stage 0": {"zero": {"stage": 0}},
        "released": released,
        "larger rounds": {"zero": {"stage": 2}, "evaluate": True},
        "recomputed": {**released, "recomputed": True},
        "blocks recomputed": {**released, "model": {"activation_checkpointing": "block"}},
    }
    found: dict[str, Any] = {}
    parameters = {}
    for name, way in ways.items():
        parameters[name], numbers, evaluated = _train(folder, name.replace(" ", "-"), **way)
        found[name] = {"drawn": numbers, "evaluated": evaluated}
    checkpoints = {"checkpoint": {"every_steps": 1}}
    _train(folder, "resumed", steps=1, **released, **checkpoints)
    parameters["resumed"], numbers, _ = _train(folder, "resumed", **released, **checkpoints)
    found["resumed"] = {"drawn": numbers, "evaluated": []}
    for name, each in parameters.items():
        found[name]["apart"] = max(float((each[key] - parameters["stage 0"][key]).abs().max()) for key in each)
    found["sums"] = {key: float(value.sum()) for key, value in parameters["stage 0"].items()}
    return found


CASE = "tests.distributed.contract.test_randomness:fresh_numbers"


def test_numbers_are_fresh_and_do_not_depend_on_the_layout(workers: Workers, tmp_path: Path) -> None:
    """Those of the loss, between and inside of units, of each microbatch, step, call and rank."""
    alone = workers.run(1, CASE, folder=str(tmp_path / "1"))[0]
    together = workers.run(2, CASE, folder=str(tmp_path / "2"))
    drawn = alone["stage 0"]["drawn"]
    assert len(set(drawn)) == len(drawn) == 2 * 4 * (2 + 2 * 5)
    for name, each in alone.items():
        if name != "sums":
            both = [rank[name]["drawn"] for rank in together]
            wanted = drawn if name != "resumed" else drawn[len(drawn) // 2 :]
            assert sorted(each["drawn"]) == sorted(both[0] + both[1]) == sorted(wanted), name
            assert each["apart"] <= 1e-9, name
            assert all(rank[name]["apart"] <= 1e-9 for rank in together), name
    for key, value in alone["sums"].items():
        assert together[0]["sums"][key] == pytest.approx(value, abs=1e-9)
    # Every evaluation draws the same numbers, and training draws as if there had been none.
    one = alone["larger rounds"]["evaluated"]
    assert len(one) == 4
    assert one[:2] != one[2:]
    assert sorted(one) == pytest.approx(sorted(x for rank in together for x in rank["larger rounds"]["evaluated"]))
