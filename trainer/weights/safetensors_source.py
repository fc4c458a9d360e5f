"""Initial values from a local Hugging Face model directory, streamed: a rank reads no more than it owns where that is possible.

A parameter that lies in a safetensors file unchanged is read by element range. One that the library converts (stacked experts,
split projections) is made whole on CPU, one conversion at a time, and the latest one is kept between reads. Headers are
checked before anything else is read (`checkpoint/format/safetensors_layout.py`), and nothing is executed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format import manifest
from zeromesh.checkpoint.format.safetensors_layout import INDEX, SINGLE, Entry, parse_json, read_header
from zeromesh.errors import CheckpointError, ConfigError, LayoutError, some
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.trainer.weights.hub_names import Conversion, Matched, match
from zeromesh.weight_init.weight_sources import (
    LostValuesError,
    ParameterSource,
    SeededSource,
    Skeleton,
    canonical_names,
    check_interval,
)

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


_COMPARED_ELEMENTS = 16384


class SafetensorsSource:
    """The parameters and buffers of `model` as the safetensors files of `directory` have them.

    Args:
        directory: with `model.safetensors`, or `model.safetensors.index.json` and its files.
        model: a Hugging Face model of the same architecture, which may be on the meta device.
        fallback: gives the parameters that no file has (a new classification head).

    `notes` are lines for the run to print. Raises `ConfigError` that lists every tensor that is missing, unexpected or of another
    shape, and for files that are broken; `LostValuesError` for values that neither the files nor `fallback` have.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: Any,
        fallback: ParameterSource,
    ) -> None:
        self._files = TensorFiles(directory)
        self._matched = match(model, self._files.entries)
        self._skeleton = Skeleton(model)
        self._fallback = fallback
        self._origin = _origins(model, self._matched)
        self._numel = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
        lost = fallback.lost() if isinstance(fallback, SeededSource) else ()
        if unknown := tuple(name for name in lost if not self._matched.provides(self._origin.get(name, name))):
            raise LostValuesError(unknown, "they are in no file either")
        self._compare_tied()
        self._made: dict[str, dict[str, torch.Tensor]] = {}
        """What the latest conversion has made, by its target."""
        remarks = {
            "not in {}, so newly initialised": self._matched.new,
            "in {} and not used by this model": self._matched.unused,
        }
        where = self._files.directory
        self.notes = tuple(f"{text.format(where)}: {some(names, 6)}" for text, names in remarks.items() if names)

    def read(self, fqn: str, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of a parameter, in the file's dtype. Raises `StorageError` for a file that has become short."""
        if fqn not in self._numel:
            raise LayoutError(f"{fqn} is not among the {len(self._numel)} parameters of this source")
        check_interval(fqn, start, end, self._numel[fqn])
        name = self._origin[fqn]
        if name in self._matched.direct:
            return self._files.read(self._matched.direct[name], start, end)
        if name in self._matched.converted:
            return self._converted(self._matched.converted[name])[name].reshape(-1)[start:end]
        return self._fallback.read(fqn, start, end)

    def buffer(self, name: str) -> torch.Tensor | None:
        """The stored value of a persistent buffer, in the file's dtype, or None."""
        if name in self._matched.direct:
            return self._files.read_whole(self._matched.direct[name])
        if name in self._matched.converted:
            return self._converted(self._matched.converted[name])[name]
        return None

    def release(self, fqn: str) -> None:
        """Let the fallback release a parameter; of what is converted, little is kept here."""
        self._fallback.release(fqn)

    def close(self) -> None:
        """Close the files and drop what was converted."""
        self._files.close()
        self._made.clear()
        self._fallback.close()

    def _converted(self, conversion: Conversion) -> dict[str, torch.Tensor]:
        """The tensors that a conversion makes; those of the latest one are kept."""
        if conversion.target not in self._made:
            self._made.clear()
            self._made[conversion.target] = conversion.run(self._files.read_whole, self._skeleton.root)
        return self._made[conversion.target]

    def _compare_tied(self) -> None:
        """Refuse files in which the names of one tied parameter have different values: one of them would be lost."""
        problems = []
        for name, origin in self._origin.items():
            first, second = self._matched.direct.get(name), self._matched.direct.get(origin)
            if name == origin or first is None or second is None or first == second:
                continue
            count = self._numel[name]
            starts = {0, count // 2, max(0, count - _COMPARED_ELEMENTS)}
            ranges = [(start, min(count, start + _COMPARED_ELEMENTS)) for start in starts]
            if not all(torch.equal(self._files.read(first, *each), self._files.read(second, *each)) for each in ranges):
                problems.append(f"{name} and {origin} are one parameter in the model and differ in the files")
        if problems:
            problems.append("set model.config.tie_word_embeddings: false to train them apart")
            raise ConfigError(problems, where="model.source")


def _origins(model: Any, matched: Matched) -> dict[str, str]:
    """Map every parameter name to the name, among those of the same parameter, under which the files have it."""
    canonical = canonical_names(model)
    stored: dict[str, str] = {}
    for name, first in canonical.items():
        if matched.provides(name) and not matched.provides(first):
            stored.setdefault(first, name)
    return {name: stored.get(first, first) for name, first in canonical.items()}
