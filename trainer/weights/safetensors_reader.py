"""The safetensors files of a Hugging Face model directory: which file has which tensor, and ranges of elements of them.

Headers are checked before anything else is read (`checkpoint/format/safetensors_layout.py`); nothing is executed, and no tensor is
read whole unless it is asked for whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from zeromesh.checkpoint.format import manifest
from zeromesh.checkpoint.format.safetensors_layout import Entry, parse_json, read_header
from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.offload.io.direct_io import PositionalFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 100_000_000


class TensorFiles:
    """The tensors of a Hugging Face model directory, by name. Files are opened when first read."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Read and check the headers. Raises `ConfigError` that says which file is wrong, and how."""
        self.directory = Path(directory)
        try:
            self.entries: Mapping[str, Entry] = _read_headers(self.directory)
        except CheckpointError as error:  # What is wrong with a file is wrong with the setting that names it.
            raise ConfigError(f"{error}; download or save it again", where="model.source") from None
        self._files: dict[Path, PositionalFile] = {}

    def read(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Read elements [start, end) of the flattened tensor `name`: 1-D, on CPU, in the file's dtype.

        Raises `StorageError` if the file gives fewer bytes than its header promises.
        """
        entry = self.entries[name]
        stop = entry.numel if end is None else end
        out = torch.empty(stop - start, dtype=entry.dtype, device="cpu")
        if out.numel():
            if entry.path not in self._files:
                # The cache of the Hub has links to its files, which are not followed otherwise.
                self._files[entry.path] = PositionalFile(entry.path.resolve(), direct=False)
            self._files[entry.path].read(out.view(torch.uint8), entry.begin + start * entry.dtype.itemsize)
        return out

    def read_whole(self, name: str) -> torch.Tensor:
        """Read tensor `name` in its shape."""
        return self.read(name).reshape(self.entries[name].shape)

    def close(self) -> None:
        """Close the files."""
        while self._files:
            self._files.popitem()[1].close()


def _read_headers(directory: Path) -> dict[str, Entry]:
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory; a model of the Hub is downloaded first: "
            "`hf download NAME --local-dir DIR`",
            where="model.source",
        )
    _refuse_part(directory)
    if (directory / INDEX).is_file():
        return _read_indexed(directory)
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    cure = "save it as safetensors (`model.save_pretrained(DIR)` of transformers does)"
    found = f"{', '.join(pickled[:3])} is pickle, which runs code when it is loaded: {cure}" if pickled else cure
    raise ConfigError(f"{directory} has neither {INDEX} nor {SINGLE}; {found}", where="model.source")


def _refuse_part(directory: Path) -> None:
    """Raise `ConfigError` for one host's part of a checkpoint, in which what other hosts have written would be read as zeros."""
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


def _read_indexed(directory: Path) -> dict[str, Entry]:
    """The tensors that the index of a directory maps to files."""
    index = directory / INDEX
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{index} is larger than {MAX_INDEX_BYTES} bytes")
    names = parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{index} has no `weight_map` of names to files")
    files = sorted(set(names.values()))
    for file in files:
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(f"{index} names the file {file!r}, which is not a plain name in the same directory")
    problems = [f"{file} is in {INDEX} and not in {directory}" for file in files if not (directory / file).is_file()]
    if not problems:
        headers = {file: read_header(directory / file) for file in files}
        missing = [name for name, file in names.items() if name not in headers[file]]
        problems = [f"{name} is not in {names[name]}, where {INDEX} says it is" for name in missing[:20]]
    if problems:
        raise ConfigError(problems, where="model.source")
    return {name: headers[file][name] for name, file in names.items()}
