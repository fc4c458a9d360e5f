"""The names of known machines, and the rows of `cards.yaml`."""

import re
from collections.abc import Iterable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from zeromesh.trainer.config.yaml_reader import parse_yaml

SHIPPED = Path(__file__).resolve().parent  # The directory of files of common hosts and of the table of cards.


@cache
def card_table() -> dict[str, Any]:
    table: dict[str, Any] = parse_yaml((SHIPPED / "cards.yaml").read_text(encoding="utf-8"), where="cards.yaml")
    return table


def known_machines() -> tuple[str, ...]:
    """Return the names of the machine files and of the cards of the table in this folder, sorted."""
    return tuple(sorted({*(path.stem for path in SHIPPED.glob("*.yaml")), *card_table()["cards"]} - {"cards"}))


def find_name(text: str, names: Iterable[str] | None = None) -> str | None:
    """Return the longest of `names` (default: the known machines) that words of `text` form, such as `NVIDIA GeForce RTX 4090`."""
    words = _words(text)
    parts = {"".join(words[start:end]) for start, end in combinations(range(len(words) + 1), 2)}
    known = known_machines() if names is None else names
    return max((name for name in known if normal_name(name) in parts), key=len, default=None)


def peak_of(device_name: str, dtype: str) -> tuple[float, str] | None:
    """Return the dense FLOP/s of a device by its data sheet, and the name of its card; None for an unknown card or dtype."""
    table = card_table()
    peaks = {name: row[dtype] for name, row in table["cards"].items() if dtype in row} | table["peaks"].get(dtype, {})
    name = find_name(device_name, peaks)
    return None if name is None else (peaks[name], name)


def normal_name(name: str) -> str:
    """Return a name in lower case without vendor, series and spaces: `NVIDIA GeForce RTX 4090` is `4090`."""
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case without vendor and series: `NVIDIA A100 PCIe` is `a100`, `pcie`."""
    left_out = r"nvidia|geforce|rtx|tesla|amd|instinct|sxm\d?|(?<=\d) ?gb"
    return re.findall("[a-z0-9]+", re.sub(left_out, " ", name.lower()))
