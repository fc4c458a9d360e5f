"""Hugging Face model directories: checkpoints without checksums, whose tensors are read by ranges of elements.

Ranks of a host read the same files, so bytes go through the page cache, and are prefetched there in the order in which they are
announced. Headers are checked before anything else is read, and nothing is executed.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from zeromesh.checkpoint.format.manifest import FileRecord, Manifest
from zeromesh.checkpoint.format.safetensors_layout import INDEX, SINGLE, TensorSpec, parse_json, read_header
from zeromesh.checkpoint.io.file_slices import elements_of
from zeromesh.checkpoint.io.reader import CheckpointReader, manifest_of, part_problem
from zeromesh.errors import CheckpointError, ConfigError
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import Interval
from zeromesh.offload.io.direct_io import PositionalFile

MAX_INDEX_BYTES = 100_000_000
_READ_AHEAD = 256 << 20
"""Bytes that are prefetched into the page cache."""
_CHUNK = 1 << 22
"""Elements per prefetch."""
_WINDOW = 1 << 20
"""Elements per dtype conversion."""


class TensorFiles(CheckpointReader):
    """The tensors of a Hugging Face model directory by name; files are opened on first read."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Read and check the headers. Raises `ConfigError` with the damaged file and the reason."""
        super().__init__(Path(directory), checked=False, manifest=manifest_of_files(Path(directory)))
        self.entries: Mapping[str, TensorSpec] = {each.name: each for each in self.manifest.tensors}
        self._files: dict[str, PositionalFile] = {}
        self._expected: Iterator[tuple[str, int, int]] = iter(())
        self._ahead = 0
        """Bytes of prefetches in progress."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        """The prefetch thread; its read errors are raised by `fill`, which reads again."""

    def path_of(self, path: str) -> Path:
        """Return the path of a file, without the symbolic links that the Hub's cache has, which are not followed otherwise."""
        return (self.directory / path).resolve()

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Prefetch elements [start, end) of tensors in this order, up to `_READ_AHEAD` bytes ahead of `fill`."""
        self._expected = (
            (name, begin, min(begin + _CHUNK, end))
            for name, start, end in ranges
            for begin in range(start, end, _CHUNK)
        )
        self._advance(0)

    def _advance(self, done: int) -> None:
        """Count `done` bytes as read, and prefetch more."""
        self._ahead -= done
        while self._ahead < _READ_AHEAD and (found := next(self._expected, None)) is not None:
            name, start, end = found
            entry = self.entries[name]
            size = entry.dtype.itemsize
            file, length, offset = self._file(entry.path), (end - start) * size, entry.begin + start * size
            if not file.in_memory(offset + length - 1):
                self._thread.submit(file.read_ahead, offset, length)
            self._ahead += length

    def _file(self, path: str) -> PositionalFile:
        if path not in self._files:
            self._files[path] = PositionalFile(self.path_of(path), direct=False, constant=True)
        return self._files[path]

    def elements(self, name: str, start: int = 0, end: int | None = None) -> torch.Tensor:
        """Read elements [start, end) of the flattened tensor `name`: 1-D, on CPU, in the file's dtype.

        Raises `StorageError` if the file gives fewer bytes than its header promises.
        """
        entry = self.entries[name]
        interval = Interval(start=start, end=entry.numel if end is None else end)
        data = torch.empty(interval.length * entry.dtype.itemsize, dtype=torch.uint8, device="cpu")
        if interval.length:
            self._read_rows(entry, StridedRows.whole(entry.numel), interval, data)
        return elements_of(data, entry)

    def whole(self, name: str) -> torch.Tensor:
        """Read a whole tensor on CPU, in the file's dtype. Raises as `elements` does."""
        return self.elements(name).reshape(self.entries[name].shape)

    def fill(self, name: str, rows: StridedRows, interval: Interval, out: torch.Tensor) -> None:
        """Fill the 1-D `out` with the non-empty `interval` of elements of the columns `rows`, converted to its dtype.

        Raises as `elements` does.
        """
        entry = self.entries[name]
        if out.device.type == "cpu" and out.dtype == entry.dtype:
            self._read_rows(entry, rows, interval, out.view(torch.uint8))
            return
        for part in rows.windows(interval, _WINDOW):
            hull = rows.hull(part)
            there = out[part.start - interval.start : part.end - interval.start]
            rows.take(self.elements(name, hull.start, hull.end), hull.start, part, there)

    def _read_rows(self, entry: TensorSpec, rows: StridedRows, interval: Interval, data: torch.Tensor) -> None:
        size, file = entry.dtype.itemsize, self._file(entry.path)
        for row, count, parts in rows.blocks(interval):
            columns = [(start * size, length * size) for start, _, length in parts]
            stride = rows.width * size
            data = data[file.read_rows(data, entry.begin + row * stride, rows=count, columns=columns, stride=stride) :]
        self._advance(rows.hull(interval).length * size)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        while self._files:
            self._files.popitem()[1].close()


def manifest_of_files(directory: Path) -> Manifest:
    """Make the manifest of a model directory from the headers of its files, without pieces, as it has no checksums. Raises
    `ConfigError` for a directory without safetensors files, a part of a checkpoint, or a damaged file, with the reason."""
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is not a directory; a model of the Hub is downloaded first: "
            "`hf download NAME --local-dir DIR`",
            where="model.source",
        )
    try:
        part = manifest_of(directory)[1].part
    except CheckpointError:
        part = (0, 1)  # Other tools write files of the same name.
    if part[1] > 1:  # The parts of other hosts would be read as zeros.
        raise ConfigError(part_problem(directory, *part, " of a checkpoint"), where="model.source")
    try:
        if (directory / INDEX).is_file():
            found = _read_indexed(directory)
        elif (directory / SINGLE).is_file():
            found = read_header(directory / SINGLE)
        else:
            pickled = sorted(path.name for path in directory.glob("*.bin"))
            cure = "save it as safetensors (`model.save_pretrained(DIR)` of transformers does)"
            if pickled:
                cure = f"{', '.join(pickled[:3])} is pickle, which runs code when it is loaded: {cure}"
            raise ConfigError(f"{directory} has neither {INDEX} nor {SINGLE}; {cure}", where="model.source")
    except CheckpointError as error:  # The error is reported for the setting that names the file.
        raise ConfigError(f"{error}; download or save it again", where="model.source") from None
    files = {each.path: FileRecord(nbytes=(directory / each.path).stat().st_size, pieces=()) for each in found.values()}
    return Manifest(step=0, files=files, tensors=tuple(found.values()))


def _read_indexed(directory: Path) -> dict[str, TensorSpec]:
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
