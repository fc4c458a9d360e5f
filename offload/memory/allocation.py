"""Memory that lasts as long as a run: of the device, and of the host, pinned if a device copies from it, or shared by processes."""

import ctypes
import errno
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import xxhash

from zeromesh.errors import StorageError
from zeromesh.offload import accelerator
from zeromesh.offload.io.transfer import allocate_pages, register_state_pages, request_huge_pages
from zeromesh.offload.memory.ledger import available_bytes
from zeromesh.offload.memory.state_memory import StateMemory

PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 << 20
_POPULATE_WRITE = 23  # Linux's MADV_POPULATE_WRITE, for which Python has no constant yet
_MOVE_TO = 7  # Linux's MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_ssize_t
_LEAST_BYTES = 1 << 16
"""The bytes from which a tensor of states gets a separate mapping; smaller ones do not fragment the heap noticeably."""


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous CPU tensor as its bytes, uint8 `[bytes]`."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def hex_digest(tensor: torch.Tensor) -> str:
    """Return 64 bits in hex that tell a tensor's bytes from others."""
    return xxhash.xxh3_64_hexdigest(tensor_bytes(tensor).numpy().data)


def allocate_lasting(shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros for a state that lasts as long as the run. On CPU they get separate pages outside the C library's heap,
    which long-lived blocks between activations would fragment (docs/decisions/0006-allocator.md)."""
    count = math.prod(shape) if isinstance(shape, tuple) else shape
    if device.type == "cpu" and count and StateMemory.in_use is not None:
        return StateMemory.in_use.allocate(count * dtype.itemsize).view(dtype).view(shape)
    if device.type != "cpu" or count * dtype.itemsize < _LEAST_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    return allocate_pages(count * dtype.itemsize).view(dtype).view(shape)


class SparePages:
    """Huge pages that buffers have released, to be moved to the address of the next buffer, since the system takes as long to zero
    new pages as a fast disk to fill them. Pages that the latest buffer did not need are returned when a buffer releases more."""

    def __init__(self) -> None:
        self._ranges: list[torch.Tensor] = []
        self._unused = 0

    def put(self, memory: torch.Tensor) -> None:
        """Add the pages of `memory`, 1-D uint8 of whole huge pages, whose contents are not needed any more."""
        self._drop(self._unused)
        if memory.nbytes and _can_move_pages():
            self._ranges.append(memory)
        else:
            _return_pages(memory)

    def move_to(self, target: torch.Tensor) -> None:
        """Move spare pages to `target`, 1-D uint8 of whole huge pages. Raises `StorageError`; `target` must not be used then."""
        begin, end = target.data_ptr(), target.data_ptr() + target.nbytes
        others = [each for each in self._ranges if not begin <= each.data_ptr() < end]
        if len(others) < len(self._ranges):  # The target's pages are among the spare ones, so nothing is moved.
            self._ranges, begin = others, end
        while self._ranges and begin < end:
            spare = self._ranges.pop()
            length = min(spare.nbytes, end - begin)
            _move_pages(spare.data_ptr(), begin, length)
            if length < spare.nbytes:
                self._ranges.append(spare[length:])
            begin += length
        self._unused = len(self._ranges)

    def give_back(self) -> None:
        self._drop(len(self._ranges))

    def _drop(self, count: int) -> None:
        for unused in self._ranges[:count]:
            _return_pages(unused)
        del self._ranges[:count]
        self._unused = 0


def _return_pages(memory: torch.Tensor) -> None:
    """Return the whole pages of `memory`, 1-D uint8, to the system. They read as zeros afterwards."""
    _libc.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), mmap.MADV_DONTNEED)


def _move_pages(source: int, target: int, nbytes: int) -> None:
    """Move pages from one mapped address to another; both stay mapped, and `source` has no pages afterwards."""
    size = ctypes.c_size_t(nbytes)
    if _libc.mremap(ctypes.c_void_p(source), size, size, _MOVE_TO, ctypes.c_void_p(target)) != target:
        reason = os.strerror(ctypes.get_errno())
        raise StorageError(f"{nbytes:,} bytes of memory for gathered parameters cannot be moved: {reason}")


@cache
def _can_move_pages() -> bool:
    pair = torch.frombuffer(mmap.mmap(-1, 2 * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    try:
        _move_pages(pair.data_ptr(), pair.data_ptr() + PAGE, PAGE)
    except StorageError:
        return False
    return True


class ReleasableBuffer:
    """A buffer at a fixed address whose memory can be released: views of `full`, `[count]`, stay valid without memory. On CPU it
    has separate pages, and `full` begins `lead` bytes after the start of one. Elsewhere its storage is resized."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device, spare: SparePages, lead: int = 0) -> None:
        """Pages are released to and taken from `spare`. There is no memory at first."""
        self._nbytes = count * dtype.itemsize
        self._spare_pages = spare
        self._pages: torch.Tensor | None = None
        if device.type != "cpu" or not self._nbytes:
            self.full = torch.empty(count, dtype=dtype, device=device)
            self.give_back()
            return
        length = lead + self._nbytes
        self._huge = length - length % _HUGE_PAGE
        # Huge pages begin at multiples of their size.
        room = _HUGE_PAGE if self._huge else 0
        found = register_state_pages(mmap.mmap(-1, length + room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        start = -torch.frombuffer(found, dtype=torch.uint8).data_ptr() % _HUGE_PAGE if room else 0
        if self._huge:
            request_huge_pages(found, start, self._huge)
        self._pages = torch.frombuffer(found, dtype=torch.uint8, count=length, offset=start)
        self.full = torch.frombuffer(found, dtype=dtype, count=count, offset=start + lead)

    def make_views(self, places: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Return views of elements [start, end) of `full`, which may have no memory."""
        if self._pages is None:
            self.take()  # torch refuses to make a view of an empty storage; an existing view stays valid.
        views = [self.full[start:end] for start, end in places]
        if self._pages is None:
            self.give_back()
        return views

    def take(self) -> None:
        """Allocate the memory, with undefined contents. Raises `StorageError`."""
        if self._pages is not None:
            self._spare_pages.move_to(self._pages[: self._huge])
        elif self.full.untyped_storage().nbytes() == 0:
            self.full.untyped_storage().resize_(self._nbytes)

    def give_back(self) -> None:
        """Release the memory: huge pages to `spare`, the rest to the system."""
        if self._pages is not None:
            self._spare_pages.put(self._pages[: self._huge])
            _return_pages(self._pages[self._huge :])
        else:
            self.full.untyped_storage().resize_(0)


@dataclass(kw_only=True, slots=True)
class PinnedBudget:
    """Allocates pinned host memory within a budget, and else pageable memory, whose copies are slower and block the host. `limit`
    is the number of bytes that may be pinned, None: `pinnable_bytes()` at each allocation; `used` are the bytes pinned now."""

    limit: int | None = None
    used: int = 0
    pageable: int = 0  # bytes of states in pageable memory, because the budget or the driver has refused to pin them
    _pinned_peak: int = 0

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate zeros on the host, `[numel]`, that last as long as a run, for a process that computes on `device`."""
        nbytes = numel * dtype.itemsize
        if not nbytes or not accelerator.is_accelerator(device):
            return allocate_lasting(numel, dtype, torch.device("cpu"))
        before = self.used
        found = self.allocate_pages(nbytes, device)
        self.pageable += nbytes - (self.used - before)
        return found.view(dtype)

    def allocate_pages(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Allocate separate zeroed pages, `[nbytes]` uint8, pinned for `device` if it is an accelerator and allows it."""
        if self.reserve(nbytes, device):
            found = _PinnedPages(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            register_state_pages(found)
            request_huge_pages(found)
            if found.pin(device):
                return torch.frombuffer(found, dtype=torch.uint8)
            self.release(nbytes)
            self.limit = self._pinned_peak = self.used  # A driver that has refused is not asked again.
        return allocate_pages(nbytes)

    def reserve(self, nbytes: int, device: torch.device) -> bool:
        """Count `nbytes` as pinned if the budget allows, and return True if it does; False where `device` is a CPU."""
        if not accelerator.is_accelerator(device):
            return False
        wanted = self.used + nbytes
        # Below the peak of `used`, no new memory is pinned: torch caches freed pinned memory.
        if wanted > self._pinned_peak:
            if nbytes > (pinnable_bytes() if self.limit is None else self.limit - self.used):
                return False
            self._pinned_peak = wanted
        self.used = wanted
        return True

    def release(self, nbytes: int) -> None:
        self.used -= nbytes


class _PinnedPages(mmap.mmap):
    """Pages pinned by the driver. torch's own pinned memory is rounded up to a power of two, which is too much for states."""

    _unpin: Callable[[], object] | None = None

    def pin(self, device: torch.device) -> bool:
        self._unpin = accelerator.pin(ctypes.addressof(ctypes.c_char.from_buffer(self)), len(self), device)
        return self._unpin is not None

    def __del__(self) -> None:
        if self._unpin is not None and not sys.is_finalizing():
            self._unpin()


def pinnable_bytes() -> int:
    """Return the bytes that this process may pin now: seven eighths of the free memory, as pinned memory cannot be paged out."""
    free = available_bytes()
    return free - free // 8


def require_memory(label: str, nbytes: int) -> None:
    """Raise `StorageError` when fewer than `nbytes` bytes of memory are available, before the kernel would end a process."""
    available = available_bytes()
    if nbytes > available > 0:
        why = f"shared memory for {label}: {nbytes:,} bytes cannot be reserved, {available:,} are available"
        raise StorageError(f"{why}; more ranks, a smaller model or stage 3 of ZeRO need less")


def _refused(label: str, nbytes: int, error: OSError) -> StorageError:
    why = f"{nbytes:,} bytes cannot be reserved ({os.strerror(error.errno or errno.EIO)})"
    return StorageError(f"shared memory for {label}: {why}; free memory, or choose the transport gloo")


class SharedSegment:
    """A mapped segment of `nbytes` bytes, zero at first, that processes of a host share. It has no name to leak, and does not live
    in `/dev/shm`, whose 64 MiB in a default container would end a run with SIGBUS. Raises `StorageError` without the memory."""

    def __init__(self, descriptor: int, nbytes: int, label: str) -> None:
        self.descriptor = descriptor
        self.nbytes = max(PAGE, -(-nbytes // PAGE) * PAGE)  # An empty range cannot be mapped.
        self.label = label
        self._map = mmap.mmap(descriptor, self.nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._close = weakref.finalize(self, os.close, descriptor)  # Also where nobody calls `close`.

    @classmethod
    def create(cls, label: str, nbytes: int, *, reserve: bool = True) -> "SharedSegment":
        """Create a segment. `reserve` allocates its memory at once: a lack of it is an error now, and not a signal later."""
        nbytes = max(PAGE, -(-nbytes // PAGE) * PAGE)
        if reserve:
            require_memory(label, nbytes)
        descriptor = os.memfd_create(f"zeromesh-{label}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            if reserve:
                os.posix_fallocate(descriptor, 0, nbytes)
            return cls(descriptor, nbytes, label)
        except OSError as error:
            os.close(descriptor)
            raise _refused(label, nbytes, error) from error

    @classmethod
    def attach(cls, pid: int, descriptor: int, nbytes: int, label: str) -> "SharedSegment":
        """Map the segment that process `pid` of this host and user has created. Raises `StorageError` if it cannot be opened."""
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), nbytes, label)
        except OSError as error:
            why = f"shared memory for {label}: {path} cannot be opened ({error.strerror})"
            cure = "ranks of one host must run as one user in one process namespace; or choose the transport gloo"
            raise StorageError(f"{why}; {cure}") from error

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """View `numel` elements at byte `offset` of the shared pages as a flat tensor."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def words(self) -> memoryview:
        """View the segment as signed 64-bit words. Storing one aligned word is atomic on supported machines."""
        return memoryview(self._map).cast("q")

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocate physical memory for a range of the segment, on any number of ranks at a time. Raises `StorageError`."""
        start = offset // PAGE * PAGE
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map, start))
        try:
            # Called through libc, since other threads keep running, which `mmap.madvise` would stop.
            if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(offset + nbytes - start), _POPULATE_WRITE):
                if (number := ctypes.get_errno()) != errno.EINVAL:
                    raise OSError(number, os.strerror(number))
                os.posix_fallocate(self.descriptor, offset, nbytes)  # Linux before 5.14.
        except OSError as error:
            raise _refused(self.label, nbytes, error) from error

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the whole pages inside a range to the system; they read as zeros afterwards."""
        start = -(-offset // PAGE) * PAGE
        end = (offset + nbytes) // PAGE * PAGE
        if end > start:
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Close the descriptor. The mapping ends with the last tensor that views it."""
        self._close()
        self.descriptor = -1
