"""`Tiers`: one place to ask for memory of any tier. Every byte that it hands out is in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from zeromesh.errors import StorageError
from zeromesh.offload.io.file_tier import PIECE, THREADS, FileTier
from zeromesh.offload.io.transfer import WaitTime, pages
from zeromesh.offload.memory.allocation import PinnedBudget, allocate_lasting, pinned_pages
from zeromesh.offload.memory.ledger import Ledger, Purpose, Tier
from zeromesh.offload.tiered_tensor import TierChoice, TieredPart, TieredTensor

STAGING_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSettings:
    """Where the file tier lies and how it is used. `label` becomes part of its files' names."""

    directories: tuple[Path, ...] = ()
    label: str = "states"
    checksums: bool = False
    threads: int = THREADS

    @property
    def staging_bytes(self) -> int:
        """Bytes of the threads' own buffers."""
        return self.threads * PIECE


@dataclass(kw_only=True, slots=True)
class Tiers:
    """The memory of one process. `device` is where it computes.

    Its file tier is opened when something first rests there; `close` removes its files.
    """

    device: torch.device
    ledger: Ledger
    files: FileSettings = field(default_factory=FileSettings)
    pinned: PinnedBudget = field(default_factory=PinnedBudget)
    _file: FileTier | None = None

    def allocate(
        self, numel: int, dtype: torch.dtype, choice: TierChoice, purpose: Purpose, label: str
    ) -> TieredTensor:
        """Allocate zeros, `[numel]`. `label` says in errors what they are.

        Raises:
            StorageError: where there is no room, or no directory to make it in.
        """
        cut, away = choice.cut(numel), Tier.FILE if choice.tier == "file" else Tier.HOST
        parts: list[TieredPart] = []
        for start, end, tier in ((0, cut, away), (cut, numel, Tier.DEVICE)):
            if start < end and tier is Tier.FILE:
                slot = self.file().allocate((end - start) * dtype.itemsize, label)
                parts.append(TieredPart(start=start, end=end, tier=tier, slot=slot))
            elif start < end:
                memory = self._memory(tier, end - start, dtype, label)
                parts.append(TieredPart(start=start, end=end, tier=tier, memory=memory))
        for part in parts:
            self.ledger.add(part.tier, purpose, (part.end - part.start) * dtype.itemsize)
        return TieredTensor(dtype, parts)

    def _memory(self, tier: Tier, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        try:
            if tier is Tier.HOST:
                return self.pinned.allocate(numel, dtype, self.device)
            return allocate_lasting(numel, dtype, self.device)
        except (OSError, MemoryError, RuntimeError) as error:
            raise StorageError(
                f"{tier.value} tier, {label}: {numel * dtype.itemsize:,} bytes cannot be allocated: {error}"
            ) from error

    def buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Make a buffer `[nbytes]`, uint8, on `device` for bytes on their way from another tier; on the host on its own pages."""
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return pinned_pages(nbytes) if self.pinned.take(nbytes, self.device) else pages(nbytes)

    def file(self) -> FileTier:
        """The file tier. Raises `StorageError` where there is no directory for it."""
        if self._file is None:
            if not self.files.directories:
                raise StorageError("something is to rest on files, and no directory for them is known")
            self._file = FileTier(
                self.files.directories,
                self.files.label,
                checksums=self.files.checksums,
                threads=self.files.threads,
                memory=partial(self.buffer, device=torch.device("cpu")),
            )
            self.ledger.add(Tier.HOST, Purpose.STAGING, self.files.staging_bytes)
        return self._file

    @property
    def in_use(self) -> Sequence[FileTier]:
        """The file tiers that are open."""
        return () if self._file is None else (self._file,)

    def waited(self) -> dict[Tier, WaitTime]:
        """Return how long callers have waited for each tier that makes them wait."""
        return dict.fromkeys([Tier.FILE], self._file.waits) if self._file is not None else {}

    def seconds_waited(self) -> float:
        """Return the seconds that callers have waited for all tiers so far."""
        return self._file.waits.total if self._file is not None else 0.0

    def check(self) -> None:
        """Raise `StorageError` where a file has been removed or shortened."""
        for file in self.in_use:
            file.check()

    def close(self) -> None:
        """Remove the files of the file tier; what rests there is lost."""
        for file in self.in_use:
            file.close()
