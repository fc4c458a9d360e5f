"""Settings of another trainer as keys of the configuration: which are mapped, which have no effect here, which are refused.

A trainer is a table of rows, one for each of its settings, and a few functions for keys that several settings decide together. The
pages docs/from-hf-trainer.md and docs/from-deepspeed.md are made of the same rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from zeromesh.trainer.config.messages import shown
from zeromesh.trainer.config.redact import REDACTED, is_secret

AUTO = "auto"


class Fate(StrEnum):
    """What becomes of a setting."""

    MAPPED = "mapped"
    IDLE = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow:
    """One setting: its `name`, dotted where settings are nested.

    `keys` are those of the configuration that it decides, by `convert` of its value, or together with others. `text` says how; or
    why it has no effect; or why it is refused, and what to do instead. `neutral` values ask for nothing.
    """

    name: str
    fate: Fate
    text: str
    keys: tuple[str, ...] = ()
    convert: Callable[[Any], Any] | None = None
    neutral: tuple[Any, ...] = ()


_MAPPED = re.compile(r"([\w. ]+) (->|=>|=) ([\w. ]+): (.+)")
_OTHER = re.compile(r"([\w. ]+): (read|no effect|refused)(?: unless (.+?))?: (.+)")
_OFF: tuple[Any, ...] = ({}, {"enabled": False})
"""Sections that ask for nothing."""


def read_table(
    text: str, convert: Mapping[str, Callable[[Any], Any]] | None = None
) -> dict[str, tuple[SettingRow, ...]]:
    """The rows of each section of a table in `text`. Its lines, of which indented ones continue the one before, are:

        ## Title                                    a section of the table begins
        [prefix]                                    the names that follow are inside `prefix`; [] ends that
        name = key: how                             the setting's value is that of the key
        name => key: how                            the key is `convert[name]` of the setting's value
        name -> key key: how                        the setting decides the keys together with others
        name: read: how                             the setting is read, and decides no key
        name name: no effect: why                   the settings have no effect
        name name: refused unless JSON or JSON: why and what to do

    A refused setting may always be None, and False where True is not among its values; `off` stands for {} or {"enabled": false}.
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
            found[title] += tuple(_rows(line, prefix, convert or {}))
    return found


def _rows(line: str, prefix: str, convert: Mapping[str, Callable[[Any], Any]]) -> Iterator[SettingRow]:
    if mapped := _MAPPED.fullmatch(line):
        name, arrow, keys, text = mapped.groups()
        function = _same if arrow == "=" else convert[name] if arrow == "=>" else None
        yield SettingRow(name=prefix + name, fate=Fate.MAPPED, text=text, keys=tuple(keys.split()), convert=function)
        return
    other = _OTHER.fullmatch(line)
    if other is None:
        raise ValueError(f"no row of a table of settings: {line!r}")
    names, what, values, text = other.groups()
    fate = Fate.MAPPED if what == "read" else Fate(what)
    allowed = _OFF if values == "off" else tuple(map(json.loads, values.split(" or "))) if values else ()
    off = () if any(value is True for value in allowed) else (False,)
    neutral = (None, *off, *allowed) if fate is Fate.REFUSED else ()
    for name in names.split():
        yield SettingRow(name=prefix + name, fate=fate, text=text, neutral=neutral)


def _same(value: Any) -> Any:
    return value


