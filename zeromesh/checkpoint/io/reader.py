"""Reading the bytes of a model directory that a layout needs: `CheckpointReader` verifies every piece of a checkpoint before use,
and `TensorFiles` reads a plain Hugging Face directory, a checkpoint without checksums. Nothing is executed."""

import os
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.io import format as formats
from zeromesh.checkpoint.io.file_slices import GRID, PlacedValues, elements_of, overlapping
from zeromesh.checkpoint.io.format import INDEX, SINGLE, ChecksumPiece, FileRecord, Manifest, TensorSpec
from zeromesh.errors import CheckpointError, ConfigError, ZeromeshError, some
from zeromesh.files import read_whole
from zeromesh.flat.layout import StridedRows
from zeromesh.intervals import Interval
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.offload.io.transfer import StagingPool

MAX_CONTENT_BYTES = 256 << 20  # of a file that is read into memory as a whole
_STAGING_BUFFERS = 4
_IO_THREADS = 2
_PAYLOADS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".metadata", ".distcp", ".gguf"}
"""Suffixes of files that hold weights. Such a file that the manifest does not list is foreign."""
MAX_INDEX_BYTES = 100_000_000
_READ_AHEAD = 256 << 20  # bytes that are prefetched into the page cache
_CHUNK = 1 << 22  # elements per prefetch
_WINDOW = 1 << 20  # elements per dtype conversion
_Fetched = tuple[ChecksumPiece, torch.Tensor, Future[None]]


