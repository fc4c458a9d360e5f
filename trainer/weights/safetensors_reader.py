"""The safetensors files of a Hugging Face model directory: which file has which tensor, and ranges of elements of them.

Headers are checked before anything else is read (`checkpoint/format/safetensors_layout.py`); nothing is executed, and no tensor is
read whole unless it is asked for whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from zeromesh.checkpoint.format import manifest
from zeromesh.checkpoint.format.safetensors_layout import Entry, parse_json, read_header
from zeromesh.errors import CheckpointError, ConfigError, StorageError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 100_000_000


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


@contextmanager
def _as_source() -> Iterator[None]:
    """What is wrong with a file is wrong with the setting that names it."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(f"{error}; download or save it again", where="model.source") from None


def _entries(directory: Path) -> dict[str, Entry]:
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory; a model of the Hub is downloaded first: "
            "`hf download NAME --local-dir DIR`",
            where="model.source",
        )
    _refuse_part(directory)
    index = directory / INDEX
    with _as_source():
        if index.is_file():
            return _indexed(directory, _weight_map(index))
        if (directory / SINGLE).is_file():
            return read_header(directory / SINGLE)
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    cure = "save it as safetensors (`model.save_pretrained(DIR)` of transformers does)"
    found = f"{', '.join(pickled[:3])} is pickle, which runs code when it is loaded: {cure}" if pickled else cure
    raise ConfigError(f"{directory} has neither {INDEX} nor {SINGLE}; {found}", where="model.source")


def _refuse_part(directory: Path) -> None:
    """Of a host's part of a checkpoint, what other hosts have written would be read as zeros."""
    path = directory / manifest.NAME
    if not path.is_file() or path.stat().st_size > manifest.MAX_BYTES:
        return
    try:
        index, count = manifest.parse(path, path.read_bytes()).part
    except CheckpointError:
        return  # Other tools write files of this name too.
    if count > 1:
        raise ConfigError(
            f"{directory} is part {index + 1} of {count} of a checkpoint, one of each host; put them together first: "
            "`zeromesh checkpoint merge PART PART ... --out DIR`",
            where="model.source",
        )


def _weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{index} is larger than {MAX_INDEX_BYTES} bytes")
    content = parse_json(index, index.read_bytes())
    names = content.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{index} has no `weight_map` of names to files")
    for file in set(names.values()):
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(f"{index} names the file {file!r}, which is not a plain name in the same directory")
    return names


def _indexed(directory: Path, names: dict[str, str]) -> dict[str, Entry]:
    files = sorted(set(names.values()))
    absent = [file for file in files if not (directory / file).is_file()]
    if absent:
        raise ConfigError([f"{file} is in {INDEX} and not in {directory}" for file in absent], where="model.source")
    headers = {file: read_header(directory / file) for file in files}
    lacking = [name for name, file in names.items() if name not in headers[file]]
    if lacking:
        problems = [f"{name} is not in {names[name]}, where {INDEX} says it is" for name in lacking[:20]]
        raise ConfigError(problems, where="model.source")
    return {name: headers[file][name] for name, file in names.items()}
