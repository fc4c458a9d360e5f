"""Transfers between tiers, the time that callers have waited for them, and the staging buffers that they pass through. Copies
between a device and its host run on a stream for each direction, and begin after all work launched before them."""

import itertools
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from queue import SimpleQueue
from weakref import WeakSet

import torch

from zeromesh.errors import StorageError
from zeromesh.offload import accelerator
from zeromesh.offload.accelerator import on_accelerator

PAGE = mmap.PAGESIZE
AllocateBuffer = Callable[[int], torch.Tensor]
_STATE_PAGES: WeakSet[mmap.mmap] = WeakSet()


class WaitTime:
    """The seconds that callers have waited for transfers of a tier: `total` so far, and `seconds` since the last call of `take`."""

    def __init__(self) -> None:
        self.seconds = self.total = 0.0

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def add(self, began: float) -> None:
        """Add the seconds since `began`, a time of `time.perf_counter`."""
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self.total += seconds


class Transfer:
    """A read or write in flight, as one future for each piece that a thread moves. Without pieces it has ended already."""

    on_device = False
    """True if `wait` orders later device work after the bytes instead of blocking the caller."""
    crosses_devices = False
    """True if bytes move between the memory of a device and the host's."""

    def __init__(self, pieces: Sequence[Future[None]] = (), waits: WaitTime | None = None, what: str = "bytes") -> None:
        self._pieces = tuple(pieces)
        self._waits = waits
        self._what = what

    @classmethod
    def with_error(cls, error: StorageError) -> "Transfer":
        """Make a transfer that has failed with `error`, which `wait` raises."""
        piece: Future[None] = Future()
        piece.set_exception(error)
        return cls([piece])

    @classmethod
    def combine(cls, transfers: "Sequence[Transfer]") -> "Transfer":
        """Join several transfers into one, which waits for all of them; none may be between a device and the host."""
        pieces = [piece for transfer in transfers for piece in transfer._pieces]
        return cls(pieces, transfers[0]._waits, transfers[0]._what)

    def done(self) -> bool:
        """Return True if `wait` would return, or raise, at once."""
        return all(piece.done() for piece in self._pieces)

    def failed(self) -> bool:
        return any(piece.done() and (piece.cancelled() or piece.exception() is not None) for piece in self._pieces)

    def wait(self) -> None:
        """Wait until all bytes have arrived. Raises `StorageError` of the first piece that failed, after all pieces have ended."""
        self.wait_for_end()
        for piece in self._pieces:
            if piece.cancelled():
                raise StorageError(f"{self._what} were not moved: the tier is closed, or has no thread for them")
            piece.result()

    def ordering(self) -> AbstractContextManager[object]:
        """Return a context: device work launched inside it comes after this transfer, other work goes on. Raises as `wait`."""
        self.wait()
        return nullcontext()

    def order(self) -> None:
        """Wait as `wait`, but for a transfer to the host block later device work only, which may then reuse the source's memory."""
        self.wait()

    def wait_for_end(self, *, counted: bool = True) -> None:
        """Wait until all pieces have ended or failed, without raising. `counted`: add the waiting time to the tier's `WaitTime`."""
        began = time.perf_counter()
        late = [piece for piece in self._pieces if not piece.done()]
        for piece in late:
            with suppress(CancelledError):
                piece.exception()
        if late and counted and self._waits is not None:
            self._waits.add(began)

    def on_end(self, call: Callable[[], None]) -> None:
        """Call `call` once when all pieces have ended or failed: from another thread, or now if they have."""
        if not self._pieces:
            call()
            return
        ended, last = itertools.count(1), len(self._pieces)  # No two threads get the same number.

        def count(_piece: Future[None]) -> None:
            if next(ended) == last:
                call()

        for piece in self._pieces:
            piece.add_done_callback(count)


DONE = Transfer()  # a transfer that has ended, for callers that had nothing to move or have moved it already


