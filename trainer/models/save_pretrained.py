"""Writing a partitioned model as a Hugging Face model directory, one parameter in memory at a time."""

from __future__ import annotations

import copy
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.checkpoint.format.safetensors_layout import FileLayout, TensorSpec, index_files, plan_files
from zeromesh.errors import StorageError
from zeromesh.files import write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.telemetry.watchdog import Activity
from zeromesh.trainer.models.peft import adapter_names, is_adapted, pretrained_of, wraps_another
from zeromesh.trainer.weights.safetensors_reader import INDEX, SINGLE
from zeromesh.weight_init.weight_sources import canonical_names
from zeromesh.zero.checkpoint_state import saved_buffers
from zeromesh.zero.full_state import FullState

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_MODEL = "base_model"
"""Folder of a checkpoint with adapters that holds the configuration of the model inside."""
_OF_ADAPTERS = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin")
"""Files that `from_pretrained` would load on top of a model that was saved where an adapter had been."""
_SYNCED_BYTES = 256 << 20
"""Written at once, and brought to the disk before more is: no wait for the disk is longer than that takes."""


def save_model(
    model: nn.Module, state: FullState | None, path: Path, mesh: Mesh, *, processing_class: Any = None
) -> str:
    """Write `path` so that `from_pretrained(path)` loads the model, or the adapter alone of one that has some; all ranks call it.

    `state` is that of a partitioned model; None: it is whole. Returns as `save_pretrained`.
    """
    if is_adapted(model):
        return save_adapter(model, gathered_adapter(model, state, mesh), path, mesh, processing_class=processing_class)
    whole = tensors_of(model) if state is None else {}
    specs = specs_of(whole) if state is None else state.stored_specs()
    tensors = iter(whole.items()) if state is None else state.stored()
    return save_pretrained(model, specs, tensors, path, mesh, processing_class=processing_class)


def save_pretrained(
    model: nn.Module,
    specs: Sequence[TensorSpec],
    tensors: Iterator[tuple[str, Tensor]],
    path: Path,
    mesh: Mesh,
    *,
    processing_class: Any = None,
) -> str:
    """Write `path` so that `from_pretrained(path)` loads it; all ranks call it, rank 0 writes.

    `tensors` are those of `specs`, parameters (tied ones once) and persistent buffers; `model` gives its configuration.
    Everything is written under another name first, so that a failure leaves what was there. Other files of a directory that
    exists stay. Returns why it could not be written, on all ranks; empty where it was.
    """
    failure = ""
    path = Path(os.path.abspath(path))
    writer = _Writer(path, mesh) if mesh.rank == 0 else None
    try:
        if writer is not None:
            writer.open(specs)
    except (OSError, StorageError) as error:
        failure = f"{str(path)!r} cannot be written ({getattr(error, 'strerror', None) or error})"
    for name, tensor in tensors:
        if writer is not None and not failure:
            failure = writer.put(name, tensor)
    if writer is not None:
        failure = writer.finish(model, processing_class, failure)
    return _agreed(failure, path, mesh)


class _Writer:
    """safetensors files and the small files beside them, in a directory beside `path`, and moved to `path` at the end."""

    def __init__(self, path: Path, mesh: Mesh) -> None:
        self._path = path
        self._mesh = mesh
        self._directory = _beside(path)
        self._layouts: list[FileLayout] = []
        self._files: list[PositionalFile] = []
        self._places: dict[str, tuple[PositionalFile, TensorSpec, int]] = {}
        self._unsynced = 0

    def open(self, tensors: Sequence[TensorSpec]) -> None:
        """Make the files at their full sizes, with their headers. Raises `OSError`, `StorageError`."""
        _begin(self._path)
        self._layouts = list(plan_files(tensors, 1))
        if len(self._layouts) == 1:
            self._layouts = [replace(self._layouts[0], path=SINGLE)]
        for layout in self._layouts:
            file = PositionalFile(self._directory / layout.path, write=True, size=layout.nbytes)
            self._files.append(file)
            self._places |= {spec.name: (file, spec, at) for spec, at in layout.places}
            self._write(file, torch.frombuffer(bytearray(layout.header), dtype=torch.uint8), 0)

    def put(self, name: str, tensor: Tensor) -> str:
        """Write one tensor; returns what went wrong, empty for nothing."""
        file, spec, at = self._places[name]
        if tuple(tensor.shape) != spec.shape:
            return f"{name} has shape {list(tensor.shape)}, {list(spec.shape)} was announced"
        flat = tensor.detach().to("cpu", spec.dtype).contiguous().reshape(-1)
        try:
            self._write(file, flat.view(torch.uint8), at)
        except StorageError as error:
            return f"{error} (while writing {name})"
        return ""

    def _write(self, file: PositionalFile, data: Tensor, offset: int) -> None:
        """Write everything, and let the others see that this rank is at work: they wait for it."""
        for start in range(0, data.numel(), _SYNCED_BYTES):
            part = data[start : start + _SYNCED_BYTES]
            file.write(part, offset + start)
            self._unsynced += part.numel()
            if self._unsynced >= _SYNCED_BYTES:
                file.sync()
                self._unsynced = 0
            self._mesh.post(Activity.SAVE)

    def finish(self, model: nn.Module, processing_class: Any, failure: str) -> str:
        """Configuration, tokenizer, then the move; returns what went wrong, here or before."""
        try:
            for file in self._files:
                file.sync()
                file.close()
            if not failure:
                if len(self._layouts) > 1:
                    for path, text in index_files(self._layouts).items():
                        write_whole(self._directory / path, text)
                save_configuration(model, self._main_dtype(), processing_class, self._directory)
                self._move()
        except Exception as error:  # noqa: BLE001 - other people's `save_pretrained` among them; all ranks have to know
            failure = failure or f"{str(self._path)!r} cannot be written ({getattr(error, 'strerror', None) or error})"
        shutil.rmtree(self._directory, ignore_errors=True)
        return failure

    def _main_dtype(self) -> torch.dtype | None:
        """The widest floating dtype that is stored: `from_pretrained` loads all of a model in one."""
        found = [spec.dtype for _, spec, _ in self._places.values() if spec.dtype.is_floating_point]
        return max(found, key=lambda dtype: dtype.itemsize, default=None)

    def _move(self) -> None:
        _move(self._directory, self._path)
        names = {layout.path for layout in self._layouts} | ({INDEX} if len(self._layouts) > 1 else set())
        numbered = [file.name for file in self._path.glob("model-*-of-*.safetensors")]
        for stale in (SINGLE, INDEX, *numbered, *_OF_ADAPTERS):
            if stale not in names:
                (self._path / stale).unlink(missing_ok=True)


