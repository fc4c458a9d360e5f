"""Consent for code: other people's code runs only where a person has named it in this very command.

A model's directory may bring Python code (`model.trust_remote_code`), and a configuration may name an object of any module (a key
`python`). What a directory says about itself, its `config.resolved.yaml` too, is no consent: anybody may have written it. Every
configuration enters through `load_config`, which asks `refused_code` here; the door that calls it says how much counts.
"""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any


class Consent(Enum):
    """What counts as a person's consent that code runs."""

    GIVEN = "the configuration"
    """The file that the person names to train, or what a program of their own hands over; and the command line."""
    COMMAND_LINE = "the command line"
    """Keys of the command line alone."""
    NEVER = "nothing"
    """A command that looks at a configuration and has no need to run anything of it."""


def foreign_code(data: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted keys in `data` that have other people's code run: `trust_remote_code`, and text under a key `python`."""
    pairs = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, value in pairs:
        here = f"{path}.{key}" if path else str(key)
        if (key == "trust_remote_code" and value) or (key == "python" and isinstance(value, str)):
            yield here
        else:
            yield from foreign_code(value, here)


def refused_code(data: Any, consent: Consent, *, typed: Mapping[str, Any]) -> list[str]:
    """Return a problem for each key of a configuration `data` that would have code run to which nobody has consented.

    Args:
        consent: what counts at this door.
        typed: the keys of the command line, nested as in the configuration.
    """
    if consent is Consent.GIVEN:
        return []
    named = set() if consent is Consent.NEVER else set(foreign_code(typed))
    cure = "read that code, and name the key on the command line too if it may run"
    if consent is Consent.NEVER:
        cure = "this command runs none; leave the key out"
    return [
        f"{key}: would run code that somebody else may have written; {cure}"
        for key in foreign_code(data)
        if key not in named
    ]
