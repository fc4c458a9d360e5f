"""Flat tensors that rest on a tier, or with their last elements on the device, and `Tiers`, which allocates and counts them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch

from zeromesh.errors import ConfigError, StorageError
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import is_accelerator, on_accelerator
from zeromesh.offload.io.durable_tier import DurableSlot, DurableTier
from zeromesh.offload.io.file_tier import THREAD_BYTES, FileSlot, FileTier
from zeromesh.offload.io.transfer import DONE, Transfer, WaitTime, copy_streams_of
from zeromesh.offload.memory.allocation import PinnedBudget, allocate_lasting
from zeromesh.offload.memory.ledger import Ledger, Purpose, Tier
from zeromesh.offload.memory.state_memory import StateMemory

STAGING_BYTES = 64 << 20
TierName = Literal["none", "host", "file"]
DURABLE = (Purpose.MASTER, Purpose.MOMENTS, Purpose.AVERAGES)  # what a step changes of the states on files
GRAIN = 2048
"""The number of elements of which each part's beginning is a multiple: whole disk blocks and processor vectors in any dtype."""
_CONVERTED = 1 << 20  # elements that are converted to another dtype at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class TierChoice:
    """The placement of a tensor: `fraction` of it on `tier`, the rest on the device. `none` is the device alone. Raises
    `ConfigError` for an unknown tier, or a fraction outside its range."""

    tier: TierName = "none"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.tier not in get_args(TierName):
            raise ConfigError(f"tier is {self.tier!r}; allowed are {', '.join(get_args(TierName))}")
        if not 0 <= self.fraction <= 1:
            raise ConfigError(f"fraction of tier {self.tier} is {self.fraction}; it must be from 0 to 1")

    @property
    def uses_tier(self) -> bool:
        """True if some elements rest on the host or in files instead of the device."""
        return self.tier != "none" and self.fraction > 0

    def leaves_device(self, device: torch.device) -> bool:
        """Return True if some elements rest outside the memory of `device`; with the tier `host` a CPU's elements do not."""
        return self.uses_tier and (self.tier == "file" or is_accelerator(device))

    def numel_on(self, tier: Tier, numel: int) -> int:
        """Return the number of elements of a tensor of `numel` that rest on `tier`."""
        cut = self.offloaded_numel(numel)
        if tier is Tier.DEVICE:
            return numel - cut
        return cut if tier.value == self.tier else 0

    def is_whole_on(self, numel: int, device: torch.device) -> bool:
        """Return True if all elements of a tensor of `numel` lie in one piece in the memory of `device`."""
        return self.offloaded_numel(numel) in ((0,) if self.leaves_device(device) else (0, numel))

    def offloaded_numel(self, numel: int) -> int:
        """Return the number of leading elements of a tensor of `numel` that rest on the tier, the host or files."""
        if not self.uses_tier:
            return 0
        return numel if self.fraction >= 1 else min(numel, -(-int(numel * self.fraction) // GRAIN) * GRAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredPart:
    """Elements [start, end) of a tiered tensor: either in `memory`, or in a file's range `slot` from its element `first` on."""

    start: int
    end: int
    tier: Tier
    memory: torch.Tensor | None = None
    slot: FileSlot | None = None
    first: int = 0

    def lies_on(self, device: torch.device) -> bool:
        """Return True if the part is in the memory of a device of this type."""
        return self.memory is not None and self.memory.device.type == device.type


class TieredTensor:
    """A flat tensor, `[numel]` of `dtype`, whose consecutive parts rest on different tiers (device, host, file). Elements in
    memory can be viewed; others have to be read and written asynchronously."""

    def __init__(self, dtype: torch.dtype, parts: Sequence[TieredPart]) -> None:
        self.dtype = dtype
        self.parts = tuple(parts)
        self.numel = parts[-1].end if parts else 0
        self._at = 0  # the place of its first element in the tensor of which it is a slice

    @classmethod
    def of(cls, tensor: torch.Tensor, tier: Tier = Tier.DEVICE) -> "TieredTensor":
        """Make a tiered tensor that views the elements of `tensor` in order, of any shape and strides, and counts as resting on
        `tier`. It has one part if `tensor` is contiguous or 1-D, but for one that repeats an element, and else one for each row."""
        rows = _rows(tensor) if tensor.numel() else []
        parts = [TieredPart(start=n * len(m), end=(n + 1) * len(m), tier=tier, memory=m) for n, m in enumerate(rows)]
        return cls(tensor.dtype, parts)

    @property
    def nbytes(self) -> int:
        """Bytes on all tiers together."""
        return self.numel * self.dtype.itemsize

    @property
    def memory(self) -> torch.Tensor:
        """All elements as one tensor in CPU memory. Raises `ValueError` if they are not in one piece there."""
        if (found := self.whole(torch.device("cpu"))) is None:
            raise ValueError("these elements are not in memory")
        return found

    def whole(self, device: torch.device) -> torch.Tensor | None:
        """Return a view of all elements if they are one piece of the memory of `device`, else None."""
        return self.view(0, self.numel, device)

    def view(self, start: int, end: int, device: torch.device) -> torch.Tensor | None:
        """Return a view of elements [start, end) if they are one piece of the memory of `device`, else None."""
        if start == end:
            return torch.empty(0, dtype=self.dtype, device=device)
        for part in self.parts:
            if part.start <= start and end <= part.end and part.memory is not None and part.lies_on(device):
                return part.memory[start - part.start : end - part.start]
        return None

    def slice(self, start: int, end: int) -> Self:
        """Return elements [start, end) as a tiered tensor on the same memory and files. Raises `ValueError` outside [0, numel]."""
        if not 0 <= start <= end <= self.numel:
            raise ValueError(f"elements [{start}, {end}) do not lie in {self.numel}")
        parts = []
        for part in self.parts:
            begin, last = max(start, part.start), min(end, part.end)
            if begin < last:
                skipped = begin - part.start
                memory = None if part.memory is None else part.memory[skipped : last - part.start]
                first = part.first + skipped
                parts.append(replace(part, start=begin - start, end=last - start, memory=memory, first=first))
        found = copy.copy(self)
        found.parts, found.numel, found._at = tuple(parts), end - start, self._at + start
        return found

    def read(self, start: int, out: torch.Tensor) -> Transfer:
        """Start to fill `out`, 1-D, from element `start` on, converted to its dtype. Raises `StorageError`, or its `wait` does."""
        return self._move(start, out, write=False)

    def write(self, start: int, data: torch.Tensor) -> Transfer:
        """Start to overwrite the elements from `start` on with `data`, 1-D, unchanged until the end. Raises as `read` does."""
        return self._move(start, data, write=True)

    def _move(self, start: int, data: torch.Tensor, *, write: bool) -> Transfer:
        # Parts in the memory of `data` come first: a copy from or to another tier is launched after them, and ends after them.
        parts = sorted(self.slice(start, start + data.numel()).parts, key=lambda part: not part.lies_on(data.device))
        started = [_move(self.dtype, part, data[part.start : part.end], write=write) for part in parts]
        moves = [move for move in started if move is not DONE]
        if len(moves) > 1 and not any(move.crosses_devices for move in moves):
            return Transfer.combine(moves)
        if len(moves) > 1:
            # A file's part and a copy between devices have no common wait; only checkpoints move both. All end before any error.
            for move in moves:
                move.wait_for_end(counted=False)
            for move in moves:
                move.wait()
            return DONE
        return moves[0] if moves else DONE

    def wait_for_writes(self) -> None:
        """Wait until all writes to files have ended. Raises `StorageError` if one has failed."""
        for part in self.parts:
            if part.slot is not None:
                part.slot.wait_for_writes()

    def load(self, device: torch.device) -> torch.Tensor:
        """Return all elements as a tensor `[numel]` on `device`: a view if they rest there, else a copy."""
        if (found := self.whole(device)) is None:
            found = torch.empty(self.numel, dtype=self.dtype, device=device)
            self.read(0, found).wait()
        return found

    def copy_to(self, out: torch.Tensor) -> None:
        """Fill `out`, 1-D of `numel` elements in host memory, converted to its dtype. Raises `StorageError`. A copy from a device
        runs on the caller's current stream, so that a thread with its own stream waits for its copies alone."""
        self._require_all(out.numel())
        if not self.parts:  # Elements that are decoded by reads.
            self.read(0, out)
        launched: torch.Stream | None = None
        for part in self.parts:
            target = out[part.start : part.end]
            if part.memory is not None:
                target.copy_(part.memory, non_blocking=True)
                launched = accelerator.current_stream(part.memory.device) if on_accelerator(part.memory) else launched
            else:
                transfer = self.read(part.start, target)
                transfer.wait_for_end(counted=False)  # This is a checkpoint's thread, for which training does not wait.
                transfer.wait()
        if launched is not None:
            accelerator.host_wait_for(launched)()

    def copy_from(self, other: "TieredTensor | torch.Tensor") -> None:
        """Copy all elements from `other`, of the same number, converted. Raises `StorageError`."""
        other = TieredTensor.of(other) if isinstance(other, torch.Tensor) else other
        self._require_all(other.numel)
        if len(other.parts) == 1 and (source := other.parts[0].memory) is not None:
            self.write(0, source).wait()
            return
        for first in range(0, self.numel, _CONVERTED):
            passing = torch.empty(min(_CONVERTED, self.numel - first), dtype=other.dtype)
            other.read(first, passing).wait()
            self.write(first, passing).wait()

    def _require_all(self, count: int) -> None:
        if count != self.numel:
            raise ValueError(f"{count} elements to copy, for a tensor of {self.numel}")


def _rows(tensor: torch.Tensor) -> list[torch.Tensor]:
    # All rows are of one length. Nothing can be written to an expanded row, only to each of its elements.
    if tensor.is_contiguous() or (tensor.ndim == 1 and tensor.stride(0)):
        return [tensor.view(-1)]
    return [row for each in tensor.unbind() for row in _rows(each)]


def _move(dtype: torch.dtype, part: TieredPart, data: torch.Tensor, *, write: bool) -> Transfer:
    if part.memory is not None:
        return _copy(data, part.memory) if write else _copy(part.memory, data)
    if part.slot is None:
        raise ValueError("a part is either in memory or in a slot")
    move = part.slot.write if write else part.slot.read
    if data.dtype == dtype:
        return move(part.first * dtype.itemsize, data.view(torch.uint8))
    for number, piece in enumerate(torch.split(data, _CONVERTED)):
        passing = piece.to(device="cpu", dtype=dtype) if write else torch.empty(piece.numel(), dtype=dtype)
        move((part.first + number * _CONVERTED) * dtype.itemsize, passing.view(torch.uint8)).wait()
        if not write:
            piece.copy_(passing)
    return DONE


def _copy(source: torch.Tensor, target: torch.Tensor) -> Transfer:
    if source.device.type != target.device.type:
        return copy_streams_of(source.device if on_accelerator(source) else target.device).copy(source, target)
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
    return DONE


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSettings:
    """The directories of the swap files, the `label` in these files' names, and whether reads are verified by checksums."""

    directories: tuple[Path, ...] = ()
    label: str = "states"
    checksums: bool = False


@dataclass(kw_only=True, slots=True)
class Tiers:
    """Allocates tensors on any tier, for a process that computes on `device`. Swap files open at first use; `close` frees them."""

    device: torch.device
    ledger: Ledger
    files: FileSettings = field(default_factory=FileSettings)
    pinned: PinnedBudget = field(default_factory=PinnedBudget)
    waits: WaitTime = field(default_factory=WaitTime)  # of callers for tiers
    states: StateMemory | None = None  # the memory of states that outlives this process
    durable: DurableTier | None = None  # the files that have a step's changes of states, and outlive this process
    checkpoint: int = -1
    """The step of the run's newest checkpoint, from which it goes on where `durable` has none that is newer; -1: none."""
    _file: FileTier | None = None

    def allocate(self, numel: int, dtype: torch.dtype, choice: TierChoice, purpose: Purpose, name: str) -> TieredTensor:
        """Allocate zeros, `[numel]`, named `name` in errors. Raises `StorageError` without room, or a directory to make it in."""
        cut, away = choice.offloaded_numel(numel), Tier.FILE if choice.tier == "file" else Tier.HOST
        parts: list[TieredPart] = []
        for start, end, tier in ((0, cut, away), (cut, numel, Tier.DEVICE)):
            length, memory, slot = end - start, None, None
            if not length:
                continue
            try:
                if tier is Tier.FILE:
                    files: FileTier = self.durable if self.durable is not None and purpose in DURABLE else self.file()
                    slot = files.allocate(length * dtype.itemsize, name)
                elif tier is Tier.HOST:
                    memory = self.pinned.allocate(length, dtype, self.device)
                else:
                    memory = allocate_lasting(length, dtype, self.device)
            except StorageError:
                raise
            except (OSError, MemoryError, RuntimeError) as error:
                what = f"{tier.value} tier, {name}: {length * dtype.itemsize:,} bytes"
                raise StorageError(f"{what} cannot be allocated: {error}") from error
            parts.append(TieredPart(start=start, end=end, tier=tier, memory=memory, slot=slot))
        return self._counted(dtype, parts, purpose)

    def _counted(self, dtype: torch.dtype, parts: Sequence[TieredPart], purpose: Purpose) -> TieredTensor:
        for part in parts:
            nbytes = (part.end - part.start) * dtype.itemsize * (1 + isinstance(part.slot, DurableSlot))
            self.ledger.add(part.tier, purpose, nbytes)
        return TieredTensor(dtype, parts)

    def stored(self, numel: int, dtype: torch.dtype, runs: Sequence[TieredPart], purpose: Purpose) -> TieredTensor:
        """Make a read-only tensor, `[numel]`, of `runs`, ascending parts in existing files; elements between them are zero."""
        parts = list(runs)
        for at, start in zip((0, *(run.end for run in runs)), (*(run.start for run in runs), numel), strict=True):
            if start > at:
                gap = torch.zeros(start - at, dtype=dtype, device=self.device)
                parts.append(TieredPart(start=at, end=start, tier=Tier.DEVICE, memory=gap))
        return self._counted(dtype, sorted(parts, key=lambda part: part.start), purpose)

    @property
    def warm(self) -> bool:
        """True if states that are allocated in memory have the values that an earlier process, or engine, has left in them."""
        return self.states is not None and self.states.warm

    def keeps(self, tensor: TieredTensor) -> bool:
        """Return True if a tensor that was just allocated has the values that an earlier process, or engine, has left in it."""

        def kept(part: TieredPart) -> bool:
            if isinstance(part.slot, DurableSlot):
                return part.slot.kept
            return self.states is not None and part.memory is not None and self.states.keeps(part.memory)

        return all(map(kept, tensor.parts))

    def buffer(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Make a buffer `[nbytes]`, uint8, on `device` for transfers with another tier; on the host it has separate pages."""
        if is_accelerator(device):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self.pinned.allocate_pages(nbytes, self.device)

    def file(self) -> FileTier:
        """Return the file tier, opened on first use. Raises `StorageError` without a directory for it."""
        if self._file is None:
            if not self.files.directories:
                raise StorageError("something is to rest on files, and no directory for them is known")
            self._file = FileTier(**self._file_options())
        return self._file

    def open_durable(self, key: str) -> DurableTier:
        """Open the files of states that outlive processes; `key` identifies the layout. Raises `StorageError`."""
        self.durable = DurableTier(key=key, **self._file_options())
        return self.durable

    def _file_options(self) -> dict[str, Any]:
        self.ledger.add(Tier.HOST, Purpose.STAGING, THREAD_BYTES)
        memory = partial(self.buffer, device=torch.device("cpu"))
        more = {each.name: getattr(self.files, each.name) for each in fields(self.files)}
        return {"waits": self.waits, "memory": memory, "device": self.device, **more}

    def waited(self) -> dict[Tier, float]:
        """Return the seconds that callers have waited for each tier since the last call."""
        return {Tier.FILE: self.waits.take()} if self._file is not None or self.durable is not None else {}

    def close(self) -> None:
        """Delete the data in the swap files, if there are any, and close those that stay."""
        for files in (self._file, self.durable):
            if files is not None:
                files.close()
