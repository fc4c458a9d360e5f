"""Consent for code: other people's code runs only where a person has named it in this very command.

A model's directory may bring Python code (`model.trust_remote_code`), and a configuration may name an object of any module (a key
`python`). What a directory says about itself, in its `config.resolved.yaml` too, is no consent: anybody may have written it. Every
configuration enters through `load_config`, which asks `refused_code`; the door that calls it says how much counts.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any


class Consent(Enum):
    """The places whose word counts as a person's consent that code runs."""

    GIVEN = "the file that the person names to train, or what a program of their own hands over, and the command line"
    COMMAND_LINE = "read that code, and name the key on the command line too if it may run"
    NEVER = "this command runs none; leave the key out"


def foreign_code(data: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted keys in `data` that have other people's code run: `trust_remote_code`, and text under a key `python`."""
    pairs = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, value in pairs:
        if (key == "trust_remote_code" and value) or (key == "python" and isinstance(value, str)):
            yield f"{path}{key}"
        yield from foreign_code(value, f"{path}{key}.")


def refused_code(data: Any, consent: Consent, *, typed: Mapping[str, Any]) -> list[str]:
    """Return a problem for each key of a configuration `data` by which code would run to which nobody has consented.

    `typed`: the keys of the command line, nested as in the configuration.
    """
    if consent is Consent.GIVEN:
        return []
    named = set(foreign_code(typed)) if consent is Consent.COMMAND_LINE else set()
    keys = [key for key in foreign_code(data) if key not in named]
    return [f"{key}: would run code that somebody else may have written; {consent.value}" for key in keys]
