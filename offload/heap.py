"""How glibc's allocator deals with what activations free, so that they find room again. With another C library nothing is done.

A process that is started with `heap_variables` calls `reuse_freed_memory` before it allocates and `settle_heap` before its first
step. docs/decisions/0006-allocator.md and 0010-small-blocks-are-reserved.md have what was measured.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator

TUNABLES = "GLIBC_TUNABLES"
"""The variable that glibc reads when a process begins."""
_NO_CACHES = "glibc.malloc.tcache_count=0"
_M_MXFAST = 1
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK = 1 << 26
"""Bytes. Above glibc's own highest threshold, so that activations stay below it."""
_NEVER = -1
_MENDED = (2, 38)
"""The glibc that finds aligned blocks again, so that none is split off large ones for small objects to settle in."""

_EXACT_BYTES = 1024
"""glibc keeps free blocks below this by their exact size."""
_RESERVED_BYTES = 256 << 10
"""Of every size, and at least `_FEWEST` blocks, at most `_MOST`."""
_FEWEST, _MOST = 8, 512
_LARGEST_SMALL = 64 << 10
_GUARD_BYTES = 24


def heap_variables() -> dict[str, str]:
    """Variables for a process to be started: small blocks that were just freed must not be the first to be used again.

    They are what glibc has split off an aligned block, and an object in one of them keeps two large blocks apart for its life.
    """
    return {TUNABLES: _NO_CACHES} if _old_glibc() is not None else {}


def reuse_freed_memory() -> bool:
    """Fix glibc's thresholds so that freed activations are used again, and only large blocks come from the system one by one.

    Each such block costs a page fault per 4 KiB every time, and glibc's own threshold moves with what was freed before. Returns
    False where the C library is another.
    """
    libc = _glibc()
    if libc is None:
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))


def settle_heap(tunables: str) -> None:
    """Give the system back what glibc holds free, holes included: after start-up, whose blocks have other sizes than a step's.

    Where `tunables`, this process's `GLIBC_TUNABLES`, has `heap_variables` in it, small blocks are then reserved: glibc takes an
    object's memory from those before it cuts it out of a hole that is large enough for a tensor. They take about 15 MiB.
    """
    libc = _glibc()
    if libc is None:
        return
    libc.malloc_trim(0)
    if _NO_CACHES in tunables and _old_glibc() is not None:
        libc.mallopt(_M_MXFAST, 0)
        _reserve(libc)


def _reserve(libc: ctypes.CDLL) -> None:
    """Free many small blocks that cannot merge, because a block in use lies behind each."""
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free.restype = None
    blocks = []
    for size in _sizes():
        for _ in range(min(_MOST, max(_FEWEST, _RESERVED_BYTES // size))):
            blocks.append(libc.malloc(size))
            libc.malloc(_GUARD_BYTES)
    for block in blocks:
        libc.free(block)


def _sizes() -> Iterator[int]:
    """Every size that glibc tells apart below `_EXACT_BYTES`, and a few above."""
    yield from range(24, _EXACT_BYTES, 16)
    size = _EXACT_BYTES
    while size < _LARGEST_SMALL:
        size += size // 4
        yield size


def _old_glibc() -> ctypes.CDLL | None:
    """The C library, if it is a glibc that splits aligned blocks."""
    libc = _glibc()
    if libc is None:
        return None
    libc.gnu_get_libc_version.restype = ctypes.c_char_p
    version = tuple(int(part) for part in libc.gnu_get_libc_version().decode().split(".")[:2])
    return libc if version < _MENDED else None


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
