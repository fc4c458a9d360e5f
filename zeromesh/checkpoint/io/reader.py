"""Reads what a layout needs of a checkpoint, and verifies every piece that it reads before it uses a byte of it."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.format import manifest
from zeromesh.checkpoint.format.manifest import ChecksumPiece, Manifest, StoredTensor, checksum
from zeromesh.checkpoint.format.safetensors_layout import parse_json
from zeromesh.checkpoint.io.blocks import GRID, Extents, overlapping
from zeromesh.errors import CheckpointError, ZeromeshError
from zeromesh.files import read_whole
from zeromesh.flat.regions import StridedRows
from zeromesh.intervals import Interval
from zeromesh.offload import TensorSlice
from zeromesh.offload.io.direct_io import PositionalFile
from zeromesh.offload.io.transfer import StagingPool

MAX_CONTENT_BYTES = 256 << 20
"""Of a file that is read into memory as a whole."""
_STAGING_BUFFERS = 4
_IO_THREADS = 2
_PAYLOADS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".metadata", ".distcp", ".gguf"}
)
"""Kinds of files that hold weights somewhere. One that the manifest does not name comes from elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadTarget:
    """A place for elements of a stored tensor, converted to the place's dtype: those from `first` on of the flattened tensor, or
    with `rows` those of its columns, of which `first` is a local position too."""

    tensor: StoredTensor
    first: int
    values: TensorSlice
    rows: StridedRows | None = None

    @property
    def begin(self) -> int:
        """Absolute byte of the first element in the tensor's file."""
        return self.tensor.begin + self._logical.start * self.tensor.spec.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the last one ends; others' may lie between, with `rows`."""
        return self.tensor.begin + self._logical.end * self.tensor.spec.dtype.itemsize

    @property
    def _logical(self) -> Interval:
        local = Interval(start=self.first, end=self.first + self.values.numel)
        return self.rows.hull(local) if self.rows is not None and local.length else local

    def put(self, window: torch.Tensor, start: int) -> None:
        """Fill what of it lies in `window`: the flattened tensor from element `start` on, 1-D."""
        own = Interval(start=self.first, end=self.first + self.values.numel)
        if self.rows is None:
            local = own.intersect(Interval(start=start, end=start + window.numel()))
            data = window[local.start - start : local.end - start]
        else:
            first, last = self.rows.before(start), self.rows.before(start + window.numel())
            local = own.intersect(Interval(start=first, end=last))
            data = torch.empty(local.length, dtype=window.dtype)
            self.rows.take(window, start, local, data)
        self.values.slice(local.start - self.first, local.end - self.first).copy_from(data)


