"""The memory of this process: bytes counted at allocation by tier and purpose (`Ledger`), and figures of the operating system."""

import contextlib
import platform
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from zeromesh.errors import StorageError


class Tier(Enum):
    """The storage of bytes: memory of the compute device, memory of the host, or files."""

    __hash__ = object.__hash__  # `Enum`'s own is a slow Python function, and the ledger is used often.

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


class Purpose(Enum):
    """The purposes for which the trainer allocates bytes; the values are the texts shown to the user."""

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
    COMMUNICATORS = "buffers of the library of collectives"
    SNAPSHOTS = "snapshots of states"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A recorded change of the ledger: from `at` on, in seconds of `time.perf_counter`, `purpose` has `nbytes` bytes on `tier`."""

    at: float
    tier: Tier
    purpose: Purpose
    nbytes: int


_CGROUP = Path("/sys/fs/cgroup")
MEMORY = (Tier.DEVICE, Tier.HOST)  # the tiers that are memory rather than disk


class Ledger:
    """Bytes of this process by tier and purpose, and their peak in memory. `limits`, in bytes, simulate a tier of less memory."""

    def __init__(self, limits: Mapping[Tier, int] | None = None) -> None:
        self._bytes: dict[tuple[Tier, Purpose], int] = defaultdict(int)
        self._limits = dict(limits or {})
        self._in_memory = self._peak = self._most_changes = 0
        self._highest: dict[tuple[Tier, Purpose], int] = {}
        self._changes: list[Change] = []

    def add(self, tier: Tier, purpose: Purpose, nbytes: int) -> None:
        """Count an allocation of `nbytes`, or, if negative, a release. Raises, and counts nothing: `StorageError` when the tier's
        limit would be exceeded, `ValueError` when more bytes are released than were counted."""
        key, now = (tier, purpose), self._bytes[tier, purpose] + nbytes
        if now < 0:
            raise ValueError(f"{purpose.value} in {tier.value}: {-nbytes:,} bytes given back, {now - nbytes:,} counted")
        limit = self._limits.get(tier)
        if limit is not None and nbytes > 0 and self.total(tier) + nbytes > limit:
            room = f"which has {limit:,} and of these {self.total(tier):,} in use"
            raise StorageError(f"{purpose.value}: {nbytes:,} bytes more do not fit into the {tier.value} tier, {room}")
        self._bytes[key] = now
        self._highest[key] = max(now, self._highest.get(key, 0))
        if len(self._changes) < self._most_changes:
            self._changes.append(Change(at=time.perf_counter(), tier=tier, purpose=purpose, nbytes=now))
        if tier is not Tier.FILE:
            self._in_memory += nbytes
            self._peak = max(self._peak, self._in_memory)

    @contextlib.contextmanager
    def recording(self, most: int) -> Iterator[list[Change]]:
        """Record the ledger's changes inside the block, after entries for the state at its start, up to about `most` entries."""
        present, began = [row for row in self._bytes.items() if row[1]], time.perf_counter()
        self._changes = [Change(at=began, tier=tier, purpose=use, nbytes=nbytes) for (tier, use), nbytes in present]
        self._most_changes = most
        try:
            yield self._changes
        finally:
            self._changes, self._most_changes = [], 0

    def total(self, *tiers: Tier) -> int:
        """Return the present bytes on `tiers`, by default on the tiers in memory (device and host)."""
        return sum(self.by_purpose(*tiers).values())

    def peak(self) -> int:
        """Return the highest total in memory so far, in bytes."""
        return self._peak

    def by_purpose(self, *tiers: Tier) -> Mapping[Purpose, int]:
        """Return the present bytes of each purpose on `tiers`, by default the tiers in memory, without purposes of no bytes."""
        sums: dict[Purpose, int] = defaultdict(int)
        for (where, purpose), nbytes in self._bytes.items():
            if nbytes and where in (tiers or MEMORY):
                sums[purpose] += nbytes
        return dict(sums)

    def take_highest(self) -> dict[Tier, dict[Purpose, int]]:
        """Return the peak bytes of each purpose on each tier since the last call; purposes without bytes are left out."""
        found: dict[Tier, dict[Purpose, int]] = {}
        for (tier, purpose), most in self._highest.items():
            if most:
                found.setdefault(tier, {})[purpose] = most
            self._highest[tier, purpose] = self._bytes[tier, purpose]
        return found


def _read_numbers(path: Path) -> dict[str, int]:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    return {name: int(number) for name, number in re.findall(r"^(\w+):?\s+(\d+)", text, re.MULTILINE)}


def _read_kib(path: str, name: str) -> int:
    return _read_numbers(Path(path)).get(name, 0) * 1024


resident_bytes = partial(_read_kib, "/proc/self/smaps_rollup", "Rss")
"""Returns the resident bytes of this process; shared pages count in full."""
mapped_file_bytes = partial(_read_kib, "/proc/self/status", "RssFile")
"""Returns the bytes of mapped files, such as libraries, in this process's memory, which other processes may share."""
peak_bytes = partial(_read_kib, "/proc/self/status", "VmHWM")
"""Returns the peak of this process's resident bytes; shared pages count in full."""
swap_bytes = partial(_read_kib, "/proc/meminfo", "SwapFree")
machine_bytes = partial(_read_kib, "/proc/meminfo", "MemTotal")


def available_bytes() -> int:
    """Return the bytes of memory that can still be allocated, the fewer of the machine's and the control group's; 0 if unknown."""
    available = _read_kib("/proc/meminfo", "MemAvailable")
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # There is no group, or it has no limit.
        return available
    # The control group counts cached files as used memory, but evicts them when memory is allocated.
    cached = _read_numbers(_CGROUP / "memory.stat")
    used -= cached.get("inactive_file", 0) + cached.get("active_file", 0)
    return min(available, max(0, limit - used))


def group_settings(name: str) -> list[str]:
    """Read file `name`, such as `memory.max`, in each control group (version 2) of this process, outermost first."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    found = []
    inner = _CGROUP / own.lstrip("/")
    for group in [each for each in (*reversed(inner.parents), inner) if each.is_relative_to(_CGROUP)]:
        with contextlib.suppress(OSError):
            found.append((group / name).read_text(encoding="ascii").strip())
    return found


def cpu_name() -> str:
    """Return the model of this machine's processor, or its architecture if the system does not name the model."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
