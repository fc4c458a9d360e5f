"""Optimizers of any class under `shard`, beside the same loop in plain PyTorch."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, _muon
from transformers import Adafactor

from tests.support.trainer_cases import seeded
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, Tier
from zeromesh.trainer.shard import ChainedOptimizer, engine_of, load, save, shard

STEPS, SAVED = 5, 3
BATCH = 12


class Lion(Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                momentum = self.state[each].setdefault("momentum", torch.zeros_like(each))
                sign = torch.lerp(each.grad, momentum, group["beta"]).sign()
                each.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * sign)
                momentum.lerp_(each.grad, 0.01)


class Lamb(Optimizer):
    """You et al., "Large Batch Optimization for Deep Learning", 2020. It gives parameters other memory, as some classes do."""

    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                state = self.state[each]
                first, second = (state.setdefault(name, torch.zeros_like(each)) for name in ("first", "second"))
                state["step"] = state.get("step", 0) + 1
                first.lerp_(each.grad, 0.1)
                second.lerp_(each.grad.square(), 0.01)
                ratio = first / (1 - 0.9 ** state["step"]) / ((second / (1 - 0.99 ** state["step"])).sqrt() + 1e-6)
                ratio += group["weight_decay"] * each
                each.data = each.data - group["lr"] * each.norm() / ratio.norm() * ratio


class GlobalNorm(Lion):
    """Divides gradients by the norm of them all, which no rank has."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1e-3)
        super().step()


class CountsItself(Lion):
    """Keeps a count of its own."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step()


class SlowWeights(Lion):
    """Keeps a copy of each parameter of its own."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.slow: dict[Any, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:
        super().step()
        for each in self.param_groups[0]["params"]:
            each.data.lerp_(self.slow.setdefault(each, each.detach().clone()), 0.5)


class TwoModes(Lion):
    """Has other values of parameters for evaluation."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class NarrowState(Lion):
    """Keeps a state of another dtype, as optimizers of 8 bits do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["codes"] = each.to(torch.int8)


MAKERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "Adam decoupled": lambda groups: torch.optim.Adam(groups, decoupled_weight_decay=True),
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
    "SGD dampened": lambda groups: torch.optim.SGD(groups, momentum=0.9, dampening=0.5, maximize=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": lambda groups: torch.optim.RAdam(groups, betas=(0.5, 0.6)),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, centered=True, momentum=0.5),
    "Adamax": torch.optim.Adamax,
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr_decay=0.1),
    "Adadelta": torch.optim.Adadelta,
    "ASGD": torch.optim.ASGD,
    "Rprop": lambda groups: torch.optim.Rprop([{"params": group["params"]} for group in groups], etas=(0.5, 1.2)),
    "Lion": Lion,
    "Muon": torch.optim.Muon,
    "Adafactor": torch.optim.Adafactor,
    "transformers": lambda groups: Adafactor(groups, beta1=0.5, relative_step=False, warmup_init=False, lr=1e-3),
    "Lamb": Lamb,
    "Muon and AdamW": lambda groups: ChainedOptimizer(torch.optim.Muon(groups[:1]), torch.optim.AdamW(groups[1:])),
}
REFUSED: dict[str, Callable[..., Optimizer]] = {
    "closure": torch.optim.LBFGS,
    "sparse": torch.optim.SparseAdam,
    "global norm": GlobalNorm,
    "own count": CountsItself,
    "slow weights": SlowWeights,
    "two modes": TwoModes,
    "narrow": NarrowState,
    "filled": lambda groups: torch.optim.Adagrad(groups, initial_accumulator_value=0.1),
    "differentiable": lambda groups: torch.optim.Adam(groups, differentiable=True),
}


class Net(nn.Module):
    """Layers of several shapes, of which shards are no whole rows, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(13, 13), nn.Linear(13, 29), nn.Linear(29, 13)])
        self.norm = nn.LayerNorm(13)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.norm(x) * self.gain


def exact_orthogonal(grad: torch.Tensor, coefficients: Any, steps: int, eps: float) -> torch.Tensor:
    """torch's, which computes in bfloat16, where the last bit of a sum over ranks counts."""
    x = grad / grad.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = coefficients[0] * x + (coefficients[1] * gram + coefficients[2] * gram @ gram) @ x
    return x


