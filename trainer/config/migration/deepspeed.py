"""A DeepSpeed configuration in place of one of zeromesh: each key is mapped, has no effect here, or is refused.

`auto` leaves what TrainingArguments say, where there are any, and else zeromesh's default. A rate follows DeepSpeed's curve without
the first step, which DeepSpeed does twice.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from zeromesh.trainer.config.messages import shown
from zeromesh.trainer.config.migration.deepspeed_derived import JOINS, data_ranks
from zeromesh.trainer.config.migration.deepspeed_table import TABLE, TREE
from zeromesh.trainer.config.migration.translate import LaunchFacts, Reading, SettingRow, Translation, translate
from zeromesh.trainer.config.trainer_config import TrainerConfig

WORD = "DeepSpeed"
_COMMON = frozenset(TREE) & frozenset(TrainerConfig.model_fields)
"""Sections that both kinds of configuration have."""

# Keys that transformers compares with its arguments; what they are called there, and the key here.
_AGREE = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", "batch.micro_size"),
    "train_batch_size": ("per_device_train_batch_size x gradient_accumulation_steps x ranks", "batch.global_size"),
    "gradient_clipping": ("max_grad_norm", "run.clip_norm"),
    "optimizer.params.lr": ("learning_rate", "optimizer.lr"),
    "optimizer.params.betas": ("adam_beta1 and adam_beta2", "optimizer.betas"),
    "optimizer.params.eps": ("adam_epsilon", "optimizer.eps"),
    "optimizer.params.weight_decay": ("weight_decay", "optimizer.weight_decay"),
    "scheduler.params.warmup_max_lr": ("learning_rate", "optimizer.lr"),
}


def is_deepspeed(data: Mapping[str, Any]) -> bool:
    """Whether a mapping is a DeepSpeed configuration: it has keys that only such have, and no section that only zeromesh's has."""
    if any(key in TrainerConfig.model_fields and key not in _COMMON for key in data):
        return False
    optimizer = data.get("optimizer")
    typed = isinstance(optimizer, Mapping) and "type" in optimizer
    return typed or any(key in TREE and key not in _COMMON for key in data)


def read_deepspeed(data: Mapping[str, Any], place: LaunchFacts, below: Mapping[str, Any] | None = None) -> Translation:
    """The keys that a DeepSpeed configuration asks for, in a world as `place` says, on top of those of TrainingArguments."""
    settings: dict[str, Any] = {}
    problems = list(_flatten(data, TREE, "", settings))
    reading = Reading(settings, place=place, below=below)
    reading.problems += problems
    reading.problems += _disagreements(reading)
    return translate(TABLE, JOINS, reading, source=WORD)


def _flatten(data: Mapping[str, Any], tree: Mapping[str, Any], prefix: str, found: dict[str, Any]) -> Iterator[str]:
    """Put values by dotted name into `found`; yields problems of what is not there, or is no section."""
    for key, value in data.items():
        path, node = f"{prefix}{key}", tree.get(key)
        if node is None:
            yield _unknown(path, value, tree)
        elif isinstance(node, SettingRow):
            found[path] = value
        elif isinstance(value, Mapping):
            yield from _flatten(value, node, f"{path}.", found)
        elif path == "zero_optimization" and value is True:
            found[f"{path}.stage"] = 1  # as in DeepSpeed's first versions
        elif value not in (None, False, "none"):
            yield f"{path}: got {shown('', value)}; allowed is a mapping of {', '.join(node)}"


def _unknown(path: str, value: Any, tree: Mapping[str, Any]) -> str:
    prefix, _, key = path.rpartition(".")
    near = difflib.get_close_matches(key, list(tree), n=1, cutoff=0.6)
    if near:
        hint = f"did you mean {f'{prefix}.' if prefix else ''}{near[0]}?"
    else:
        leaves = {row.name.rpartition(".")[2]: row.name for row in reversed(TABLE)}
        away = difflib.get_close_matches(key, list(leaves), n=1, cutoff=0.8)
        hint = f"did you mean {leaves[away[0]]}?" if away else "docs/from-deepspeed.md lists all that are known"
    got = "" if isinstance(value, Mapping) else f" (got {shown(path, value)})"
    return f"{path}: unknown key{got}; {hint}"


def _disagreements(reading: Reading) -> Iterator[str]:
    """Values that TrainingArguments say otherwise, of which nobody knows which one is meant."""
    below, settings = reading.below, reading.settings
    cure = "make them agree, or set this one to 'auto'"
    for name, (argument, key) in _AGREE.items():
        if name in settings and key in below and settings[name] != below[key]:
            yield f"{name}: {shown('', settings[name])}, but {argument} of TrainingArguments is {shown('', below[key])}; {cure}"
    name = "gradient_accumulation_steps"
    if {"batch.global_size", "batch.micro_size"} <= below.keys() and name in settings:
        accumulation = below["batch.global_size"] // (below["batch.micro_size"] * data_ranks(reading))
        if settings[name] != accumulation:
            yield f"{name}: {shown('', settings[name])}, but that of TrainingArguments is {accumulation}; {cure}"
    name = "scheduler.params.warmup_num_steps"
    if (
        name in settings
        and "schedule.warmup_ratio" not in below
        and "schedule.warmup_steps" in below
        and settings[name] != max(1, below["schedule.warmup_steps"])
    ):
        yield f"{name}: {settings[name]}, but warmup_steps of TrainingArguments is {below['schedule.warmup_steps']}; {cure}"
    for section, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        name = f"{section}.enabled"
        if (
            name in settings
            and "precision.compute" in below
            and bool(settings[name]) != (below["precision.compute"] == dtype)
        ):
            yield f"{name}: {shown('', settings[name])}, but TrainingArguments compute in {below['precision.compute']}; {cure}"