def gathered_adapter(model: nn.Module, state: FullState | None, mesh: Mesh) -> dict[str, Tensor]:
    """The tensors of `adapter_names`, whole, in the CPU's memory of rank 0; empty on others. All ranks call it.

    `state` is that of a partitioned model; None: it is whole.
    """
    names = adapter_names(model)
    tensors = iter(tensors_of(model).items()) if state is None else chain(state.parameters(names), state.buffers())
    held = {}
    for name, tensor in tensors:
        if name in names and mesh.rank == 0:
            held[name] = tensor.detach().to("cpu", copy=True)
            mesh.post(Activity.SAVE)
    return held


def write_adapter(model: Any, held: dict[str, Tensor], directory: Path) -> None:
    """Write adapters into a directory, as the model's own `save_pretrained` does; `held` has the tensors of `adapter_names`."""
    # What adapters train of embeddings is among their own tensors; PEFT would look at the Hub for what else may be.
    own = {"save_embedding_layers": False} if wraps_another(model) else {}
    ties = {name: held[first] for name, first in canonical_names(model).items() if first in held}
    model.save_pretrained(directory, state_dict=held | ties, **own)


def save_adapter(model: Any, held: dict[str, Tensor], path: Path, mesh: Mesh, *, processing_class: Any = None) -> str:
    """Write the adapters of `model` alone; all ranks call it, and rank 0, which has them in `held`, writes.

    Returns as `save_pretrained`.
    """
    failure = ""
    path = Path(os.path.abspath(path))
    if mesh.rank == 0:
        try:
            _begin(path)
            write_adapter(model, held, _beside(path))
            _save_part(processing_class, _beside(path))
            _move(_beside(path), path)
        except Exception as error:  # noqa: BLE001 - other people's `save_pretrained` among them; all ranks have to know
            failure = f"{str(path)!r} cannot be written ({getattr(error, 'strerror', None) or error})"
        shutil.rmtree(_beside(path), ignore_errors=True)
    return _agreed(failure, path, mesh)


def _beside(path: Path) -> Path:
    """Where what becomes `path` is written first."""
    # Short, since the name of `path` may be the longest that there is.
    name = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
    return path.with_name(f".zeromesh-{name}.tmp")


def _begin(path: Path) -> None:
    """An empty directory beside `path`. Raises `OSError`."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "there is a file of this name; give a directory")
    shutil.rmtree(_beside(path), ignore_errors=True)
    _beside(path).mkdir(parents=True)


def _move(directory: Path, path: Path) -> None:
    """The directory as a whole where there is none; else part by part, the weights last."""
    if not path.exists():
        directory.rename(path)
        return
    for name in sorted(os.listdir(directory), key=lambda name: name.endswith((".safetensors", INDEX))):
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        os.replace(directory / name, path / name)


def _agreed(failure: str, path: Path, mesh: Mesh) -> str:
    """Why `path` could not be written, on all ranks."""
    failed = int(mesh.world.max_(torch.tensor([int(bool(failure))]), "end of saving")[0])
    return failure or (f"{path} could not be written by rank 0, whose error says why" if failed else "")


def save_configuration(
    model: nn.Module,
    dtype: torch.dtype | None,
    processing_class: Any,
    directory: Path,
    adapter: dict[str, Tensor] | None = None,
) -> None:
    """What `from_pretrained` reads beside the weights. The configuration says their dtype and the model's class.

    Of a model with adapters these are the adapters of `adapter`, which PEFT loads from there, while the configuration of the model
    inside goes into a folder of its own: the weights have names that no class of transformers would find.
    """
    inside = pretrained_of(model) if adapter is not None else model
    config: Any = copy.deepcopy(getattr(inside, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(inside).__name__]
        config.dtype = str(dtype).removeprefix("torch.")
    below = directory
    if adapter is not None:
        write_adapter(model, adapter, directory)
        below = directory / BASE_MODEL
    for part in (config, getattr(inside, "generation_config", None)):
        _save_part(part, below)
    _save_part(processing_class, directory)


def _save_part(part: Any, directory: Path) -> None:
    save = getattr(part, "save_pretrained", None)
    if save is not None:
        save(directory)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What is stored of a whole model: parameters, tied ones once, and persistent buffers."""
    return {**{name: parameter.detach() for name, parameter in model.named_parameters()}, **saved_buffers(model)}


def specs_of(tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
    """As what they are stored."""
    return [
        TensorSpec(kind="model", name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
