"""The safetensors format: headers, of which every field is checked before use, and the layout of whole tensors in files. Headers
written here end at a multiple of 4096 bytes, so that tensor data can bypass the page cache."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from zeromesh.errors import CheckpointError, errors_as
from zeromesh.files import json_object
from zeromesh.intervals import grouped, round_up
from zeromesh.offload.io.direct_io import BLOCK

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""The file names by which Hugging Face finds a directory's weights: the index of several files, and the single file."""
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMS = 64
_MOST_LEVELS = 64
_MOST_BITS = 1000  # of an integer in JSON, so that it can still be converted to a float
_MAX_NAME = 1000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_FILE = 4 << 30  # bytes after which tensors go to a new file; a tensor is never cut, so its file may be larger
_LEAST_FILE = 64 << 20  # bytes below which dividing tensors among more files does not make writing faster
_MOST_FOR_WRITERS = 64  # files of a kind for parallel writers, since every rank opens all of them


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """A whole tensor, at byte `begin` of the file `path`, if in any; `kind` is `model`, `master` or the name of a moment."""

    kind: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: str = ""
    begin: int = 0
    numel: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    end: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        numel = math.prod(self.shape)
        nbytes = numel * self.dtype.itemsize
        for name, value in (("numel", numel), ("nbytes", nbytes), ("end", self.begin + nbytes)):
            object.__setattr__(self, name, value)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(kind="model", name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """A file to be written: its path within the checkpoint, its header, its tensors, and its size in bytes."""

    path: str
    header: bytes
    tensors: tuple[TensorSpec, ...]
    nbytes: int


def plan_files(specs: Iterable[TensorSpec], writers: int) -> tuple[FileLayout, ...]:
    """Lay tensors out in files, in order within each kind: as many files as writers if that makes writing faster."""
    kinds = grouped(("model" if spec.kind == "model" else f"optimizer/{spec.kind}", spec) for spec in specs)
    files: list[FileLayout] = []
    for stem, members in kinds.items():
        total = sum(spec.nbytes for spec in members)
        count = max(-(-total // _LARGEST_FILE), min(writers, _MOST_FOR_WRITERS, total // _LEAST_FILE), 1)
        groups: list[list[TensorSpec]] = [[]]
        filled = 0
        for spec in members:
            if groups[-1] and len(groups) < count and filled + spec.nbytes / 2 >= total / count * len(groups):
                groups.append([])
            groups[-1].append(spec)
            filled += spec.nbytes
        for number, group in enumerate(groups, start=1):
            files.append(_file(f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", group))
    return tuple(files)


def _file(path: str, specs: Sequence[TensorSpec]) -> FileLayout:
    # Wider dtypes come first, as in the format's own writer, so that each tensor begins at a multiple of its element size.
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    ends = list(accumulate((spec.nbytes for spec in ordered), initial=0))
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for spec, offsets in zip(ordered, pairwise(ends), strict=True):
        fields[spec.name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    size = round_up(8 + len(text), BLOCK)
    header = (size - 8).to_bytes(8, "little") + text.ljust(size - 8)
    tensors = tuple(replace(spec, path=path, begin=size + begin) for spec, begin in zip(ordered, ends, strict=False))
    return FileLayout(path=path, header=header, tensors=tensors, nbytes=size + ends[-1])


def index_files(files: Iterable[FileLayout]) -> dict[str, bytes]:
    """Build the index of each kind by its path, in Hugging Face's format: the file of each tensor of several numbered files."""
    found: dict[str, dict[str, Any]] = {}
    for spec in (tensor for file in files for tensor in file.tensors):
        path = f"{spec.path.rsplit('-', 3)[0]}.safetensors.index.json"  # Of `STEM-NUMBER-of-COUNT.safetensors`.
        index = found.setdefault(path, {"metadata": {"total_size": 0}, "weight_map": {}})
        index["metadata"]["total_size"] += spec.nbytes
        index["weight_map"][spec.name] = spec.path.rpartition("/")[2]
    return {path: json.dumps(index, indent=1).encode() for path, index in found.items()}


def read_header(path: Path) -> dict[str, TensorSpec]:
    """Read the tensors of a file, by name and as of kind `model`. Raises `CheckpointError` with the header's first problem."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(f"{path} says that its header has {length} bytes, but the file has {size}")
        content = parse_json(path, file.read(length))
    content.pop("__metadata__", None)
    check_names(path, content)
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in content.items()}
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            raise CheckpointError(f"{path} leaves a hole or an overlap before {entry.name} (byte {end})")
        end = entry.end
    if end != size:
        raise CheckpointError(f"{path} has {size} bytes, but its header describes {end}: it is cut short or has a tail")
    return entries


def _entry(path: Path, name: str, fields: Any, origin: int) -> TensorSpec:
    absent = f"{path} has no dtype, shape and two data_offsets for {name}: "
    with errors_as(CheckpointError, absent, KeyError, TypeError, ValueError):
        code, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        hint = "; quantized weights are dequantized first" if str(code).startswith(("F8", "F4", "F6")) else ""
        raise CheckpointError(f"{path} holds {name} as {code!r:.50}; known are {', '.join(DTYPES)}{hint}")
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if len(numbers) > MAX_DIMS + 2:
        raise CheckpointError(f"{path} gives {name} {len(shape):,} dims; at most {MAX_DIMS} are allowed")
    if not are_valid_sizes(*numbers):
        raise CheckpointError(f"{path} has a shape or offsets for {name} that are not whole numbers below 2**62")
    if end - begin != math.prod(shape) * DTYPES[code].itemsize:
        raise CheckpointError(f"{path} gives {name} {end - begin} bytes, {code}{shape} has another size")
    begin += origin
    return TensorSpec(kind="model", name=name, dtype=DTYPES[code], shape=tuple(shape), path=path.name, begin=begin)


def are_valid_sizes(*values: Any) -> bool:
    """Return True if values from an untrusted file are valid numbers of bytes or elements."""
    for value in values:  # noqa: SIM110 - a manifest may have millions of pieces
        if type(value) is not int or not 0 <= value < 1 << 62:
            return False
    return True


def check_names(path: Path, names: Iterable[str]) -> None:
    """Raise `CheckpointError` for a tensor name that a terminal or UTF-8 would change."""
    for name in names:
        if len(name) > _MAX_NAME or not name.isprintable():
            cure = f"names are of at most {_MAX_NAME:,} printable characters"
            raise CheckpointError(f"{path} has a tensor called {name[:100]!r}; {cure}")


def check_plain(where: object, name: str, content: Any) -> None:
    """Raise `CheckpointError` if parsed JSON is deeply nested, or has huge integers or numbers that are not finite."""
    level = [content]
    for _ in range(_MOST_LEVELS):
        below: list[Any] = []
        for value in level:
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise CheckpointError(f"{where}: {name} has an integer of more than {_MOST_BITS} bits")
            if isinstance(value, float) and not math.isfinite(value):
                raise CheckpointError(f"{where}: {name} has a number that is not finite")
            if isinstance(value, dict | list):
                below += value.values() if isinstance(value, dict) else value
        if not below:
            return
        level = below
    raise CheckpointError(f"{where}: {name} is nested deeper than {_MOST_LEVELS} levels")


def parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    """Parse a JSON object without repeated names. Raises `CheckpointError`."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name appears twice")
        return result

    return json_object(raw, lambda why: CheckpointError(f"{path} {why}"), object_pairs_hook=once)
