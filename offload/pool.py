"""A bounded number of buffers that bytes pass through on their way to and from files or a device."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from queue import SimpleQueue

import torch

PAGE = mmap.PAGESIZE
Memory = Callable[[int], torch.Tensor]
"""Makes a buffer of so many bytes."""


def pages(nbytes: int) -> torch.Tensor:
    """Pages of their own, `[nbytes]` uint8, as `O_DIRECT` needs them."""
    return torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


class StagingPool:
    """`count` buffers of `nbytes` bytes, handed out one by one: whatever passes through, memory stays bounded.

    Buffers are 1-D uint8 tensors that `memory` makes. Threads may share a pool.
    """

    def __init__(self, count: int, nbytes: int, memory: Memory = pages) -> None:
        """Raises `ValueError` for a pool without buffers, or buffers that are not whole pages."""
        if count < 1 or nbytes < PAGE or nbytes % PAGE:
            raise ValueError(f"{count} buffers of {nbytes} bytes; give 1 or more, of a multiple of {PAGE} bytes")
        self.nbytes = nbytes
        self.total = count * nbytes
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for _ in range(count):
            self._free.put(memory(nbytes))

    @property
    def free(self) -> int:
        """Buffers that `take` would give at once."""
        return self._free.qsize()

    def take(self) -> torch.Tensor:
        """A free buffer, `[nbytes]`, waiting for one."""
        return self._free.get()

    def give(self, buffer: torch.Tensor) -> None:
        """Hand a buffer back."""
        self._free.put(buffer)
