"""Shared memory between the processes of one host, from `memfd_create`.

An anonymous file descriptor has no name to leak and does not live in `/dev/shm`, whose 64 MiB in a default container
would end a run with SIGBUS. A peer opens it through `/proc/<pid>/fd/<fd>`, which the kernel allows to the same user.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref

import torch

from zeromesh.errors import StorageError
from zeromesh.offload import available_bytes

PAGE = mmap.PAGESIZE


def _whole_pages(nbytes: int) -> int:
    """At least one page: an empty range cannot be mapped."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


def require_memory(label: str, nbytes: int) -> None:
    """Refuse a reservation that the system could only answer with its out-of-memory killer.

    Raises:
        StorageError: when fewer than `nbytes` bytes are available.
    """
    available = available_bytes()
    if nbytes > available > 0:
        raise StorageError(
            f"shared memory for {label}: {nbytes:,} bytes cannot be reserved, {available:,} are available; "
            "more ranks, a smaller model or stage 3 of ZeRO need less"
        )


class SharedSegment:
    """A mapped shared memory segment of `nbytes` bytes, zero at first.

    Raises:
        StorageError: when the memory is not there or a peer's segment cannot be opened.
    """

    def __init__(self, descriptor: int, nbytes: int, label: str) -> None:
        nbytes = _whole_pages(nbytes)
        self.descriptor = descriptor
        self.nbytes = nbytes
        self.label = label
        self._map = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._close = weakref.finalize(self, os.close, descriptor)  # Also where nobody calls `close`.

    @classmethod
    def create(cls, label: str, nbytes: int, *, reserve: bool = True) -> SharedSegment:
        """Make a segment. `reserve` takes its memory at once, so that a lack of it is an error here and no signal later."""
        nbytes = _whole_pages(nbytes)
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
            raise StorageError(
                f"shared memory for {label}: {nbytes:,} bytes cannot be reserved ({os.strerror(error.errno or errno.EIO)}); "
                "free memory, or choose the transport gloo"
            ) from error

    @classmethod
    def attach(cls, pid: int, descriptor: int, nbytes: int, label: str) -> SharedSegment:
        """Map the segment that process `pid` of this host made."""
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), nbytes, label)
        except OSError as error:
            raise StorageError(
                f"shared memory for {label}: {path} cannot be opened ({error.strerror}); "
                "ranks of one host must run as one user in one process namespace; or choose the transport gloo"
            ) from error

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of `numel` elements at byte `offset`, on the shared pages."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def words(self) -> memoryview:
        """The segment as signed 64-bit words. A store of one aligned word is atomic on the machines this is used on."""
        return memoryview(self._map).cast("q")

    def reserve(self, offset: int, nbytes: int) -> None:
        """Take memory for a range whose pages were given back."""
        os.posix_fallocate(self.descriptor, offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the whole pages inside a range to the system; they read as zeros afterwards."""
        start = -(-offset // PAGE) * PAGE
        end = (offset + nbytes) // PAGE * PAGE
        if end > start:
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last tensor that looks at it."""
        self._close()
        self.descriptor = -1
