"""The host tier: memory of the machine beside the device's own, pinned where a device copies from it."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch

from zeromesh.offload.device import allocate_lasting
from zeromesh.offload.pool import pages
from zeromesh.offload.process import available_bytes

_SHARE_OF_FREE = 2
"""Pinned memory cannot be paged out: at most this part of what is free is pinned without being told to."""


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
        if int(_runtime().cudaHostRegister(address, len(self), 0)):
            return False
        self._address = address
        return True

    def __del__(self) -> None:
        if self._address and not sys.is_finalizing():
            _runtime().cudaHostUnregister(self._address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def pinned_limit() -> int:
    """Bytes that this process may pin: within RLIMIT_MEMLOCK, and a part of what machine and control group have free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = available_bytes() // _SHARE_OF_FREE
    return free if soft == resource.RLIM_INFINITY else min(soft, free)
