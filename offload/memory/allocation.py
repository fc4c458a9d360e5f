"""Memory for what lives as long as a run: of the device, and of the host beside it, pinned where a device copies from it."""

import ctypes
import math
import mmap
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeromesh.offload.io.transfer import pages
from zeromesh.offload.memory.ledger import available_bytes

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


class ReleasableBuffer:
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
        """Make views of elements [start, end), which stay valid also while there is no memory."""
        self.take()  # A view of memory that is not there cannot be made, only kept.
        views = [self.full[start:end] for start, end in places]
        self.give_back()
        return views

    def take(self) -> None:
        """Take memory, whose contents are undefined."""
        storage = self.full.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self._nbytes)

    def give_back(self) -> None:
        """Give the memory back to the system."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)
        else:
            self.full.untyped_storage().resize_(0)


_SHARE_OF_FREE = 2
"""Pinned memory cannot be paged out: at most this part of what is free is pinned without a limit."""


@dataclass(kw_only=True, slots=True)
class PinnedBudget:
    """Bytes that may be pinned; what goes beyond is ordinary memory, from which copies are slower. None: `pinned_limit` decides."""

    limit: int | None = None
    used: int = 0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros on the host, `[numel]`, that last as long as a run, for a process that computes on `device`."""
        nbytes = numel * dtype.itemsize
        if nbytes and self.take(nbytes, device):
            return pinned_pages(nbytes).view(dtype)
        return allocate_lasting(numel, dtype, torch.device("cpu"))

    def take(self, nbytes: int, device: torch.device) -> bool:
        """Whether so many bytes more may be pinned; they count from now on. For a CPU there is nothing to pin."""
        if device.type == "cpu":
            return False
        if self.limit is None:
            self.limit = pinned_limit()
        if self.used + nbytes > self.limit:
            return False
        self.used += nbytes
        return True

    def give(self, nbytes: int) -> None:
        """So many are not pinned any more."""
        self.used -= nbytes


def pinned_pages(nbytes: int) -> torch.Tensor:
    """Pages of their own, `[nbytes]` uint8, that CUDA devices copy from and to by themselves.

    torch's own pinned memory is rounded up to a power of two, which for states is too much. Where the system refuses to pin, they
    are ordinary pages.
    """
    found = _PinnedPages(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(found, dtype=torch.uint8) if found.register() else pages(nbytes)


class _PinnedPages(mmap.mmap):
    """Pages that are registered with CUDA until they go."""

    _address = 0

    def register(self) -> bool:
        """Have CUDA pin them."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        if int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0)):  # type: ignore[no-untyped-call]
            return False
        self._address = address
        return True

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]


def pinned_limit() -> int:
    """Bytes that this process may pin: within RLIMIT_MEMLOCK, and a part of what machine and control group have free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = available_bytes() // _SHARE_OF_FREE
    return free if soft == resource.RLIM_INFINITY else min(soft, free)
