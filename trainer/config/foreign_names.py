"""Names of zeromesh's keys in transformers, TRL, axolotl, LLaMA-Factory and others, for hints and the migration page.

They are the rows of `foreign_names.yaml`. DeepSpeed's settings are translated, and have a table of their own.
"""

from collections.abc import Mapping
from typing import Any

from zeromesh.trainer.config.deepspeed_table import TABLE, read_rows

NO_KEY = "no key"
"""The prefix of explanations for settings without a key here."""
_ROWS = [(key, names.split()) for key, names in read_rows("foreign_names.yaml").items()]
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
_FILE_KEYS = {
    "axolotl": {"base_model"},
    "LLaMA-Factory": {"model_name_or_path", "template", "finetuning_type", "cutoff_len"},
    "transformers or TRL": {"model_name_or_path", "per_device_train_batch_size", "learning_rate", "num_train_epochs"},
}
"""Typical keys of other trainers' files; two of them, or the only one, identify the trainer."""


KEY_BY_DEEPSPEED_NAME = {row.name.rpartition(".")[2].lower(): row.keys[0] for row in TABLE if row.keys}
KEY_BY_NAME = {name: key for key, names in NAMES.items() for name in names}
"""The zeromesh key of each foreign name in lower case."""


def foreign_problems(data: Mapping[str, Any]) -> list[str]:
    """Return the equivalent of each key of another trainer's configuration; an empty list for any other mapping."""
    trainer = next((name for name, keys in _FILE_KEYS.items() if len(keys & data.keys()) >= min(2, len(keys))), None)
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
    return found | dict(zip(("adam_beta1", "adam_beta2"), keys.get("optimizer.betas", ()), strict=False))
