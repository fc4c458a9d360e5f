"""Copies between a CUDA device and its host beside what is computed: a stream each way, and never a wait of the host.

    in     host -> device     whoever uses the bytes on the device comes after the copy by an event
    out    device -> host     whoever uses the bytes on the host waits for the copy

A copy begins when what was launched before it on the current stream is done. One way in waits for the ways out before it, so bytes
that have left are what comes back.

Copies between a CUDA device and its host beside what is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch

from zeromesh.offload.io.transfer import Transfer


class CopyLane:
    """Of one device and one process. Threads may share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Events of a stream happen in order, so one thread can wait for all of them.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="zeromesh-copies")

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Start to copy between device and host, converted to the target's dtype; both are kept until that is done.

        The host's memory should be pinned: from other memory the host itself copies, and waits.
        """
        inward = target.is_cuda
        event = self._launch(self._in if inward else self._out, source, target)
        done = self._threads.submit(_wait_for, event, (source, target))
        return _Inward(self._device, self._in, event, done) if inward else _Outward([done])

    def now(self) -> torch.cuda.Event:
        """What has been launched on the current stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def move(self, source: torch.Tensor, target: torch.Tensor, after: torch.cuda.Event) -> None:
        """Copy after an event, now: for threads whose business is to wait."""
        stream = self._in if target.is_cuda else self._out
        with torch.cuda.stream(stream):
            stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            copied = stream.record_event()
        copied.synchronize()

    def _launch(self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if stream is self._in:
            stream.wait_stream(self._out)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = stream.record_event()
        return event


class _Outward(Transfer):
    """Bytes on their way from a device."""

    crosses = True


class _Inward(Transfer):
    """Bytes on their way into a device: what is launched there comes after them, and the host goes on."""

    on_device = crosses = True

    def __init__(
        self, device: torch.device, stream: torch.cuda.Stream, event: torch.cuda.Event, done: Future[None]
    ) -> None:
        super().__init__([done])
        self._device, self._stream, self._event = device, stream, event

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    @contextmanager
    def ordering(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield


@cache
def lane_of(device: torch.device) -> CopyLane:
    """The lane between this process's memory and a CUDA device."""
    return CopyLane(device)


def _wait_for(event: torch.cuda.Event, _kept: tuple[torch.Tensor, torch.Tensor]) -> None:
    event.synchronize()


class SideStream:
    """Copies between a CUDA device and its host beside what is computed, in the order in which they were asked for.

    The host never waits here. At most `in_flight` tensors on their way out are held; then the device waits for the oldest one.
    """

    def __init__(self, device: torch.device, in_flight: int) -> None:
        self._device, self._in_flight = device, in_flight
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._held: deque[tuple[torch.Tensor, int, torch.cuda.Event]] = deque()

    def copy_out(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.cuda.Event:
        """Start to copy a tensor of the device to `out`, of its shape and dtype, in pinned memory."""
        while len(self._held) >= self._in_flight:
            self._release()
        event = self._copy(tensor, out)
        # Its memory belongs to the stream that computes, which could use it again: it is held until the copy has been made.
        self._held.append((tensor, tensor._version, event))
        return event

    def copy_in(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.cuda.Event:
        """Start to copy a tensor in pinned memory to `out`, on the device; who uses `out` has to wait for the event."""
        event = self._copy(tensor, out)
        out.record_stream(self._stream)  # It may be dropped before anybody has waited.
        return event

    def settle(self) -> None:
        """Let go what has been copied out. Raises `RuntimeError` where it was changed meanwhile."""
        while self._held and self._held[0][2].query():  # type: ignore[no-untyped-call]
            self._release()

    def _copy(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            out.copy_(tensor, non_blocking=True)
            event: torch.cuda.Event = self._stream.record_event()
        return event

    def _release(self) -> None:
        tensor, version, event = self._held.popleft()
        torch.cuda.current_stream(self._device).wait_event(event)
        if tensor._version != version:
            raise changed(tensor, "while it was copied to the host")


def changed(tensor: torch.Tensor, when: str) -> RuntimeError:
    return RuntimeError(
        f"a tensor {list(tensor.shape)} of {tensor.dtype} that recomputation needs was changed in place {when}; "
        "have whatever changed it make a new tensor"
    )
