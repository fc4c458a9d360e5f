"""The interface for users: the trainer, its configuration, its data and the command line.

`Trainer`, `Generator` and `FitReport` are handed on lazily, so that reading a configuration loads neither torch nor
transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.config.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from zeromesh.trainer.inference.generator import Generated, Generator
    from zeromesh.trainer.loop.context import FitReport
    from zeromesh.trainer.trainer import Trainer

__all__ = ["Callback", "FitReport", "Generated", "Generator", "Trainer", "TrainerConfig"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from zeromesh.trainer.trainer import Trainer

        return Trainer
    if name == "FitReport":
        from zeromesh.trainer.loop.context import FitReport

        return FitReport
    if name in {"Generated", "Generator"}:
        from zeromesh.trainer.inference import generator

        return getattr(generator, name)
    raise AttributeError(f"module 'zeromesh.trainer' has no attribute {name!r}")
