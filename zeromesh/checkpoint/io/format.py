"""The files of a checkpoint: the safetensors format, with the layout of whole tensors in files, and `manifest.json`, which lists
files, tensors and checksums (docs/checkpoint-format.md). Every field is checked before use. Headers written here end at a multiple
of 4096 bytes, so that tensor data can bypass the page cache."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import xxhash

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
DTYPES = (
    {f"F{bits}": getattr(torch, f"float{bits}") for bits in (64, 32, 16)}
    | {f"I{bits}": getattr(torch, f"int{bits}") for bits in (64, 32, 16, 8)}
    | {f"U{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)}
    | {"BF16": torch.bfloat16, "C64": torch.complex64, "BOOL": torch.bool}
    | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
)
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_FILE = 4 << 30  # bytes after which tensors go to a new file; a tensor is never cut, so its file may be larger
_LEAST_FILE = 64 << 20  # bytes below which dividing tensors among more files does not make writing faster
_MOST_FOR_WRITERS = 64  # files of a kind for parallel writers, since every rank opens all of them
MANIFEST = "manifest.json"
FORMAT = "zeromesh-checkpoint"
SCHEMA = 2  # the highest that is read, written with a source of frozen weights; other checkpoints have schema 1
SOURCE = "source/"
MAX_BYTES = 1 << 30
_MAX_FILES = 1_000_000
REPLICA = ".replica"
"""Ends the kind of a tensor that each replica has of its own, but the first, before the number of the replica."""
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}"
_PATH = re.compile(rf"{_PART}(/{_PART})?")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


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
            files.append(_lay_out(f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors", group))
    return tuple(files)


def _lay_out(path: str, specs: Sequence[TensorSpec]) -> FileLayout:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksumPiece:
    """Bytes [begin, end) of the file `path`, their checksum, and the rank that wrote them."""

    path: str
    begin: int
    end: int
    checksum: str
    rank: int


def checksum(data: torch.Tensor | bytes) -> str:
    """Return the xxh3-128 of bytes, or of a 1-D uint8 tensor on CPU, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data if isinstance(data, bytes) else data.numpy().data)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file of a checkpoint: its size and its sorted pieces, which tile the file unless the manifest is one of several parts."""

    nbytes: int
    pieces: tuple[ChecksumPiece, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of `manifest.json`. `part` is (index, count) where each host has a directory of its own, else (0, 1). `source` is
    the directory of the files below `SOURCE`, whose tensors are frozen weights; empty without such files."""

    step: int
    files: Mapping[str, FileRecord]
    tensors: tuple[TensorSpec, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    part: tuple[int, int] = (0, 1)
    source: str = ""

    def is_elsewhere(self, path: str) -> bool:
        """Return True if a file is in the source of the frozen weights rather than in the checkpoint."""
        return bool(self.source) and path.startswith(SOURCE)

    @property
    def nbytes(self) -> int:
        """Bytes of all files in the checkpoint."""
        return sum(record.nbytes for path, record in self.files.items() if not self.is_elsewhere(path))

    def to_json(self) -> bytes:
        """Serialize the manifest with its own hash."""
        files, tensors = dict[str, Any](), dict[str, dict[str, list[Any]]]()
        for path, record in sorted(self.files.items()):
            pieces = [[each.begin, each.end, each.checksum, each.rank] for each in record.pieces]
            files[path] = {"bytes": record.nbytes, "pieces": pieces}
        for each in self.tensors:
            tensors.setdefault(each.kind, {})[each.name] = [each.path, each.begin, DTYPE_NAMES[each.dtype], list(each.shape)]
        schema = 2 if self.source else 1
        content: dict[str, Any] = {"format": FORMAT, "schema": schema, "step": self.step, "files": files}
        content |= {"tensors": tensors, "aliases": dict(self.aliases), "layout": dict(self.layout)}
        content |= {"part": list(self.part), **({"source": self.source} if self.source else {})}
        return _signed(content)[1]


def _signed(content: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the hash of a manifest's content, as canonical JSON, and the manifest with it."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return digest, json.dumps({**content, "sha256": digest}, separators=(",", ":")).encode()


def parse_manifest(path: Path, raw: bytes) -> Manifest:
    """Parse a manifest from the bytes of `path`. Raises `CheckpointError` with the first problem of what it says."""
    content = parse_json(path, raw)
    found = content.pop("sha256", None)
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no manifest of zeromesh: its format is {content.get('format')!r:.50}")
    schema = content.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA:
        cure = "; use a newer zeromesh to read it" if type(schema) is int and schema > SCHEMA else ""
        raise CheckpointError(f"{path} has schema {schema!r:.50}, this version reads up to {SCHEMA}{cure}")
    digest, signed = _signed(content)
    if found != digest:
        raise CheckpointError(f"{path} does not agree with its own sha256: it was changed or is damaged")
    # The hash covers the content: trailing blanks or `1E-5` for `1e-5` would not change it.
    if raw != signed:
        raise CheckpointError(f"{path} is not written as it was: bytes were added or changed")

    def checked(name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        if not fits(value := content.get(name)):
            raise CheckpointError(f"{path}: {name} should be {expected}")
        return value

    index, count = checked(
        "part",
        lambda part: isinstance(part, list) and len(part) == 2 and are_valid_sizes(*part) and part[0] < part[1],
        "an index and a count that is larger, two whole numbers",
    )
    names = ("files", "layout", "tensors", "aliases")
    files, layout, tensors, aliases = (checked(each, lambda it: isinstance(it, dict), "an object") for each in names)
    if not all(isinstance(each, str) for each in aliases.values()):
        raise CheckpointError(f"{path}: aliases should be an object of texts")
    if len(files) > _MAX_FILES:
        raise CheckpointError(f"{path} names {len(files):,} files; at most {_MAX_FILES:,} are allowed")
    records = {name: _file_record(path, name, value, whole=count == 1) for name, value in files.items()}
    check_plain(path, "layout", layout)
    content.setdefault("source", "")
    return Manifest(
        step=checked("step", are_valid_sizes, "a whole number, 0 or more"),
        files=records,
        tensors=_tensors(path, tensors, records),
        aliases=aliases,
        layout=layout,
        part=(index, count),
        source=checked("source", lambda value: isinstance(value, str), "the path of a directory"),
    )


def is_path(name: str) -> bool:
    return bool(_PATH.fullmatch(name)) and name != MANIFEST


def _file_record(path: Path, name: str, value: Any, *, whole: bool) -> FileRecord:
    if not is_path(name):
        raise CheckpointError(f"{path} names the file {name[:300]!r}, which is no plain name inside the checkpoint")
    content: Mapping[str, Any] = value if isinstance(value, dict) else {}
    rows, nbytes = content.get("pieces"), content.get("bytes")
    if not isinstance(rows, list) or nbytes is None or not are_valid_sizes(nbytes):
        raise CheckpointError(f"{path}: {name} should have a number of bytes and a list of pieces")
    found, end, nothing = [], 0, list[Any]([None] * 4)
    for row in rows:
        begin, stop, digest, rank = row if isinstance(row, list) and len(row) == 4 else nothing
        if not are_valid_sizes(begin, stop, rank) or not (isinstance(digest, str) and _CHECKSUM.fullmatch(digest)):
            raise CheckpointError(f"{path}: {name} has a piece that is no [begin, end, checksum, rank]")
        if begin < end or stop <= begin or stop > nbytes or (whole and begin != end):
            why = f"{path}: {name} has the piece [{begin}, {stop}) after byte {end} of {nbytes}"
            raise CheckpointError(f"{why}: pieces overlap, leave a gap or end beyond the file")
        found.append(ChecksumPiece(path=name, begin=begin, end=stop, checksum=digest, rank=rank))
        end = stop
    if whole and end != nbytes:
        raise CheckpointError(f"{path}: the pieces of {name} end at byte {end} of {nbytes}")
    return FileRecord(nbytes=nbytes, pieces=tuple(found))


def _tensors(path: Path, kinds: Mapping[str, Any], files: Mapping[str, FileRecord]) -> tuple[TensorSpec, ...]:
    found: list[TensorSpec] = []
    for kind, rows in kinds.items():
        if not re.fullmatch(_PART, kind) or not isinstance(rows, dict):
            raise CheckpointError(f"{path}: tensors {kind[:300]!r} should be an object, under a plain name")
        check_names(path, rows)
        for name, row in rows.items():
            match row:
                case [str(file), begin, str(code), list(dims)] if (
                    file in files and code in DTYPES and len(dims) <= MAX_DIMS and are_valid_sizes(begin, *dims)
                ):
                    dtype, shape = DTYPES[code], tuple(dims)
                    found.append(TensorSpec(kind=kind, name=name, dtype=dtype, shape=shape, path=file, begin=begin))
                case _:
                    raise CheckpointError(f"{path}: {kind} {name} is no [file, begin, dtype, shape] of this version: {row!r:.200}")
    end, last = 0, ""
    for tensor in sorted(found, key=attrgetter("path", "begin", "end")):
        nbytes = files[tensor.path].nbytes
        if tensor.begin % tensor.dtype.itemsize or tensor.end > nbytes:
            what = f"{tensor.kind} {tensor.name} of {tensor.nbytes} bytes at {tensor.begin}"
            raise CheckpointError(f"{path}: {what} does not fit {tensor.path} of {nbytes} bytes")
        if tensor.path == last and tensor.begin < end:
            raise CheckpointError(f"{path}: {tensor.name} overlaps another tensor in {tensor.path}")
        last, end = tensor.path, tensor.end
    return tuple(found)
