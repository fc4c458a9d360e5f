"""Copies between a CUDA device and its host beside what is computed: a stream each way, and never a wait of the host.

    in     host -> device     whoever uses the bytes on the device comes after the copy by an event
    out    device -> host     whoever uses the bytes on the host waits for the copy

A copy begins when what was launched before it on the current stream is done. A copy in waits for the copies out before it, so that
bytes that have left are what comes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch

from zeromesh.offload.io.transfer import Transfer


class CopyStreams:
    """The streams between one device and this process's memory. Threads may share them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.inward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._outward = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Events of a stream happen in order, so one thread can wait for all of them.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="zeromesh-copies")

    def start(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        """Start to copy between device and host, converted to the target's dtype; returns what happens when it is done.

        The caller keeps both tensors until then. The host's memory should be pinned: from other memory the host itself copies,
        and waits.
        """
        stream = self.inward if target.is_cuda else self._outward
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if target.is_cuda:
            stream.wait_stream(self._outward)
        return _copy(stream, source, target)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Transfer:
        """Start to copy as `start` does; both tensors are kept until that is done."""
        event = self.start(source, target)
        ended = self._threads.submit(_wait_for, event, (source, target))
        if target.is_cuda:
            return _TransferToDevice(self._device, self.inward, event, ended)
        transfer = Transfer([ended])
        transfer.crosses = True
        return transfer

    def now(self) -> torch.cuda.Event:
        """An event for what has been launched on the current stream."""
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def copy_after(self, event: torch.cuda.Event, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy after an event and return when that is done: for threads whose business is to wait."""
        stream = self.inward if target.is_cuda else self._outward
        stream.wait_event(event)
        _copy(stream, source, target).synchronize()


class _TransferToDevice(Transfer):
    """Bytes on their way into a device: what is launched there comes after them, and the host goes on."""

    on_device = crosses = True

    def __init__(
        self, device: torch.device, stream: torch.cuda.Stream, event: torch.cuda.Event, ended: Future[None]
    ) -> None:
        super().__init__([ended])
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
def copy_streams_of(device: torch.device) -> CopyStreams:
    """The streams between this process's memory and a CUDA device."""
    return CopyStreams(device)


def _copy(stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
    return event


def _wait_for(event: torch.cuda.Event, _kept: tuple[torch.Tensor, torch.Tensor]) -> None:
    event.synchronize()
