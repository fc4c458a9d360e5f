"""A checkpoint's model as a plain Hugging Face model directory, through bounded buffers whatever its size.

A file that is written is walked in windows; what a window holds is read from the checkpoint, verified and converted on its way:

    model-00001-of-00002.safetensors   | header | a  |   b    |  c | d |
    windows                                     |  1   |   2   |  3    |

Tensors that the hub has in another form than the model are read whole, those of one conversion at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format.manifest import ChecksumPiece, StoredTensor
from zeromesh.checkpoint.format.safetensors_layout import FileLayout, TensorSpec, index_files, parse_json, plan_files
from zeromesh.checkpoint.io.file_slices import merged, overlapping
from zeromesh.checkpoint.io.reader import CheckpointReader, ReadTarget
from zeromesh.checkpoint.store import fresh_directory
from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.files import read_whole, write_whole
from zeromesh.intervals import Interval
from zeromesh.offload import TieredTensor
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.offload.io.transfer import StagingPool
from zeromesh.trainer.checkpoints.trainer_state import EVALUATED, NAME, name_in
from zeromesh.trainer.models.save_pretrained import ADAPTER_WEIGHTS
from zeromesh.trainer.monitoring.console import Console
from zeromesh.trainer.tools.checkpoint.adapter_export import convert_adapter, has_adapter, merge_adapter
from zeromesh.trainer.tools.checkpoint.progress import Throughput, one_core
from zeromesh.trainer.weights.hub_names import HubNames
from zeromesh.trainer.weights.library_logging import quiet_library

_WINDOW = 32 << 20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorTarget:
    """A stored tensor, and where in a file that is written it goes, as `dtype`."""

    source: StoredTensor
    dtype: torch.dtype
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.source.spec.numel * self.dtype.itemsize


def export_checkpoint(
    directory: Path, out: Path, dtype: str, console: Console, *, merge: bool = False, ema: bool = False
) -> None:
    """Write the model of a checkpoint to `out`: `dtype` is a name, or `keep` for the weights that the model computes with.

    Otherwise weights are converted from the master weights, where there are any. Of a model with adapters the adapters alone are
    written; with `merge`, the model with them merged into its weights. `ema`: averaged weights.

    Raises:
        ConfigError: where `out` exists, or the dtype cannot hold a weight.
        CheckpointError, StorageError: when the checkpoint is damaged, or `out` cannot be written.
    """
    reader = CheckpointReader(directory)
    chosen = _chosen(reader, dtype, ema=ema)
    nbytes = sum(source.spec.numel * to.itemsize for source, to in chosen.values())
    adapted = has_adapter(reader)
    if merge and not adapted:
        raise ConfigError(f"--merge is for runs with adapters, and {directory} has none; leave it out")
    if ema and adapted and not merge:
        raise ConfigError("--ema writes whole models: with adapters, give --merge too")
    with fresh_directory(out, nbytes) as folder:
        _copy_documents(reader, folder)
        if adapted:
            with quiet_library(), one_core():
                if merge:
                    to = _DTYPES.get(dtype) or next(t.spec.dtype for t, _ in chosen.values() if t.spec.kind == "model")
                    merge_adapter(folder, reader, chosen, to)
                else:
                    convert_adapter(folder, _DTYPES.get(dtype))
            console.note(f"{out}: step {reader.manifest.step}, {dtype}, {'merged' if merge else 'the adapter alone'}")
            return
        if dtype != "keep":
            _tell_dtype(folder / "config.json", dtype)
        with quiet_library():
            names = HubNames(folder)
        if names.note:
            console.note(names.note)
        moved = Throughput(console, "exporting", sum(source.spec.nbytes for source, _ in chosen.values()))
        export = _Export(reader, chosen, folder, names, moved)
        with one_core():
            export.write()
    count = len(export.files)
    console.note(f"{out}: step {reader.manifest.step}, {dtype}, {count} file{'' if count == 1 else 's'}, read {moved}")


def _chosen(reader: CheckpointReader, dtype: str, *, ema: bool = False) -> dict[str, tuple[StoredTensor, torch.dtype]]:
    """For every tensor of the model, from what it is made and the dtype that it gets, in the order of what is read."""
    kinds: tuple[str, ...] = ("model",) if dtype == "keep" else ("model", "master")
    kept = {t.spec.name: t.spec.dtype for t in reader.manifest.tensors if t.spec.kind == "model"}
    if ema:
        kinds += ("ema",)
        if not reader.document(name_in(reader.manifest.files)).get("averages"):
            raise ConfigError(f"{reader.directory} has no averaged weights (ema.decay); leave --ema out")
    found = {t.spec.name: t for kind in kinds for t in reader.manifest.tensors if t.spec.kind == kind}
    if not found:
        raise CheckpointError(f"{reader.directory} holds no model")
    ordered = sorted(found.values(), key=lambda tensor: (tensor.path, tensor.begin))
    wanted = _DTYPES.get(dtype)
    return {
        t.spec.name: (t, wanted if wanted is not None and t.spec.dtype.is_floating_point else kept[t.spec.name])
        for t in ordered
    }


def _copy_documents(reader: CheckpointReader, folder: Path) -> None:
    """Configuration, generation configuration, tokenizer and whatever else lies beside the weights."""
    for path, record in reader.manifest.files.items():
        if (path.endswith((".safetensors", ".safetensors.index.json")) and path != ADAPTER_WEIGHTS) or path in (
            NAME,
            EVALUATED,
        ):
            continue
        (folder / path).parent.mkdir(exist_ok=True)
        with PositionalFile(folder / path, write=True, size=record.nbytes) as file:
            _copy(reader, record.pieces, file)
            file.sync()


def _copy(reader: CheckpointReader, pieces: Sequence[ChecksumPiece], file: PositionalFile) -> None:
    def write(piece: ChecksumPiece, data: torch.Tensor) -> None:
        file.write(data, piece.begin)

    reader.stream(pieces, write)


def _tell_dtype(path: Path, dtype: str) -> None:
    """Say in `config.json` what the weights are: `from_pretrained` loads them as what it says there."""
    if path.is_file():
        content = parse_json(path, read_whole(path))
        _set_dtype(content, dtype)
        content["dtype"] = dtype
        write_whole(path, json.dumps(content, indent=2).encode() + b"\n")


def _set_dtype(content: dict[str, Any], dtype: str) -> None:
    for name, value in content.items():
        if name in ("dtype", "torch_dtype") and isinstance(value, str):
            content[name] = dtype
        elif name.endswith("config") and isinstance(value, dict):
            _set_dtype(value, dtype)


class _Export:
    """The weights of one export: the plan at birth, then `write`."""

    def __init__(
        self,
        reader: CheckpointReader,
        chosen: dict[str, tuple[StoredTensor, torch.dtype]],
        folder: Path,
        names: HubNames,
        tell: Callable[[int], None],
    ) -> None:
        """`tell` gets the bytes of the checkpoint that were read, again and again."""
        self._reader, self._chosen, self._folder, self._names, self._tell = reader, chosen, folder, names, tell
        meta = {name: torch.empty(s.spec.shape, dtype=to, device="meta") for name, (s, to) in chosen.items()}
        groups = self._names.groups(meta)
        order = {name: place for place, name in enumerate(chosen)}
        direct = sorted((g for g in groups if not g.converted), key=lambda group: order[group.names[0]])
        self._converted = [group for group in groups if group.converted]
        self._sources = {name: chosen[group.names[0]][0] for group in direct for name in group.outputs}
        specs = [
            TensorSpec(kind="model", name=name, dtype=each.dtype, shape=tuple(each.shape))
            for group in (*direct, *self._converted)
            for name, each in group.outputs.items()
        ]
        if len({spec.name for spec in specs}) != len(specs):
            raise CheckpointError(f"{reader.directory}: two tensors would have one name on the hub")
        files = plan_files(specs, 1)
        self.files = files if len(files) > 1 else (replace(files[0], path=_SINGLE),)
        self._places = {spec.name: (file.path, spec, at) for file in self.files for spec, at in file.places}

    def write(self) -> None:
        """Write all files and bring them to the disk. Raises as `export_checkpoint` does."""
        for layout in self.files:
            with PositionalFile(self._folder / layout.path, write=True, size=layout.nbytes) as file:
                file.write(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8), 0)
                self._write_direct(layout, file)
        for group in self._converted:
            tensors = {name: self._read_whole(name) for name in group.names}
            for name, tensor in self._names.revert(tensors).items():
                self._write_whole(name, tensor)
        for layout in self.files:
            with PositionalFile(self._folder / layout.path, write=True) as file:
                file.sync()
        if len(self.files) > 1:
            write_whole(self._folder / _INDEX, index_files(self.files)[_INDEX])

    def _write_direct(self, layout: FileLayout, file: PositionalFile) -> None:
        """Write the tensors of a file that are as they are in the checkpoint, window by window."""
        places = [
            _TensorTarget(source=self._sources[spec.name], dtype=spec.dtype, begin=at)
            for spec, at in layout.places
            if spec.name in self._sources and spec.nbytes
        ]
        buffer = StagingPool(1, _WINDOW).take()
        for window in _windows(places):
            targets = []
            for place in overlapping(places, window.start, window.end):
                begin, end = max(place.begin, window.start), min(place.end, window.end)
                memory = buffer[begin - window.start : end - window.start].view(place.dtype)
                first = (begin - place.begin) // place.dtype.itemsize
                targets.append(ReadTarget(tensor=place.source, first=first, values=TieredTensor.of(memory)))
            self._read(targets)
            file.write(buffer[: window.length], window.start)

    def _read(self, targets: Sequence[ReadTarget]) -> None:
        self._reader.read(targets, lambda: None)
        for target in targets:
            self._check_range(target)
        self._tell(sum(target.end - target.begin for target in targets))

    def _check_range(self, target: ReadTarget) -> None:
        """Raise `ConfigError` where a number has become infinite in a dtype of a smaller range."""
        spec, memory = target.tensor.spec, target.values.memory
        if not memory.is_floating_point() or torch.finfo(memory.dtype).max >= torch.finfo(spec.dtype).max:
            return
        lost = memory.isinf()
        if not bool(lost.any()):
            return
        exact = torch.empty(memory.numel(), dtype=torch.float64)
        self._reader.read(
            [ReadTarget(tensor=target.tensor, first=target.first, values=TieredTensor.of(exact))], lambda: None
        )
        values = exact[lost & exact.isfinite()].abs()
        if values.numel():
            name = str(memory.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{spec.name} has {values.numel():,} numbers up to {float(values.max()):.4g}, and {name} ends at "
                f"{torch.finfo(memory.dtype).max:.4g}; give --dtype bfloat16, float32 or keep"
            )

    def _read_whole(self, name: str) -> torch.Tensor:
        source, dtype = self._chosen[name]
        tensor = torch.empty(source.spec.shape, dtype=dtype)
        self._read([ReadTarget(tensor=source, first=0, values=TieredTensor.of(tensor.view(-1)))])
        return tensor

    def _write_whole(self, name: str, tensor: torch.Tensor) -> None:
        path, spec, at = self._places[name]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
            raise CheckpointError(
                f"{name} became {tensor.dtype} {list(tensor.shape)}; {spec.dtype} {list(spec.shape)} was planned"
            )
        if tensor.numel():
            with PositionalFile(self._folder / path, write=True) as file:
                file.write(tensor.detach().contiguous().view(-1).view(torch.uint8), at)


def _windows(places: Sequence[_TensorTarget]) -> Iterator[Interval]:
    """The bytes of a file that places take, cut at multiples of the window."""
    for extent in merged(Interval(start=place.begin, end=place.end) for place in places):
        start = extent.start
        while start < extent.end:
            end = min(extent.end, (start // _WINDOW + 1) * _WINDOW)
            yield Interval(start=start, end=end)
            start = end
