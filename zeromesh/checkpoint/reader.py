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

from zeromesh.checkpoint import manifest as manifests
from zeromesh.checkpoint.blocks import GRID, overlapping
from zeromesh.checkpoint.manifest import Manifest, Piece, StoredTensor, checksum
from zeromesh.checkpoint.tensor_files import parse_json
from zeromesh.errors import CheckpointError
from zeromesh.offload.aio import PositionalFile
from zeromesh.offload.pool import StagingPool

_STAGING_BUFFERS = 4
_IO_THREADS = 2
_PAYLOADS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".metadata", ".distcp", ".gguf"}
)
"""Kinds of files that hold weights somewhere. One that the manifest does not name comes from elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Memory, 1-D, for elements `first` and following of a flattened stored tensor, converted to the memory's dtype."""

    tensor: StoredTensor
    first: int
    memory: torch.Tensor

    @property
    def begin(self) -> int:
        """Absolute byte in the tensor's file."""
        return self.tensor.begin + self.first * self.tensor.spec.dtype.itemsize

    @property
    def end(self) -> int:
        return self.begin + self.memory.numel() * self.tensor.spec.dtype.itemsize


class CheckpointReader:
    """A checkpoint whose manifest is sound and whose files are all there, at their sizes.

    Raises:
        CheckpointError: at construction, that names the first thing that is wrong.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.digest, self.manifest = _manifest_of(directory)
        if self.manifest.part[1] > 1:
            index, count = self.manifest.part
            raise CheckpointError(
                f"{directory} is part {index + 1} of {count}, one of each host; put them together first: "
                "`zeromesh checkpoint merge PART PART ... --out DIR`"
            )
        self._check_files()
        self._tensors = {(tensor.spec.kind, tensor.spec.name): tensor for tensor in self.manifest.tensors}

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
        parts: list[bytes] = []
        self._stream(record.pieces, lambda piece, data: parts.append(data.numpy().tobytes()), lambda: None)
        return b"".join(parts)

    def read(self, targets: Iterable[Target], tell: Callable[[], None]) -> None:
        """Fill all targets. `tell` is called after every piece. A target is filled only with bytes that were verified.

        Raises:
            CheckpointError: naming the file, the bytes and a tensor in them, when a piece is not what was written.
            StorageError: when the system cannot read.
        """
        by_file: dict[str, list[Target]] = {}
        for target in sorted(targets, key=lambda each: (each.tensor.path, each.begin)):
            if target.memory.numel():
                by_file.setdefault(target.tensor.path, []).append(target)
        needed = [piece for path, members in by_file.items() for piece in self._covering(path, members)]

        def use(piece: Piece, data: torch.Tensor) -> None:
            for target in overlapping(by_file[piece.path], piece.begin, piece.end):
                _copy_out(target, piece, data)
            tell()

        self._stream(needed, use, tell)

    def verify(self, tell: Callable[[], None] = lambda: None) -> None:
        """Read and verify everything. Raises as `read` does."""
        every = [piece for record in self.manifest.files.values() for piece in record.pieces]
        self._stream(every, lambda piece, data: None, tell)

    def _covering(self, path: str, targets: Sequence[Target]) -> Iterator[Piece]:
        """Pieces of a file that hold a byte of the targets, which are in order."""
        pieces = self.manifest.files[path].pieces
        last: Piece | None = None
        for target in targets:
            for piece in overlapping(pieces, target.begin, target.end):
                if last is None or piece.begin > last.begin:
                    yield piece
                    last = piece

    def _stream(
        self, pieces: Sequence[Piece], use: Callable[[Piece, torch.Tensor], None], tell: Callable[[], None]
    ) -> None:
        """Read and verify pieces in order, a few ahead, and hand each to `use`."""
        largest = max((piece.end - piece.begin for piece in pieces), default=0)
        if largest > GRID:
            raise CheckpointError(f"{self.directory}: a piece of {largest:,} bytes; the format's grid is {GRID:,}")
        pool = StagingPool(_STAGING_BUFFERS, GRID)
        files: dict[str, PositionalFile] = {}
        flying: deque[tuple[Piece, torch.Tensor, Future[None]]] = deque()
        with ThreadPoolExecutor(_IO_THREADS) as threads:
            try:
                for piece in pieces:
                    if len(flying) == _STAGING_BUFFERS:
                        _finish(flying, pool, use)
                    if piece.path not in files:
                        files[piece.path] = PositionalFile(self.directory / piece.path)
                    buffer = pool.take()
                    flying.append((piece, buffer, threads.submit(self._fetch, files[piece.path], piece, buffer)))
                while flying:
                    _finish(flying, pool, use)
            finally:
                threads.shutdown(cancel_futures=True)
                for file in files.values():
                    file.close()

    def _fetch(self, file: PositionalFile, piece: Piece, buffer: torch.Tensor) -> None:
        data = buffer[: piece.end - piece.begin]
        file.read(data, piece.begin)
        found = checksum(data)
        if found != piece.checksum:
            raise CheckpointError(
                f"{file.path}: bytes [{piece.begin:,}, {piece.end:,}) are not what rank {piece.rank} wrote "
                f"(xxh3 {found}, {piece.checksum} was recorded){self._inside(piece)}"
            )

    def _inside(self, piece: Piece) -> str:
        names = [
            tensor.spec.name
            for tensor in self.manifest.tensors
            if tensor.path == piece.path and tensor.begin < piece.end and tensor.end > piece.begin
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"; they hold {', '.join(names[:3])}{more}" if names else ""

    def _check_files(self) -> None:
        """Every file is a plain file of its size, and none that holds weights comes from elsewhere."""
        for path, record in self.manifest.files.items():
            where = self.directory / path
            try:
                if path.count("/") and not stat.S_ISDIR(where.parent.lstat().st_mode):
                    raise CheckpointError(f"{where.parent} is no directory")
                found = where.lstat()
            except OSError as error:
                raise CheckpointError(f"{where} cannot be read: {error.strerror or error}") from error
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{where} is a link or no file")
            if found.st_size != record.nbytes:
                raise CheckpointError(f"{where} has {found.st_size:,} bytes, {record.nbytes:,} were written")
        foreign = [path for path in _files_in(self.directory) if Path(path).suffix in _PAYLOADS]
        foreign = [path for path in foreign if path not in self.manifest.files]
        if foreign:
            raise CheckpointError(
                f"{self.directory} holds {', '.join(foreign[:3])}, which {manifests.NAME} does not name; "
                "move what is not of this checkpoint elsewhere"
            )


def _manifest_of(directory: Path) -> tuple[str, Manifest]:
    """A directory's manifest, and a checksum that tells it from any other."""
    path = directory / manifests.NAME
    try:
        if path.lstat().st_size > manifests.MAX_BYTES or not stat.S_ISREG(path.lstat().st_mode):
            raise CheckpointError(f"{path} is no file of at most {manifests.MAX_BYTES:,} bytes")
        raw = path.read_bytes()
        return checksum(raw), manifests.parse(path, raw)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {manifests.NAME}: it is no whole checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _files_in(directory: Path) -> Iterator[str]:
    for folder, _, names in os.walk(directory, followlinks=False):
        yield from ((Path(folder) / name).relative_to(directory).as_posix() for name in names)


def _finish(
    flying: deque[tuple[Piece, torch.Tensor, Future[None]]],
    pool: StagingPool,
    use: Callable[[Piece, torch.Tensor], None],
) -> None:
    """Wait for the oldest read, use it, and hand its buffer back."""
    piece, buffer, future = flying.popleft()
    future.result()
    use(piece, buffer[: piece.end - piece.begin])
    pool.give(buffer)


def _copy_out(target: Target, piece: Piece, data: torch.Tensor) -> None:
    dtype = target.tensor.spec.dtype
    begin, end = max(target.begin, piece.begin), min(target.end, piece.end)
    # An element of a hostile file might lie across two pieces; those that are written here never do.
    if begin % dtype.itemsize or end % dtype.itemsize:
        raise CheckpointError(
            f"{piece.path}: the piece [{piece.begin}, {piece.end}) cuts an element of {target.tensor.spec.name}"
        )
    first = (begin - target.begin) // dtype.itemsize
    count = (end - begin) // dtype.itemsize
    values = data[begin - piece.begin : end - piece.begin].view(dtype)
    target.memory[first : first + count].copy_(values)
