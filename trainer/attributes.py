"""What a run changes on the modules of a model that is somebody else's, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

# Compiled or checkpointed blocks, Hugging Face's switch for checkpointing, training mode, its way to save.
_CHANGED = ("forward", "training", "gradient_checkpointing", "_gradient_checkpointing_func", "save_pretrained")
_ABSENT = object()


class KeptAttributes:
    """The attributes of every module of `model` that a run may change, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[nn.Module, dict[str, Any]]] = [
            (module, {name: vars(module).get(name, _ABSENT) for name in _CHANGED}) for module in model.modules()
        ]

    def put_back(self) -> None:
        """The model is as it was, but for its parameters and buffers."""
        for module, attributes in self._kept:
            for name, value in attributes.items():
                if value is _ABSENT:
                    vars(module).pop(name, None)
                else:
                    vars(module)[name] = value


class TrainingModes:
    """Which modules of a model train, from step to step. `restore` before a step undoes a `model.eval()` that nobody took back; a
    module that the user puts into evaluation mode by itself (frozen statistics) stays in it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._modes = [module.training for module in self._modules]

    def restore(self) -> None:
        """Put the modules back into the modes of the last step, if the model as a whole is in evaluation mode."""
        if self._modules[0].training:
            self._modes = [module.training for module in self._modules]
            return
        for module, mode in zip(self._modules, self._modes, strict=True):
            module.training = mode


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """As `model.eval()`, but each module is afterwards in the mode in which it was."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
