"""transformers' `TrainingArguments` in place of a configuration: each field is mapped, has no effect here, or is refused.

What transformers' Trainer does with the arguments is what the configuration says: linear decay of the rate, no weight decay of
biases and normalisations, epochs whose last batch is smaller, float32 unless bf16 or fp16 is set.
"""

from __future__ import annotations

import dataclasses
from inspect import get_annotations
from typing import Any

import torch

from zeromesh.trainer.config.migration.training_arguments_derived import JOINS
from zeromesh.trainer.config.migration.training_arguments_table import TABLE
from zeromesh.trainer.config.migration.translate import LaunchFacts, Reading, Translation, translate

WORD = "TrainingArguments"
_KNOWN = frozenset(row.name for row in TABLE)
_OF_TRANSFORMERS = "transformers.training_args"


def read_training_arguments(arguments: Any, place: LaunchFacts) -> Translation:
    """The keys that a `TrainingArguments` asks for, in a world as `place` says.

    A field of a subclass that is not transformers' own is the user's business; one that transformers has and this version does not
    know is refused when it is set.
    """
    fields = {field.name: field for field in dataclasses.fields(arguments) if field.init}
    defaults = {name: _default(field) for name, field in fields.items()}
    settings = {name: _as_given(arguments, name) for name in fields}
    # Not a field: what accelerate's launcher says, where neither bf16 nor fp16 does.
    settings["mixed_precision"] = getattr(arguments, "mixed_precision", None)
    reading = Reading(settings, defaults=_DEFAULTS | defaults, place=place)
    for name in fields:
        if name not in _KNOWN and _is_of_transformers(type(arguments), name) and settings[name] != defaults[name]:
            reading.refuse(name, "this version of zeromesh does not know it; leave it out")
    translation = translate(TABLE, JOINS, reading, source=WORD)
    own = [name for name in fields if name not in _KNOWN and not _is_of_transformers(type(arguments), name)]
    if not own:
        return translation
    note = f"{WORD}: {', '.join(own)}: no effect: fields of {type(arguments).__name__} that transformers does not have"
    return dataclasses.replace(translation, notes=(*translation.notes, note))


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


_DEFAULTS: dict[str, Any] = {"activation_checkpointing": None, "data_seed": None, "warmup_steps": 0}
"""Defaults of fields that older versions of transformers do not have."""


def _as_given(arguments: Any, name: str) -> Any:
    """The value of a field; its default where it is but what transformers makes of that."""
    value = getattr(arguments, name)
    value = getattr(value, "value", value)
    match name:
        case "report_to" if value == []:
            return "none"
        case "debug" if value == []:
            return ""
        case "disable_tqdm" | "activation_checkpointing" | "gradient_checkpointing" if value is False:
            return None
        case "do_eval" if getattr(arguments.eval_strategy, "value", arguments.eval_strategy) != "no":
            return False
        case "dataloader_pin_memory" if arguments.use_cpu:
            return True
        case "use_cpu" if not torch.cuda.is_available():
            return False
        case "accelerator_config" if value is not None and value == type(value)():
            return None
    return value


def _is_of_transformers(kind: type, name: str) -> bool:
    """Whether a field is declared by one of transformers' own classes."""
    return any(base.__module__.startswith("transformers.") and name in get_annotations(base) for base in kind.__mro__)
