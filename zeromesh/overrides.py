"""Attributes that an instance has in place of those of its class: a module's `forward`, say, while a model stays as it is."""

from collections.abc import Callable
from functools import partial
from typing import Any


def override(instance: object, attribute: str, value: Any) -> Callable[[], None]:
    """Set an attribute of the instance itself; returns a call that puts back what was there."""
    own = vars(instance)
    undo = (
        partial(own.__setitem__, attribute, own[attribute]) if attribute in own else partial(own.pop, attribute, None)
    )
    own[attribute] = value
    return undo
