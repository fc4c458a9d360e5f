"""Reading values of Hugging Face configurations, some of which answer a question with an exception."""

from __future__ import annotations

from typing import Any


def text_part(config: Any) -> Any:
    """The configuration of the model's language part; the whole where there is no single one."""
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):
        return config


def integer(config: Any, name: str) -> int | None:
    """A value that is one integer for the whole model, or None."""
    try:
        value = getattr(config, name, None)
    except (AttributeError, ValueError, RuntimeError):  # it differs from layer to layer
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
