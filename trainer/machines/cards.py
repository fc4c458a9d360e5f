"""The names of known machines, and the rows of `cards.yaml`."""

import re
from collections.abc import Iterable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from zeromesh.trainer.config.yaml_reader import parse_yaml

SHIPPED = Path(__file__).resolve().parent
"""The directory of files of common hosts and of the table of cards."""


@cache
def card_table() -> dict[str, Any]:
    """Return the contents of `cards.yaml`."""
    table: dict[str, Any] = parse_yaml((SHIPPED / "cards.yaml").read_text(encoding="utf-8"), where="cards.yaml")
    return table


def shipped() -> tuple[str, ...]:
    """Return the names of the known machines."""
    return tuple(sorted({*(path.stem for path in SHIPPED.glob("*.yaml")), *card_table()["cards"]} - {"cards"}))


def named_in(text: str, names: Iterable[str] | None = None) -> str | None:
    """Return the name, by default of a known machine, that covers most of `text`, such as `NVIDIA GeForce RTX 4090`; None for no
    match."""
    words = _words(text)
    parts = {"".join(words[start:end]) for start, end in combinations(range(len(words) + 1), 2)}
    known = shipped() if names is None else names
    return max((name for name in known if plain_name(name) in parts), key=len, default=None)


def peak_of(device_name: str, dtype: str) -> tuple[float, str] | None:
    """Return the dense FLOP/s of a device by its data sheet, and the name of its card; None for an unknown card or dtype."""
    table = card_table()
    peaks = {name: row[dtype] for name, row in table["cards"].items() if dtype in row} | table["peaks"].get(dtype, {})
    name = named_in(device_name, peaks)
    return None if name is None else (peaks[name], name)


def plain_name(name: str) -> str:
    """Return the words of a name in one."""
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    """Return the words of a name without vendor and series: `NVIDIA GeForce RTX 4090` is `4090`."""
    left_out = r"nvidia|geforce|rtx|tesla|amd|instinct|sxm\d?|(?<=\d) ?gb"
    return re.findall("[a-z0-9]+", re.sub(left_out, " ", name.lower()))
