"""Opens, reads and writes files of a run: links are not followed, opening never waits for a pipe, and the umask sets
permissions. It also tracks the disk operations that this process waits for, to tell a slow disk from a hanging rank. Functions
that open, read and write raise `OSError`. For a path that is no regular file, its `strerror` names the kind of file."""

import contextlib
import errno
import fcntl
import gc
import io
import json
import os
import re
import secrets
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zeromesh.errors import StorageError

_TEMPORARY = re.compile(r"\.zeromesh-[0-9a-f]{16}\.tmp")  # short, since the final name may have the most of 255 bytes
_KINDS = {"l": "a symbolic link", "d": "a directory", "p": "a named pipe", "s": "a socket"}
_KINDS |= dict.fromkeys("cb", "a device")
"""Names of what is no regular file, by the first letter of `stat.filemode`."""
DISK_CALLS: dict[int, list[tuple[str, str | os.PathLike[str], float]]] = {}
"""The running disk calls of each thread, outermost first: operation, path and start time."""
_NO_LOCK_ERRNOS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open the regular file at `path` and return its descriptor; a file created by `os.O_CREAT` has the umask's permissions."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV):
            _require_regular(os.lstat(path).st_mode, path, flags)
        raise
    try:
        _require_regular(os.fstat(descriptor).st_mode, path, flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(mode: int, path: str | os.PathLike[str], flags: int) -> None:
    if kind := _KINDS.get(stat.filemode(mode)[0]):
        cure = "; remove it" if flags & os.O_CREAT else ""
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file{cure}", os.fspath(path))


def read_whole(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Return all bytes of a file. Raises `OSError`, also for a file of more than `limit` bytes, of which nothing is read."""
    with disk_call("read", path), open(open_regular(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {limit:,} are read", os.fspath(path))
        return file.read()


def json_object(data: bytes, refuse: Callable[[str], Exception], **options: Any) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Raises the error that `refuse` makes of what is wrong, such as `is not JSON (...)`."""
    try:
        found = json.loads(data.decode(), **options)
    except (ValueError, RecursionError) as error:
        raise refuse(f"is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise refuse("is not a JSON object")
    return found


def write_whole(path: str | os.PathLike[str], data: bytes, *, sync: bool = True) -> None:
    """Replace the content of `path` atomically: concurrent readers, and those after a kill or an error, find the old content or the
    new. A link at `path` is replaced, and its target left alone. With `sync` the data is flushed to disk first."""
    path = Path(path)
    passing = path.parent / f".zeromesh-{secrets.token_hex(8)}.tmp"
    try:
        with disk_call("write", path):
            with open(open_regular(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(data)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(passing, path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        with contextlib.suppress(OSError):
            passing.unlink()
        raise


def remove_unfinished(directory: Path) -> None:
    """Remove the files that processes killed in `write_whole` left in a directory without writers. Raises `OSError`."""
    for path in directory.iterdir():
        if _TEMPORARY.fullmatch(path.name) and not path.is_dir():  # A model that is saved here may be one.
            path.unlink(missing_ok=True)


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed, by `flock`, or on file systems without it by an open file description lock of `fcntl`;
    returns False if another open file holds the lock. Raises `OSError` when the file system supports neither."""
    whole_file = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    calls: Any = ((fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB), (fcntl.fcntl, fcntl.F_OFD_SETLK, whole_file))
    for lock, *how in calls:
        try:
            lock(descriptor, *how)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            if error.errno not in _NO_LOCK_ERRNOS:
                raise
        else:
            return True
    raise OSError(errno.ENOLCK, "the file system has no locks, neither flock nor fcntl")


@contextlib.contextmanager
def refusals(path: str | os.PathLike[str], what: str, cure: str = "") -> Iterator[None]:
    """Turn an `OSError` into a `StorageError`: `path`, or the error's file below it, cannot be `what`, with reason and `cure`."""
    try:
        yield
    except OSError as error:
        name, found = os.fspath(path), str(error.filename)
        name = found if found.startswith(os.path.join(name, "")) else name
        raise StorageError(f"{name!r} cannot be {what}: {error.strerror or error}{cure}") from error


@contextlib.contextmanager
def disk_call(what: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Record for the length of the block that this thread waits for a disk; blocks may be nested."""
    thread = threading.get_ident()
    calls = DISK_CALLS.setdefault(thread, [])
    calls.append((what, path, time.monotonic()))
    try:
        yield
    except OSError as error:
        if error.filename is None:  # Errors of calls on a descriptor have no file name.
            error.filename = os.fspath(path)
        raise
    finally:
        calls.pop()
        if not calls:
            del DISK_CALLS[thread]


def longest_disk_call() -> tuple[str, float, float] | None:
    """Return the disk call that runs longest, among the innermost one of each thread, with its seconds so far, and those of the
    outermost call around it; None if no thread waits for a disk."""
    now = time.monotonic()
    found = [(calls[0][2], *calls[-1]) for calls in map(list, list(DISK_CALLS.values())) if calls]
    if not found:
        return None
    outer, what, path, since = min(found, key=lambda call: call[3])
    return f"{what} of {os.fspath(path)!r}", now - since, now - outer


def flush_files() -> None:
    """Flush all files of Python that are open, also those that nobody closes: `python SCRIPT` does so by taking modules apart."""
    opened = (each for each in gc.get_objects() if issubclass(type(each), io.IOBase))
    for each in (*opened, sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            each.flush()
