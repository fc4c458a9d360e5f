"""Frozen weights that a checkpoint references in the model's source directory instead of storing them."""

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch

from zeromesh.checkpoint.io import format as formats
from zeromesh.checkpoint.io.file_slices import PlacedValues, TensorShard, record_of
from zeromesh.checkpoint.io.format import SOURCE, Manifest, TensorSpec, is_path
from zeromesh.checkpoint.io.reader import CheckpointReader, manifest_of_files
from zeromesh.checkpoint.loader import places_of
from zeromesh.errors import CheckpointError, ConfigError, some
from zeromesh.flat.encoded_shard import ReadElements
from zeromesh.offload import TieredTensor, tensor_bytes
from zeromesh.telemetry.status_board import Activity
from zeromesh.trainer.formatting import human_bytes
from zeromesh.trainer.models.adapters import is_adapted, pretrained_of
from zeromesh.trainer.models.user_model import source_of
from zeromesh.units.unit import digest
from zeromesh.zero.engine import ZeroEngine
from zeromesh.zero.full_state import MODEL

NO_REFERENCES = Manifest(step=0, files={})


def source_directory(model: torch.nn.Module) -> Path | None:
    """Return the local directory that a transformers model was loaded from, or None."""
    from zeromesh.trainer.models.build import directory_of  # Checkpoint tools work without transformers.

    name = source_of(model)
    try:
        return None if name is None else Path(os.path.abspath(directory_of(name, None)))
    except ConfigError:
        return None


class FrozenWeights:
    """The frozen weights of an engine that are unchanged from its model's source; all ranks build one and call it alike. `how` is
    `checkpoint.frozen`: auto, reference or whole. Raises `ConfigError` for references to a model's source that is no directory."""

    def __init__(self, engine: ZeroEngine, how: Literal["auto", "reference", "whole"], note: Callable[[str], None]) -> None:
        self._engine, self._note, self._line = engine, note, ""
        self._directory = source_directory(engine.model)
        if how == "reference" and self._directory is None:
            problem = "reference needs a model that came from a directory, which this one did not; set it to whole"
            raise ConfigError(problem, where="checkpoint.frozen")
        self._wanted = how == "reference" or (how == "auto" and is_adapted(engine.model))
        self._reader: CheckpointReader | None = None  # of the source, under the engine's weight names, with checksums
        self._unlike: list[str] | None = None  # the encoded parameters that the source does not have as here
        self._unchanged: dict[tuple[str, int], tuple[int, ...]] = {}
        """Shards that equal the source, by name and first element: their digest, and inode, size and times of the file."""

    def referenced(self) -> Manifest:
        """Return the frozen weights that a checkpoint may reference now, with their source files."""
        mesh, state = self._engine.mesh, self._engine.checkpoint_state
        frozen = state.frozen() if self._wanted else set()
        if not frozen:
            return NO_REFERENCES
        kept: tuple[TensorSpec, ...] = ()
        try:
            reader = self._reader = self._reader or self._open(frozen)
            encoded = state.encoded() & frozen
            plain = frozen - encoded
            shards = [each for each in state.shards_to_write() if each.spec.kind == MODEL and each.spec.name in plain]

            def differing() -> list[str]:
                if self._unlike is None:
                    missing = [name for name in encoded if reader.tensor(MODEL, name) is None]
                    self._unlike = missing + state.unlike_encoded(encoded.difference(missing), elements_of(reader))
                return [*self._unlike, *(shard.spec.name for shard in shards if not self._is_same(reader, shard))]

            rows = mesh.world.all_or_raise("comparison of frozen weights", differing, CheckpointError)
            others = frozen.intersection(chain(*rows))
            kept = tuple(each for each in reader.manifest.tensors if each.name in frozen - others)
            size = human_bytes(sum(each.nbytes for each in kept))
            line = f"checkpoints name {size} of frozen weights in {self._directory}, and do not hold them"
            line += f"; they hold {some(sorted(others))}, which it does not have as here" if others else ""
        except CheckpointError as error:
            line = f"WARNING: checkpoints hold the frozen weights: {error}"
        if line != self._line:
            self._note(line)
        self._line = line
        return replace(reader.manifest, tensors=kept) if kept else NO_REFERENCES

    def _open(self, frozen: set[str]) -> CheckpointReader:
        """Open the source under the engine's weight names; rank 0 reads headers and computes checksums."""
        mesh, state = self._engine.mesh, self._engine.checkpoint_state
        specs = [each for each in state.tensors(reading=True) if each.name in frozen]
        aliases = [(alias, name) for alias, name in state.aliases().items() if name in frozen]

        def look() -> bytes:
            if self._directory is None:
                return b""
            tensors = tuple(_source_tensors(self._engine.model, self._directory, specs, aliases))
            records = {}
            for path in {each.path for each in tensors}:
                with (self._directory / path.removeprefix(SOURCE)).open("rb") as file:
                    nbytes = os.fstat(file.fileno()).st_size
                    records[path] = record_of(path, file, nbytes, mesh.rank, lambda: mesh.post(Activity.SAVE))
            return Manifest(step=0, files=records, tensors=tensors, source=str(self._directory)).to_json()

        text = mesh.world.all_or_raise("reading the source of frozen weights", look, CheckpointError, first=True)[0]
        manifest = formats.parse_manifest(Path("source of frozen weights"), text) if text else NO_REFERENCES
        reader = CheckpointReader(Path(), checked=False, manifest=manifest)
        reader.source = self._directory or reader.source
        return reader

    def _is_same(self, reader: CheckpointReader, shard: TensorShard) -> bool:
        """Return True if the source's elements of a shard are bitwise equal. Raises `CheckpointError` if the file has changed."""
        tensor = reader.tensor(MODEL, shard.spec.name)
        if tensor is None:
            return False
        values, file = shard.values.load(self._engine.mesh.device), reader.path_of(tensor.path).stat()
        key = (shard.spec.name, shard.interval.start)
        now = (int(digest(values)), file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns)
        if self._unchanged.get(key) != now:
            there = torch.empty(shard.interval.length, dtype=shard.spec.dtype)
            places = places_of(reader, [replace(shard, values=TieredTensor.of(there))])
            reader.read(places, lambda: self._engine.mesh.post(Activity.SAVE))
            if not torch.equal(tensor_bytes(there), tensor_bytes(values.to("cpu", shard.spec.dtype))):
                return False
            self._unchanged[key] = now
        return True


