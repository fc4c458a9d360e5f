"""The memory that one forward and backward of the workload allocates by itself: no engine, no ranks, no optimizer.

The model is an ordinary one in the compute dtype, its products and its loss are those that zeromesh's trainer takes, and every
gradient is freed as soon as autograd has it, as the engine does. PyTorch's profiler tells of every allocation of the CPU
allocator, so the highest sum is exact and has nothing in it of libraries or of the C library's heap.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench.workload import Workload
from zeromesh.trainer.losses.losses import make_loss
from zeromesh.trainer.models import prepare
from zeromesh.trainer.models.prepare import enable_activation_checkpointing, use_fastest_linear

RESULT = "ACTIVATIONS "


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes above the parameters."""

    saved: int
    """Kept from forward for backward."""
    peak: int
    """The most at any moment of forward and backward, gradients and temporary results included."""


def measure(workload: Workload) -> Activations:
    """One step after a first one, which fills the libraries' caches."""
    torch.manual_seed(workload.seed)
    model = workload.build_model().to(workload.compute).train()
    loss = make_loss(model)  # Tried before the layers change, as by the trainer.
    use_fastest_linear(model, workload.compute, "cpu")
    # The profiler sees PyTorch's allocator alone, so what recomputed blocks keep comes from it here.
    prepare.allocate_lasting = _ordinary  # type: ignore[attr-defined]
    enable_activation_checkpointing(model, "block" if workload.checkpointing else "none")
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(forget)
    tokens = workload.tokens()[0, : workload.micro]
    batch = {"input_ids": tokens, "labels": tokens}
    seed = 1.0 / tokens.numel()

    def forward() -> torch.Tensor:
        return loss(model, batch, seed=seed)

    def backward(total: torch.Tensor) -> None:
        total.backward(torch.full_like(total, seed))  # type: ignore[no-untyped-call]

    backward(forward())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward_only:
        total = forward()
    backward(total)
    del total
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as both:
        backward(forward())
    return Activations(saved=running(forward_only)[-1], peak=max(running(both)))


def _ordinary(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def forget(parameter: nn.Parameter) -> None:
    """A gradient is freed as soon as autograd has it."""
    parameter.grad = None


def running(profiled: Any) -> list[int]:
    """Bytes allocated since the start, after each allocation and each release."""
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    total, sums = 0, [0]
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        total += event.nbytes()
        sums.append(total)
    return sums


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(RESULT + json.dumps(asdict(measure(Workload.from_json(sys.argv[1])))))
