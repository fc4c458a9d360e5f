"""The hosts of a launch, as a file lists them: a line `NAME slots=N [address=NAME]` for each (pure).

`NAME` is the host for ssh, `slots` the processes to start there, and `address` the name or address by which the other hosts reach
it, where that is another one. What follows a `#` is a comment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zeromesh.errors import ConfigError

MAX_SLOTS = 1024
_HOST = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ADDRESS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_KEYS = ("slots", "address")
_FORM = "allowed is `NAME slots=N [address=NAME]`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A host, its processes, and the name or address that the other hosts find it under.

    A name never begins with `-`, which ssh would take for an option. Raises `ConfigError`.
    """

    name: str
    slots: int
    address: str

    def __post_init__(self) -> None:
        wrong = []
        if not _HOST.fullmatch(self.name):
            wrong.append(f"host {self.name!r}: allowed are letters, digits, '.', '-' and '_', and a USER@ before them")
        if not 1 <= self.slots <= MAX_SLOTS:
            wrong.append(f"host {self.name!r}: slots is {self.slots}; allowed is 1 to {MAX_SLOTS}")
        if not _ADDRESS.fullmatch(self.address):
            wrong.append(f"host {self.name!r}: address {self.address!r} is neither a host name nor an IPv4 address")
        if wrong:
            raise ConfigError(wrong)


def read_hosts(text: str, *, where: str) -> tuple[Host, ...]:
    """The hosts of a hostfile, in its order, which is the order of ranks. `where` names the file in errors.

    Raises:
        ConfigError: with every mistake and its line.
    """
    hosts: dict[str, tuple[int, Host]] = {}
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _read_line(words)
        except ConfigError as error:
            problems += [f"line {number}: {problem}" for problem in error.problems]
            continue
        # One host under two names may be meant (two of its addresses); one name twice is a slip.
        before, _ = hosts.setdefault(host.name, (number, host))
        if before != number:
            problems.append(f"line {number}: host {host.name!r} is on line {before} already; add up its slots")
    if not hosts and not problems:
        problems.append(f"no host in it; {_FORM}, a line for each host")
    if problems:
        raise ConfigError(problems, where=where)
    return tuple(host for _, host in hosts.values())


def _read_line(words: Sequence[str]) -> Host:
    name, *rest = words
    if "=" in name:
        raise ConfigError(f"{name!r} stands where the host's name should be; {_FORM}")
    values: dict[str, str] = {}
    problems = []
    for word in rest:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            problems.append(f"{word!r} is not understood; {_FORM}")
        elif key in values:
            problems.append(f"{key} is given twice")
        else:
            values[key] = value
    slots = values.get("slots", "")
    if "slots" not in values:
        problems.append(f"host {name!r} has no slots=N, the number of processes to start there")
    elif not re.fullmatch(r"[0-9]{1,6}", slots):
        problems.append(f"slots={slots}: allowed is an integer from 1 to {MAX_SLOTS}")
    if problems:
        raise ConfigError(problems)
    return Host(name=name, slots=int(slots), address=values.get("address", name.rpartition("@")[2]))
