"""Consent for code: third-party code runs only if the user has named it in this very command.

A model's directory may bring Python code (`model.trust_remote_code`), and a configuration may name an object of any module (a key
`python`). A directory's own files, `config.resolved.yaml` too, give no consent: anybody may have written them. Every
configuration enters through `load_config`, which asks `refused_code`; its caller sets the required consent.
"""

from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any


class Consent(Enum):
    """The sources that count as a user's consent to run code."""

    GIVEN = "the file that the person names to train, or what a program of their own hands over, and the command line"
    COMMAND_LINE = "read that code, and name the key on the command line too if it may run"
    NEVER = "this command runs none; leave the key out"


def foreign_code(data: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted keys in `data` that run third-party code: `trust_remote_code`, and text under a key `python`."""
    pairs = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, value in pairs:
        if (key == "trust_remote_code" and value) or (key == "python" and isinstance(value, str)):
            yield f"{path}{key}"
        yield from foreign_code(value, f"{path}{key}.")


def refused_code(data: Any, consent: Consent, *, named: Collection[str]) -> list[str]:
    """Return a problem for each key of a configuration `data` that would run code without the user's consent. `named` are the keys
    of the command line, dotted."""
    if consent is Consent.GIVEN:
        return []
    typed = tuple(f"{key}." for key in named) if consent is Consent.COMMAND_LINE else ()
    keys = [key for key in foreign_code(data) if not f"{key}.".startswith(typed)]
    return [f"{key}: would run code that somebody else may have written; {consent.value}" for key in keys]