def optimizer_of(name: str, model: nn.Module) -> Optimizer:
    """Two groups with rates and decay of their own; Muon has matrices alone."""
    matrices = [each for each in model.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    first, second = (matrices[:1], matrices[1:]) if name == "Muon" else (matrices, others)
    groups = [{"params": first, "weight_decay": 0.1, "lr": 0.02}, {"params": second, "weight_decay": 0.0, "lr": 0.01}]
    return {**MAKERS, **REFUSED}[name](groups)


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return (model(rows[:, :13]) - rows[:, 13:]).square().mean()


def batches() -> Iterable[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(BATCH, 26, generator=random, dtype=torch.float64) for _ in range(STEPS)]


def trained(mesh: Mesh, name: str, stages: list[int], folder: str, offload: str = "none") -> dict[str, Any]:
    """Steps at each stage, or those after a checkpoint in `folder`: the largest difference from the plain loop."""
    _muon._zeropower_via_newtonschulz = exact_orthogonal
    plain = seeded(Net).double()
    own, states = optimizer_of(name, plain), []
    for rows in batches():
        loss_of(plain, rows).backward()
        own.step()
        own.zero_grad()
        states.append({key: value.detach().clone() for key, value in plain.named_parameters()})
    moved = max(float((value - states[0][key]).abs().max()) for key, value in states[-1].items())
    found: dict[str, Any] = {"moved": moved, "off": 0.0, "bytes": []}
    for stage in stages:
        model = seeded(Net).double()
        model, optimizer = shard(
            model, optimizer_of(name, model), stage=stage, offload={"optimizer": offload, "directory": folder}
        )
        path, first = Path(folder) / f"{name} {stage}", 0
        if path.exists() and load(path, model, optimizer) is not None:
            first = SAVED
        for step, rows in enumerate(batches()):
            if step < first:
                continue
            loss_of(model, rows.tensor_split(mesh.world_size)[mesh.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == SAVED and not first:
                save(path, model, optimizer)
        off = max(float((value - states[-1][key]).abs().max()) for key, value in engine_of(model).state.parameters())
        found["off"] = max(found["off"], off)
        found["bytes"].append(engine_of(model).ledger.by_purpose(*Tier).get(Purpose.MOMENTS, 0))
        engine_of(model).close()
    return found


def exchanged(mesh: Mesh, folder: str) -> list[str]:
    """What is said of a checkpoint with the states of another optimizer, here and there; of its weights alone nothing."""
    found = []
    for kinds in ((torch.optim.AdamW, torch.optim.SGD), (torch.optim.SGD, torch.optim.AdamW)):
        for kind in kinds:
            model, optimizer = shard(seeded(Net).double(), kind, stage=2)
            if kind is kinds[0]:
                loss_of(model, next(iter(batches()))).backward()
                optimizer.step()  # type: ignore[union-attr]
                save(f"{folder}/{kind.__name__}", model, optimizer)
                continue
            try:
                load(f"{folder}/{kinds[0].__name__}", model, optimizer)
            except LayoutError as error:
                found.append(str(error))
            assert load(f"{folder}/{kinds[0].__name__}", model) == {}
    return found


def refused(mesh: Mesh, name: str) -> str:
    """What is said of an optimizer that cannot be run over parts."""
    model = seeded(Net).double()
    if name == "closure":
        optimizer: Optimizer = torch.optim.LBFGS(model.parameters())
    elif name == "used":
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    else:
        optimizer = optimizer_of(name, model)
    plan = {"inner.1": "colwise", "inner.2": "rowwise"} if mesh.tensor.size > 1 else None
    try:
        shard(model, optimizer, parallel={"tensor": mesh.tensor.size, "plan": plan})
    except ConfigError as error:
        return str(error)
    return ""
