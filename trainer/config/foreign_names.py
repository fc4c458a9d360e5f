"""The settings of other trainers: the translation of every key of a DeepSpeed configuration (`deepspeed.yaml`), and the names that
transformers, TRL, axolotl, LLaMA-Factory and others give to our keys (`foreign_names.yaml`), for hints and the migration page."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

from zeromesh.trainer.config.yaml_reader import read_texts


class Fate(StrEnum):
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


def _rows_of(row: Mapping[str, Any]) -> list[SettingRow]:
    text, fate, unless = row.get("text"), Fate.MAPPED, row.get("unless", [])
    if text is None:
        fate, text = (Fate.IDLE, row["idle"]) if "idle" in row else (Fate.REFUSED, row["refused"])
    keys, section = tuple(row.get("is", row.get("sets", "")).split()), f"{row['in']}." if "in" in row else ""
    shared: dict[str, Any] = {"fate": fate, "text": text, "keys": keys, "is_copied": "is" in row}
    if fate is Fate.REFUSED:
        shared["neutral"] = (None, *([] if any(value is True for value in unless) else [False]), *unless)
    return [SettingRow(name=section + name, **shared) for name in row["names"].split()]


_DEEPSPEED = read_texts(Path(__file__).with_name("deepspeed.yaml"))
WORDS: Mapping[str, Mapping[str, Any]] = _DEEPSPEED.pop("words")
"""DeepSpeed's defaults, and the names here for its optimizers, curves, tiers and dtypes, by kind."""
SECTIONS = {title: tuple(chain.from_iterable(map(_rows_of, rows))) for title, rows in _DEEPSPEED.items()}
TABLE = tuple(chain.from_iterable(SECTIONS.values()))

NO_KEY = "no key"  # The prefix of explanations for settings without a key here.
_FOREIGN = read_texts(Path(__file__).with_name("foreign_names.yaml"))
_FILE_KEYS: Mapping[str, list[str]] = _FOREIGN.pop("files")
_ROWS = [(key, names.split()) for key, names in _FOREIGN.items()]
NAMES: Mapping[str, tuple[str, ...]] = {
    key: others
    for key, names in _ROWS
    if (others := tuple(name.lstrip("*") for name in names if f"*{key.rpartition('.')[2]}" != name))
}
"""Foreign names by their equivalent here, if they differ: a key, or an instruction."""
ARGUMENTS = {key: name[1:] for key, names in _ROWS for name in names if name.startswith("*")}
# `run_name` is no hint, as `run.run_name` is meant to be `run.name`.
ARGUMENTS |= {"schedule.warmup_ratio": ARGUMENTS["schedule.warmup_steps"], "tracking.name": "run_name"}
STEP_INTERVALS = {"run.log_every": "logging", "run.eval_every": "eval", "checkpoint.every_steps": "save"}
"""`ARGUMENTS` maps keys to arguments of transformers and TRL, and `STEP_INTERVALS` to the NAME in `NAME_strategy`, `NAME_steps`."""
KEY_BY_DEEPSPEED_NAME = {row.name.rpartition(".")[2].lower(): row.keys[0] for row in TABLE if row.keys}
KEY_BY_NAME = {name: key for key, names in NAMES.items() for name in names}  # by foreign names in lower case


def foreign_problems(data: Mapping[str, Any]) -> list[str]:
    """Return the equivalent of each key of another trainer's configuration; an empty list for any other mapping."""
    trainer = next((name for name, keys in _FILE_KEYS.items() if len(data.keys() & keys) >= min(2, len(keys))), None)
    if trainer is None:
        return []
    named = [f"{key}: here {KEY_BY_NAME[key.lower()]}" for key in data if key.lower() in KEY_BY_NAME]
    rest = ", ".join(key for key in data if key.lower() not in KEY_BY_NAME)
    says = f"this is a configuration of {trainer}, whose keys have other names here; docs/configuration.md lists all"
    return [says, *named, *([f"without a name here that is known: {rest}"] if rest else [])]


def training_arguments(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the transformers arguments that correspond to `keys`; null keys are left out."""
    found = {name: keys[key] for key, name in ARGUMENTS.items() if keys.get(key) is not None}
    for name, every in ((name, keys[key]) for key, name in STEP_INTERVALS.items() if key in keys):
        found[f"{name}_strategy"] = "epoch" if every == "epoch" else "steps" if every else "no"
        found |= {f"{name}_steps": every} if every and every != "epoch" else {}
    return found | dict(zip(("adam_beta1", "adam_beta2"), keys.get("optimizer.betas") or (), strict=False))
