"""Writing a partitioned model as a Hugging Face model directory, one parameter in memory at a time."""

import copy
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.checkpoint.format.safetensors_layout import INDEX, SINGLE, TensorSpec, index_files, plan_files
from zeromesh.errors import StorageError
from zeromesh.files import write_whole
from zeromesh.mesh.process_mesh import Mesh
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.telemetry.watchdog import Activity
from zeromesh.trainer.models.adapters import adapter_names, is_adapted, pretrained_of, wraps_another
from zeromesh.weight_init.weight_sources import canonical_names
from zeromesh.zero.full_state import FullState, saved_buffers

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_MODEL = "base_model"
"""Folder of a checkpoint with adapters that holds the configuration of the model inside."""
_ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin")
"""Files that `from_pretrained` would load on top of a model that was saved where an adapter had been."""
Places = dict[str, tuple[PositionalFile, TensorSpec, int]]
"""For each tensor by name the file that it belongs to, what it is, and the position of its first byte."""
_SYNCED_BYTES = 256 << 20
"""Bytes that are written at once, and synced to the disk before more is: that bounds a single wait for the disk."""


def save_model(
    model: nn.Module, state: FullState | None, path: Path, mesh: Mesh, *, processing_class: Any = None
) -> str:
    """Write `path` so that `from_pretrained(path)` loads the model, or the adapter alone of one that has some.

    All ranks call it, rank 0 writes. `state` is that of a partitioned model; None: the model is whole. Everything is written under
    another name first, so that a failure leaves what was there. Other files of a directory that exists stay. Returns why it could
    not be written, on all ranks; empty where it was.
    """
    path = Path(os.path.abspath(path))
    adapter = gathered_adapter(model, state, mesh) if is_adapted(model) else None
    whole = _stored_tensors(model) if state is None else {}
    specs = [TensorSpec(kind="model", name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in whole.items()]
    specs = specs if state is None else state.stored_specs()
    writer = _DirectoryWriter(path, mesh) if mesh.rank == 0 else None
    if writer is not None:
        with writer.catching():
            writer.begin(() if adapter is not None else specs)
    if adapter is None:
        for name, tensor in whole.items() if state is None else state.stored():
            if writer is not None and not writer.failure:
                with writer.catching(f" (while writing {name})"):
                    writer.put(name, tensor)
    failure = "" if writer is None else writer.finish(model, processing_class, adapter)
    failed = int(mesh.world.max_(torch.tensor([int(bool(failure))]), "end of saving")[0])
    return failure or (f"{path} could not be written by rank 0, whose error says why" if failed else "")


class _DirectoryWriter:
    """Writes the files of a model into a directory beside `path`, and moves them to `path` at the end.

    `failure` says what went wrong first; empty: nothing. Nothing more is written after a failure.
    """

    def __init__(self, path: Path, mesh: Mesh) -> None:
        self.failure = ""
        self._path = path
        self._mesh = mesh
        # A short name, since that of `path` may be the longest that there is.
        digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
        self._directory = path.with_name(f".zeromesh-{digest}.tmp")
        self._files = ExitStack()
        self._places: Places = {}
        self._indices: Mapping[str, bytes] = {}
        self._unsynced = 0

    @contextmanager
    def catching(self, where: str = "") -> Iterator[None]:
        """Keep an error of the block, of somebody else's `save_pretrained` too, as the failure: all ranks have to know."""
        try:
            yield
        except Exception as error:  # noqa: BLE001
            reason = getattr(error, "strerror", None) or error
            self.failure = self.failure or (
                f"{error}{where}" if where else f"{str(self._path)!r} cannot be written ({reason})"
            )

    def begin(self, tensors: Sequence[TensorSpec]) -> None:
        """Make an empty directory, and in it the files of `tensors` at their full sizes, with their headers."""
        if self._path.exists() and not self._path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "there is a file of this name; give a directory")
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        self._places, self._indices = begin_files(self._directory, tensors, self._files)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one of the tensors. Raises `StorageError`."""
        file, spec, at = self._places[name]
        if tuple(tensor.shape) != spec.shape:
            raise StorageError(f"{name} has shape {list(tensor.shape)}, {list(spec.shape)} was announced")
        flat = tensor.detach().to("cpu", spec.dtype).contiguous().reshape(-1)
        self._write(file, flat.view(torch.uint8), at)

    def _write(self, file: PositionalFile, data: Tensor, offset: int) -> None:
        """Write everything, and let the other ranks, which wait for it, see that this one is at work."""
        for start in range(0, data.numel(), _SYNCED_BYTES):
            part = data[start : start + _SYNCED_BYTES]
            file.write(part, offset + start)
            self._unsynced += part.numel()
            if self._unsynced >= _SYNCED_BYTES:
                file.sync()
                self._unsynced = 0
            self._mesh.post(Activity.SAVE)

    def finish(self, model: nn.Module, processing_class: Any, adapter: dict[str, Tensor] | None) -> str:
        """Write adapters or the configuration, and the tokenizer, then move everything; returns the failure."""
        with self.catching(), self._files:
            for file in {file for file, _, _ in self._places.values()}:
                file.sync()
        if not self.failure:
            with self.catching():
                if adapter is not None:
                    _write_adapter(model, adapter, self._directory)
                    _save_part(processing_class, self._directory)
                else:
                    for name, text in self._indices.items():
                        write_whole(self._directory / name, text)
                    # `from_pretrained` loads all of a model in one dtype: the widest floating one that is stored.
                    found = [spec.dtype for _, spec, _ in self._places.values() if spec.dtype.is_floating_point]
                    widest = max(found, key=lambda dtype: dtype.itemsize, default=None)
                    save_configuration(model, widest, processing_class, self._directory)
                self._move()
        shutil.rmtree(self._directory, ignore_errors=True)
        return self.failure

    def _move(self) -> None:
        """Move the directory as a whole where there is none; else part by part, the weights last."""
        if not self._path.exists():
            self._directory.rename(self._path)
            return
        names = os.listdir(self._directory)
        for name in sorted(names, key=lambda name: name.endswith((".safetensors", INDEX))):
            if (self._path / name).is_dir():
                shutil.rmtree(self._path / name)
            os.replace(self._directory / name, self._path / name)
        if self._places:
            numbered = [file.name for file in self._path.glob("model-*-of-*.safetensors")]
            for stale in {SINGLE, INDEX, *numbered, *_ADAPTER_FILES}.difference(names):
                (self._path / stale).unlink(missing_ok=True)


def begin_files(folder: Path, tensors: Sequence[TensorSpec], files: ExitStack) -> tuple[Places, Mapping[str, bytes]]:
    """Make the safetensors files of a model at their full sizes, with their headers; they are open until `files` closes.

    Returns where each tensor belongs, by name, and the index of several files by its path.
    """
    layouts = plan_files(tensors, 1)
    if len(layouts) == 1:
        layouts = (replace(layouts[0], path=SINGLE),)
    places: Places = {}
    for layout in layouts:
        file = files.enter_context(PositionalFile(folder / layout.path, write=True, size=layout.nbytes))
        file.write(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8), 0)
        places |= {spec.name: (file, spec, at) for spec, at in layout.places}
    return places, index_files(layouts) if len(layouts) > 1 else {}


def gathered_adapter(model: nn.Module, state: FullState | None, mesh: Mesh) -> dict[str, Tensor]:
    """Return the tensors of `adapter_names`, whole, in the CPU's memory of rank 0; empty on others. All ranks call it.

    `state` is that of a partitioned model; None: the model is whole.
    """
    names = adapter_names(model)
    tensors = iter(_stored_tensors(model).items()) if state is None else chain(state.parameters(names), state.buffers())
    gathered = {}
    for name, tensor in tensors:
        if name in names and mesh.rank == 0:
            gathered[name] = tensor.detach().to("cpu", copy=True)
            mesh.post(Activity.SAVE)
    return gathered


def _write_adapter(model: Any, adapter: dict[str, Tensor], directory: Path) -> None:
    """Write adapters as the model's own `save_pretrained` does."""
    # What adapters train of embeddings is among their own tensors; PEFT would look at the Hub for what else may be.
    own = {"save_embedding_layers": False} if wraps_another(model) else {}
    ties = {name: adapter[first] for name, first in canonical_names(model).items() if first in adapter}
    model.save_pretrained(directory, state_dict=adapter | ties, **own)


def save_configuration(
    model: nn.Module,
    dtype: torch.dtype | None,
    processing_class: Any,
    directory: Path,
    adapter: dict[str, Tensor] | None = None,
) -> None:
    """Write what `from_pretrained` reads beside the weights. The configuration says their dtype and the model's class.

    Of a model with adapters these are the adapters of `adapter`, which PEFT loads from there, while the configuration of the model
    inside goes into a folder of its own: the weights have names that no class of transformers would find.
    """
    inside = pretrained_of(model) if adapter is not None else model
    config: Any = copy.deepcopy(getattr(inside, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(inside).__name__]
        config.dtype = str(dtype).removeprefix("torch.")
    if adapter is not None:
        _write_adapter(model, adapter, directory)
    for part in (config, getattr(inside, "generation_config", None)):
        _save_part(part, directory if adapter is None else directory / BASE_MODEL)
    _save_part(processing_class, directory)


def _save_part(part: Any, directory: Path) -> None:
    save = getattr(part, "save_pretrained", None)
    if save is not None:
        save(directory)


def _stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is stored of a whole model: parameters, tied ones once, and persistent buffers."""
    return {**{name: parameter.detach() for name, parameter in model.named_parameters()}, **saved_buffers(model)}
