"""Optimizers of any class under `shard`: equal to the loop in plain PyTorch, with states divided among ranks, or refused."""

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, _muon
from transformers import Adafactor

from tests.support.plain import error_of, plain_loop
from tests.support.trainer_cases import seeded
from tests.support.workers import Workers
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, Tier
from zeromesh.trainer.shard import ChainedOptimizer, engine_of, load, save, shard

BLOCK, LEAST = 64, 512


class Blocks(torch.Tensor):
    """Values as codes of one byte with a scale for each block of them. No operation of torch's takes it."""

    inner: tuple[str, ...] = ("codes", "scale", "levels")

    @staticmethod
    def __new__(cls: type["Blocks"], *, dtype: torch.dtype, **inner: torch.Tensor) -> "Blocks":
        codes = inner["codes"]
        made: Blocks = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        return made

    def __init__(self, *, dtype: torch.dtype, **inner: torch.Tensor) -> None:
        vars(self).update(inner)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return list(self.inner), self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], dtype: torch.dtype, *_: Any) -> "Blocks":
        return cls(dtype=dtype, **inner)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{function} of blocks")

    @classmethod
    def zeros(cls, like: torch.Tensor) -> "Blocks":
        levels = torch.linspace(-1, 1, 255, device=like.device)
        codes = torch.zeros(like.shape, dtype=torch.uint8, device=like.device)
        scale = torch.zeros(like.numel() // BLOCK, device=like.device)
        return cls(codes=codes, scale=scale, levels=levels * levels.abs(), dtype=like.dtype)

    def values(self) -> torch.Tensor:
        return (self.levels[self.codes.long()].view(-1, BLOCK) * self.scale[:, None]).view(self.shape)

    def put(self, values: torch.Tensor) -> None:
        rows = values.float().reshape(-1, BLOCK)
        self.scale.copy_(rows.abs().amax(1).clamp(min=1e-12))
        codes = torch.bucketize(self.rounded(rows / self.scale[:, None]), (self.levels[1:] + self.levels[:-1]) / 2)
        self.codes.copy_(codes.view(self.shape))

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        return values


class FloatBlocks(Blocks):
    inner = ("codes", "scale")

    @classmethod
    def zeros(cls, like: torch.Tensor) -> "Blocks":
        made = Blocks.zeros(like)
        return cls(codes=made.codes.to(torch.float8_e4m3fn), scale=made.scale, dtype=like.dtype)

    def values(self) -> torch.Tensor:
        return (self.codes.float().view(-1, BLOCK) * self.scale[:, None]).view(self.shape)

    def put(self, values: torch.Tensor) -> None:
        rows = values.float().reshape(-1, BLOCK)
        self.scale.copy_(rows.abs().amax(1).clamp(min=1e-12))
        self.codes.copy_((rows / self.scale[:, None]).view(self.shape))


class ChanceBlocks(Blocks):
    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        return values + torch.rand_like(values) / 100


class BlockAdam(Optimizer):
    """Adam with states in blocks where a tensor is not small and has whole ones, and a rate that must be a tensor."""

    kinds: tuple[type[Blocks], type[Blocks]] = (Blocks, FloatBlocks)

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        param_group["lr"] = torch.as_tensor(param_group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not isinstance(group["lr"], torch.Tensor):
                raise TypeError("lr must be a tensor")
            for each in group["params"]:
                self.update(each, self.state[each], group["lr"])

    def update(self, each: nn.Parameter, state: dict[str, Any], lr: torch.Tensor) -> None:
        names, blocks = ("exp_avg", "exp_avg_sq"), each.numel() >= LEAST and each.numel() % BLOCK == 0
        if not state:
            state["step"] = torch.zeros(())
            made = [kind.zeros(each) if blocks else torch.zeros_like(each) for kind in self.kinds]
            state.update(zip(names, made, strict=True))
        state["step"] += 1
        first, second = (state[name].values().to(each.dtype) if blocks else state[name] for name in names)
        first, second = first.lerp(each.grad, 0.1), second.lerp(each.grad.square(), 0.01)
        for name, value in zip(names, (first, second), strict=True):
            (state[name].put if blocks else state[name].copy_)(value)
        root = (second / (1 - 0.99 ** state["step"])).sqrt() + 1e-8
        each.sub_(lr * first / (1 - 0.9 ** state["step"]) / root)


class ChanceAdam(BlockAdam):
    kinds = (ChanceBlocks, FloatBlocks)


class ReadingAdam(BlockAdam):
    def update(self, each: nn.Parameter, state: dict[str, Any], lr: torch.Tensor) -> None:
        super().update(each, state, lr * (1.0 if each.numel() < LEAST else each.view(-1)[0].abs().clamp(1, 1).item()))


class RoundingAdam(BlockAdam):
    bf16_stochastic_round = True


class Row(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : self.weight.numel()] @ self.weight.flatten()


class Rows(nn.Module):
    """Parameters with blocks, too small for blocks, with a part of a block left, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        shapes: list[tuple[int, ...]] = [(64, 128), (33, 256), (64, 128), (4100,), (7,), (), (3, 4, 1024)]
        self.rows = nn.ModuleList(Row(*shape) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([row(x * 2.0**-number).sum() for number, row in enumerate(self.rows)]).sum()


def maker(name: str) -> Callable[[nn.Module], Optimizer]:
    if name in globals():
        return lambda model: globals()[name](model.parameters())
    kind = getattr(importlib.import_module("torchao.optim"), name)
    return lambda model: kind(model.parameters(), lr=0.01)


def exact_batches() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(BATCH, 12288, generator=random).mul(8).round().div(8) for _ in range(STEPS)]


def trained_exactly(mesh: Mesh, name: str, kinds: list[tuple[int, str]], folder: str) -> dict[str, Any]:
    """Whether weights are those of the plain loop at each of the stages and tiers, and the bytes of the states."""

    def rate(optimizer: Optimizer) -> None:
        optimizer.param_groups[0]["lr"].fill_(0.02)

    make = maker(name)
    with torch.compiler.set_stance("force_eager"):  # Compiling takes seconds for each shape.
        plain = seeded(Rows)
        own = make(plain)
        rate(own)
        plain_loop(plain, exact_batches(), Rows.forward, own)
        found: dict[str, Any] = {"equal": [], "bytes": []}
        for stage, tier in kinds:
            model, path = seeded(Rows), Path(folder) / f"{name} {stage}"
            options = {"stage": stage, "reduce": "sum", "offload": {"optimizer": tier, "directory": folder}}
            weights, nbytes = sharded(mesh, model, make(model), exact_batches(), Rows.forward, path, rate, **options)
            found["equal"].append(all(torch.equal(each, weights[key].cpu()) for key, each in plain.named_parameters()))
            found["bytes"].append(nbytes)
    return found


def refused_blocks(mesh: Mesh, name: str) -> str:
    model = seeded(Rows)
    first, *others = model.parameters()
    optimizer = ChainedOptimizer(torch.optim.SGD([first], lr=0.1), globals()[name](others))
    return error_of(lambda: shard(model, optimizer), ConfigError)


EVERY = [(0, "none"), (1, "host"), (2, "file"), (3, "file")]


def test_weights_are_those_of_one_process_on_any_number_of_ranks(workers: Workers, tmp_path: Path) -> None:
    arguments = {"name": "BlockAdam", "folder": str(tmp_path)}
    both = workers.run(2, "test_optimizers:trained_exactly", kinds=EVERY, **arguments)
    # They go on from what both have saved.
    alone = workers.run(1, "test_optimizers:trained_exactly", kinds=[(0, "file"), (2, "none")], **arguments)
    three = workers.run(3, "test_optimizers:trained_exactly", kinds=[(3, "none")], **arguments)
    for found in (*both, *alone, *three):
        assert all(found["equal"])
    whole = alone[0]["bytes"][0]
    for shares in (*zip(*(found["bytes"] for found in both), strict=True), [found["bytes"][0] for found in three]):
        assert sum(shares) == whole
        assert max(shares) < 0.75 * whole
    assert whole < 0.4 * 8 * sum(each.numel() for each in Rows().parameters())


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_those_of_torchao(workers: Workers, tmp_path: Path, name: str) -> None:
    pytest.importorskip("torchao.optim")
    for ranks in (2, 1):
        arguments = {"name": name, "kinds": [(1, "none"), (3, "file")], "folder": str(tmp_path)}
        for found in workers.run(ranks, "test_optimizers:trained_exactly", **arguments):
            assert all(found["equal"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ChanceAdam", "depends on others, on groups beside its own, on its place, or on chance"),
        ("ReadingAdam", "keeps states that depend on sizes, and which it keeps of rows.1.weight is not known"),
        ("RoundingAdam", "has bf16_stochastic_round=True"),
    ],
)
def test_what_cannot_be_exact_is_refused(workers: Workers, name: str, said: str) -> None:
    assert said in workers.run(1, "test_optimizers:refused_blocks", name=name)[0]


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


class Counted(Optimizer):
    """An average of iterates by weights that a group sums up, whichever of its parameters move, as Schedule-Free's."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "count": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weight = group["lr"] * (1 + group["count"])
            group["weight_sum"] += weight
            group["norm"] = group.get("norm", 1.0) * 0.9
            for each in group["params"]:
                if each.grad is not None:
                    fast = self.state[each].setdefault("fast", each.clone())
                    fast.sub_(each.grad, alpha=group["lr"] * group["norm"])
                    each.lerp_(fast, weight / group["weight_sum"])
            group["count"] += 1


class GlobalNorm(Lion):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1e-3)
        super().step()


class CountsItself(Lion):
    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step()


class SlowWeights(Lion):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.slow: dict[Any, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:
        super().step()
        for each in self.param_groups[0]["params"]:
            each.data.lerp_(self.slow.setdefault(each, each.detach().clone()), 0.5)


class TwoModes(Lion):
    def train(self) -> None: ...

    def eval(self) -> None: ...


class Marked(Lion):
    """A class that reads what is set on parameters."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for number, each in enumerate(group["params"]):
                each.factor = 0.5 + number

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.add_(each, alpha=getattr(each, "factor", 100.0))
        super().step()


class NarrowState(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["codes"] = each.to(torch.complex128)


MAKERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "Adam decoupled": lambda groups: torch.optim.Adam(groups, decoupled_weight_decay=True),
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True, maximize=True),
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
    "Counted": Counted,
    "Marked": Marked,
    "Muon and AdamW": lambda groups: ChainedOptimizer(torch.optim.Muon(groups[:1]), torch.optim.AdamW(groups[1:])),
}
REFUSED: dict[str, Callable[..., Optimizer]] = {
    "closure": torch.optim.LBFGS,
    "sparse": torch.optim.SparseAdam,
    "global norm": GlobalNorm,
    "own count": CountsItself,
    "slow weights": SlowWeights,
    "own count of a part": lambda groups: ChainedOptimizer(CountsItself(groups[:1]), torch.optim.AdamW(groups[1:])),
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


class Resting(Net):
    """A net whose first layer, in every second step, has no gradient."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) if self.calls % 2 else self.norm(self.inner[2](torch.tanh(self.inner[1](x)))) * self.gain


class Late(Resting):
    calls = 1


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


def sharded(
    mesh: Mesh,
    model: Any,
    optimizer: Any,
    batches: Iterable[torch.Tensor],
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    path: Path,
    first: Callable[[Any], object] = bool,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], int]:
    """Weights after steps, or those after a checkpoint at `path`, and the bytes of the states. `first` sets the optimizer up."""
    model, optimizer = shard(model, optimizer, **options)
    resumed = path.exists() and load(path, model, optimizer) is not None
    if not resumed:
        first(optimizer)
    for step, rows in enumerate(batches, 1):
        if resumed and step <= SAVED:
            continue
        loss(model, rows.tensor_split(mesh.world_size)[mesh.rank].to(mesh.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED:
            save(path, model, optimizer)
    engine = engine_of(model)
    weights = {name: value.clone() for name, value in engine.state.parameters()}
    nbytes = engine.ledger.by_purpose(*Tier).get(Purpose.MOMENTS, 0)
    engine.close()
    return weights, nbytes


def trained(mesh: Mesh, name: str, stages: list[int], folder: str, offload: str = "none", net: str = "Net") -> dict[str, Any]:
    """Steps at each stage, or those after a checkpoint in `folder`: the largest difference from the plain loop."""
    _muon._zeropower_via_newtonschulz = exact_orthogonal
    made = {"Net": Net, "Resting": Resting, "Late": Late}[net]
    plain = seeded(made).double()
    states = plain_loop(plain, batches(), loss_of, optimizer_of(name, plain)).states[1:]
    moved = max(float((value - states[0][key]).abs().max()) for key, value in states[-1].items())
    found: dict[str, Any] = {"moved": moved, "off": 0.0, "bytes": []}
    for stage in stages:
        model, path = seeded(made).double(), Path(folder) / f"{name} {stage}"
        options = {"stage": stage, "offload": {"optimizer": offload, "directory": folder}}
        weights, nbytes = sharded(mesh, model, optimizer_of(name, model), batches(), loss_of, path, **options)
        off = max(float((value - states[-1][key]).abs().max()) for key, value in weights.items())
        found["off"] = max(found["off"], off)
        found["bytes"].append(nbytes)
    return found


EXCHANGED: dict[str, Any] = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "BlockAdam": BlockAdam}


def exchanged(mesh: Mesh, folder: str, kinds: list[str]) -> list[str]:
    """What is said of a checkpoint with the states of another optimizer, there and back; of its weights alone nothing."""
    found = []
    for saved, loaded in (kinds, kinds[::-1]):
        for kind in (saved, loaded):
            model = seeded(Rows)
            model, optimizer = shard(model, EXCHANGED[kind](model.parameters()), stage=2)
            if kind == saved:
                model(exact_batches()[0].to(mesh.device)).backward()
                optimizer.step()
                save(f"{folder}/{kind}", model, optimizer)
            else:
                found.append(error_of(partial(load, f"{folder}/{saved}", model, optimizer), LayoutError))
                assert load(f"{folder}/{saved}", model) == {}
            engine_of(model).close()
    return found


def refused(mesh: Mesh, name: str) -> str:
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
    return error_of(lambda: shard(model, optimizer, parallel={"tensor": mesh.tensor.size, "plan": plan}), ConfigError)


WHOLE = {"Muon", "Muon and AdamW", "Adafactor", "transformers", "Lamb"}
ALIKE = {"Adam decoupled", "SGD dampened", "RAdam", "Adamax", "Adadelta", "Lion", "AdamW", "RMSprop", "Muon"}
"""Of states such as those of another: Adam, SGD, NAdam, Adagrad, and Muon beside AdamW."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "every"),
    [
        pytest.param(name, every, marks=pytest.mark.full if every or name in ALIKE else (), id=f"{name}-{stages}")
        for name in MAKERS
        for every, stages in ((False, "some"), (True, "every stage"))
    ],
)
def test_updates_are_those_of_plain_pytorch(workers: Workers, tmp_path: Path, name: str, every: bool) -> None:
    stages = [0, 1, 2, 3] if every else [0, 3] if name in WHOLE else [3]
    arguments = {"name": name, "stages": stages, "folder": str(tmp_path)}
    both = workers.run(4 if every else 2, "test_optimizers:trained", **arguments)
    alone = workers.run(1, "test_optimizers:trained", **arguments)[0]  # It goes on from what both have saved.
    for found in (*both, alone):
        assert found["off"] < 1e-9
        assert found["moved"] > 1e-4
    for stage, whole, *shares in zip(stages, alone["bytes"], *(found["bytes"] for found in both), strict=True):
        assert whole > 0
        if name in WHOLE:  # Each tensor lies on one of the ranks, at stage 0 too.
            assert sum(shares) == whole
            assert max(shares) < 0.75 * whole
        elif stage:
            assert max(shares) < 0.8 * whole  # Small buckets have much padding.


@pytest.mark.parametrize(
    ("name", "net"), [("NAdam", "Resting"), ("Adafactor", "Resting"), ("Counted", "Resting"), ("Counted", "Late")]
)
def test_without_a_gradient_a_parameter_neither_moves_nor_decays(workers: Workers, tmp_path: Path, name: str, net: str) -> None:
    arguments = {"name": name, "stages": [1, 3], "folder": str(tmp_path), "net": net}
    assert max(found["off"] for found in workers.run(2, "test_optimizers:trained", **arguments)) < 1e-9


@pytest.mark.parametrize("name", ["NAdam", "Adafactor"])
def test_states_rest_on_files(workers: Workers, tmp_path: Path, name: str) -> None:
    arguments = {"name": name, "stages": [1], "folder": str(tmp_path), "offload": "file"}
    for ranks in (2, 1):
        assert max(found["off"] for found in workers.run(ranks, "test_optimizers:trained", **arguments)) < 1e-9


@pytest.mark.parametrize(
    ("kinds", "there", "back"),
    [
        (["AdamW", "SGD"], ["exp_avg, exp_avg_sq of its optimizer"], ["has no exp_avg in it"]),
        (
            ["BlockAdam", "AdamW"],
            ["has exp_avg.codes, exp_avg.levels, exp_avg.scale", "of its optimizer, which is of another kind than the one here"],
            ["does not fit this model and optimizer", "rows.0.weight has no step in it"],
        ),
    ],
)
def test_states_of_another_optimizer_are_refused(
    workers: Workers, tmp_path: Path, kinds: list[str], there: list[str], back: list[str]
) -> None:
    for first, second in workers.run(2, "test_optimizers:exchanged", folder=str(tmp_path), kinds=kinds):
        assert all(words in first for words in there)
        assert all(words in second for words in back)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("closure", "LBFGS has parameters, or their id(), in _params"),
        ("sparse", "SparseAdam: a trial of its step"),
        ("global norm", "depends on others"),
        ("own count", "keeps count outside"),
        ("own count of a part", "CountsItself: a trial"),
        ("slow weights", "keeps slow outside"),
        ("two modes", "has train() and eval()"),
        ("narrow", "keeps torch.complex128 as 'codes'"),
        ("filled", "initial_accumulator_value"),
        ("differentiable", "differentiable"),
        ("used", "before the first update"),
    ],
)
def test_what_cannot_be_right_is_refused(workers: Workers, name: str, said: str) -> None:
    assert said in workers.run(1, "test_optimizers:refused", name=name)[0]


def test_whole_tensors_are_not_divided_by_a_tensor_axis(workers: Workers) -> None:
    for said in workers.run(2, "test_optimizers:refused", name="Lamb", tensor=2):
        assert "tensor parallelism divides inner.1.weight" in said
