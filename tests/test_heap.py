"""Holes of the heap: with the variables of the launcher and blocks in reserve, small objects keep no large blocks apart."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from zeromesh.mesh.launcher import launch_workers
from zeromesh.offload.heap import TUNABLES, heap_variables

SCRIPT = """
import ctypes, os, torch
from zeromesh.offload import reuse_freed_memory, settle_heap

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena o s h d u f used free k".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
libc.malloc.restype = ctypes.c_void_p
reuse_freed_memory()
settle_heap(os.environ.get("GLIBC_TUNABLES", ""))
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


def growth(variables: dict[str, str]) -> int:
    """Bytes by which the heap grows over forty layers, of which 0.1 MB stay."""
    environment = {name: value for name, value in os.environ.items() if name != TUNABLES}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(not heap_variables(), reason="this C library finds aligned blocks again")
def test_layers_find_the_room_that_others_have_left() -> None:
    with_reserve, without = growth(heap_variables()), growth({})
    assert with_reserve < 16 << 20
    assert without > 3 * with_reserve


def test_workers_begin_with_the_variables_unless_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def start(config: object, command: str) -> object:
        return lambda *arguments: seen.append(os.environ.get(TUNABLES))

    monkeypatch.setattr("zeromesh.mesh.launcher.elastic_launch", start)
    monkeypatch.delenv(TUNABLES, raising=False)
    launch_workers(["-c", "pass"], processes=2)
    assert TUNABLES not in os.environ
    monkeypatch.setenv(TUNABLES, "glibc.malloc.arena_max=1")
    launch_workers(["-c", "pass"], processes=2)
    assert seen == [heap_variables().get(TUNABLES), "glibc.malloc.arena_max=1"]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    from zeromesh.offload import reuse_freed_memory, settle_heap

    assert heap_variables() == {}
    assert reuse_freed_memory() is False
    settle_heap("glibc.malloc.tcache_count=0")