def tree_of(table: Iterable[SettingRow]) -> dict[str, Any]:
    """The dotted names of rows as a tree of mappings, with a row at each leaf."""
    tree: dict[str, Any] = {}
    for row in table:
        *parents, key = row.name.split(".")
        at = tree
        for parent in parents:
            at = at.setdefault(parent, {})
        at[key] = row
    return tree


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFacts:
    """What another trainer's settings may count with: `ranks` of the launch, `samples` of the training data if that is known.

    `tensor` and `pipeline` are axes that the configuration sets beside them; None: it does not.
    """

    ranks: int = 1
    samples: int | None = None
    tensor: int | None = None
    pipeline: int | None = None

    def data_ranks(self, tensor: int = 1) -> int:
        """Ranks that train on samples of their own, with `tensor` ranks to a layer unless the configuration says how many."""
        return max(1, self.ranks // ((self.tensor or tensor) * (self.pipeline or 1)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """What was read: `values` by dotted key, where each came from, lines for a person, and problems."""

    values: Mapping[str, Any]
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def on(self, below: Translation | None) -> Translation:
        """Both, this one's values where they are about the same."""
        if below is None:
            return self
        return Translation(
            values={**below.values, **self.values},
            origins={**below.origins, **self.origins},
            notes=(*below.notes, *self.notes),
            problems=(*below.problems, *self.problems),
        )

    def sections(self) -> dict[str, Any]:
        """The values as a configuration nests them."""
        found: dict[str, Any] = {}
        for path, value in self.values.items():
            *parents, key = path.split(".")
            at = found
            for parent in parents:
                at = at.setdefault(parent, {})
            at[key] = value
        return found


class Reading:
    """Settings of another trainer while they are translated. Calling it gives a setting's value."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        defaults: Mapping[str, Any] | None = None,
        place: LaunchFacts,
        below: Mapping[str, Any] | None = None,
    ) -> None:
        """`defaults` replace settings that are not there; `below` are values by key that hold where no setting says otherwise."""
        self.settings = {name: value for name, value in settings.items() if value != AUTO}
        self.automatic = tuple(name for name, value in settings.items() if value == AUTO)
        self.defaults = defaults or {}
        self.place = place
        self.below: Mapping[str, Any] = below or {}
        self.problems: list[str] = []
        self.notes_of_joins: list[str] = []

    def __call__(self, name: str, default: Any = None) -> Any:
        """The value of a setting; None or `default` where it is not there."""
        value = self.settings.get(name, self.defaults.get(name, default))
        return value.value if isinstance(value, Enum) else value

    def names(self, beginning: str) -> list[str]:
        """Settings that are there, automatic ones too, whose names begin so."""
        return [name for name in (*self.settings, *self.automatic) if name.startswith(beginning)]

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

    def note(self, line: str) -> None:
        """Add a line about something for which there is no setting."""
        self.notes_of_joins.append(line)

    def refuse(self, name: str, why: str) -> None:
        """A setting cannot be had as it is."""
        problem = f"{name}: {why}"
        if problem not in self.problems:
            self.problems.append(problem)


Pairs = Iterator[tuple[str, Any]]
Join = Callable[[Reading], Pairs]
"""What yields keys and values that several settings decide together."""


def translate(table: Sequence[SettingRow], joins: Sequence[Join], reading: Reading, *, source: str) -> Translation:
    """Read all settings by their rows. `source` is a word for notes."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for row in table:
        if row.name not in reading.settings:
            continue
        if row.fate is Fate.REFUSED and reading(row.name) not in row.neutral:
            reading.refuse(row.name, f"{_shown(row.name, reading(row.name))} is not available: {row.text}")
        if row.convert is not None:
            values[row.keys[0]] = row.convert(reading(row.name))
    for join in joins:
        values.update(join(reading))
    for row in table:
        if row.name in reading.settings:
            origins.update({key: f"{source} {row.name}" for key in row.keys if key in values})
    notes = tuple(f"{source}: {line}" for line in (*_lines(table, reading, values), *reading.notes_of_joins))
    return Translation(values=values, origins=origins, notes=notes, problems=tuple(reading.problems))


def _lines(table: Sequence[SettingRow], reading: Reading, values: Mapping[str, Any]) -> Iterator[str]:
    """A line for each setting that was asked for and mapped, and one for each reason why some have no effect."""
    why: dict[str, list[str]] = {}
    same: list[str] = []
    for row in table:
        asked = row.name in reading.settings and reading(row.name) != reading.defaults.get(row.name, _NOTHING)
        if row.fate is Fate.IDLE and (asked or row.name in reading.automatic):
            why.setdefault(row.text, []).append(row.name)
        elif row.fate is Fate.REFUSED and asked:
            same.append(row.name)
        elif row.fate is Fate.MAPPED and row.name in reading.automatic:
            yield f"{row.name}: auto -> {', '.join(_resolved(row, reading, values)) or row.text}"
        elif row.fate is Fate.MAPPED and asked:
            found = [f"{key}: {shown(key, values[key])}" for key in row.keys if key in values]
            what = ", ".join(found) or ("nothing, by what else is set" if row.keys else row.text)
            yield f"{row.name}: {_shown(row.name, reading(row.name))} -> {what}"
    if same:
        yield f"{', '.join(same)}: what is done here anyway"
    for text, names in why.items():
        yield f"{', '.join(names)}: no effect: {text}"


def _resolved(row: SettingRow, reading: Reading, values: Mapping[str, Any]) -> Iterator[str]:
    """What a key is for whose setting is automatic, and whence."""
    for key in row.keys:
        if key in values:
            yield f"{key}: {shown(key, values[key])}"
        elif key in reading.below:
            yield f"{key}: {shown(key, reading.below[key])} of TrainingArguments"
        elif not reading.below:
            yield f"{key}: zeromesh's default"


class _Nothing:
    """Equal to no value."""


_NOTHING = _Nothing()


def _shown(name: str, value: Any) -> str:
    return REDACTED if is_secret(name, value) else shown("", value)
