"""A checkpoint of a run with adapters as an adapter that PEFT loads, or as the model with the adapters merged into its weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from zeromesh.checkpoint.format.manifest import StoredTensor
from zeromesh.checkpoint.io.reader import CheckpointReader, ReadTarget
from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.offload import TieredTensor
from zeromesh.trainer.models.adapters import import_peft
from zeromesh.trainer.models.save_pretrained import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE_MODEL
from zeromesh.trainer.weights.hub_names import read_class
from zeromesh.weight_init.weight_sources import canonical_names

_PREFIX = "base_model.model."
"""What PEFT puts before the names of the model inside. Names of adapters that were added to the model itself lack it."""


def has_adapter(reader: CheckpointReader) -> bool:
    """Whether a checkpoint is of a model with adapters."""
    return ADAPTER_CONFIG in reader.manifest.files


def convert_adapter(folder: Path, dtype: torch.dtype | None) -> None:
    """Give the adapter in `folder`, where all small files of a checkpoint are, another floating dtype; None: leave it as it is.

    Raises:
        CheckpointError: where the checkpoint has no weights of an adapter.
        ConfigError: where the dtype cannot hold one of them.
    """
    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(
            f"the checkpoint has {ADAPTER_CONFIG} and no {ADAPTER_WEIGHTS}; an older version wrote it"
        )
    shutil.rmtree(folder / BASE_MODEL, ignore_errors=True)
    if dtype is not None:
        tensors = load_file(path)
        _require_range(tensors, dtype)
        converted = {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}
        save_file(converted, path, metadata={"format": "pt"})


def merge_adapter(
    folder: Path, reader: CheckpointReader, chosen: Mapping[str, tuple[StoredTensor, torch.dtype]], dtype: torch.dtype
) -> None:
    """Put the model with its adapters merged, as `dtype`, in the place of the adapter in `folder`. It is held in memory as a whole.

    `chosen` has every tensor of the model.

    Raises:
        CheckpointError: where the tensors are not those of the model that the files in `folder` describe.
        ConfigError: where the dtype cannot hold a weight, and for a model that is none of transformers.
    """
    peft = import_peft()
    cls, config, reason = read_class(folder / BASE_MODEL)
    if cls is None:
        raise ConfigError(
            f"{reason}; load the adapter with PEFT, and merge it there (merge_and_unload)", where="--merge"
        )
    widest = torch.promote_types(torch.float32, max((to for _, to in chosen.values()), key=lambda each: each.itemsize))
    model: Any = peft.get_peft_model(cls(config).to(widest), peft.PeftConfig.from_pretrained(folder))
    _fill(model, reader, chosen)
    merged = model.merge_and_unload(safe_merge=True)
    _require_range(dict(merged.named_parameters()), dtype)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "README.md"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / BASE_MODEL)
    merged.to(dtype).save_pretrained(folder)


def _fill(
    model: torch.nn.Module, reader: CheckpointReader, chosen: Mapping[str, tuple[StoredTensor, torch.dtype]]
) -> None:
    """Read every tensor of a checkpoint into the model. Raises `CheckpointError` unless each has one and each has its place."""
    first = canonical_names(model)
    state = model.state_dict()
    missing = {first.get(name, name) for name, _ in model.named_parameters()}
    for given, (source, _) in chosen.items():
        name = given if given.startswith(_PREFIX) else f"{_PREFIX}{given}"
        tensor = state.get(name)
        if tensor is None or tuple(tensor.shape) != source.spec.shape:
            raise CheckpointError(f"{given} of {reader.directory} has no place in {type(model).__name__}")
        memory = torch.empty(source.spec.shape, dtype=tensor.dtype)
        reader.read([ReadTarget(tensor=source, first=0, values=TieredTensor.of(memory.view(-1)))], lambda: None)
        tensor.copy_(memory)
        missing.discard(first.get(name, name))
    if missing:
        raise CheckpointError(
            f"{reader.directory} has no {', '.join(sorted(missing)[:4])}; its adapter has another name"
        )


def _require_range(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raise `ConfigError` where a number would become infinite."""
    limit = torch.finfo(dtype).max
    for name, tensor in tensors.items():
        largest = float(tensor.detach().abs().max()) if tensor.is_floating_point() and tensor.numel() else 0.0
        if limit < largest < float("inf"):
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"{name} has numbers up to {largest:.4g}, and {kind} ends at {limit:.4g}; give --dtype bfloat16, float32 or keep"
            )
