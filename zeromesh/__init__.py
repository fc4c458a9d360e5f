"""zeromesh: a ZeRO-style trainer on PyTorch that is exact, small in memory and fast.

`from zeromesh import Trainer` is all that most people need. The engine lives in the subpackages of this package, the
trainer in `zeromesh.trainer`, and what knows about memory tiers in `zeromesh.offload`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeromesh.trainer import Callback, FitReport, Generated, Generator, Trainer, TrainerConfig

__version__ = "0.1.0"
_LOOP = ("ChainedOptimizer", "averaged", "gathered", "load", "save", "shard", "state_dict", "unshard")
_TRAINER = ("Callback", "FitReport", "Generated", "Generator", "Trainer", "TrainerConfig")
__all__ = [
    "Callback",
    "FitReport",
    "Generated",
    "Generator",
    "Trainer",
    "TrainerConfig",
    "__version__",
    "receive_weights",
    *_LOOP,
]


def __getattr__(name: str) -> Any:
    """Hand on the trainer's names lazily, so that the engine never imports what stands above it."""
    if name in _LOOP:
        from zeromesh.trainer import shard

        return getattr(shard, name)
    if name == "receive_weights":
        from zeromesh.trainer.weights.handoff import receive_weights

        return receive_weights
    if name in _TRAINER:
        from zeromesh import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'zeromesh' has no attribute {name!r}")
