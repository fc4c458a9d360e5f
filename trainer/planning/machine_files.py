"""Machines from files, and common ones by name, by a driver's name of a card, or by the size of its memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zeromesh.environment import setting
from zeromesh.errors import ConfigError
from zeromesh.files import write_whole
from zeromesh.trainer.config.messages import allowed, known_paths, shown, unknown_key
from zeromesh.trainer.config.yaml_reader import read_yaml
from zeromesh.trainer.machines import cards
from zeromesh.trainer.planning.machine import Machine


def machine_file() -> Path:
    """Return the path that `zeromesh plan --measure` writes, and that plans read first."""
    return Path(setting("XDG_CACHE_HOME") or "~/.cache").expanduser() / "zeromesh" / "machine.yaml"


def find_machine(given: str | None = None, *, devices: int = 1) -> Machine:
    """Return the machine with a name (`h100`), a size (`24GB`) or a file, or, for None, the one measured here. `devices` is the
    number of cards per host where the description has none. Raises `ConfigError` for an unknown machine."""
    if given in (None, "cpu") and machine_file().exists():
        return read_machine(machine_file())
    wanted = cards.plain_name("laptop" if given == "cpu" else given or "")
    name = next((each for each in cards.shipped() if cards.plain_name(each) == wanted), None)
    if name is not None:
        own = cards.SHIPPED / f"{name}.yaml"
        return read_machine(own) if own.exists() else _of_card(name, devices)
    if given is not None and (given.endswith((".yaml", ".yml", ".json")) or Path(given).expanduser().exists()):
        return read_machine(Path(given).expanduser())
    if given is not None and (size := re.fullmatch(r"(\d+(?:\.\d+)?) ?gi?b?", given.lower())):
        return _of_size(float(size[1]), devices)
    known = f"{', '.join(cards.shipped())}, a size such as 24GB, or the path of a machine file"
    missing = f"no machine was measured here ({machine_file()}): run zeromesh plan --measure, or name"
    raise ConfigError(f"{missing if given is None else f'no machine is called {given!r}; allowed are'} {known}")


def _of_card(name: str, devices: int) -> Machine:
    """Return the machine of a row of the table, with `devices` cards per host; missing fields are those of `every`."""
    row, every = cards.card_table()["cards"][name], cards.card_table()["every"]
    products = {dtype: part * row[dtype] for dtype, part in every["parts_of_peak"].items() if dtype in row}
    copies = {"to_device": row["copies"], "to_host": row["copies"], **every["copies"]}
    return Machine.model_validate(
        {
            "name": row["name"],
            "sources": every["sources"],
            "device": {
                **every["device"],
                "memory_bytes": row["memory"],
                "memory_bandwidth": row["bandwidth"],
                "products": products,
                "copies": copies,
            },
            "host": {"devices": devices, **{key: devices * each for key, each in every["host"].items()}},
            "links": {
                "inside": {"nccl": {**every["link"], "bandwidth": row["link"]}},
                "between": {"nccl": every["between"]},
            },
            "disk": every["disk"],
            "library": every["library"],
        }
    )


def _of_size(gigabytes: float, devices: int) -> Machine:
    """Return the slowest card of the table with bfloat16 products and about that much memory, limited to that size."""
    seen = int(0.97 * gigabytes * 2**30)
    every = (_of_card(name, devices) for name in cards.card_table()["cards"])

    def place(card: Machine) -> tuple[float, float]:
        return round(max(0.0, abs(card.device.memory_bytes / seen - 1) - 0.1), 1), card.device.memory_bandwidth

    card = min((each for each in every if "bfloat16" in each.device.products), key=place)
    device = card.device.model_copy(update={"memory_bytes": min(card.device.memory_bytes, seen)})
    return card.model_copy(
        update={"device": device, "name": f"a card of {gigabytes:g} GB with the rates of {card.name}"}
    )


def read_machine(path: Path) -> Machine:
    """Read a machine file. Raises one `ConfigError` with all errors of the file."""
    where = str(path)
    data = read_yaml(path, "no such machine file; zeromesh plan --measure writes one", where=where)
    if not isinstance(data, dict):
        raise ConfigError(
            f"holds {shown('', data)}; allowed is a mapping of {', '.join(Machine.model_fields)}", where=where
        )
    try:
        return Machine.model_validate(data)
    except ValidationError as error:
        found = dict.fromkeys(map(_problem, error.errors(include_url=False)))
        raise ConfigError(list(found), where=where) from None


def write_machine(machine: Machine, path: Path) -> None:
    """Write a machine file, and create its parent directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, machine.to_yaml().encode())


def _problem(detail: Any) -> str:
    name = ".".join(map(str, detail["loc"]))
    section, known = name.rpartition(".")[0], known_paths(Machine)
    if detail["type"] == "extra_forbidden":
        return unknown_key(name, {}, known)
    given = "is missing" if detail["type"] == "missing" else f"got {shown('', detail['input'])}"
    return f"{name}: {given}; allowed is {allowed(known.get(name) or known[section])}"
