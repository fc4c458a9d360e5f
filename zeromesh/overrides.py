"""Attributes of modules that a run sets for a while: an instance's own `forward`, say, or tensors that a module puts aside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


def override(instance: object, attribute: str, value: Any) -> Callable[[], None]:
    """Set an attribute of the instance itself; returns a call that puts back what was there."""
    own = vars(instance)
    undo = (
        partial(own.__setitem__, attribute, own[attribute]) if attribute in own else partial(own.pop, attribute, None)
    )
    own[attribute] = value
    return undo


@contextmanager
def tensors_put_aside(root: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Take from modules, after the block, the tensors that they have put aside as attributes inside it, such as a recurrent state.

    Attributes that were there before and were not None stay as they are. Yields a call that returns the names of those attributes
    that hold such a tensor now.
    """
    had = [(name, module, dict(vars(module))) for name, module in root.named_modules()]

    def found() -> Iterator[tuple[str, nn.Module, str, bool]]:
        for name, module, before in had:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and before.get(attribute) is None:
                    yield f"{name}.{attribute}".strip("."), module, attribute, attribute in before

    try:
        yield lambda: [name for name, *_ in found()]
    finally:
        for _, module, attribute, was_none in found():
            if was_none:
                setattr(module, attribute, None)
            else:
                delattr(module, attribute)