class CopyDirection:
    """One direction of copies between a device and host memory: the stream, and the host bytes of copies in flight."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.Stream(device)
        # Events of a stream happen in order, so one thread can wait for all of them.
        self.thread = ThreadPoolExecutor(1, "zeromesh-copies", partial(accelerator.make_current, device))
        self.in_flight: deque[tuple[int, int, torch.Event]] = deque()
        self.lock = threading.Lock()


class CopyStreams:
    """Two streams of one device for asynchronous copies, one to the device and one to the host. Threads may share the object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inward, self._outward = CopyDirection(device), CopyDirection(device)
        self.inward = self._inward.stream  # of the copies to the device

    def start(self, source: torch.Tensor, target: torch.Tensor) -> torch.Event:
        """Start a copy between device and host, converted to the target's dtype, after copies in the other direction that touch
        the same host bytes; returns its end's event, until which the caller keeps both tensors. Unpinned memory blocks the host."""
        lane, other = (self._inward, self._outward) if on_accelerator(target) else (self._outward, self._inward)
        lane.stream.wait_stream(accelerator.current_stream(self._device))
        host = source if on_accelerator(target) else target
        begin, end = host.data_ptr(), host.data_ptr() + host.nbytes
        with other.lock:
            while other.in_flight and other.in_flight[0][2].query():
                other.in_flight.popleft()
            touching = [event for first, last, event in other.in_flight if first < end and last > begin]
        for earlier in touching:
            lane.stream.wait_event(earlier)
        event = _copy(lane.stream, source, target)
        with lane.lock:
            lane.in_flight.append((begin, end, event))
        return event

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Start a copy as `start` does, and return its transfer, which references both tensors until the copy ends or `order`."""
        event = self.start(source, target)
        lane = self._inward if on_accelerator(target) else self._outward
        wait, kept = accelerator.host_wait_for(lane.stream), [source, target]
        ended = lane.thread.submit(lambda _kept: wait(), kept)
        if lane is self._inward:
            return _TransferToDevice(self._device, lane.stream, event, ended)
        return _TransferToHost(self._device, event, ended, kept)

    def copy_later(self) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Return a function `copy(target, source)` for another thread, which copies after the present device work, and waits."""
        event = accelerator.record_event(accelerator.current_stream(self._device))

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            stream = (self._inward if on_accelerator(target) else self._outward).stream
            stream.wait_event(event)
            _copy(stream, source, target)
            accelerator.host_wait_for(stream)()

        return copy


class _TransferToDevice(Transfer):
    """A transfer from the host to a device. `wait` does not block the host: it orders later device work after the transfer."""

    on_device = crosses_devices = True

    def __init__(self, device: torch.device, stream: torch.Stream, event: torch.Event, ended: Future[None]) -> None:
        super().__init__([ended])
        self._device, self._stream, self._event = device, stream, event

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        accelerator.current_stream(self._device).wait_event(self._event)

    def ordering(self) -> AbstractContextManager[object]:
        return accelerator.launching_on(self._stream)


class _TransferToHost(Transfer):
    """A transfer from a device to the host, which references `kept`, source and target; `order` drops the source."""

    crosses_devices = True

    def __init__(self, device: torch.device, event: torch.Event, ended: Future[None], kept: list[torch.Tensor]) -> None:
        super().__init__([ended])
        self._device, self._event, self._kept = device, event, kept

    def order(self) -> None:
        accelerator.current_stream(self._device).wait_event(self._event)
        del self._kept[0]


copy_streams_of = cache(CopyStreams)  # the streams between this process's memory and a device, one object per device


def _copy(stream: torch.Stream, source: torch.Tensor, target: torch.Tensor) -> torch.Event:
    with accelerator.launching_on(stream):
        if source.dtype != target.dtype:
            # The device converts to the target's dtype, since a conversion on the host would block the calling thread.
            source = source.to(stream.device, non_blocking=True)
        target.copy_(source, non_blocking=True)
        return accelerator.record_event(stream)


def register_state_pages(found: mmap.mmap) -> mmap.mmap:
    """Register the pages of an anonymous mapping with states, for `states_hidden_from_children`; returns the mapping."""
    _STATE_PAGES.add(found)
    return found


@contextmanager
def states_hidden_from_children() -> Iterator[None]:
    """Inside the block, forked children do not inherit the registered pages: a child would keep a copy of each page that the
    parent writes later, and of each pinned page from the start, since a device writes to fixed physical pages."""
    held = [each for each in _STATE_PAGES if not each.closed]
    for each in held:
        each.madvise(mmap.MADV_DONTFORK)
    try:
        yield
    finally:
        for each in held:
            each.madvise(mmap.MADV_DOFORK)


def allocate_pages(nbytes: int) -> torch.Tensor:
    """Allocate zeros outside the heap, `[nbytes]` uint8, aligned to pages as `O_DIRECT` requires, and on huge pages if available:
    a disk transfers contiguous physical memory up to twice as fast as scattered single pages."""
    found = register_state_pages(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    request_huge_pages(found)
    return torch.frombuffer(found, dtype=torch.uint8)


def request_huge_pages(found: mmap.mmap, *part: int) -> None:
    """Advise the kernel to use huge pages for a mapping, or for a `part` of it, given by start and length in bytes."""
    with suppress(OSError):  # The kernel may be built without huge pages.
        found.madvise(mmap.MADV_HUGEPAGE, *part)


class StagingPool(SimpleQueue[torch.Tensor]):
    """The free ones of `count` buffers, `[nbytes]` uint8, allocated by `memory`, which bound the memory of transfers. `get` waits
    for one, and `put` gives it back; threads may share them."""

    def __init__(self, count: int, nbytes: int, memory: AllocateBuffer = allocate_pages) -> None:
        if count < 0 or nbytes < PAGE or nbytes % PAGE:
            raise ValueError(f"{count} buffers of {nbytes} bytes; give 0 or more, of a multiple of {PAGE} bytes")
        for _ in range(count):
            self.put(memory(nbytes))
