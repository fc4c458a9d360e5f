"""Modules given to process sets: the model computes what it does on one process, and each rank has its own parameters alone."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.simulated.device import compiler
from tests.support.plain import apart, distance
from tests.support.tables import row, tried
from tests.support.workers import Workers
from zeromesh.errors import CollectiveError, LayoutError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.module_placement import ModulePlacement, place


class _Tower(nn.Module):
    def __init__(self, width: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, plus: torch.Tensor | None = None) -> dict[str, Any]:
        hidden = checkpoint(self._run, x, use_reentrant=False) if self.recompute else self._run(x)
        hidden = scale * hidden if plus is None else scale * hidden + plus
        return {"hidden": hidden, "largest": x.argmax(-1), "given": plus}

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Towers(nn.Module):
    """Two towers side by side, a third one behind them, and parts that no pattern names."""

    def __init__(self, *, width: int = 8, dropout: float = 0.0, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.left, self.right = _Tower(width, recompute=recompute), _Tower(width)
        self.drop = nn.Dropout(dropout)
        self.middle = nn.Sequential(nn.Linear(2 * width, width), nn.Dropout(dropout), nn.LayerNorm(width))
        self.embedding, self.frozen = nn.Embedding(width, width), nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        left = self.left(x, scale=0.5, plus=self.frozen(x.detach()))
        both = torch.cat([left["hidden"], self.right(x, plus=left["given"])["hidden"]], dim=-1).relu_()
        return self.head(self.drop(self.middle(both)) + self.embedding(left["largest"])).pow(2).mean()


def _build(**options: Any) -> Towers:
    torch.manual_seed(5)
    return Towers(**options).double()


def _placed(mesh: Mesh, model: Towers) -> ModulePlacement:
    sets, last = mesh.process_sets, mesh.world.size - 1
    # What an earlier case has left: workers live on.
    for name in list(sets):
        sets.remove(name)
    sets.declare({"a": [0], "b": [last], "both": [0, 1] if last else [0]})
    homes = {"left": "b", "r*t": "a", "middle": "both", "embedding": "b", "frozen": "a"}
    return place(model, {name: sets[home] for name, home in homes.items()}, mesh)


def _train(model: Towers, clip: Any, steps: int = 3) -> dict[str, Any]:
    """Losses, norms and what this process has of gradients and parameters after some steps."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    generator, losses, norms = torch.Generator().manual_seed(1), [], []
    for _ in range(steps):
        x = torch.randn(4, 8, dtype=torch.float64, generator=generator).to(model.head.weight.device)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(clip(0.05)))
        optimizer.step()
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": parameters}


SIMULATED = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler for the simulated device")
test_parts_on_different_ranks = tried(
    "test_module_placement",
    [
        *(row(size, "trains", recompute=size == 3) for size in (1, 2, 3)),
        row(2, "trains", SIMULATED, recompute=False, device="sim"),
        row(2, "refusals"),
    ],
    folder=False,
)


def trains(mesh: Mesh, recompute: bool) -> None:
    """A placed model beside the whole one, on every rank."""
    model = _build(recompute=recompute).to(mesh.device)
    whole, size = copy.deepcopy(model), mesh.world_size
    placement = _placed(mesh, model)
    found = _train(model, placement.clip_grad_norm_)
    wanted = _train(whole, lambda norm: nn.utils.clip_grad_norm_(whole.parameters(), norm))
    homes = {"left": [size - 1], "right": [0], "middle": [0, 1][:size], "embedding": [size - 1], "frozen": [0]}
    assert {name: list(home.ranks) for name, home in placement.homes.items()} == homes
    assert apart(found["losses"], wanted["losses"]) <= 1e-12
    assert apart(found["norms"], wanted["norms"]) <= 1e-6
    with torch.no_grad():
        ones = torch.ones(2, 8, dtype=torch.float64, device=mesh.device)
        assert apart([model(ones).item()], [whole(ones).item()]) <= 1e-9
    for kind in ("gradients", "parameters"):
        mine = [name for name in wanted[kind] if mesh.rank in homes.get(name.partition(".")[0], range(size))]
        assert distance(found[kind], {name: wanted[kind][name] for name in mine}) <= 1e-9, kind


def test_dropout_is_alike_where_activations_are(workers: Workers) -> None:
    found = workers.run(3, "test_module_placement:draws")
    assert all(each["losses"] == found[0]["losses"] for each in found)
    assert all(each["next"] == found[0]["next"] for each in found)
    for name in ("middle.0.weight", "head.weight"):
        holders = [each["parameters"][name] for each in found if name in each["parameters"]]
        assert len(holders) == (2 if name.startswith("middle") else 3)
        assert all(each == holders[0] for each in holders)


def draws(mesh: Mesh) -> dict[str, Any]:
    """Dropout inside of placed modules and outside of them."""
    model = _build(dropout=0.5).to(mesh.device)
    placement = _placed(mesh, model)
    torch.manual_seed(9)
    found = _train(model, placement.clip_grad_norm_, steps=2)
    parameters = {name: each.tolist() for name, each in found["parameters"].items()}
    return {"losses": found["losses"], "parameters": parameters, "next": torch.rand(()).item()}


class _Moody(nn.Module):
    """Returns more on rank 0 than elsewhere."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x, x] if self.rank == 0 else [x]


def refusals(mesh: Mesh) -> None:
    """What cannot be placed, and what a placed module may not do."""
    home = mesh.process_sets.add([0], name="somewhere")
    tied = _build()
    tied.head.weight = nn.Parameter(torch.zeros(1, 8, dtype=torch.float64))
    tied.left.down.bias = tied.right.down.bias
    for refused, names, said in (
        (_build(), ["centre"], "placement of 'centre' on process set somewhere: the model has no such module"),
        (_build(), ["left", "left.up"], "placement: left.up is inside left, which is placed as a whole; name one of them"),
        (tied, ["left"], "placement: left.down.bias and right.down.bias are one parameter in parts of the model"),
    ):
        with pytest.raises(LayoutError, match=f"^{said}"):
            place(refused, dict.fromkeys(names, home), mesh)
    model = nn.Sequential(_Moody(mesh.rank))
    place(model, {"0": home}, mesh)
    if mesh.rank == 0:
        model(torch.ones(2))
    else:
        with pytest.raises(CollectiveError, match=r"^0 on process set somewhere returned 2 tensors, where its shapes promise 1"):
            model(torch.ones(2))