class CheckpointReader:
    """A checkpoint whose manifest is sound and whose files are all there, at their sizes.

    `parts` True takes also a part of a checkpoint. `checked` False takes that, and directories whose files are not right
    (`problems` says how): for tools that look closer.

    Raises:
        CheckpointError: at construction, that names the first thing that is wrong.
    """

    def __init__(self, directory: Path, *, checked: bool = True, parts: bool = False) -> None:
        self.directory = directory
        self.digest, self.manifest = manifest_of(directory)
        if checked and not parts and self.manifest.part[1] > 1:
            index, count = self.manifest.part
            raise CheckpointError(
                f"{directory} is part {index + 1} of {count}, one of each host; put them together first: "
                "`zeromesh checkpoint merge PART PART ... --out DIR`"
            )
        if checked:
            for _, problem in self.problems():
                raise CheckpointError(problem)
        self._tensors = {(tensor.spec.kind, tensor.spec.name): tensor for tensor in self.manifest.tensors}

    def pieces(self) -> list[ChecksumPiece]:
        """Every piece of every file, those of a file in order."""
        return [piece for record in self.manifest.files.values() for piece in record.pieces]

    def tensor(self, kind: str, name: str) -> StoredTensor | None:
        """A stored tensor, under its own name or that of a tied one."""
        return self._tensors.get((kind, name)) or self._tensors.get((kind, self.manifest.aliases.get(name, name)))

    def document(self, path: str) -> dict[str, Any]:
        """A JSON object among the files, verified. Raises `CheckpointError`."""
        return parse_json(self.directory / path, self.content(path))

    def content(self, path: str) -> bytes:
        """All bytes of a small file, verified. Raises `CheckpointError`."""
        record = self.manifest.files.get(path)
        if record is None:
            raise CheckpointError(f"{self.directory} has no {path}")
        if record.nbytes > MAX_CONTENT_BYTES:
            raise CheckpointError(
                f"{self.directory / path} has {record.nbytes:,} bytes; at most {MAX_CONTENT_BYTES:,} are read at once"
            )
        parts: list[bytes] = []
        self.stream(record.pieces, lambda piece, data: parts.append(data.numpy().tobytes()), lambda: None)
        return b"".join(parts)

    def read(self, targets: Iterable[ReadTarget], tell: Callable[[], None]) -> None:
        """Fill all targets. `tell` is called after every piece. A target is filled only with bytes that were verified.

        Raises:
            CheckpointError: naming the file, the bytes and a tensor in them, when a piece is not what was written.
            StorageError: when the system cannot read.
        """
        by_file = targets_by_file(targets)
        needed = [piece for path, members in by_file.items() for piece in self._covering(path, members)]

        def use(piece: ChecksumPiece, data: torch.Tensor) -> None:
            for target in by_file[piece.path].touching(piece.begin, piece.end):
                copy_out(target, piece, data)
            tell()

        self.stream(needed, use, tell)

    def verify(self, tell: Callable[[], None] = lambda: None) -> None:
        """Read and verify everything. Raises as `read` does."""
        self.stream(self.pieces(), lambda piece, data: None, tell)

    def _covering(self, path: str, targets: Iterable[ReadTarget]) -> Iterator[ChecksumPiece]:
        """Pieces of a file that hold a byte of the targets, which are in order."""
        pieces = self.manifest.files[path].pieces
        last: ChecksumPiece | None = None
        for target in targets:
            for piece in overlapping(pieces, target.begin, target.end):
                if last is None or piece.begin > last.begin:
                    yield piece
                    last = piece

    def stream(
        self,
        pieces: Sequence[ChecksumPiece],
        use: Callable[[ChecksumPiece, torch.Tensor], None],
        tell: Callable[[], None],
        failed: Callable[[ChecksumPiece, ZeromeshError], None] | None = None,
    ) -> None:
        """Read and verify pieces in order, a few ahead, and hand each to `use`, 1-D uint8.

        `failed`, if given, gets the pieces that are not what was written and why, instead of this method raising as `read` does.
        """
        for piece in pieces:
            if piece.end - piece.begin > GRID:
                raise CheckpointError(
                    f"{self.directory / piece.path} has a piece of {piece.end - piece.begin:,} bytes; the format's grid is {GRID:,}"
                )
        pool = StagingPool(_STAGING_BUFFERS, GRID)
        files: dict[str, PositionalFile] = {}
        flying: deque[tuple[ChecksumPiece, torch.Tensor, Future[None]]] = deque()
        with ThreadPoolExecutor(_IO_THREADS) as threads:
            try:
                for piece in pieces:
                    if len(flying) == _STAGING_BUFFERS:
                        _finish(flying, pool, use, failed)
                    if piece.path not in files:
                        _close_all_but({each.path for each, _, _ in flying}, files)
                        files[piece.path] = PositionalFile(self.directory / piece.path)
                    buffer = pool.take()
                    flying.append((piece, buffer, threads.submit(self._fetch, files[piece.path], piece, buffer)))
                while flying:
                    _finish(flying, pool, use, failed)
            finally:
                threads.shutdown(cancel_futures=True)
                _close_all_but(set(), files)

    def _fetch(self, file: PositionalFile, piece: ChecksumPiece, buffer: torch.Tensor) -> None:
        data = buffer[: piece.end - piece.begin]
        file.read(data, piece.begin)
        found = checksum(data)
        if found != piece.checksum:
            raise CheckpointError(
                f"{file.path}: bytes [{piece.begin:,}, {piece.end:,}) are not what rank {piece.rank} wrote "
                f"(xxh3 {found}, {piece.checksum} was recorded){self._inside(piece)}"
            )

    def _inside(self, piece: ChecksumPiece) -> str:
        names = [
            tensor.spec.name
            for tensor in self.manifest.tensors
            if tensor.path == piece.path and tensor.begin < piece.end and tensor.end > piece.begin
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"; they hold {', '.join(names[:3])}{more}" if names else ""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Files that are not plain files of their sizes, or that hold weights and come from elsewhere: each path, and what it is.

        Of a part, files that have no piece in it may be absent.
        """
        for path, record in self.manifest.files.items():
            if record.pieces or self.manifest.part[1] == 1:
                problem = self._problem(path, record.nbytes)
                if problem:
                    yield path, problem
        foreign = [path for path in _files_in(self.directory) if path not in self.manifest.files and _has_weights(path)]
        if foreign:
            yield (
                foreign[0],
                f"{self.directory} holds {', '.join(map(repr, foreign[:3]))}, which {manifest.NAME} does not name; "
                "move what is not of this checkpoint elsewhere",
            )

    def _problem(self, path: str, nbytes: int) -> str:
        where = self.directory / path
        try:
            if path.count("/") and not stat.S_ISDIR(where.parent.lstat().st_mode):
                return f"{where.parent} is no directory"
            found = where.lstat()
        except OSError as error:
            return f"{where} cannot be read: {error.strerror or error}"
        if not stat.S_ISREG(found.st_mode):
            return f"{where} is a link or no file"
        if found.st_size != nbytes:
            return f"{where} has {found.st_size:,} bytes, {nbytes:,} were written"
        return ""


def manifest_of(directory: Path) -> tuple[str, Manifest]:
    """A directory's manifest, and a checksum that tells it from any other."""
    path = directory / manifest.NAME
    try:
        raw = read_whole(path, manifest.MAX_BYTES)
        return checksum(raw), manifest.parse(path, raw)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {manifest.NAME}: it is no whole checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _has_weights(path: str) -> bool:
    name = Path(path).name.lower()
    return name in _PAYLOADS or Path(name).suffix in _PAYLOADS


def _files_in(directory: Path) -> Iterator[str]:
    for folder, _, names in os.walk(directory, followlinks=False):
        yield from ((Path(folder) / name).relative_to(directory).as_posix() for name in names)


def _close_all_but(used: set[str], files: dict[str, PositionalFile]) -> None:
    """A large checkpoint has more files than a process may have open."""
    for path in files.keys() - used:
        files.pop(path).close()


def _finish(
    flying: deque[tuple[ChecksumPiece, torch.Tensor, Future[None]]],
    pool: StagingPool,
    use: Callable[[ChecksumPiece, torch.Tensor], None],
    failed: Callable[[ChecksumPiece, ZeromeshError], None] | None,
) -> None:
    """Wait for the oldest read, use it, and hand its buffer back."""
    piece, buffer, future = flying.popleft()
    try:
        future.result()
    except ZeromeshError as error:
        if failed is None:
            raise
        failed(piece, error)
    else:
        use(piece, buffer[: piece.end - piece.begin])
    pool.give(buffer)


def targets_by_file(targets: Iterable[ReadTarget]) -> dict[str, Extents[ReadTarget]]:
    """Targets of something, by the path of their file."""
    found: dict[str, list[ReadTarget]] = {}
    for target in targets:
        if target.values.numel:
            found.setdefault(target.tensor.path, []).append(target)
    return {path: Extents(found[path]) for path in sorted(found)}


def copy_out(target: ReadTarget, piece: ChecksumPiece, data: torch.Tensor) -> None:
    """Fill what of `target` lies in `piece` from the piece's bytes, 1-D uint8, converted to the target's dtype."""
    dtype = target.tensor.spec.dtype
    begin, end = max(target.begin, piece.begin), min(target.end, piece.end)
    # Of a hostile manifest, an element might lie across two pieces, or not aligned in memory; those written here never do.
    if any(at % dtype.itemsize for at in (begin, end, begin - piece.begin)):
        raise CheckpointError(
            f"{piece.path}: the piece [{piece.begin}, {piece.end}) cuts an element of {target.tensor.spec.name}"
        )
    window = data[begin - piece.begin : end - piece.begin].view(dtype)
    target.put(window, (begin - target.tensor.begin) // dtype.itemsize)