def elements_of(reader: CheckpointReader) -> ReadElements:
    """Return a function that reads elements of tensors in the source of frozen weights, verified; it keeps the last tensor alone.
    Each rank may read others, also where the ranks of a reader read together."""
    local = CheckpointReader(reader.directory, checked=False, manifest=reader.manifest)
    local.source = reader.source

    @lru_cache(1)
    def whole(name: str) -> torch.Tensor:
        if (tensor := local.tensor(MODEL, name)) is None:
            raise CheckpointError(f"{reader.directory}: there is no {name}")
        values = torch.empty(tensor.numel, dtype=tensor.dtype)
        local.read([PlacedValues.stored(tensor, 0, TieredTensor.of(values))])
        return values

    return lambda name, start, end: whole(name)[start:end]


def _source_tensors(
    model: torch.nn.Module, directory: Path, specs: Iterable[TensorSpec], aliases: Iterable[tuple[str, str]]
) -> Iterator[TensorSpec]:
    """Yield the tensors in the files of `directory` that hold the weights `specs`, with the names of the specs."""
    from zeromesh.trainer.weights.quantized_files import quantization_of
    from zeromesh.trainer.weights.safetensors_source import match, quiet_library

    if quantization_of(directory) is not None:
        return
    entries = {each.name: each for each in manifest_of_files(directory).tensors}
    inside: Any = pretrained_of(model)
    prefix = next(f"{name}." for name, each in model.named_modules() if each is inside).lstrip(".")
    with torch.device("meta"), quiet_library():
        unused = dict(match(type(inside)(copy.deepcopy(inside.config)), entries).direct)
    for spec in specs:
        for name in (spec.name, *(alias for alias, first in aliases if first == spec.name)):
            # PEFT nests replaced layers and copied modules one level deeper, and experts one for each adapted parameter.
            plain = re.sub(r"\.(base_layer|original_module)(?=\.)", "", name.removeprefix(prefix))
            entry = entries.get(unused.pop(plain, ""))
            if entry is not None and entry.shape == spec.shape and is_path(SOURCE + entry.path):
                if entry.begin % entry.dtype.itemsize == 0:
                    yield replace(entry, kind=spec.kind, name=spec.name, path=SOURCE + entry.path)
                break
