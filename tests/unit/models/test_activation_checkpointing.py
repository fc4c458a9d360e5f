"""Activation checkpointing changes memory and nothing else."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.architectures import small_model
from zeromesh.errors import ConfigError, PhaseError
from zeromesh.trainer.models.prepare import Mode, enable_activation_checkpointing


def gpt2() -> Any:
    torch.manual_seed(0)
    made = small_model("gpt2", num_hidden_layers=3, vocab_size=50, n_positions=32, bos_token_id=None, eos_token_id=None)
    made.config.use_cache = False  # as in training; with one, the mask and so the sums of attention are made otherwise
    return made.double().train()  # dropout 0.1: recomputation has to draw the same numbers


def llama() -> Any:
    torch.manual_seed(0)
    return small_model("llama", num_hidden_layers=3, vocab_size=50, intermediate_size=64).double().train()


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], Counter[str]]:
    ids = torch.arange(40).reshape(2, 20) % 50
    torch.manual_seed(1)
    with Operations() as operations:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, operations.count


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("mode", ["block", "selective"])
def test_gradients_are_the_same(build: Any, mode: Mode) -> None:
    loss, gradients, plain = step(build())
    model = build()
    assert enable_activation_checkpointing(model, mode) == 3
    loss2, gradients2, operations = step(model)
    assert torch.equal(loss, loss2)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients2[name]), name
    products = [key for key in plain if key.startswith(("aten.mm", "aten.addmm", "aten._scaled"))]
    forward = {key: operations[key] - plain[key] for key in products if "backward" not in key}
    assert any(extra > 0 for extra in forward.values()) == (mode == "block"), forward


def test_a_recomputation_may_run_operators_that_a_cache_spared_the_forward() -> None:
    found: list[Any] = []
    for mode in ("none", "selective"):
        model, spared = llama(), iter([True] * 3 + [False] * 3)  # a block's forward, then its recomputation

        def transport(_module: Any, args: Any, spared: Any = spared) -> None:
            if not next(spared):
                args[0].detach().view(torch.int64)

        if mode == "selective":
            enable_activation_checkpointing(model, mode)
            for layer in model.model.layers:
                layer.mlp.register_forward_pre_hook(transport)
        found.append(step(model)[:2])
        assert mode == "none" or not list(spared)
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(gradient, found[1][1][name]) for name, gradient in found[0][1].items())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        out: torch.Tensor = x + scale * self.inner(x)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)
        return x.square().sum()


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_plain_blocks(mode: Mode) -> None:
    results, calls = [], 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1

    for wrapped in (False, True):
        net = Net()
        if wrapped:
            assert enable_activation_checkpointing(net, mode, blocks=list(net.blocks)) == 3
            for block in net.blocks:
                block.register_forward_pre_hook(hook)
        torch.manual_seed(3)
        net(torch.ones(4, 8)).backward()
        results.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert calls == 3  # hooks of the block do not run again in recomputation


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="Net has none"):
        enable_activation_checkpointing(Net(), "block")


class Moving(Block):
    """A block that changes buffers of several kinds, on which its result depends."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(8, momentum=0.3), nn.BatchNorm1d(8)
        self.other._buffers["running_mean"] = self.norm.running_mean
        self.bound = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        self.calls = self.calls + 1
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        rest = self.other.running_mean
        x = self.bound(x - self.mean) * (1 + 1 / self.calls) + self.norm(x) + (rest if rest is not None else 0)
        return super().forward(x, scale=scale)


@pytest.mark.parametrize("mode", ["block", "selective"])
def test_buffers_change_once(mode: Mode) -> None:
    """Those that a forward changes are as it found them when its block is recomputed, twice too, and after a second forward."""
    results = []
    for wrapped in (False, True):
        net = Net()
        torch.manual_seed(2)
        net.blocks = nn.ModuleList(Moving() for _ in range(2))
        if wrapped:
            enable_activation_checkpointing(net, mode, blocks=list(net.blocks))
        torch.manual_seed(3)
        first, second = net(torch.randn(4, 8)), net(torch.randn(4, 8))
        for loss in (second, first, first)[: 3 if mode == "block" else 2]:
            loss.backward(retain_graph=mode == "block")
        gradients = (each.grad for each in net.parameters() if each.grad is not None)
        results.append([*gradients, *net.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("replaced", [False, True])
def test_large_buffers_that_change_are_refused(replaced: bool) -> None:
    class Large(Block):
        def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            if replaced:
                self.table = self.table + 1
            elif self.training:
                self.table.add_(1)
            return super().forward(x, scale=scale)

    net = Net()
    net.blocks = nn.ModuleList([Large()])
    net.blocks[0].register_buffer("table", torch.zeros(1 << 19))
    enable_activation_checkpointing(net, "block", blocks=list(net.blocks))
    with pytest.raises(PhaseError, match=r"changes its buffer table, .*activation_checkpointing: none"):
        net(torch.ones(4, 8))
