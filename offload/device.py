"""The device tier: memory for what lives as long as a run."""

from __future__ import annotations

import math
import mmap

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
    pages = mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
