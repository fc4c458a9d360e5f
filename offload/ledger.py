"""`Ledger`: every byte that is allocated on purpose, by tier and purpose, counted where it is allocated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """Kind of memory."""

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


class Purpose(Enum):
    """What bytes are for."""

    PARAMETERS = "parameters in the compute dtype"
    MASTER = "master weights"
    MOMENTS = "optimizer moments"
    GRADIENTS = "gradient shards"
    PARTIAL_GRADIENTS = "gradients summed over microbatches"
    GRADIENT_BUCKETS = "gradient buckets in flight"
    MODULE_BUFFERS = "module buffers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One allocation. `nbytes` is this process's share where memory is shared between processes."""

    tier: Tier
    purpose: Purpose
    label: str
    nbytes: int


class Ledger:
    """Bytes of this process by tier and purpose, and the highest sum so far."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[Tier, Purpose], int] = defaultdict(int)
        self._peak = 0

    def add(self, tier: Tier, purpose: Purpose, nbytes: int) -> None:
        """Count an allocation (or, negative, its end).

        Raises:
            ValueError: when more is taken back than was counted.
        """
        key = (tier, purpose)
        if self._bytes[key] + nbytes < 0:
            raise ValueError(
                f"{purpose.value} in {tier.value}: {-nbytes:,} bytes given back, {self._bytes[key]:,} counted"
            )
        self._bytes[key] += nbytes
        self._peak = max(self._peak, self.total())

    def total(self, tier: Tier | None = None) -> int:
        """Bytes now, of one tier or of all."""
        return sum(nbytes for (where, _), nbytes in self._bytes.items() if tier in (None, where))

    def peak(self) -> int:
        """The highest total so far, in bytes."""
        return self._peak

    def by_purpose(self) -> Mapping[Purpose, int]:
        """Bytes now by purpose, over all tiers; purposes without bytes are left out."""
        sums: dict[Purpose, int] = defaultdict(int)
        for (_, purpose), nbytes in self._bytes.items():
            if nbytes:
                sums[purpose] += nbytes
        return dict(sums)
