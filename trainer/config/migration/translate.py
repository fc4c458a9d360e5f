"""Settings of another trainer as keys of the configuration: which are mapped, which have no effect here, which are refused.

A trainer is a table of rows, one for each of its settings, and a few functions for keys that several settings decide together. The
page docs/from-deepspeed.md is made of the same rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from zeromesh.trainer.config.messages import either, shown

AUTO = "auto"
_LARGEST_COUNT = 1 << 53


class Fate(StrEnum):
    """How a setting of another trainer is treated."""

    MAPPED = "mapped"
    IDLE = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow:
    """One setting: its `name`, dotted where settings are nested.

    `keys` are those of the configuration that it decides, together with others unless `as_it_is`. `text` says how; or why it has
    no effect; or why it is refused, and what to do instead. `neutral` values ask for nothing.
    """

    name: str
    fate: Fate
    text: str
    keys: tuple[str, ...] = ()
    as_it_is: bool = False
    neutral: tuple[Any, ...] = ()


_MAPPED = re.compile(r"([\w. ]+) (->|=) ([\w. ]+): (.+)")
_OTHER = re.compile(r"([\w. ]+): (read|no effect|refused)(?: unless (.+?))?: (.+)")


def read_table(text: str) -> dict[str, tuple[SettingRow, ...]]:
    """The rows of each section of a table in `text`. Its lines, of which indented ones continue the one before, are:

        ## Title                                    a section of the table begins
        [prefix]                                    the names that follow are inside `prefix`; [] ends that
        name = key: how                             the setting's value is that of the key
        name -> key key: how                        the setting decides the keys together with others
        name: read: how                             the setting is read, and decides no key
        name name: no effect: why                   the settings have no effect
        name name: refused unless JSON or JSON: why and what to do

    A refused setting may always be None, and False where True is not among its values; `off` stands for {} or {"enabled": false}.
    The text `"` is that of the row before.
    """
    found: dict[str, tuple[SettingRow, ...]] = {}
    title = prefix = ""
    for line in re.sub(r"\n {4}", " ", text.strip()).splitlines():
        if line.startswith("## "):
            title, prefix = line[3:], ""
            found[title] = ()
        elif line.startswith("["):
            prefix = f"{line[1:-1]}." if line != "[]" else ""
        elif line:
            line = line.removesuffix('"') + found[title][-1].text if line.endswith(': "') else line
            found[title] += tuple(_rows(line, prefix))
    return found


def _rows(line: str, prefix: str) -> Iterator[SettingRow]:
    if mapped := _MAPPED.fullmatch(line):
        name, arrow, keys, text = mapped.groups()
        found = tuple(keys.split())
        yield SettingRow(name=prefix + name, fate=Fate.MAPPED, text=text, keys=found, as_it_is=arrow == "=")
        return
    other = _OTHER.fullmatch(line)
    if other is None:
        raise ValueError(f"no row of a table of settings: {line!r}")
    names, what, values, text = other.groups()
    neutral: tuple[Any, ...] = ()
    if what == "refused":
        allowed = (
            [{}, {"enabled": False}] if values == "off" else json.loads(f"[{(values or '').replace(' or ', ',')}]")
        )
        neutral = (None, *([] if any(value is True for value in allowed) else [False]), *allowed)
    for name in names.split():
        yield SettingRow(
            name=prefix + name, fate=Fate.MAPPED if what == "read" else Fate(what), text=text, neutral=neutral
        )


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted names as mappings in mappings."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, key = path.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[key] = value
    return tree


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFacts:
    """Numbers that some settings depend on: the `ranks` of the launch.

    `tensor` and `pipeline` are axes that the configuration sets beside them; None: it does not.
    """

    ranks: int = 1
    tensor: int | None = None
    pipeline: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A configuration that was read: `values` by dotted key, where each came from, lines for a person, and problems."""

    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class Reading:
    """Settings of another trainer while they are translated. Calling it gives a setting's value."""

    def __init__(self, settings: Mapping[str, Any], place: LaunchFacts, *, tensor: int = 1) -> None:
        """`tensor` ranks share a layer unless the configuration says how many."""
        self.settings = {name: value for name, value in settings.items() if value != AUTO}
        self.automatic = tuple(name for name, value in settings.items() if value == AUTO)
        self.tensor = tensor
        self.data_ranks = max(1, place.ranks // ((place.tensor or tensor) * (place.pipeline or 1)))
        """Ranks that train on samples of their own."""
        self.problems: list[str] = []
        self.notes: list[str] = []
        """Lines about something for which there is no setting."""

    def __call__(self, name: str, default: Any = None) -> Any:
        """The value of a setting; None or `default` where it is not there."""
        return self.settings.get(name, default)

    def has(self, beginning: str) -> bool:
        """Whether a setting is there, perhaps an automatic one, whose name begins so."""
        return any(name.startswith(beginning) for name in (*self.settings, *self.automatic))

    def number(self, name: str) -> float | None:
        """A setting that is to be counted with; None where it is not there, or no number, which is refused."""
        value = self(name)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        try:
            return float(value if isinstance(value, str) else "")
        except ValueError:
            self.refuse(name, f"got {shown('', value)}; allowed is a number")
            return None

    def count(self, name: str, least: int = 1, most: int = _LARGEST_COUNT) -> int | None:
        """A whole number, as 1e3 is too; None where it is not there, or wrong, which is refused."""
        value = self(name)
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if value is None or (math.isfinite(number) and number == int(number) and least <= number <= most):
            return None if value is None else int(number)
        limit = "" if most == _LARGEST_COUNT else f" and <= {most}"
        self.refuse(name, f"got {shown('', value)}; allowed is an integer >= {least}{limit}")
        return None

    def choice(self, name: str, choices: Mapping[str, Any], *, required: bool = False) -> Any:
        """Look the word of a setting up in `choices`, in upper or lower case; None if it is not there, and then it is refused."""
        value = self(name)
        for word, choice in choices.items():
            if value is not None and str(value).lower() == word.lower():
                return choice
        if value is not None or required:
            self.refuse(name, f"got {shown('', value)}; allowed is {either(list(choices))}")
        return None

    def refuse(self, name: str, why: str) -> None:
        """Note a problem: the setting cannot be taken as it is."""
        problem = f"{name}: {why}"
        if problem not in self.problems:
            self.problems.append(problem)


Pairs = Iterator[tuple[str, Any]]
Join = Callable[[Reading], Pairs]
"""What yields keys and values that several settings decide together."""


def translate(table: Sequence[SettingRow], joins: Sequence[Join], reading: Reading, *, source: str) -> Translation:
    """Read all settings by their rows. `source` is a word for notes."""
    values: dict[str, Any] = {}
    present = [row for row in table if row.name in reading.settings]
    for row in present:
        value = reading(row.name)
        if row.fate is Fate.REFUSED and value not in row.neutral:
            reading.refuse(row.name, f"{shown(row.name, value)} is not available: {row.text}")
        if row.as_it_is:
            values[row.keys[0]] = value
    for join in joins:
        values.update(join(reading))
    origins = {key: f"{source} {row.name}" for row in present for key in row.keys if key in values}
    notes = tuple(f"{source}: {line}" for line in (*_lines(table, reading, values), *reading.notes))
    return Translation(values=values, origins=origins, notes=notes, problems=tuple(reading.problems))


def _lines(table: Sequence[SettingRow], reading: Reading, values: Mapping[str, Any]) -> Iterator[str]:
    """A line for each setting that was asked for and mapped, and one for each reason why some have no effect."""
    why: dict[str, list[str]] = {}
    for row in table:
        automatic = row.name in reading.automatic
        asked = row.name in reading.settings
        if row.fate is Fate.IDLE and (asked or automatic):
            why.setdefault(f"no effect: {row.text}", []).append(row.name)
        elif row.fate is Fate.REFUSED and asked:
            why.setdefault("what is done here anyway", []).append(row.name)
        elif row.fate is Fate.MAPPED and (asked or automatic):
            found = ", ".join(f"{key}: {shown(key, values[key])}" for key in row.keys if key in values)
            default = "zeromesh's default" if automatic else "nothing, by what else is set" if row.keys else row.text
            yield f"{row.name}: {AUTO if automatic else shown(row.name, reading(row.name))} -> {found or default}"
    for text, names in why.items():
        yield f"{', '.join(names)}: {text}"
