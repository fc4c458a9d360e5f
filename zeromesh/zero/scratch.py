"""Reused memory for gradient shards that live only from their reduction to their update inside backward."""

from __future__ import annotations

import torch

from zeromesh.offload import Ledger, Purpose, Tier


class ScratchPool:
    """Flat tensors of one dtype, handed out and taken back; grows to what is in use at once."""

    def __init__(self, dtype: torch.dtype, device: torch.device, ledger: Ledger) -> None:
        self._dtype = dtype
        self._device = device
        self._ledger = ledger
        self._free: list[torch.Tensor] = []

    def take(self, length: int) -> torch.Tensor:
        """`length` elements of a free tensor; their values are arbitrary. One that is too short makes room for a longer one."""
        self._free.sort(key=torch.Tensor.numel)
        place = next((place for place, tensor in enumerate(self._free) if tensor.numel() >= length), None)
        if place is not None:
            return self._free.pop(place)[:length]
        if self._free:
            self._count(-self._free.pop().numel())
        self._count(length)
        return torch.empty(length, dtype=self._dtype, device=self._device)

    def give(self, tensor: torch.Tensor) -> None:
        """Take a tensor back that `take` handed out."""
        self._free.append(tensor._base if tensor._base is not None else tensor)

    def _count(self, elements: int) -> None:
        self._ledger.add(Tier.DEVICE, Purpose.GRADIENTS, elements * self._dtype.itemsize)
