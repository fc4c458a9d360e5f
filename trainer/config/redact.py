"""The redaction of secrets in texts and settings: whatever a run writes about its configuration goes through here."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"

_KEY = re.compile(
    r"secret|passw|passphrase|credential|bearer|authori[sz]ation|cookie|signature|connection_?string|"
    r"(?:api|access|private|auth|hub|hf|wandb)[_-]?(?:key|token)|(?:^|[_-])(?:pass|pwd|pat)$",
    re.IGNORECASE,
)
"""Whatever such a key has is a secret, a number too."""
_KEY_OF_TEXT = re.compile(r"(?i:(?:^|[_.\s-])(?:key|token))$|[a-z](?:Key|Token)$")
"""Texts of such a key are secrets, and numbers are none: `github_token`, but not `pad_token: 0`."""
_OF_A_VOCABULARY = re.compile(r"<.*>|\[.*\]", re.DOTALL)
"""Special tokens of tokenizers, as `pad_token` has them."""
_SHAPES = re.compile(
    r"hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|[rs]k_(?:live|test)_[A-Za-z0-9]{10,}|gh[oprsu]_[A-Za-z0-9]{20,}|"
    r"github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|"
    r"npm_[A-Za-z0-9]{20,}|pypi-[A-Za-z0-9_-]{20,}|nvapi-[A-Za-z0-9_-]{20,}|wandb_v\d_\w{20,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)|(?<=Bearer )\S{8,}",
    re.DOTALL,
)
"""Keys of well-known services, which say themselves what they are."""
_IN_ADDRESS = re.compile(r"(?<=://)(?:[^/\s]*:[^/\s]*|[^/\s:@]*:(?!\d+/)[^\s@]*|[^/\s:@]{8,})(?=@)")
"""User and password, or a token alone, in an address. What follows a colon is a password unless it is a port."""
_ASSIGNED = re.compile(
    r"((?:[?&][^=&\s]{0,40}(?:token|key|secret|passw|pwd|sig|credential|auth)[^=&\s]{0,40}"
    r"|(?:token|secret|password|passwd|pwd|(?:api|access|account)[_-]?key)\s*)=\s*)[^\s&;,'\"]+",
    re.IGNORECASE,
)
"""In the query of an address, or in the words that say how to connect to something."""


def is_secret(key: str, value: object = "") -> bool:
    """Return True if a key's name says that its value is a secret. The values true, false and null are none."""
    if value is None or isinstance(value, bool):
        return False
    if _KEY.search(key):
        return True
    return isinstance(value, str) and bool(_KEY_OF_TEXT.search(key)) and not _OF_A_VOCABULARY.fullmatch(value)


class Redaction:
    """Takes secrets out: `known` ones, such as values of the environment, and what looks like one."""

    def __init__(self, known: Sequence[str] = ()) -> None:
        self._known = sorted(known, key=len, reverse=True)

    def text(self, text: str) -> str:
        """The text with `<redacted>` in the place of each secret."""
        for secret in self._known:
            text = text.replace(secret, REDACTED)
        return _ASSIGNED.sub(rf"\1{REDACTED}", _IN_ADDRESS.sub(REDACTED, _SHAPES.sub(REDACTED, text)))

    def values(self, values: Any, secret: bool = False) -> Any:
        """The same of all texts in mappings and lists, and of what keys call a `secret`, of which the form is left."""
        if isinstance(values, Mapping):
            return {
                self.values(key): self.values(value, secret or is_secret(str(key), value))
                for key, value in values.items()
            }
        if isinstance(values, list | tuple):
            return [self.values(value, secret) for value in values]
        if secret and values not in ("", None) and not isinstance(values, bool):
            return REDACTED
        return self.text(values) if isinstance(values, str) else values
