"""The host tier: memory of the machine beside the device's own, pinned where a device copies from it."""

from __future__ import annotations

import resource
from dataclasses import dataclass

import torch

from zeromesh.offload.device import allocate_lasting
from zeromesh.offload.process import available_bytes

_SHARE_OF_FREE = 2
"""Pinned memory cannot be paged out: at most this part of what is free is pinned without being told to."""


@dataclass(kw_only=True, slots=True)
class PinnedBudget:
    """Bytes that may be pinned; what goes beyond is ordinary memory, from which copies are slower. None: `pinned_limit` decides."""

    limit: int | None = None
    used: int = 0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros on the host, `[numel]`, for a process that computes on `device`."""
        nbytes = numel * dtype.itemsize
        if device.type != "cpu":
            if self.limit is None:
                self.limit = pinned_limit()
            if self.used + nbytes <= self.limit:
                self.used += nbytes
                return torch.zeros(numel, dtype=dtype, pin_memory=True)
        return allocate_lasting(numel, dtype, torch.device("cpu"))


def pinned_limit() -> int:
    """Bytes that this process may pin: within RLIMIT_MEMLOCK, and a part of what machine and control group have free."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = available_bytes() // _SHARE_OF_FREE
    return free if soft == resource.RLIM_INFINITY else min(soft, free)
