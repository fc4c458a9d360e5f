"""The global gradient norm: every element counted once over the ranks that own it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zeromesh.mesh.groups import ProcessSet


def squared_norm(shards: Iterable[torch.Tensor]) -> float:
    """Sum of squares of this rank's gradient shards; nan or inf where they hold such. Padding is zero and adds nothing."""
    total = 0.0
    for shard in shards:
        if shard.numel():
            total += float(torch.linalg.vector_norm(shard)) ** 2
    return total


def global_norm(squares: float, owners: ProcessSet | None) -> float:
    """The norm from each owner's sum of squares. `owners` is None where this rank holds every element.

    All ranks get the same number, so what follows from it (skipping a step, clipping) they do together.
    """
    total = torch.tensor([squares], dtype=torch.float64)
    if owners is not None:
        owners.sum_(total, "sum of the gradient norm")
    return float(total.sqrt())


def clip_factor(norm: float, limit: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies gradients by: min(1, limit / (norm + 1e-6)); 1 for limit 0 (off)."""
    if limit <= 0:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
