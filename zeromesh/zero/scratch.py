"""Reused memory for gradient shards that live only from their reduction to their update inside backward."""

from __future__ import annotations

import torch

from zeromesh.offload import Ledger, Purpose, Tier


class ScratchPool:
    """Tensors of one length and dtype, handed out and taken back; grows to what is in use at once."""

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device, ledger: Ledger) -> None:
        self._length = length
        self._dtype = dtype
        self._device = device
        self._ledger = ledger
        self._free: list[torch.Tensor] = []

    def take(self, length: int) -> torch.Tensor:
        """The first `length` elements of a free tensor; their values are arbitrary."""
        if not self._free:
            tensor = torch.empty(self._length, dtype=self._dtype, device=self._device)
            self._ledger.add(Tier.DEVICE, Purpose.GRADIENTS, self._length * self._dtype.itemsize)
            self._free.append(tensor)
        return self._free.pop()[:length]

    def give(self, tensor: torch.Tensor) -> None:
        """Take a tensor back that `take` handed out."""
        whole = tensor._base if tensor._base is not None else tensor
        self._free.append(whole)