class CheckpointReader:
    """A checkpoint with a valid manifest, whose files all exist with their sizes. `parts` True also accepts a part of a checkpoint.
    `checked` False accepts that and directories with wrong files, which `problems` lists. `manifest` replaces the directory's.
    Raises `CheckpointError` at construction, naming the first problem."""

    def __init__(self, directory: Path, *, checked: bool = True, parts: bool = False, manifest: Manifest | None = None) -> None:
        self.directory = directory
        self.digest, self.manifest = manifest_of(directory) if manifest is None else ("", manifest)
        self.source = Path(self.manifest.source)  # the directory of frozen weights that the checkpoint only refers to
        self._tensors = {(tensor.kind, tensor.name): tensor for tensor in self.manifest.tensors}
        if checked and not parts and self.manifest.part[1] > 1:
            raise CheckpointError(part_error_text(directory, *self.manifest.part))
        for _, problem in self.problems() if checked else ():
            raise CheckpointError(problem)

    def tensor(self, kind: str, name: str) -> TensorSpec | None:
        """Look up a stored tensor by its own name or that of a tied tensor."""
        return self._tensors.get((kind, name)) or self._tensors.get((kind, self.manifest.aliases.get(name, name)))

    def path_of(self, path: str) -> Path:
        """Return the path of a file of the manifest: in the checkpoint, or in the source of the frozen weights."""
        away = self.manifest.is_elsewhere(path)  # Links are resolved, since the Hub's cache has links to its files.
        return (self.source / path.removeprefix(formats.SOURCE)).resolve() if away else self.directory / path

    def pieces(self) -> list[ChecksumPiece]:
        """List every piece of every file, in order within each file."""
        return [piece for record in self.manifest.files.values() for piece in record.pieces]

    def content(self, path: str) -> bytes:
        """Return all bytes of a small file, verified. Raises `CheckpointError`."""
        if (record := self.manifest.files.get(path)) is None:
            raise CheckpointError(f"{self.directory} has no {path}")
        if record.nbytes > MAX_CONTENT_BYTES:
            cure = f"at most {MAX_CONTENT_BYTES:,} are read at once"
            raise CheckpointError(f"{self.directory / path} has {record.nbytes:,} bytes; {cure}")
        found: dict[int, bytes] = {}
        self.stream(record.pieces, lambda piece, data: found.update({piece.begin: data.numpy().tobytes()}))
        return b"".join(found[begin] for begin in sorted(found))

    def document(self, path: str) -> dict[str, Any]:
        """Read a JSON object from a file, verified. Raises `CheckpointError`."""
        return formats.parse_json(self.directory / path, self.content(path))

    def read(self, targets: Iterable[PlacedValues], on_progress: Callable[[], None] = lambda: None) -> None:
        """Fill all targets with verified bytes. `on_progress` is called after every piece. Raises as `stream`."""
        users: dict[ChecksumPiece, list[PlacedValues]] = {}
        for target in targets:
            if target.values.numel:
                size, pieces = target.tensor.dtype.itemsize, self.manifest.files[target.tensor.path].pieces
                for piece in overlapping(pieces, target.begin, target.end):
                    if piece.begin % size or min(piece.end, target.end) % size:  # Only a hostile manifest does that.
                        where = f"{piece.path}: the piece [{piece.begin}, {piece.end})"
                        raise CheckpointError(f"{where} cuts an element of {some(self.tensors_in([piece]))}")
                    users.setdefault(piece, []).append(target)

        def use(piece: ChecksumPiece, data: torch.Tensor) -> None:
            for target in users[piece]:
                target.take(data, piece.begin)
            on_progress()

        self.stream(sorted(users, key=lambda piece: (piece.path, piece.begin)), use)

    def tensors_in(self, pieces: Sequence[ChecksumPiece]) -> list[str]:
        """List the names of the tensors that have a byte in pieces of one file, in the file's order."""
        there = [each for each in self.manifest.tensors if each.path == pieces[0].path]
        touched = [each for each in there if any(each.begin < p.end and p.begin < each.end for p in pieces)]
        return [each.name for each in sorted(touched, key=lambda each: each.begin)]

    def stream(self, pieces: Sequence[ChecksumPiece], use: Callable[[ChecksumPiece, torch.Tensor], None]) -> None:
        """Read and verify pieces, and hand each to `use`, 1-D uint8. Raises `CheckpointError` with the file, the bytes and a tensor
        in them, when a piece is not what was written; `StorageError` when the system cannot read."""
        with closing(self.fetch_pieces(pieces)) as fetched:
            for piece, data, read in fetched:
                read.result()
                use(piece, data)

    def fetch_pieces(self, pieces: Sequence[ChecksumPiece]) -> Generator[_Fetched, None, None]:
        """Yield pieces in order, with bytes, 1-D uint8, valid until the next, and a finished future with a damaged one's error."""
        for piece in pieces:
            if piece.end - piece.begin > GRID:
                why = f"{self.directory / piece.path} has a piece of {piece.end - piece.begin:,} bytes"
                raise CheckpointError(f"{why}; the format's grid is {GRID:,}")
        pool, rest = StagingPool(_STAGING_BUFFERS, GRID), iter(pieces)
        in_flight: deque[_Fetched] = deque()
        opened: dict[str, Future[PositionalFile]] = {}
        with ThreadPoolExecutor(_IO_THREADS) as threads:
            try:
                while True:
                    for piece in islice(rest, pool.qsize()):
                        if piece.path not in opened:
                            opened[piece.path] = threads.submit(PositionalFile, self.path_of(piece.path))
                        buffer = pool.get()
                        in_flight.append((piece, buffer, threads.submit(self._fetch, piece, buffer, opened[piece.path])))
                    if not in_flight:
                        return
                    piece, buffer, future = in_flight.popleft()
                    wait([future])
                    yield piece, buffer[: piece.end - piece.begin], future
                    pool.put(buffer)
                    if piece.path not in [each.path for each, *_ in in_flight]:
                        _close(opened.pop(piece.path))
            finally:
                threads.shutdown(cancel_futures=True)
                for file in opened.values():
                    _close(file)

    def _fetch(self, piece: ChecksumPiece, buffer: torch.Tensor, file: Future[PositionalFile]) -> None:
        data, path = buffer[: piece.end - piece.begin], self.path_of(piece.path)
        away = self.manifest.is_elsewhere(piece.path)
        problem = _problem(path, self.manifest.files[piece.path].nbytes, "there") if away else ""
        if not problem:
            file.result().read(data, piece.begin)
            if (found := formats.checksum(data)) == piece.checksum:
                return
            wrote = "was there" if away else f"rank {piece.rank} wrote"
            problem = f"{path}: bytes [{piece.begin:,}, {piece.end:,}) are not what {wrote}"
            problem += f" (xxh3 {found}, {piece.checksum} was recorded)"
        if names := self.tensors_in([piece]):
            problem += f"; they hold {some(names)}"
        cure = "; the checkpoint names these frozen weights and does not hold them: put the file back as it was"
        raise CheckpointError(problem + cure if away else problem)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield path and problem of each file of the manifest that is missing, no plain file or of another size, and of files with
        weights that it does not list. The source of frozen weights is checked when it is read."""
        known = self.manifest.files
        for path, record in known.items():
            if self.manifest.is_elsewhere(path) or not (record.pieces or self.manifest.part[1] == 1):
                continue
            if problem := _problem(self.directory / path, record.nbytes, "written", nested="/" in path):
                yield path, problem
        foreign = []
        for folder, _, names in os.walk(self.directory, followlinks=False):
            for name in names:
                path = (Path(folder) / name).relative_to(self.directory).as_posix()
                if path not in known and not _PAYLOADS.isdisjoint((name.lower(), Path(name.lower()).suffix)):
                    foreign.append(path)
        if foreign:
            shown, cure = ", ".join(map(repr, foreign[:3])), "move what is not of this checkpoint elsewhere"
            yield foreign[0], f"{self.directory} holds {shown}, which {formats.MANIFEST} does not name; {cure}"


def _problem(where: Path, nbytes: int, was: str, *, nested: bool = False) -> str:
    try:
        if nested and not stat.S_ISDIR(where.parent.lstat().st_mode):
            return f"{where.parent} is no directory"
        found = where.lstat()
    except OSError as error:
        return f"{where} cannot be read: {error.strerror or error}"
    if not stat.S_ISREG(found.st_mode):
        return f"{where} is a link or no file"
    return f"{where} has {found.st_size:,} bytes, {nbytes:,} were {was}" if found.st_size != nbytes else ""


def _close(file: Future[PositionalFile]) -> None:
    if not file.cancelled() and file.exception() is None:
        file.result().close()


def copy_file(
    readers: Iterable[CheckpointReader], path: str, folder: Path, moved: Callable[[int], None] = lambda nbytes: None
) -> None:
    """Copy a file of a checkpoint or its parts into `folder`; `moved` receives the bytes of pieces. Raises as `stream`."""
    records = [(each, each.manifest.files[path]) for each in readers if path in each.manifest.files]
    (folder / path).parent.mkdir(exist_ok=True)
    with PositionalFile(folder / path, write=True, size=records[0][1].nbytes) as file:

        def use(piece: ChecksumPiece, data: torch.Tensor) -> None:
            file.write(data, piece.begin)
            moved(data.numel())

        for reader, record in records:
            reader.stream(record.pieces, use)
        file.sync()


def manifest_of(directory: Path) -> tuple[str, Manifest]:
    """Read a directory's manifest, with a checksum that identifies it."""
    path = directory / formats.MANIFEST
    try:
        raw = read_whole(path, formats.MAX_BYTES)
        return formats.checksum(raw), formats.parse_manifest(path, raw)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {formats.MANIFEST}: it is no whole checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def part_error_text(directory: Path, index: int, count: int, of: str = "") -> str:
    """Return the message about part `index` of `count` of a checkpoint, where a whole one is needed; `of` follows the count."""
    cure = "put them together first: `zeromesh checkpoint merge PART PART ... --out DIR`"
    return f"{directory} is part {index + 1} of {count}{of}, one of each host; {cure}"


