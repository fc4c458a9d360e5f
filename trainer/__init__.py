"""What a person touches: the trainer, its configuration, its data and the command line.

`Trainer` and `FitReport` are handed on lazily, so that reading a configuration loads neither torch nor
transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeromesh.trainer.config import TrainerConfig

if TYPE_CHECKING:
    from zeromesh.trainer.trainer import FitReport, Trainer

__all__ = ["FitReport", "Trainer", "TrainerConfig"]


def __getattr__(name: str) -> Any:
    if name in {"FitReport", "Trainer"}:
        from zeromesh.trainer import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module 'zeromesh.trainer' has no attribute {name!r}")
