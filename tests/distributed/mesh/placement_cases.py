"""Models whose modules live on process sets, beside the same model on one process."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeromesh.errors import CollectiveError, LayoutError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.module_placement import ModulePlacement, place

Batch = Mapping[str, torch.Tensor]


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
        right = self.right(x, plus=left["given"])
        both = torch.cat([left["hidden"], right["hidden"]], dim=-1).relu_()
        hidden = self.drop(self.middle(both)) + self.embedding(left["largest"])
        return self.head(hidden).pow(2).mean()


def _build(**options: Any) -> Towers:
    torch.manual_seed(5)
    return Towers(**options).double()


def _placed(mesh: Mesh, model: Towers) -> ModulePlacement:
    sets, last = mesh.process_sets, mesh.world.size - 1
    # What an earlier case has left: workers live on.
    for name in list(sets):
        sets.remove(name)
    sets.declare({"a": [0], "b": [last], "both": [0, 1] if last else [0]})
    return place(
        model,
        {"left": sets["b"], "r*t": sets["a"], "middle": sets["both"], "embedding": sets["b"], "frozen": sets["a"]},
        mesh,
    )


def _train(model: Towers, clip: Any, steps: int = 3) -> dict[str, Any]:
    """Losses, norms and what this process has of gradients and parameters after some steps."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    generator, found = torch.Generator().manual_seed(1), {"losses": [], "norms": []}
    for _ in range(steps):
        x = torch.randn(4, 8, dtype=torch.float64, generator=generator).to(model.head.weight.device)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        found["losses"].append(loss.item())
        found["norms"].append(float(clip(0.05)))
        optimizer.step()
    found["gradients"] = {name: each.grad.tolist() for name, each in model.named_parameters() if each.grad is not None}
    found["parameters"] = {name: each.detach().tolist() for name, each in model.named_parameters()}
    return found


def trains(mesh: Mesh, recompute: bool) -> dict[str, Any]:
    """A placed model beside the whole one, on every rank."""
    model = _build(recompute=recompute).to(mesh.device)
    whole = copy.deepcopy(model)
    placement = _placed(mesh, model)
    placed = _train(model, placement.clip_grad_norm_)
    alone = _train(whole, lambda norm: nn.utils.clip_grad_norm_(whole.parameters(), norm))
    with torch.no_grad():
        evaluated = [each(torch.ones(2, 8, dtype=torch.float64, device=mesh.device)).item() for each in (model, whole)]
    homes = {name: list(home.ranks) for name, home in placement.homes.items()}
    return {"placed": placed, "alone": alone, "homes": homes, "evaluated": evaluated}


def draws(mesh: Mesh) -> dict[str, Any]:
    """Dropout inside of placed modules and outside of them."""
    model = _build(dropout=0.5).to(mesh.device)
    placement = _placed(mesh, model)
    torch.manual_seed(9)
    found = _train(model, placement.clip_grad_norm_, steps=2)
    return {"losses": found["losses"], "parameters": found["parameters"], "next": torch.rand(()).item()}


def refusals(mesh: Mesh) -> list[str]:
    """What cannot be placed, and what a placed module may not do."""
    home = mesh.process_sets.add([0], name="somewhere")
    tied = _build()
    tied.head.weight = nn.Parameter(torch.zeros(1, 8, dtype=torch.float64))
    tied.left.down.bias = tied.right.down.bias
    said = []
    for model, homes in (
        (_build(), {"centre": home}),
        (_build(), {"left": home, "left.up": home}),
        (tied, {"left": home}),
    ):
        try:
            place(model, homes, mesh)
        except LayoutError as error:
            said.append(str(error))
    model = nn.Sequential(_Moody(mesh.rank))
    place(model, {"0": home}, mesh)
    try:
        model(torch.ones(2))
        said.append("ran")
    except CollectiveError as error:
        said.append(str(error))
    return said


class _Moody(nn.Module):
    """Returns more on rank 0 than elsewhere."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x, x] if self.rank == 0 else [x]