class TensorFiles(CheckpointReader):
    """The tensors of a Hugging Face model directory by name; files are opened on first read. Ranks of a host read the same files,
    so bytes go through the page cache, and are prefetched there in the order in which they are announced (`expect`)."""

    def __init__(self, directory: str | os.PathLike[str], manifest: Manifest | None = None) -> None:
        """Read and check the headers, unless `manifest` describes the files. Raises as `manifest_of_files` does."""
        super().__init__(Path(directory), checked=False, manifest=manifest or manifest_of_files(Path(directory)))
        self._specs = {each.name: each for each in self.manifest.tensors}
        self.entries: Mapping[str, TensorSpec] = self._specs
        self._files: dict[str, PositionalFile] = {}
        self._expected: Iterator[tuple[str, int, int]] = iter(())
        self._ahead = 0  # bytes of prefetches in progress
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")  # `fill` raises what it meets.

    def path_of(self, path: str) -> Path:
        return (self.directory / path).resolve()  # The Hub's cache has links, which are not followed otherwise.

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Prefetch elements [start, end) of tensors in this order, up to `_READ_AHEAD` bytes ahead of `fill`."""
        chunks = ((name, begin, end) for name, start, end in ranges for begin in range(start, end, _CHUNK))
        self._expected = ((name, begin, min(begin + _CHUNK, end)) for name, begin, end in chunks)
        self._advance(0)

    def _advance(self, done: int) -> None:
        self._ahead -= done
        while self._ahead < _READ_AHEAD and (found := next(self._expected, None)) is not None:
            name, start, end = found
            entry = self._specs[name]
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
        """Read elements [start, end) of flattened `name`, 1-D on CPU, in the file's dtype. A short file raises `StorageError`."""
        entry = self._specs[name]
        interval = Interval(start=start, end=entry.numel if end is None else end)
        data = torch.empty(interval.length * entry.dtype.itemsize, dtype=torch.uint8, device="cpu")
        if interval.length:
            self._read_rows(entry, StridedRows.whole(entry.numel), interval, data)
        return elements_of(data, entry)

    def whole(self, name: str) -> torch.Tensor:
        """Read a whole tensor on CPU, in the dtype of `entries`. Raises as `elements` does."""
        return self.elements(name).reshape(self.entries[name].shape)

    def fill(self, name: str, rows: StridedRows, interval: Interval, out: torch.Tensor) -> None:
        """Fill the 1-D `out` with the non-empty `interval` of the columns `rows`, converted. Raises as `elements` does."""
        if out.device.type == "cpu" and self.is_stored_as(name, out.dtype):
            self._read_rows(self._specs[name], rows, interval, out.view(torch.uint8))
            return
        for part in rows.windows(interval, _WINDOW):
            hull = rows.hull(part)
            there = out[part.start - interval.start : part.end - interval.start]
            rows.take(self.elements(name, hull.start, hull.end), hull.start, part, there)

    def is_stored_as(self, name: str, dtype: torch.dtype) -> bool:
        return self.entries[name].dtype == dtype

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
    """Make the manifest of a model directory from the headers of its files, without checksums. Raises `ConfigError` for a directory
    without safetensors files, a part of a checkpoint, or a damaged file."""
    if not directory.is_dir():
        why = f"{directory} is not a directory; a model of the Hub is downloaded first"
        raise ConfigError(f"{why}: `hf download NAME --local-dir DIR`", where="model.source")
    with suppress(CheckpointError):  # Other tools write files of the same name.
        part = manifest_of(directory)[1].part
        if part[1] > 1:  # The parts of other hosts would be read as zeros.
            raise ConfigError(part_error_text(directory, *part, " of a checkpoint"), where="model.source")
    try:
        if (directory / INDEX).is_file():
            found = _read_indexed(directory)
        elif (directory / SINGLE).is_file():
            found = formats.read_header(directory / SINGLE)
        else:
            pickled = sorted(path.name for path in directory.glob("*.bin"))
            cure = "save it as safetensors (`model.save_pretrained(DIR)` of transformers does)"
            if pickled:
                cure = f"{', '.join(pickled[:3])} is pickle, which runs code when it is loaded: {cure}"
            raise ConfigError(f"{directory} has neither {INDEX} nor {SINGLE}; {cure}", where="model.source")
    except CheckpointError as error:  # The error is reported for the setting that names the file.
        raise ConfigError(f"{error}; download or save it again", where="model.source") from None
    paths = dict.fromkeys(each.path for each in found.values())
    files = {path: FileRecord(nbytes=(directory / path).stat().st_size, pieces=()) for path in paths}
    return Manifest(step=0, files=files, tensors=tuple(found.values()))


