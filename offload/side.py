"""Copies between a CUDA device and its host beside what is computed."""

from __future__ import annotations

from collections import deque

import torch


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
