"""The safetensors files of a directory: their headers, checked before anything is believed, and ranges of
elements.

    8 bytes   length of the header, little-endian
    header    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, "__metadata__":
    {...}} data      the tensors, back to back

Nothing is executed, and no tensor is read whole unless it is asked for whole.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeromesh.errors import ConfigError, StorageError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_INDEX_BYTES = 100_000_000
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
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One tensor in a file: `begin` and `end` are absolute byte positions."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class TensorFiles:
    """The tensors of a Hugging Face model directory, by name. Files are opened when first read."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Read and check the headers. Raises `ConfigError` that says which file is wrong, and how."""
        self.directory = Path(directory)
        self.entries: Mapping[str, Entry] = _entries(self.directory)
        self._descriptors: dict[Path, int] = {}

    def read(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Elements [start, end) of the flattened tensor `name`, 1-D, on CPU, in the file's dtype.

        Raises `StorageError` if the file gives fewer bytes than its header promises.
        """
        entry = self.entries[name]
        stop = entry.numel if end is None else end
        out = torch.empty(stop - start, dtype=entry.dtype, device="cpu")
        if out.numel():
            _read_into(self._open(entry.path), entry, entry.begin + start * entry.dtype.itemsize, out)
        return out

    def _open(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[path]

    def close(self) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


def _read_into(descriptor: int, entry: Entry, position: int, out: torch.Tensor) -> None:
    view = memoryview(out.view(torch.uint8).numpy().data)
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], position + done)
        if count == 0:
            raise StorageError(
                f"{entry.path}: {entry.name} should have {len(view)} bytes at {position}, the file ends after {done}"
            )
        done += count


def _entries(directory: Path) -> dict[str, Entry]:
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory; a model of the Hub is downloaded first: "
            "`hf download NAME --local-dir DIR`",
            where="model.source",
        )
    index = directory / INDEX
    if index.is_file():
        return _indexed(directory, _weight_map(index))
    if (directory / SINGLE).is_file():
        return _header(directory / SINGLE)
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    cure = "save it as safetensors (`model.save_pretrained(DIR)` of transformers does)"
    found = f"{', '.join(pickled[:3])} is pickle, which runs code when it is loaded: {cure}" if pickled else cure
    raise ConfigError(f"{directory} has neither {INDEX} nor {SINGLE}; {found}", where="model.source")


def _weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise _wrong(index, f"is larger than {MAX_INDEX_BYTES} bytes")
    content = _json(index, index.read_bytes())
    names = content.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise _wrong(index, "has no `weight_map` of names to files")
    for file in set(names.values()):
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise _wrong(index, f"names the file {file!r}, which is not a plain name in the same directory")
    return names


def _indexed(directory: Path, names: dict[str, str]) -> dict[str, Entry]:
    files = sorted(set(names.values()))
    absent = [file for file in files if not (directory / file).is_file()]
    if absent:
        raise ConfigError([f"{file} is in {INDEX} and not in {directory}" for file in absent], where="model.source")
    headers = {file: _header(directory / file) for file in files}
    lacking = [name for name, file in names.items() if name not in headers[file]]
    if lacking:
        problems = [f"{name} is not in {names[name]}, where {INDEX} says it is" for name in lacking[:20]]
        raise ConfigError(problems, where="model.source")
    return {name: headers[file][name] for name, file in names.items()}


def _header(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise _wrong(path, f"says that its header has {length} bytes, but the file has {size}")
        content = _json(path, file.read(length))
    content.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in content.items()}
    position = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position:
            raise _wrong(path, f"leaves a hole or an overlap before {entry.name} (byte {position})")
        position = entry.end
    if position != size:
        raise _wrong(path, f"has {size} bytes, but its header describes {position}: it is cut short or has a tail")
    return entries


def _entry(path: Path, name: str, fields: Any, origin: int) -> Entry:
    try:
        code, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _wrong(path, f"has no dtype, shape and two data_offsets for {name}") from None
    if not isinstance(code, str) or code not in DTYPES:
        hint = "; quantized weights are dequantized first" if str(code).startswith(("F8", "F4", "F6")) else ""
        raise _wrong(path, f"holds {name} as {code!r}; known are {', '.join(DTYPES)}{hint}")
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise _wrong(path, f"has a shape or offsets for {name} that are not whole numbers")
    if end - begin != math.prod(shape) * DTYPES[code].itemsize:
        raise _wrong(path, f"gives {name} {end - begin} bytes, {code}{shape} has another size")
    dtype = DTYPES[code]
    return Entry(name=name, path=path, dtype=dtype, shape=tuple(shape), begin=origin + begin, end=origin + end)


def _json(path: Path, raw: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name appears twice")
        return result

    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"is not readable JSON ({error})") from None
    if not isinstance(content, dict):
        raise _wrong(path, "is not a JSON object")
    return content


def _wrong(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} {what}; download or save it again", where="model.source")
