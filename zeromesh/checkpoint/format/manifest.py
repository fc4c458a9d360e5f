"""`manifest.json` lists a checkpoint's files, tensors and checksums, and is fully checked when read (docs/checkpoint-format.md)."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import xxhash

from zeromesh.checkpoint.format import safetensors_layout
from zeromesh.checkpoint.format.safetensors_layout import DTYPE_NAMES, DTYPES, MAX_DIMS, TensorSpec, are_valid_sizes
from zeromesh.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "zeromesh-checkpoint"
SCHEMA = 2  # the highest that is read, written with a source of frozen weights; other checkpoints have schema 1
SOURCE = "source/"
MAX_BYTES = 1 << 30
_MAX_FILES = 1_000_000
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}"
_PATH = re.compile(rf"{_PART}(/{_PART})?")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


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
        tensors: dict[str, dict[str, list[Any]]] = {}
        for each in self.tensors:
            row = [each.path, each.begin, DTYPE_NAMES[each.dtype], list(each.shape)]
            tensors.setdefault(each.kind, {})[each.name] = row
        content: dict[str, Any] = {
            "format": FORMAT,
            "schema": 2 if self.source else 1,
            "step": self.step,
            "files": {
                path: {
                    "bytes": record.nbytes,
                    "pieces": [[each.begin, each.end, each.checksum, each.rank] for each in record.pieces],
                }
                for path, record in sorted(self.files.items())
            },
            "tensors": tensors,
            "aliases": dict(self.aliases),
            "layout": dict(self.layout),
            "part": list(self.part),
            **({"source": self.source} if self.source else {}),
        }
        return _signed(content)[1]


def _signed(content: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return the hash of a manifest's content, as canonical JSON, and the manifest with it."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return digest, json.dumps({**content, "sha256": digest}, separators=(",", ":")).encode()


def parse(path: Path, raw: bytes) -> Manifest:
    """Parse a manifest from the bytes of `path`. Raises `CheckpointError` with the first problem of what it says."""
    content = safetensors_layout.parse_json(path, raw)
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
        value = content.get(name)
        if not fits(value):
            raise CheckpointError(f"{path}: {name} should be {expected}")
        return value

    index, count = checked(
        "part",
        lambda part: isinstance(part, list) and len(part) == 2 and are_valid_sizes(*part) and part[0] < part[1],
        "an index and a count that is larger, two whole numbers",
    )
    files, layout, tensors, aliases = (
        checked(name, lambda value: isinstance(value, dict), "an object")
        for name in ("files", "layout", "tensors", "aliases")
    )
    if not all(isinstance(each, str) for each in aliases.values()):
        raise CheckpointError(f"{path}: aliases should be an object of texts")
    if len(files) > _MAX_FILES:
        raise CheckpointError(f"{path} names {len(files):,} files; at most {_MAX_FILES:,} are allowed")
    records = {name: _file(path, name, value, whole=count == 1) for name, value in files.items()}
    safetensors_layout.check_plain(path, "layout", layout)
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
    return bool(_PATH.fullmatch(name)) and name != NAME


def _file(path: Path, name: str, value: Any, *, whole: bool) -> FileRecord:
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
            raise CheckpointError(
                f"{path}: {name} has the piece [{begin}, {stop}) after byte {end} of {nbytes}: pieces overlap, leave a gap "
                "or end beyond the file"
            )
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
        safetensors_layout.check_names(path, rows)
        for name, row in rows.items():
            match row:
                case [str(file), begin, str(code), list(dims)] if (
                    file in files and code in DTYPES and len(dims) <= MAX_DIMS and are_valid_sizes(begin, *dims)
                ):
                    dtype, shape = DTYPES[code], tuple(dims)
                    found.append(TensorSpec(kind=kind, name=name, dtype=dtype, shape=shape, path=file, begin=begin))
                case _:
                    problem = f"{path}: {kind} {name} is no [file, begin, dtype, shape] of this version: {row!r:.200}"
                    raise CheckpointError(problem)
    end, last = 0, ""
    for tensor in sorted(found, key=attrgetter("path", "begin", "end")):
        nbytes = files[tensor.path].nbytes
        if tensor.begin % tensor.dtype.itemsize or tensor.end > nbytes:
            raise CheckpointError(
                f"{path}: {tensor.kind} {tensor.name} of {tensor.nbytes} bytes at {tensor.begin} does not fit {tensor.path} of "
                f"{nbytes} bytes"
            )
        if tensor.path == last and tensor.begin < end:
            raise CheckpointError(f"{path}: {tensor.name} overlaps another tensor in {tensor.path}")
        last, end = tensor.path, tensor.end
    return tuple(found)
