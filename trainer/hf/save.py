"""Writing a partitioned model as a Hugging Face model directory, one parameter in memory at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.errors import StorageError
from zeromesh.mesh.groups import Mesh
from zeromesh.trainer.hf.safetensors_files import DTYPES, SINGLE

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a tensor lies in the file's data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def save_pretrained(
    model: nn.Module, parameters: Iterator[tuple[str, Tensor]], path: Path, mesh: Mesh, processing_class: Any
) -> None:
    """Write `path` so that `from_pretrained(path)` loads it; all ranks call it, rank 0 writes.

    Parameters come in their master dtype, tied ones once. The directory appears whole or not at all: it is written
    under another name and renamed, and one that is there already is replaced.

    Raises:
        StorageError: when it cannot be written; on all ranks.
    """
    failure = ""
    temporary = path.with_name(f"{path.name}.tmp")
    writer = _Writer(temporary) if mesh.rank == 0 else None
    try:
        if writer is not None:
            writer.open(_places(model))
    except OSError as error:
        failure = f"{temporary}: {error.strerror or error}"
    for name, tensor in parameters:
        if writer is not None and not failure:
            failure = writer.put(name, tensor)
    if writer is not None:
        failure = failure or writer.finish(model, processing_class, path)
    _agree(mesh, failure, path)


def _agree(mesh: Mesh, failure: str, path: Path) -> None:
    failed = int(mesh.world.max_(torch.tensor([int(bool(failure))]), "end of saving")[0])
    if failed:
        raise StorageError(failure or f"{path} could not be written by rank 0, whose error says why")


class _Writer:
    """One safetensors file and the small files beside it, in a directory that is renamed at the end."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: dict[str, _Place] = {}
        self._descriptor = -1
        self._data_at = 0

    def open(self, places: Mapping[str, _Place]) -> None:
        """Make the file at its full size, with its header."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        self._places = dict(places)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, place in self._places.items():
            header[name] = {
                "dtype": _DTYPE_NAMES[place.dtype],
                "shape": list(place.shape),
                "data_offsets": [place.start, place.end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        size = max((place.end for place in self._places.values()), default=0)
        self._descriptor = os.open(self._directory / SINGLE, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._data_at = 8 + len(text)
        if size:
            os.posix_fallocate(self._descriptor, 0, self._data_at + size)
        _write_all(self._descriptor, len(text).to_bytes(8, "little") + text, 0)

    def put(self, name: str, tensor: Tensor) -> str:
        """Write one tensor; returns what went wrong, empty for nothing."""
        place = self._places[name]
        if tuple(tensor.shape) != place.shape:
            return f"{name} has shape {list(tensor.shape)}, {list(place.shape)} was announced"
        flat = tensor.detach().to("cpu", place.dtype).contiguous().reshape(-1)
        if not flat.numel():
            return ""
        try:
            _write_all(self._descriptor, flat.view(torch.uint8).numpy().data, self._data_at + place.start)
        except OSError as error:
            return f"{self._directory / SINGLE}: {error.strerror or error} while writing {name}"
        return ""

    def finish(self, model: nn.Module, processing_class: Any, path: Path) -> str:
        """Buffers, configuration, tokenizer, then the rename; returns what went wrong."""
        problem = ""
        for name, buffer in _saved_buffers(model).items():
            problem = problem or self.put(name, buffer)
        try:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            _save_configuration(model, processing_class, self._directory)
            if problem:
                return problem
            old = path.with_name(f"{path.name}.old")
            if path.exists():
                path.rename(old)
            self._directory.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            return f"{path}: {error.strerror or error}"
        return ""


def _save_configuration(model: nn.Module, processing_class: Any, directory: Path) -> None:
    for part in (getattr(model, "config", None), getattr(model, "generation_config", None), processing_class):
        save = getattr(part, "save_pretrained", None)
        if save is not None:
            save(directory)


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers, as `state_dict` has them."""
    found: dict[str, Tensor] = {}
    for fqn, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{fqn}.{name}" if fqn else name] = buffer
    return found


def _places(model: nn.Module) -> dict[str, _Place]:
    """Places without holes: wider dtypes first, as the format's own writer orders them; tied parameters once."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        trained = parameter.requires_grad and parameter.is_floating_point()
        tensors[name] = (_master_dtype(parameter.dtype) if trained else parameter.dtype, tuple(parameter.shape))
    for name, buffer in _saved_buffers(model).items():
        tensors[name] = (buffer.dtype, tuple(buffer.shape))
    places, end = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        places[name] = _Place(dtype=dtype, shape=shape, start=start, end=end)
    return places


def _master_dtype(compute: torch.dtype) -> torch.dtype:
    return compute if compute.itemsize >= 4 else torch.float32


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """`pwrite` until everything is written: one call may write less, and 2 GiB at most."""
    view = memoryview(data).cast("B")
    while view:
        written = os.pwrite(descriptor, view[: 1 << 30], offset)
        offset += written
        view = view[written:]
