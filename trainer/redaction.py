"""What is a secret, and texts and settings without them: whatever a run writes about its configuration goes through here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"

_KEY = re.compile(
    r"secret|passw|passphrase|credential|bearer|(?:api|access|private|auth|hub|hf|wandb)[_-]?(?:key|token)|^(?:key|token)$",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|AKIA[A-Z0-9]{16}"
)
"""Keys of well-known services, which say themselves what they are."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@:]*:[^/\s@]+(?=@)|(?<=://)[^/\s@:]{8,}(?=@)")
"""User and password, or a token alone, in an address."""


def is_secret(key: str) -> bool:
    """Whether a key's name says that its value is a secret."""
    return bool(_KEY.search(key))


class Redaction:
    """Takes secrets out: `known` ones, such as values of the environment, and what looks like one."""

    def __init__(self, known: Sequence[str] = ()) -> None:
        self._known = sorted(known, key=len, reverse=True)

    def text(self, text: str) -> str:
        """The text with `<redacted>` in the place of each secret."""
        for secret in self._known:
            text = text.replace(secret, REDACTED)
        return _IN_ADDRESS.sub(REDACTED, _SHAPES.sub(REDACTED, text))

    def values(self, values: Any) -> Any:
        """The same of all texts in mappings and lists, and of what keys call a secret."""
        if isinstance(values, str):
            return self.text(values)
        if isinstance(values, Mapping):
            return {key: self._value(str(key), value) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return [self.values(value) for value in values]
        return values

    def _value(self, key: str, value: Any) -> Any:
        return REDACTED if isinstance(value, str) and value and is_secret(key) else self.values(value)
