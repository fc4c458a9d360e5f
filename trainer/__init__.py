"""The user interface: the trainer, its configuration, its data and the command line.

`Trainer`, `Generator` and `FitReport` are imported lazily, so that reading a configuration loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeromesh.trainer.callbacks.callback import Callback
from zeromesh.trainer.config.trainer_config import TrainerConfig

if TYPE_CHECKING:
    from zeromesh.trainer.inference.generator import Generated, Generator
    from zeromesh.trainer.loop.context import FitReport
    from zeromesh.trainer.trainer import Trainer

__all__ = ["Callback", "FitReport", "Generated", "Generator", "Trainer", "TrainerConfig"]
_LAZY = {"Trainer": "trainer", "FitReport": "loop.context"}
_LAZY |= dict.fromkeys(("Generated", "Generator"), "inference.generator")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'zeromesh.trainer' has no attribute {name!r}")
    return getattr(import_module(f"zeromesh.trainer.{_LAZY[name]}"), name)
