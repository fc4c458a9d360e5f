"""The device tier: memory for what lives as long as a run."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

_LEAST_BYTES = 1 << 16
"""Below this a mapping of its own is not worth its page table; such blocks are too small to matter on the heap."""


def allocate_lasting(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros for states, which stay while activations come and go.

    On CPU they are pages of their own, outside the C library's heap: between activations they would cut it into pieces that
    fit nothing later (see docs/decisions/0006-allocator.md). Huge pages are taken where there are any.
    """
    count = math.prod(shape) if isinstance(shape, tuple) else shape
    if device.type != "cpu" or count * dtype.itemsize < _LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(_own_pages(count * dtype.itemsize), dtype=dtype, count=count).view(shape)


def _own_pages(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class PassingMemory:
    """Memory that comes and goes at one address: `full`, `[count]`, whose views stay valid also while it has no memory.

    On CPU it is pages of its own, zero when they come back, for the reason that states are. Elsewhere its storage is resized.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._nbytes = count * dtype.itemsize
        self._pages = _own_pages(self._nbytes) if device.type == "cpu" and self._nbytes else None
        if self._pages is not None:
            self.full = torch.frombuffer(self._pages, dtype=dtype, count=count)
        else:
            self.full = torch.empty(count, dtype=dtype, device=device)

    def carve(self, places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Views of elements [start, end), which stay valid also while there is no memory."""
        self.take()  # A view of memory that is not there cannot be made, only kept.
        views = [self.full[start:end] for start, end in places]
        self.give_back()
        return views

    def take(self) -> None:
        """Have memory, whose contents are undefined."""
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self._nbytes)

    def give_back(self) -> None:
        """Have none."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)
        else:
            self.full.untyped_storage().resize_(0)
