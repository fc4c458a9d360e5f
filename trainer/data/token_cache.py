"""The on-disk cache of tokenised text, whose file of token ids all ranks of a host map into memory. The key is a digest of the
files (paths, sizes, times of change), the tokenizer and the held-out fraction. Nothing is unpickled.

    <cache>/<key>/tokens.bin    ids back to back: kept documents, then those that are held out
                  entry.json    counts, xxh3 of each block of 64 KiB, and a checksum of the entry itself
"""

import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash

from zeromesh.errors import DataError, StorageError
from zeromesh.files import open_regular, read_whole, write_whole
from zeromesh.trainer.data.tokenizer import TokenArray

_BLOCK = 1 << 16  # bytes that have one checksum
_CHECKED_AT_ONCE = 256 << 20  # bytes that are verified when an entry is opened; later blocks when they are read
_ENTRY, _TOKENS = "entry.json", "tokens.bin"
BEGINS, TARGET = 2, 1  # flag bits of a marked token, an int32: it begins a document, or is a target
ID_SHIFT = 2  # bits by which its id is shifted left, past the flags
_ABANDONED_SECONDS = 86400.0  # the age at which temporary folders of killed processes are removed


class TextAmount(NamedTuple):
    """Amounts of text in documents, bytes and tokens, including end-of-text tokens."""

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0


class TokenWriter:
    """Writer of the tokens of documents to a file, in the narrowest dtype for `vocab_size` ids, or int32 if `marked`."""

    def __init__(self, file: BinaryIO, vocab_size: int, *, marked: bool = False) -> None:
        narrow = np.min_scalar_type(vocab_size - 1) if vocab_size <= 1 << 16 else np.int32
        self.dtype = np.dtype(np.int32 if marked else narrow)
        self.amount = TextAmount()
        self.largest = 0
        self._file = file
        self._vocab_size, self._marked = vocab_size, marked

    def append(self, ids: TokenArray, *, text_bytes: int, targets: TokenArray | None = None) -> None:
        """Append the tokens of one document, and their target mask, bool. Raises `DataError` for ids outside of the vocabulary."""
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise DataError(f"the tokenizer gave ids from {ids.min()} to {ids.max()}, and its vocabulary has {self._vocab_size}")
        stored = ids
        if self._marked and targets is not None:
            stored = (ids.astype(np.int32) << ID_SHIFT) | targets
            stored[0] |= BEGINS
        self._file.write(stored.astype(self.dtype).tobytes())
        documents, all_bytes, count = self.amount
        self.amount = TextAmount(documents + 1, all_bytes + text_bytes, count + ids.size)
        self.largest = max(self.largest, int(ids.max()))


