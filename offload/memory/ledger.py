"""`Ledger`: every byte that is allocated on purpose, by tier and purpose, counted where it is allocated."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from zeromesh.errors import StorageError


class Tier(Enum):
    """Kind of memory."""

    __hash__ = (
        object.__hash__
    )  # Members are single objects; `Enum`'s own hash is a Python function, and the ledger is used often.

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


class Purpose(Enum):
    """What bytes are for."""

    __hash__ = object.__hash__

    PARAMETERS = "parameters in the compute dtype"
    MASTER = "master weights"
    MOMENTS = "optimizer moments"
    AVERAGES = "averaged weights"
    GRADIENTS = "gradient shards"
    PARTIAL_GRADIENTS = "gradients summed over microbatches"
    GRADIENT_BUCKETS = "gradient buckets in flight"
    ACTIVATIONS = "kept inputs of blocks"
    STAGING = "buffers on the way to and from files"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """From the moment `at` on, in seconds of `time.perf_counter`, there are `nbytes` of a purpose on a tier."""

    at: float
    tier: Tier
    purpose: Purpose
    nbytes: int


MEMORY = (Tier.DEVICE, Tier.HOST)
"""What is memory, and no disk."""


class Ledger:
    """Bytes of this process by tier and purpose, and the highest sum in memory so far.

    `limits` are bytes that a tier may not exceed: on a machine whose device and host are one memory, a stand-in for a device.
    """

    def __init__(self, limits: Mapping[Tier, int] | None = None) -> None:
        self._bytes: dict[tuple[Tier, Purpose], int] = defaultdict(int)
        self._limits = dict(limits or {})
        self._in_memory = 0
        self._peak = 0
        self._highest: dict[tuple[Tier, Purpose], int] = {}
        self._changes: list[Change] | None = None
        self._most_changes = 0

    def add(self, tier: Tier, purpose: Purpose, nbytes: int) -> None:
        """Count an allocation (or, negative, its end).

        Raises:
            StorageError: when the tier's limit would be exceeded; then nothing is counted.
            ValueError: when more is taken back than was counted.
        """
        key = (tier, purpose)
        if self._bytes[key] + nbytes < 0:
            raise ValueError(
                f"{purpose.value} in {tier.value}: {-nbytes:,} bytes given back, {self._bytes[key]:,} counted"
            )
        limit = self._limits.get(tier)
        if limit is not None and nbytes > 0 and self.total(tier) + nbytes > limit:
            raise StorageError(
                f"{purpose.value}: {nbytes:,} bytes more do not fit into the {tier.value} tier, which has {limit:,} and of "
                f"these {self.total(tier):,} in use"
            )
        now = self._bytes[key] = self._bytes[key] + nbytes
        if now > self._highest.get(key, 0):
            self._highest[key] = now
        changes = self._changes
        if changes is not None and len(changes) < self._most_changes:
            changes.append(Change(at=time.perf_counter(), tier=tier, purpose=purpose, nbytes=now))
        if tier is not Tier.FILE:
            self._in_memory += nbytes
            self._peak = max(self._peak, self._in_memory)

    @contextmanager
    def recording(self, most: int) -> Iterator[list[Change]]:
        """Changes inside the block, at most about `most` of them, after what there is when it begins."""
        began = time.perf_counter()
        changes = [
            Change(at=began, tier=tier, purpose=purpose, nbytes=nbytes)
            for (tier, purpose), nbytes in self._bytes.items()
            if nbytes
        ]
        self._changes, self._most_changes = changes, most
        try:
            yield changes
        finally:
            self._changes = None

    def total(self, *tiers: Tier) -> int:
        """Bytes now, of some tiers; of all memory where none is named."""
        return sum(nbytes for (where, _), nbytes in self._bytes.items() if where in (tiers or MEMORY))

    def peak(self) -> int:
        """The highest total in memory so far, in bytes."""
        return self._peak

    def by_purpose(self, *tiers: Tier) -> Mapping[Purpose, int]:
        """Bytes now by purpose, of some tiers, or of all memory; purposes without bytes are left out."""
        sums: dict[Purpose, int] = defaultdict(int)
        for (where, purpose), nbytes in self._bytes.items():
            if nbytes and where in (tiers or MEMORY):
                sums[purpose] += nbytes
        return dict(sums)

    def take_highest(self) -> dict[Tier, dict[Purpose, int]]:
        """The most bytes that each purpose has had on each tier since this was last asked; purposes without bytes are left out."""
        found: dict[Tier, dict[Purpose, int]] = {}
        for (tier, purpose), most in self._highest.items():
            if most:
                found.setdefault(tier, {})[purpose] = most
            self._highest[tier, purpose] = self._bytes[tier, purpose]
        return found
