"""The global gradient norm: every element counted once over the ranks that own it."""

from __future__ import annotations

import torch

from zeromesh.mesh.groups import ProcessSet


def norm_of(shard: torch.Tensor) -> torch.Tensor:
    """The norm of a gradient shard, a scalar where that lies; nan or inf where it holds such. Padding is zero and adds nothing."""
    norm: torch.Tensor = torch.linalg.vector_norm(shard)
    return norm


def global_norm(squares: float, owners: ProcessSet) -> float:
    """The norm from the sums of squares of `owners`, who count every element once.

    All ranks get the same number, so what follows from it (skipping a step, clipping) they do together.
    """
    total = torch.tensor([squares], dtype=torch.float64)
    owners.sum_(total, "sum of the gradient norm")
    return float(total.sqrt())


def clip_factor(norm: float, limit: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies gradients by: min(1, limit / (norm + 1e-6)); 1 for limit 0 (off)."""
    if limit <= 0:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
