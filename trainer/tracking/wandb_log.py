"""How far an offline wandb run has got, from the file that wandb keeps of it.

The file is a log as LevelDB has them: after 7 bytes, blocks of 32 KiB of chunks, each with a checksum, its length and whether it is
a whole record or a first, middle or last part of one. Records are protobuf messages of `wandb.proto`.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

_BLOCK = 32 << 10
_FILE_HEADER = 7
_CHUNK = struct.Struct("<IHB")
_WHOLE, _FIRST, _LAST = 1, 2, 4
_SPAN = 1 << 20
"""Bytes of a file's end that are looked at first: rows of hundreds of steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRow:
    """The last row of a run that has `key`: its value, the number that wandb gave the row, and the names of all values of it."""

    value: int
    number: int
    names: frozenset[str]


def last_row(folder: Path, ident: str, key: str) -> LastRow | None:
    """The last row that has an integer `key` in the files of offline run `ident` below `folder`; None where there is none.

    Raises:
        OSError: where a file cannot be read.
    """
    # Their folders are named by the second in which they began.
    for path in sorted(folder.glob(f"offline-run-*-{ident}*/run-{ident}.wandb"), reverse=True):
        found = _last_row_of(path, key)
        if found is not None:
            return found
    return None


def _last_row_of(path: Path, key: str) -> LastRow | None:
    size, span = path.stat().st_size, _SPAN
    while True:
        start = max(0, size - span) // _BLOCK * _BLOCK
        found = None
        with path.open("rb") as file:
            file.seek(start)
            for number, values in _rows(file.read(), start):
                if values.get(key, "").isdecimal():
                    found = LastRow(value=int(values[key]), number=number, names=frozenset(values))
        if found is not None or start == 0:
            return found
        span *= 8


def _rows(data: bytes, start: int) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Number and values, in JSON, of each row of history in a file's bytes from `start` on."""
    from wandb.proto.wandb_internal_pb2 import Record

    for content in _records(data, start):
        record = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield record.history.step.num, {item.key or "/".join(item.nested_key): item.value_json for item in items}


def _records(data: bytes, start: int) -> Iterator[bytes]:
    """The records that begin in `data`, which begins with a block, up to where a kill has cut it off."""
    record: bytes | None = None
    at = _FILE_HEADER if start == 0 else 0
    while at + _CHUNK.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _CHUNK.size:
            at += left
            continue
        checksum, length, kind = _CHUNK.unpack_from(data, at)
        body = data[at + _CHUNK.size : at + _CHUNK.size + length]
        if len(body) < length or crc32(body, crc32(bytes([kind]))) != checksum:
            return
        at += _CHUNK.size + length
        if kind in (_WHOLE, _FIRST):
            record = b""
        if record is not None:
            record += body
            if kind in (_WHOLE, _LAST):
                yield record
                record = None