def _read_indexed(directory: Path) -> dict[str, TensorSpec]:
    index = directory / INDEX
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{index} is larger than {MAX_INDEX_BYTES} bytes")
    names = formats.parse_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{index} has no `weight_map` of names to files")
    files = sorted(set(names.values()))
    for file in files:
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(f"{index} names the file {file!r}, which is not a plain name in the same directory")
    problems = [f"{file} is in {INDEX} and not in {directory}" for file in files if not (directory / file).is_file()]
    if not problems:
        headers = {file: formats.read_header(directory / file) for file in files}
        missing = [name for name, file in names.items() if name not in headers[file]]
        problems = [f"{name} is not in {names[name]}, where {INDEX} says it is" for name in missing[:20]]
    if problems:
        raise ConfigError(problems, where="model.source")
    return {name: headers[file][name] for name, file in names.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """A damaged file: its first reasons, and the tensors that have a byte in its damaged pieces."""

    path: str
    reasons: tuple[str, ...]
    tensors: tuple[str, ...] = ()


def find_damage(reader: CheckpointReader, on_progress: Callable[[int], None]) -> Iterator[Damage]:
    """Verify every piece with a reader made unchecked, and yield all damage; `on_progress` receives the bytes of each piece."""
    problems = dict(reader.problems())
    for path, record in reader.manifest.files.items():
        bad: list[ChecksumPiece] = []
        reasons: list[str] = []
        try:
            for piece, _, read in reader.fetch_pieces(record.pieces):
                if (error := read.exception()) is not None:
                    bad.append(piece)
                    reasons.append(str(error))
                on_progress(piece.end - piece.begin)
        except ZeromeshError as error:
            bad, reasons = list(record.pieces), [str(error)]
        if len(bad) > 1 and len(reasons) > 1:
            reasons = [reasons[0], f"so are {len(bad) - 1:,} more of its {len(record.pieces):,} pieces"]
        if path in problems:
            reasons = [problems.pop(path), *reasons]
        elif not reasons and not reader.manifest.is_elsewhere(path) and path.endswith(".safetensors"):
            # Not compared: files of frozen weights' source, which has names of its own, and a host's parts of files.
            reasons = _disagreement(reader, path) if reader.manifest.part[1] == 1 else []
        if reasons:
            yield Damage(path=path, reasons=tuple(reasons), tensors=tuple(reader.tensors_in(bad)) if bad else ())
    yield from (Damage(path=path, reasons=(problem,)) for path, problem in problems.items())


def _disagreement(reader: CheckpointReader, name: str) -> list[str]:
    """Return the differences between a sound file's header, which other programs read, and the manifest."""
    path = reader.directory / name
    try:
        found = {each.name: (each.dtype, each.shape, each.begin) for each in formats.read_header(path).values()}
    except (ZeromeshError, OSError) as error:
        return [str(error)]
    if not (tensors := {t.name: (t.dtype, t.shape, t.begin) for t in reader.manifest.tensors if t.path == name}):
        return []  # A document, such as adapters for other programs, whose tensors the manifest does not list.
    names = sorted(name for name in found.keys() | tensors.keys() if found.get(name) != tensors.get(name))
    return [f"{path}: its header and the manifest do not agree about {', '.join(names[:3])}"] if names else []
