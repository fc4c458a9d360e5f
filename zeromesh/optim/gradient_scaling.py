"""Dynamic loss scale for float16 gradients, as in Micikevicius et al., "Mixed Precision Training", 2018.

The global gradient norm: every element counted once over the ranks that own it.
"""

from __future__ import annotations

import torch

from zeromesh.mesh.process_mesh import ProcessSet
from zeromesh.options import ScalerSettings


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


class LossScaler:
    """The present scale. With settings None it is 1 for ever."""

    def __init__(self, settings: ScalerSettings | None) -> None:
        self._settings = settings
        self.scale = settings.initial if settings else 1.0
        self.good_steps = 0
        """Steps without an overflow since the scale has changed."""

    @property
    def dynamic(self) -> bool:
        return self._settings is not None

    def load(self, scale: float, good_steps: int) -> None:
        """Go on from an earlier run's. A scale that is fixed here stays."""
        if self._settings is not None:
            self.scale, self.good_steps = scale, good_steps

    def update(self, *, overflow: bool) -> None:
        """Learn from a step; all ranks call it with the same verdict."""
        settings = self._settings
        if settings is None:
            return
        if overflow:
            self.scale = max(settings.smallest, self.scale * settings.backoff)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == settings.growth_interval:
            self.scale *= settings.growth
            self.good_steps = 0
