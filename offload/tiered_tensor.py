"""`TieredTensor`: a flat tensor whose elements rest on one tier, or partly on one and partly on the device.

    | elements on a tier                          | elements on the device   |
    0                                             cut                     numel

What is in memory can be looked at (`view`); what is not has to be read and written, which goes on beside other work.
`TensorSlice` is an interval of one, for those who only copy in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from zeromesh.errors import ConfigError
from zeromesh.offload.io.copy_streams import copy_streams_of
from zeromesh.offload.io.file_tier import FileSlot
from zeromesh.offload.io.transfer import DONE, Transfer, TransferGroup
from zeromesh.offload.memory.ledger import Tier

TierName = Literal["none", "host", "file"]
GRAIN = 2048
"""Elements. A part begins at a multiple of it: whole blocks of a file in any dtype, and whole vectors of a processor."""
_CONVERTED = 1 << 20
"""Elements that are converted to another dtype at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TierChoice:
    """The place where something rests: `fraction` of it on `tier`, the rest on the device. `none` is the device alone.

    Raises:
        ConfigError: for a tier that there is not, or a fraction that is none.
    """

    tier: TierName = "none"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.tier not in get_args(TierName):
            raise ConfigError(f"tier is {self.tier!r}; allowed are {', '.join(get_args(TierName))}")
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"fraction of tier {self.tier} is {self.fraction}; it must be from 0 to 1")

    @property
    def away(self) -> bool:
        """Whether any of it leaves the device."""
        return self.tier != "none" and self.fraction > 0

    def leaves(self, device: torch.device) -> bool:
        """Tell whether any of it leaves the memory of `device`. A CPU's own memory is the host's."""
        return self.away and (self.tier == "file" or device.type != "cpu")

    def on(self, tier: Tier, numel: int) -> int:
        """Return how many of `numel` elements rest on a tier."""
        cut = self.cut(numel)
        if tier is Tier.DEVICE:
            return numel - cut
        return cut if tier.value == self.tier else 0

    def in_reach(self, numel: int, device: torch.device) -> bool:
        """Tell whether `numel` elements lie in one piece of the memory of `device`."""
        return self.cut(numel) == 0 or (self.cut(numel) == numel and not self.leaves(device))

    def cut(self, numel: int) -> int:
        """Return how many of `numel` elements rest on the tier: the first ones."""
        if not self.away:
            return 0
        return numel if self.fraction >= 1 else min(numel, -(-int(numel * self.fraction) // GRAIN) * GRAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredPart:
    """Elements [start, end): in `memory`, or in the `slot` of a file."""

    start: int
    end: int
    tier: Tier
    memory: torch.Tensor | None = None
    slot: FileSlot | None = None


class TieredTensor:
    """`[numel]` of `dtype`, in parts that follow each other."""

    def __init__(self, dtype: torch.dtype, parts: Sequence[TieredPart]) -> None:
        self.dtype = dtype
        self.parts = tuple(part for part in parts if part.end > part.start)
        self.numel = max((part.end for part in parts), default=0)

    @classmethod
    def of(cls, tensor: torch.Tensor, tier: Tier = Tier.DEVICE) -> TieredTensor:
        """Make one that views a flat tensor."""
        return cls(tensor.dtype, [TieredPart(start=0, end=tensor.numel(), tier=tier, memory=tensor)])

    @property
    def nbytes(self) -> int:
        """Bytes over all tiers."""
        return self.numel * self.dtype.itemsize

    def bytes_on(self, tier: Tier) -> int:
        """Sum the bytes on one tier."""
        return sum((part.end - part.start) * self.dtype.itemsize for part in self.parts if part.tier is tier)

    def view(self, start: int, end: int, device: torch.device) -> torch.Tensor | None:
        """Elements [start, end) where they are, if that is one piece of the device's own memory."""
        if start == end:
            return torch.empty(0, dtype=self.dtype, device=device)
        for part in self.parts:
            if part.start <= start and end <= part.end and part.memory is not None:
                if part.memory.device.type == device.type:
                    if start == part.start and end == part.end:
                        return part.memory
                    return part.memory[start - part.start : end - part.start]
                return None
        return None

    def whole(self, device: torch.device) -> torch.Tensor | None:
        """All elements where they are, if that is one piece of the device's own memory."""
        return self.view(0, self.numel, device)

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        """Start to fill `out`, 1-D, from element `start` on, converted to its dtype.

        Raises:
            StorageError: now or at the transfer's `wait`.
        """
        return self._move(start, out, write=False)

    def write(self, start: int, data: torch.Tensor) -> Transfer:
        """Start to replace the elements from `start` on by `data`, 1-D, which must stay as it is until that is done.

        Raises as `read` does.
        """
        return self._move(start, data, write=True)

    def _move(self, start: int, data: torch.Tensor, *, write: bool) -> Transfer:
        end = start + data.numel()
        if not 0 <= start <= end <= self.numel:
            raise ValueError(f"elements [{start}, {end}) do not lie in {self.numel}")
        transfers = []
        for part in self.parts:
            first, last = max(start, part.start), min(end, part.end)
            if first < last:
                piece = data[first - start : last - start]
                transfers.append(_move(self.dtype, part, first - part.start, piece, write=write))
        return TransferGroup(transfers)

    def settle(self) -> None:
        """Return when all that was written is where it rests. Raises `StorageError` where it is not."""
        for part in self.parts:
            if part.slot is not None:
                part.slot.settle()

    def load(self, device: torch.device) -> torch.Tensor:
        """All elements on `device`, `[numel]`: where they rest if they do so there, else read into new memory."""
        found = self.whole(device)
        if found is None:
            found = torch.empty(self.numel, dtype=self.dtype, device=device)
            self.read(0, found).wait()
        return found

    def copy_from(self, other: TieredTensor) -> None:
        """Become a copy of another tensor of as many elements, converted. Raises `StorageError`."""
        if other.numel != self.numel:
            raise ValueError(f"{other.numel} elements are not a copy for {self.numel}")
        here, there = self.parts[0].memory if self.parts else None, other.parts[0].memory if other.parts else None
        if len(self.parts) == len(other.parts) == 1 and here is not None and there is not None:
            here.copy_(there)
            return
        for first in range(0, self.numel, _CONVERTED):
            passing = torch.empty(min(_CONVERTED, self.numel - first), dtype=other.dtype)
            other.read(first, passing).wait()
            self.write(first, passing).wait()

    def slice(self, start: int, end: int) -> TensorSlice:
        """Elements [start, end)."""
        return TensorSlice(tensor=self, start=start, end=end)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSlice:
    """Elements [start, end) of a tensor, to be copied out or in."""

    tensor: TieredTensor
    start: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSlice:
        """All elements of a flat tensor in memory."""
        return cls(tensor=TieredTensor.of(tensor), start=0, end=tensor.numel())

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def memory(self) -> torch.Tensor:
        """These elements, where they are in the memory of the CPU. Raises `ValueError` where they are not."""
        found = self.tensor.view(self.start, self.end, torch.device("cpu"))
        if found is None:
            raise ValueError("these elements are not in memory")
        return found

    def slice(self, start: int, end: int) -> TensorSlice:
        """Elements [start, end) of these. Raises `ValueError` where they are others'."""
        if not 0 <= start <= end <= self.numel:
            raise ValueError(f"elements [{start}, {end}) do not lie in a slice of {self.numel}")
        return TensorSlice(tensor=self.tensor, start=self.start + start, end=self.start + end)

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill `out`, 1-D of `numel` elements, converted to its dtype. Raises `StorageError`."""
        self._require_all(out)
        transfer = self.tensor.read(self.start, out)
        transfer.end(counted=False)  # A checkpoint's thread waits beside training.
        transfer.wait()

    def copy_from(self, data: torch.Tensor) -> None:
        """Become `data`, 1-D of `numel` elements, converted to this dtype. Raises `StorageError`."""
        self._require_all(data)
        self.tensor.write(self.start, data).wait()

    def _require_all(self, other: torch.Tensor) -> None:
        """Raise `ValueError` where others' elements would be copied, or not all of these."""
        if other.numel() != self.numel:
            raise ValueError(f"{other.numel()} elements to copy, for a slice of {self.numel}")


def _move(dtype: torch.dtype, part: TieredPart, at: int, data: torch.Tensor, *, write: bool) -> Transfer:
    """Start to move `data` to or from the elements of a part from `at` on, which are of `dtype`."""
    if part.memory is not None:
        here = part.memory[at : at + data.numel()]
        return _copy(data, here) if write else _copy(here, data)
    if part.slot is None:
        raise ValueError("a part is either in memory or in a slot")
    move = part.slot.write if write else part.slot.read
    if data.dtype == dtype:
        return move(at * dtype.itemsize, data.view(torch.uint8))
    for number, piece in enumerate(torch.split(data, _CONVERTED)):
        passing = piece.to(device="cpu", dtype=dtype) if write else torch.empty(piece.numel(), dtype=dtype)
        move((at + number * _CONVERTED) * dtype.itemsize, passing.view(torch.uint8)).wait()
        if not write:
            piece.copy_(passing)
    return DONE


def _copy(source: torch.Tensor, target: torch.Tensor) -> Transfer:
    if source.device.type != target.device.type:
        return copy_streams_of(source.device if source.is_cuda else target.device).copy(source, target)
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
    return DONE
