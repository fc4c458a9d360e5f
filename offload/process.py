"""What this process and this machine have in memory, and making the C allocator return what was freed."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_CGROUP = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Bytes of this process in memory; pages that processes share count in full."""
    return _status_bytes(Path("/proc/self/smaps_rollup"), "Rss:")


def proportional_bytes() -> int:
    """Bytes of this process in memory; a page that n processes share counts as its nth part."""
    return _status_bytes(Path("/proc/self/smaps_rollup"), "Pss:")


def peak_bytes() -> int:
    """The most bytes of this process that were ever in memory; pages that processes share count in full."""
    return _status_bytes(Path("/proc/self/status"), "VmHWM:")


def available_bytes() -> int:
    """Bytes that could still be taken: the system's, or the control group's where that is less. 0 when not known."""
    available = _status_bytes(Path("/proc/meminfo"), "MemAvailable:")
    limit, used = _read_integer(_CGROUP / "memory.max"), _read_integer(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _status_bytes(path: Path, field: str) -> int:
    try:
        with path.open(encoding="ascii") as file:
            for line in file:
                if line.startswith(field):
                    return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def _read_integer(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def return_freed_memory(threshold: int) -> bool:
    """Tell glibc to take blocks of `threshold` bytes and more straight from the system, and to return them when freed.

    By default glibc raises that threshold to 32 MiB as soon as a large block is freed, after which activations of one shape
    after another are carved from a heap whose holes stay with the process. Returns False where the C library is another.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, threshold)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, threshold))