_Write = Callable[[TokenWriter, TokenWriter], None]
_Remarks = Callable[[TokenArray, int], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredText:
    """The token ids of a text, those of kept documents first, then of held-out ones; `largest` is the largest id."""

    tokens: TokenArray
    kept: TextAmount
    held: TextAmount
    largest: int
    digest: str
    remarks: dict[str, Any]
    path: Path
    blocks: list[int | None] = field(repr=False)  # The xxh3 of each block; None once it is verified.

    def check(self, first: int, end: int) -> None:
        """Verify the ids from `first` to `end`. Raises `DataError` for damaged blocks."""
        size = self.tokens.itemsize
        for block in range(first * size // _BLOCK, -(-end * size // _BLOCK)):
            data = self.tokens.view(np.uint8)[block * _BLOCK : (block + 1) * _BLOCK]
            if self.blocks[block] not in (None, xxhash.xxh3_64_intdigest(data.tobytes())):
                with suppress(OSError):
                    (self.path / _ENTRY).unlink()
                cure = "start again, and the text is tokenised anew"
                raise DataError(f"{str(self.path / _TOKENS)!r} is damaged at byte {block * _BLOCK:,}; {cure}")
            self.blocks[block] = None


@dataclass(frozen=True, slots=True)
class TokenCache:
    """Cache entries below a directory that is made on demand; with None, entries are temporary and deleted once mapped."""

    root: Path | None
    note: Callable[[str], None] = lambda text: None

    def get(self, key: str | None, vocab_size: int, write: _Write, remarks: _Remarks, *, marked: bool) -> StoredText:
        """Return the entry of a key. A missing entry is created: `write` gets a writer of kept and one of held-out documents, whose
        tokens are `marked` or not, and `remarks` gets all tokens and the number of kept ones, and returns JSON values to store. An
        entry without a key is private to the process. Raises `StorageError` if the entry cannot be written."""
        path = None if self.root is None or key is None else self.root / key
        try:
            if path is not None:
                if path.exists():
                    try:
                        return _open(path)
                    except (DataError, OSError, ValueError, TypeError, KeyError) as error:
                        self.note(f"tokens in {path} are damaged ({error}); the text is tokenised anew")
                        shutil.rmtree(path)
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                for left in path.parent.glob(".*.tmp"):
                    with suppress(OSError):
                        if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                            shutil.rmtree(left)
            names: Any = {"prefix": ".tokens-", "suffix": ".tmp", "ignore_cleanup_errors": True}
            with tempfile.TemporaryDirectory(dir=path and path.parent, **names) as folder:
                _write_entry(Path(folder), vocab_size, write, remarks, marked)
                if path is None:
                    return _open(Path(folder))
                with suppress(OSError):  # Another process has written the same entry.
                    Path(folder).rename(path)
            return _open(path)
        except OSError as error:
            where = str(self.root or tempfile.gettempdir())
            raise StorageError(f"tokens cannot be kept in {where!r} ({error}); set data.cache") from error


def _write_entry(folder: Path, vocab_size: int, write: _Write, remarks: _Remarks, marked: bool) -> None:
    with (folder / _TOKENS).open("xb") as file, tempfile.TemporaryFile(dir=folder) as held_file:
        kept, held = (TokenWriter(each, vocab_size, marked=marked) for each in (file, held_file))
        write(kept, held)
        held_file.seek(0)
        shutil.copyfileobj(held_file, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
    whole, blocks = xxhash.xxh3_128(kept.dtype.str.encode()), []
    with (folder / _TOKENS).open("rb") as file:
        while block := file.read(_BLOCK):
            whole.update(block)
            blocks.append(xxhash.xxh3_64_intdigest(block))
    tokens = np.memmap(folder / _TOKENS, kept.dtype, "r") if blocks else np.empty(0, kept.dtype)
    entry: dict[str, Any] = {"dtype": kept.dtype.str, "amounts": [kept.amount, held.amount], "blocks": blocks}
    entry |= {"largest": max(kept.largest, held.largest), "digest": whole.hexdigest()}
    text = json.dumps({**entry, "remarks": remarks(tokens, kept.amount.tokens)}, sort_keys=True)
    write_whole(folder / _ENTRY, json.dumps([xxhash.xxh3_64_hexdigest(text.encode()), text]).encode())


def _open(folder: Path) -> StoredText:
    checksum, text = json.loads(read_whole(folder / _ENTRY))
    if xxhash.xxh3_64_hexdigest(text.encode()) != checksum:
        raise DataError(f"{_ENTRY} is not as it was written")
    entry = json.loads(text)
    kept, held = (TextAmount(*amount) for amount in entry["amounts"])
    dtype = np.dtype(entry["dtype"])
    nbytes = (kept.tokens + held.tokens) * dtype.itemsize
    with open(open_regular(folder / _TOKENS, os.O_RDONLY), "rb") as file:
        if (size := os.fstat(file.fileno()).st_size) != nbytes:
            raise DataError(f"{_TOKENS} has {size:,} bytes, and {nbytes:,} were written")
        memory = mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) if nbytes else b""
    same = {name: entry[name] for name in ("largest", "digest", "remarks", "blocks")}
    stored = StoredText(tokens=np.frombuffer(memory, dtype=dtype), kept=kept, held=held, path=folder, **same)
    stored.check(0, min(nbytes, _CHECKED_AT_ONCE) // dtype.itemsize)
    return stored
