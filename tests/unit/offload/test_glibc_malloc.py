"""Holes of the heap: small objects keep no large blocks apart, however the process was started."""

import ctypes
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from zeromesh.offload.memory import glibc_malloc

SCRIPT = """
import ctypes, sys, torch
from zeromesh.offload import reuse_freed_memory, prevent_fragmentation

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena o s h d u f used free k".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p
reuse_freed_memory()
if sys.argv[1] == "settled":
    assert prevent_fragmentation()
before = libc.mallinfo2().arena
for layer in range(40):
    for count in (700_000, 500_003, 300_001):  # a layer's tensors, which go, and small objects, which stay
        first, second = torch.empty(count), torch.empty(count // 2 + 5 * layer)
        for size in (48, 64, 80, 96, 112, 200, 400):
            libc.malloc(size)
        del first
        third = torch.empty(count + 7)
        del second, third
print(libc.mallinfo2().arena - before)
"""
_LIBRARY, _VERSION = platform.libc_ver()
_SPLITS = _LIBRARY == "glibc" and tuple(map(int, _VERSION.split(".")[:2])) < (2, 38)


def growth(settled: str, variables: dict[str, str]) -> int:
    """Bytes by which the heap grows over forty layers, of which 0.1 MB stay."""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, settled], env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not _SPLITS, reason="this C library finds aligned blocks again")
@pytest.mark.full
def test_layers_find_the_room_that_others_have_left() -> None:
    uncached = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    with ThreadPoolExecutor() as threads:
        settled, without, tuned = threads.map(growth, ("settled", "not", "settled"), ({}, {}, uncached))
    assert settled < 16 << 20
    assert without > 3 * settled
    assert tuned < 16 << 20


STALE = """
import ctypes, threading
from zeromesh.offload import prevent_fragmentation

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
cached, settled = threading.Event(), threading.Event()

def work():
    first, second = libc.malloc(200), libc.malloc(200)
    libc.free(first)
    mark = ctypes.string_at(first + 8, 8)  # What a thread's cache writes into the blocks that it holds.
    cached.set()
    settled.wait()
    ctypes.memmove(second + 8, mark, 8)
    libc.free(second)
    print("free")

thread = threading.Thread(target=work)
thread.start()
cached.wait()
assert prevent_fragmentation() and prevent_fragmentation()
settled.set()
thread.join()
"""


@pytest.mark.skipif(not _SPLITS, reason="this C library finds aligned blocks again")
def test_a_block_that_looks_like_a_cached_one_is_freed() -> None:
    done = subprocess.run([sys.executable, "-c", STALE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "free"), done.stderr


def test_parameters_that_lie_elsewhere_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glibc_malloc, "_caches", [])
    monkeypatch.setattr(glibc_malloc, "_CACHE_SIZES", b"no such bytes in the library's data")
    monkeypatch.setattr(glibc_malloc, "_reserve", lambda libc: pytest.fail("nothing is to be reserved"))
    assert glibc_malloc.prevent_fragmentation() is False


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert glibc_malloc.reuse_freed_memory() is False
    assert glibc_malloc.prevent_fragmentation() is False


class FakeLibrary:
    """Counts the calls of an allocator whose blocks are numbered."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.freed: list[int] = []
        self.trimmed: list[int] = []
        self.malloc = lambda size: self.blocks.append(size) or len(self.blocks)
        self.free = lambda block: self.freed.append(block)
        self.malloc_trim = self.trimmed.append
        self.gnu_get_libc_version = lambda: b"2.38"


def test_reserved_blocks_have_one_in_use_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = FakeLibrary()
    glibc_malloc._reserve(libc)  # type: ignore[arg-type]
    assert {number % 2 for number in libc.freed} == {1}, "every other block is freed"
    assert 2 * len(libc.freed) == len(libc.blocks)
    monkeypatch.setattr(glibc_malloc, "_glibc", lambda: libc)
    assert glibc_malloc.prevent_fragmentation() is False, "which finds aligned blocks again"
    assert libc.trimmed == [0], "free memory goes to the system"
