"""A directory that appears whole or not at all: written under another name, brought to the disk, then renamed."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zeromesh.errors import ConfigError, StorageError
from zeromesh.offload.io.direct_io import sync_directory

_SPARE_BYTES = 16 << 20
"""For small files and what directories take."""


@contextmanager
def fresh_directory(out: Path, nbytes: int) -> Iterator[Path]:
    """A directory to be filled inside the block with about `nbytes` bytes; it is `out` when the block has ended well.

    Otherwise it is removed. What is written into it through `PositionalFile` has to be synced inside the block.

    Raises:
        ConfigError: where there is something at `out` already.
        StorageError: where there is no room, or it cannot be written.
    """
    out = Path(os.path.realpath(out))
    # Short, since `out` may have the longest name; its own, since another process may be writing the same directory.
    temporary = out.with_name(f".zeromesh-{secrets.token_hex(8)}.tmp")
    occupied = f"{out} exists and is not an empty directory; give another one, or remove it first"
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(occupied)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        if free < nbytes + _SPARE_BYTES:
            raise StorageError(
                f"{str(out)!r} takes {nbytes:,} bytes, {_SPARE_BYTES:,} more are kept free, and {free:,} are free; make room"
            )
        yield temporary
        for folder in {temporary, *(path for path in temporary.rglob("*") if path.is_dir())}:
            sync_directory(folder)
        temporary.rename(out)  # Only where there is nothing yet, or an empty directory.
        sync_directory(out.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and error.filename == str(temporary):
            raise ConfigError(f"{occupied}: something else has been written there meanwhile") from error
        raise StorageError(f"{error.filename or str(out)!r} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
