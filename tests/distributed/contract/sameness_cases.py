"""Cases of ranks that were given different things, which workers run."""

from collections.abc import Callable as Function
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tests.support.plain import compare, plain_fit
from tests.support.trainer_cases import settings
from zeromesh import Callback, Trainer
from zeromesh.mesh.process_mesh import Mesh


class Counting(nn.Module):
    """A linear model with a buffer, both as torch's generator has them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(80, 80) for _ in range(2))
        self.head = nn.Linear(80, width)
        self.register_buffer("shift", torch.randn(80))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x + self.shift))
        return self.head(x)


def samples(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(80, generator=generator, dtype=torch.float64)} for _ in range(count)]


def squares(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Sum and count of a loss."""
    return model(batch["x"]).square().sum(), len(batch["x"])


def _of(way: str, value: Any) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Sections of the configuration and arguments of the trainer that a rank has otherwise."""
    section, _, key = way.partition(".")
    if key:
        return {section: {key: value}}, {}
    made: dict[str, Function[[Any], Any]] = {
        "train_dataset": samples,
        "eval_dataset": lambda counts: {name: samples(n) for name, n in counts.items()},
        "lr_scheduler": lambda _: lambda optimizer: StepLR(optimizer, 1),
        "callbacks": lambda _: [Callback()],
        "model": lambda width: Counting(width).double(),
    }
    return {}, {} if value is None else {way: made[way](value)}


def refused(mesh: Mesh, folder: str, ways: list[tuple[str, Any, Any]]) -> list[str]:
    """For each way, name and values of rank 0 and of the others: the error with which a run begins."""
    found = []
    for way, first, other in ways:
        torch.manual_seed(0)
        sections, arguments = _of(way, first if mesh.rank == 0 else other)
        base = settings(folder, run={"max_steps": 2})
        config = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
        arguments = {"model": Counting().double(), "train_dataset": samples(9), **arguments}
        try:
            with Trainer(config=config, compute_loss=squares, **arguments) as trainer:
                trainer.fit()
            found.append("")
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(f"{type(error).__name__}: {error}")
    return found


def weights(mesh: Mesh, folder: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train models that each rank has drawn with a seed of its own; how far they are from a plain loop with those of rank 0."""
    torch.manual_seed(0)
    plain = plain_fit(Counting(), samples(23), settings(folder), squares)
    found = []
    for layout in layouts:
        torch.manual_seed(mesh.rank)
        model = Counting().double()
        apart, _ = compare(model, settings(folder, **layout), samples(23), plain, compute_loss=squares)
        found.append({"parameters": apart["parameters"], "shift": float(model.shift.sum())})
    return found
