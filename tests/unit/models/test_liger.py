"""The loss by liger-kernel, for which a stand-in computes here: what reaches it, and what its trial finds."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from zeromesh.errors import ConfigError
from zeromesh.kernels.chunked_cross_entropy import UNCHANGED, LogitChange, chunked_cross_entropy
from zeromesh.trainer.losses import chunked_head

Fused = Callable[..., torch.Tensor]


def stand_in(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bias: Any, **settings: Any
) -> torch.Tensor:
    """What liger's function computes, by its documentation."""
    assert (settings["reduction"], settings["accum_dtype"]) == ("sum", torch.float32)
    logits = (hidden @ weight.t()).float() + (0 if bias is None else bias.float())
    if cap := settings["softcap"]:
        logits = cap * (logits / cap).tanh()
    return cross_entropy(logits, targets, reduction="sum")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fused], None]:
    def put(fused: Fused) -> None:
        module = ModuleType("liger_kernel.transformers.functional")
        module.liger_fused_linear_cross_entropy = fused  # type: ignore[attr-defined]
        for name in ("liger_kernel", "liger_kernel.transformers"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)

    monkeypatch.setattr(chunked_head, "found", lambda: torch.device("cuda"))
    return put


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 16, generator=generator).to(dtype).requires_grad_() for rows in (300, 50))
    targets = torch.randint(0, 50, (300,), generator=generator)
    targets[::7] = -100
    return hidden, weight, targets


@pytest.mark.parametrize(
    "change", [UNCHANGED, LogitChange(scale=0.25), LogitChange(cap=3.0), LogitChange(scale=2.0, cap=5.0)], ids=str
)
def test_it_is_the_loss_in_chunks(install: Callable[[Fused], None], change: LogitChange) -> None:
    install(stand_in)
    compute, results = chunked_head.LigerLoss(), []
    for kernel in (compute, chunked_cross_entropy):
        hidden, weight, targets = problem()
        loss = kernel(hidden, weight, None, targets, seed=1.0, chunk_tokens=64, change=change)
        loss.backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_another_result_is_refused(install: Callable[[Fused], None]) -> None:
    install(lambda *arguments, **settings: stand_in(*arguments, **settings) * 1.01)
    with pytest.raises(ConfigError, match=r"model\.loss: a trial found liger's loss apart by 0\.01"):
        chunked_head.LigerLoss()(*problem()[:2], None, problem()[2], seed=1.0, chunk_tokens=64, change=UNCHANGED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_heads_that_it_has_no_kernel_for_are_refused(install: Callable[[Fused], None], dtype: torch.dtype) -> None:
    install(stand_in)
    hidden, weight, targets = problem(dtype)
    more = {} if dtype is torch.float64 else {"exchange": object()}
    with pytest.raises(ConfigError, match="liger has no kernel for this head"):
        chunked_head.LigerLoss()(hidden, weight, None, targets, seed=1.0, chunk_tokens=64, change=UNCHANGED, **more)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_head, "found", lambda: None)
    with pytest.raises(ConfigError, match="liger's kernels run on GPUs"):
        chunked_head.LigerLoss()
    monkeypatch.setattr(chunked_head, "found", lambda: torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        chunked_head.LigerLoss()
