"""Optimizers that keep states in blocks of codes of one byte, under `shard`, beside the same loop in plain PyTorch.

Losses are linear, of inputs with few bits: sums of gradients are exact in any order, so that weights can be equal bit by bit.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tests.support.trainer_cases import seeded
from zeromesh.errors import ConfigError, LayoutError
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload import Purpose, Tier
from zeromesh.trainer.shard import ChainedOptimizer, engine_of, load, save, shard

STEPS, SAVED, BATCH = 6, 3, 12
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
    """Codes that are floats."""

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
    """Codes that are rounded at random."""

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
    """Reads an element of larger tensors, which a tensor without elements has not."""

    def update(self, each: nn.Parameter, state: dict[str, Any], lr: torch.Tensor) -> None:
        super().update(each, state, lr * (1.0 if each.numel() < LEAST else each.view(-1)[0].abs().clamp(1, 1).item()))


class RoundingAdam(BlockAdam):
    """Has an option of torchao's optimizers."""

    bf16_stochastic_round = True


class Row(nn.Module):
    """Products with one parameter."""

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
    """What makes the optimizer of a name, of this module or of torchao."""
    if name in globals():
        return lambda model: globals()[name](model.parameters())
    kind = getattr(importlib.import_module("torchao.optim"), name)
    return lambda model: kind(model.parameters(), lr=0.01)


def batches() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(BATCH, 12288, generator=random).mul(8).round().div(8) for _ in range(STEPS)]


def trained(mesh: Mesh, name: str, kinds: list[tuple[int, str]], folder: str) -> dict[str, Any]:
    """Steps at stages with offload, or those after a checkpoint in `folder`: whether weights are those of the plain loop."""
    make = maker(name)
    with torch.compiler.set_stance("force_eager"):  # Compiling takes seconds for each shape.
        plain = seeded(Rows)
        own = make(plain)
        own.param_groups[0]["lr"].fill_(0.02)
        for rows in batches():
            plain(rows).backward()
            own.step()
            own.zero_grad()
        found: dict[str, Any] = {"equal": [], "bytes": []}
        for stage, tier in kinds:
            model = seeded(Rows)
            model, optimizer = shard(
                model, make(model), stage=stage, reduce="sum", offload={"optimizer": tier, "directory": folder}
            )
            path, first = Path(folder) / f"{name} {stage}", 0
            if path.exists() and load(path, model, optimizer) is not None:
                first = SAVED
            else:
                optimizer.param_groups[0]["lr"].fill_(0.02)
            for step, rows in enumerate(batches()[first:], first + 1):
                model(rows.tensor_split(mesh.world_size)[mesh.rank].to(mesh.device)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == SAVED:
                    save(path, model, optimizer)
            weights = dict(engine_of(model).state.parameters())
            found["equal"].append(all(torch.equal(each, weights[key].cpu()) for key, each in plain.named_parameters()))
            found["bytes"].append(engine_of(model).ledger.by_purpose(*Tier).get(Purpose.MOMENTS, 0))
            engine_of(model).close()
    return found


def exchanged(mesh: Mesh, folder: str) -> list[str]:
    """What is said of a checkpoint with the states of another optimizer."""
    found = []
    for kinds in (("BlockAdam", "AdamW"), ("AdamW", "BlockAdam")):
        for kind in kinds:
            model = seeded(Rows)
            made = torch.optim.AdamW(model.parameters()) if kind == "AdamW" else maker(kind)(model)
            model, optimizer = shard(model, made, stage=2)
            if kind == kinds[0]:
                model(batches()[0].to(mesh.device)).backward()
                optimizer.step()
                save(f"{folder}/{kind}", model, optimizer)
            else:
                try:
                    load(f"{folder}/{kinds[0]}", model, optimizer)
                except LayoutError as error:
                    found.append(str(error))
            engine_of(model).close()
    return found


def refused(mesh: Mesh, name: str) -> str:
    """What is said of an optimizer that cannot be exact."""
    model = seeded(Rows)
    first, *others = model.parameters()
    try:
        shard(model, ChainedOptimizer(torch.optim.SGD([first], lr=0.1), globals()[name](others)))
    except ConfigError as error:
        return str(error)
    return ""
