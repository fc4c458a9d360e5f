"""Reads what wandb keeps of an offline run, by a way of its own."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32


def records(path: Path) -> Iterator[Any]:
    """The records of a file, up to where it was cut off."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        body = data[at + 7 : at + 7 + length]
        if len(body) < length:
            return
        assert crc32(body, crc32(bytes([kind]))) == checksum
        at += 7 + length
        record = body if kind in (1, 2) else record + body
        if kind in (1, 4):
            yield Record.FromString(record)


def files(run: Path) -> list[Path]:
    """The files of a run's directory, oldest first."""
    return sorted(run.glob("wandb/offline-run-*/run-*.wandb"))


def rows(path: Path) -> list[dict[str, Any]]:
    found = [record.history.item for record in records(path) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in found]


def started(path: Path) -> tuple[str, dict[str, Any]]:
    """What the run is called in a file, and the configuration that it holds."""
    (run,) = (record.run for record in records(path) if record.WhichOneof("record_type") == "run")
    return str(run.display_name), {item.key: json.loads(item.value_json) for item in run.config.update}
