"""Settings of glibc's allocator that let freed activations be reused. Nothing is done with another C library.
docs/decisions/0006-allocator.md and 0010-small-blocks-are-reserved.md have what was measured."""

import ctypes
import re
import struct
from pathlib import Path

_M_MXFAST = 1
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGE_BLOCK = 1 << 26
"""The mmap threshold in bytes, above the highest that glibc chooses by itself, so that activations come from the heap."""
_NEVER = -1  # a threshold that no block reaches
_FIXED_VERSION = (2, 38)
"""The first glibc version that reuses aligned free blocks, instead of splitting small objects' blocks off large ones."""

_CACHE_SIZES = struct.pack("NN", 64, 1032)
"""Two adjacent words of glibc's parameters: the number of size classes in a thread's cache, and its largest size in bytes."""
_MOST_CACHED = (1 << 16) - 1  # the largest value of `tcache_count` that glibc allows
_caches: list[ctypes.c_size_t] = []
"""The word with the number of size classes, remembered once found, since it is then set to 0, and a search would fail."""
_PARAMETERS_BYTES = 160
"""The number of bytes before the cache sizes in which the two thresholds must lie, in the same structure of glibc."""

_EXACT_BYTES = 1024  # the size in bytes below which glibc keeps free blocks by exact size
_RESERVED_BYTES = 16 << 10
"""The bytes that `_reserve` reserves in blocks of each size; there are `_FEWEST` to `_MOST` blocks of a size."""
_FEWEST, _MOST = 8, 512
_LARGEST_SMALL = 64 << 10  # bytes of the largest reserved block
_GUARD_BYTES = 24  # of the block in use between two reserved ones


def reuse_freed_memory(largest: int = _LARGE_BLOCK) -> bool:
    """Fix glibc's thresholds, before a process allocates, so that freed activations are reused and only blocks of `largest` bytes
    and more are mapped one by one, which costs a page fault per 4 KiB. Returns False with another C library."""
    if (libc := _glibc()) is None:
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, largest)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _NEVER))


def prevent_fragmentation() -> bool:
    """Return free memory of the heap to the system, before the first step; with glibc before 2.38, keep small objects from dividing
    it from then on: they would lie between large blocks, which cannot merge while they live. They get about 2 MiB of blocks that
    are reserved here, and glibc keeps no freed blocks aside. Returns True if blocks are reserved."""
    if (libc := _glibc()) is None:
        return False
    libc.malloc_trim(0)
    libc.gnu_get_libc_version.restype = ctypes.c_char_p
    version = tuple(int(part) for part in libc.gnu_get_libc_version().decode().split(".")[:2])
    if version >= _FIXED_VERSION or not reuse_freed_memory():
        return False
    _caches.extend([] if _caches else _cached_sizes())
    if len(_caches) != 1:
        _caches.clear()
        return False
    _caches[0].value = 0
    libc.mallopt(_M_MXFAST, 0)
    _reserve(libc)
    return True


def _cached_sizes() -> list[ctypes.c_size_t]:
    """Search the C library's data for `tcache_bins`, the number of size classes in a thread's cache, which no call can set, by
    its default value and the words near it, which `reuse_freed_memory` has set. Returns all matches."""
    # With 0 of them a thread's cache is neither read nor written again. With 0 blocks of each, `tcache_count`, the blocks that the
    # cache of another thread still holds count as damage when it frees a block that looks like one of them: glibc aborts.
    thresholds = struct.pack("N", _LARGE_BLOCK), struct.pack("n", _NEVER)
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        if not name or not rights.startswith("rw") or not Path(name[0]).name.startswith(("libc.so", "libc-")):
            continue
        start, end = (int(each, 16) for each in addresses.split("-"))
        data = ctypes.string_at(start, end - start)
        for match in re.finditer(re.escape(_CACHE_SIZES) + rb"(.{8})", data, re.DOTALL):
            before = data[max(0, match.start() - _PARAMETERS_BYTES) : match.start()]
            if struct.unpack("N", match[1])[0] <= _MOST_CACHED and all(each in before for each in thresholds):
                found.append(ctypes.c_size_t.from_address(start + match.start()))
    return found


def _reserve(libc: ctypes.CDLL) -> None:
    """Put many free small blocks on the heap for later small objects; a block in use after each keeps them from merging."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    sizes = [*range(24, _EXACT_BYTES, 16)]  # Every size that glibc tells apart, and a few above.
    size = _EXACT_BYTES
    while size < _LARGEST_SMALL:
        size += size // 4
        sizes.append(size)
    blocks = []
    for size in sizes:
        for _ in range(min(_MOST, max(_FEWEST, _RESERVED_BYTES // size))):
            blocks.append(libc.malloc(size))
            libc.malloc(_GUARD_BYTES)
    for block in blocks:
        libc.free(block)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
