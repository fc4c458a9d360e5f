"""The configuration's models in words: what a key allows, and which key an unknown one may mean.

Error messages and the generated reference both say what is allowed; they say it from here, out of the
models themselves.
"""

import difflib
import re
from collections.abc import Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zeromesh.trainer.config.redact import REDACTED, Redaction
from zeromesh.trainer.config.sections.base import Allowed
from zeromesh.trainer.config.trainer_config import TrainerConfig

_SECRET = re.compile(r"key|token|secret|passw", re.IGNORECASE)
_SECRET_NUMBER = re.compile(
    r"secret|passw|(?:api|access|private|auth)[_-]?(?:key|token)|(?:^|\.)(?:key|token)$", re.IGNORECASE
)
"""Names such as num_key_value_heads and bos_token_id are those of numbers, too, which are none."""

_ELSEWHERE = {
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "weight_decay_rate",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.name": "optim",
    "schedule.name": "lr_scheduler_type",
    "schedule.warmup_ratio": "warmup_ratio",
    "schedule.warmup_steps": "num_warmup_steps",
    "run.clip_norm": "max_grad_norm gradient_clipping grad_clip",
    "batch.micro_size": "per_device_train_batch_size train_micro_batch_size_per_gpu",
    "batch.global_size": "train_batch_size batch_size",
    "batch.global_size (accumulation is derived from it)": "gradient_accumulation_steps",
    "run.epochs": "num_train_epochs epochs",
    "run.max_steps": "steps",
    "run.log_every": "logging_steps",
    "run.log_first_step": "logging_first_step",
    "run.eval_every": "eval_steps",
    "model.activation_checkpointing": "gradient_checkpointing",
    "model.compile": "torch_compile",
    "model.source": "model_name_or_path",
    "data.sequence_length": "max_length max_seq_length seq_len block_size",
    "precision.compute": "dtype bf16 fp16",
    "zero.stage": "zero_stage zero_optimization",
    "zero.overlap": "overlap_comm",
    "offload.optimizer": "offload_optimizer cpu_offload device",
    "offload.parameters": "offload_param",
    "offload.directory": "nvme_path",
    "parallel.shard": "world_size dp",
    "parallel.tensor": "tp",
    "parallel.pipeline": "pp",
}
"""Keys, and names in lower case that people bring for them from other trainers."""
_BY_OTHER_NAME = {name: key for key, names in _ELSEWHERE.items() for name in names.split()}


@cache
def known_paths(model: type[BaseModel] = TrainerConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """All keys and sections by their dotted paths, sections before what they hold."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        found[prefix + name] = field
        section = section_of(field)
        if section is not None:
            found |= known_paths(section, f"{prefix}{name}.")
    return found


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section, or may be one, else None."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def allowed(field: FieldInfo) -> str:
    """What a field allows: `an integer >= 1 or auto`."""
    section = section_of(field)
    if section is not None and not any(isinstance(item, Allowed) for item in field.metadata):
        return f"a mapping of {', '.join(section.model_fields)}"
    return _allowed(field.annotation, field.metadata)


def choices(field: FieldInfo) -> list[str]:
    """The words that a field allows, where it allows words."""
    kinds = [field.annotation, *get_args(field.annotation)]
    return [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]


def nearest_choice(word: str, field: FieldInfo) -> str | None:
    """The choice of `field` that `word` may be a slip of; a word that another key allows is none."""
    if any(word in choices(other) for other in known_paths().values()):
        return None
    return _nearest(word, choices(field), cutoff=0.6)


def suggestion(path: str) -> str | None:
    """The key that an unknown path may mean: one of another section, a slip, another trainer's name."""
    section, _, key = path.rpartition(".")
    leaves = {known.rpartition(".")[2]: known for known in reversed(known_paths())}
    if key in leaves:
        return leaves[key]
    siblings = [known for known in known_paths() if known.rpartition(".")[0] == section]
    slip = _nearest(key, [sibling.rpartition(".")[2] for sibling in siblings], cutoff=0.6)
    if slip is not None:
        return f"{section}.{slip}" if section else slip
    if key.lower() in _BY_OTHER_NAME:
        return _BY_OTHER_NAME[key.lower()]
    slip = _nearest(key, list(leaves), cutoff=0.8)
    return leaves[slip] if slip else None


def _nearest(word: str, words: Sequence[str], *, cutoff: float) -> str | None:
    close = difflib.get_close_matches(word.lower(), words, n=1, cutoff=cutoff)
    return close[0] if close else None


def shown(path: str, value: object) -> str:
    """`value` for an error message: short, and never a secret or what may hold one."""
    secret = _SECRET_NUMBER if value is None or isinstance(value, int | float) else _SECRET
    if path not in known_paths() and secret.search(path):
        return REDACTED
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys"
    if isinstance(value, list | tuple) and not all(isinstance(item, str | int | float | None) for item in value):
        return f"a list of {len(value)} items"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = Redaction().text(repr(list(value)) if isinstance(value, tuple) else repr(value))
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _allowed(kind: Any, metadata: Sequence[Any]) -> str:
    for item in metadata:
        if isinstance(item, Allowed):
            return item.text
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        # `Field(...)` packs constraints together.
        own = [each for item in arguments[1:] for each in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _allowed(arguments[0], [*own, *metadata])
    if origin is Literal:
        return either([str(argument) for argument in arguments])
    if origin in (Union, UnionType):
        return either([_allowed(argument, []) for argument in arguments])
    if origin is tuple:
        return f"a list of {_allowed(arguments[0], [])}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "text", NoneType: "null"}
    return words.get(kind, "a mapping") + _bounds(metadata)


def _bounds(metadata: Sequence[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [
        f"{sign} {getattr(item, name):g}"
        for item in metadata
        for name, sign in signs.items()
        if isinstance(item, annotated_types.BaseMetadata) and hasattr(item, name)
    ]
    return f" {' and '.join(found)}" if found else ""


def either(words: list[str]) -> str:
    """Words as a choice: `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
