"""Writing a partitioned model as a Hugging Face model directory, one parameter in memory at a time."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.mesh.groups import Mesh
from zeromesh.mesh.watch import Activity
from zeromesh.trainer.hf.safetensors_files import DTYPES, INDEX, SINGLE

_SYNCED_BYTES = 256 << 20
"""Written at once, and brought to the disk before more is: no wait for the disk is longer than that takes."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a tensor lies in the file's data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def save_pretrained(
    model: nn.Module,
    parameters: Iterator[tuple[str, Tensor]],
    path: Path,
    mesh: Mesh,
    *,
    processing_class: Any = None,
    master: torch.dtype | None = None,
) -> str:
    """Write `path` so that `from_pretrained(path)` loads it; all ranks call it, rank 0 writes.

    Parameters come as they are to be stored, tied ones once: trained ones in `master`, if given, else all in the dtype that
    the model has. Everything is written under another name first, so that a failure leaves what was there. Other files of
    a directory that exists stay. Returns why it could not be written, on all ranks; empty where it was.
    """
    failure = ""
    path = Path(os.path.abspath(path))
    writer = _Writer(path, mesh) if mesh.rank == 0 else None
    try:
        if writer is not None:
            writer.open(_places(model, master))
    except OSError as error:
        failure = f"{str(path)!r} cannot be written ({error.strerror or error})"
    for name, tensor in parameters:
        if writer is not None and not failure:
            failure = writer.put(name, tensor)
    if writer is not None:
        failure = writer.finish(model, processing_class, failure)
    failed = int(mesh.world.max_(torch.tensor([int(bool(failure))]), "end of saving")[0])
    return failure or (f"{path} could not be written by rank 0, whose error says why" if failed else "")


class _Writer:
    """One safetensors file and the small files beside it, in a directory beside `path`, and moved to `path` at the end."""

    def __init__(self, path: Path, mesh: Mesh) -> None:
        self._path = path
        self._mesh = mesh
        self._directory = path.with_name(f".{path.name}.zeromesh-tmp")
        self._places: dict[str, _Place] = {}
        self._descriptor = -1
        self._data_at = 0
        self._unsynced = 0

    def open(self, places: Mapping[str, _Place]) -> None:
        """Make the file at its full size, with its header. Raises `OSError`."""
        if self._path.exists() and not self._path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "there is a file of this name; give a directory")
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
        self._write(len(text).to_bytes(8, "little") + text, 0)

    def put(self, name: str, tensor: Tensor) -> str:
        """Write one tensor; returns what went wrong, empty for nothing."""
        place = self._places[name]
        if tuple(tensor.shape) != place.shape:
            return f"{name} has shape {list(tensor.shape)}, {list(place.shape)} was announced"
        flat = tensor.detach().to("cpu", place.dtype).contiguous().reshape(-1)
        if not flat.numel():
            return ""
        try:
            self._write(flat.view(torch.uint8).numpy().data, self._data_at + place.start)
        except OSError as error:
            return f"{self._directory / SINGLE}: {error.strerror or error} while writing {name}"
        return ""

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        """Write everything, and let the others see that this rank is at work: they wait for it."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._descriptor, view[:_SYNCED_BYTES], offset)
            offset += written
            view = view[written:]
            self._unsynced += written
            if self._unsynced >= _SYNCED_BYTES:
                os.fdatasync(self._descriptor)
                self._unsynced = 0
            self._mesh.post(Activity.SAVE)

    def finish(self, model: nn.Module, processing_class: Any, failure: str) -> str:
        """Buffers, configuration, tokenizer, then the move; returns what went wrong, here or before."""
        if not failure:
            for name, buffer in _saved_buffers(model).items():
                failure = failure or self.put(name, buffer)
        try:
            if self._descriptor >= 0:
                os.fsync(self._descriptor)
                os.close(self._descriptor)
            if not failure:
                save_configuration(model, self._main_dtype(), processing_class, self._directory)
                self._move()
        except (OSError, ValueError) as error:
            failure = failure or f"{str(self._path)!r} cannot be written ({getattr(error, 'strerror', None) or error})"
        shutil.rmtree(self._directory, ignore_errors=True)
        return failure

    def _main_dtype(self) -> torch.dtype | None:
        """The widest floating dtype that is stored: `from_pretrained` loads all of a model in one."""
        found = [place.dtype for place in self._places.values() if place.dtype.is_floating_point]
        return max(found, key=lambda dtype: dtype.itemsize, default=None)

    def _move(self) -> None:
        """The directory as a whole where there is none; else file by file, the weights last."""
        if not self._path.exists():
            self._directory.rename(self._path)
            return
        names = sorted(os.listdir(self._directory), key=lambda name: name == SINGLE)
        for name in names:
            os.replace(self._directory / name, self._path / name)
        for stale in (INDEX, *(file.name for file in self._path.glob("model-*-of-*.safetensors"))):
            (self._path / stale).unlink(missing_ok=True)


def save_configuration(model: nn.Module, dtype: torch.dtype | None, processing_class: Any, directory: Path) -> None:
    """What `from_pretrained` reads beside the weights. The configuration says their dtype and the model's class."""
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = str(dtype).removeprefix("torch.")
    for part in (config, getattr(model, "generation_config", None), processing_class):
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


def _places(model: nn.Module, master: torch.dtype | None) -> dict[str, _Place]:
    """Places without holes: wider dtypes first, as the format's own writer orders them; tied parameters once."""
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        trained = parameter.requires_grad and parameter.is_floating_point()
        tensors[name] = (master if master and trained else parameter.dtype, tuple(parameter.shape))
    for name, buffer in _saved_buffers(model).items():
        tensors[name] = (buffer.dtype, tuple(buffer.shape))
    places, end = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        start, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        places[name] = _Place(dtype=dtype, shape=shape, start=start, end=end)
    return places
