"""The translation of every key of a DeepSpeed configuration: the rows of `deepspeed.yaml`.

The tables of docs/coming-from.md are generated from the same rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml


class Fate(StrEnum):
    """The treatment of another trainer's setting."""

    MAPPED = "mapped"
    IDLE = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow:
    """A row of the table, about DeepSpeed's setting `name`, dotted if nested. `keys` are the keys of zeromesh that it sets: the
    first one to its value if `is_copied`, else together with other settings. `text` explains the translation, or why the setting
    has no effect or is refused, and what to do instead. A refused setting may have one of the `neutral` values, without effect."""

    name: str
    fate: Fate
    text: str
    keys: tuple[str, ...] = ()
    is_copied: bool = False
    neutral: tuple[Any, ...] = ()


def read_rows(name: str) -> dict[str, Any]:
    """Return the parsed content of a YAML file in the folder of this module."""
    # The loader in C takes a tenth of the time, where PyYAML was built with it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content: dict[str, Any] = loader(Path(__file__).with_name(name).read_text(encoding="utf-8")).get_single_data()
    return content


def _rows_of(row: Mapping[str, Any]) -> list[SettingRow]:
    text, fate, unless = row.get("text"), Fate.MAPPED, row.get("unless", [])
    if text is None:
        fate, text = (Fate.IDLE, row["idle"]) if "idle" in row else (Fate.REFUSED, row["refused"])
    neutral = (None, *([] if any(value is True for value in unless) else [False]), *unless)
    return [
        SettingRow(
            name=".".join([*filter(None, [row.get("in")]), name]),
            fate=fate,
            text=text,
            keys=tuple(row.get("is", row.get("sets", "")).split()),
            is_copied="is" in row,
            neutral=neutral if fate is Fate.REFUSED else (),
        )
        for name in row["names"].split()
    ]


SECTIONS = {
    title: tuple(found for row in rows for found in _rows_of(row))
    for title, rows in read_rows("deepspeed.yaml").items()
}
TABLE = tuple(row for rows in SECTIONS.values() for row in rows)
