"""The redaction of secrets in texts and settings, applied to all output about a run's configuration."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

REDACTED = "<redacted>"

_SECRET_KEY = re.compile(
    r"secret|passw|passphrase|credential|bearer|authori[sz]ation|cookie|signature|connection_?string|"
    r"(?:api|access|private|auth|hub|hf|wandb)[_-]?(?:key|token)|(?:^|[_-])(?:pass|pwd|pat)$",
    re.IGNORECASE,
)
"""Names of keys whose values are secrets, numbers included."""
_SECRET_TEXT_KEY = re.compile(r"(?i:(?:^|[_.\s-])(?:key|token))$|[a-z](?:Key|Token)$")
"""Names of keys whose texts are secrets, and whose numbers are not: `github_token`, but not `pad_token: 0`."""
_SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]", re.DOTALL)  # of tokenizers, such as values of `pad_token`
_SERVICE_KEY = re.compile(
    r"hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|[rs]k_(?:live|test)_[A-Za-z0-9]{10,}|gh[oprsu]_[A-Za-z0-9]{20,}|"
    r"github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|xox[abeoprs]-[A-Za-z0-9-]{10,}|"
    r"npm_[A-Za-z0-9]{20,}|pypi-[A-Za-z0-9_-]{20,}|nvapi-[A-Za-z0-9_-]{20,}|wandb_v\d_\w{20,}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)|(?<=Bearer )\S{8,}",
    re.DOTALL,
)
_URL_CREDENTIALS = re.compile(r"(?<=://)(?:[^/\s]*:[^/\s]*|[^/\s:@]*:(?!\d+/)[^\s@]*|[^/\s:@]{8,})(?=@)")
"""User and password, or a token alone, in a URL. Text after a colon is a password unless it is a port."""
_ASSIGNED_SECRET = re.compile(
    r"((?:[?&][^=&\s]{0,40}(?:token|key|secret|passw|pwd|sig|credential|auth)[^=&\s]{0,40}"
    r"|(?:token|secret|password|passwd|pwd|(?:api|access|account)[_-]?key)\s*)=\s*)[^\s&;,'\"]+",
    re.IGNORECASE,
)


def is_secret(key: str, value: object = "") -> bool:
    """Return True if a key's name marks its value as secret; true, false and null are never secret."""
    if value is None or isinstance(value, bool):
        return False
    if _SECRET_KEY.search(key):
        return True
    return isinstance(value, str) and bool(_SECRET_TEXT_KEY.search(key)) and not _SPECIAL_TOKEN.fullmatch(value)


class Redaction:
    """Replacement of `known` secrets, such as environment values, and of texts that look like secrets."""

    def __init__(self, known: Sequence[str] = ()) -> None:
        self._known = sorted(known, key=len, reverse=True)

    def text(self, text: str) -> str:
        for secret in self._known:
            text = text.replace(secret, REDACTED)
        return _ASSIGNED_SECRET.sub(rf"\1{REDACTED}", _URL_CREDENTIALS.sub(REDACTED, _SERVICE_KEY.sub(REDACTED, text)))

    def values(self, values: Any, secret: bool = False) -> Any:
        """Redact all texts in mappings and lists, and whole values of secret keys; the structure is kept."""
        if isinstance(values, Mapping):
            return {self.values(key): self.values(value, secret or is_secret(str(key), value)) for key, value in values.items()}
        if isinstance(values, list | tuple):
            return [self.values(value, secret) for value in values]
        if secret and values not in ("", None) and not isinstance(values, bool):
            return REDACTED
        return self.text(values) if isinstance(values, str) else values
