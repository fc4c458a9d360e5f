"""A batch on its way to the device, with facts about its masks and positions that spare the device a synchronization.

transformers' models inspect masks and positions to decide if attention needs a mask at all. On an accelerator each such question
synchronizes the host with the device in every forward. The host answers them instead, from the batch before its copy: padding masks
without padding, and positions of a single sequence.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from transformers import masking_utils

from zeromesh.offload.accelerator import current_stream, is_accelerator, launching_on, on_accelerator, record_event
from zeromesh.overrides import replaced

_Function = Callable[..., Any]


class DeviceBatch(dict[str, Any]):
    """A batch whose tensors are on the device inside `present`. `targets` is the number of targets that the host has counted; None:
    the forward counts them."""

    def __init__(
        self,
        batch: Mapping[str, Any],
        device: torch.device,
        compute: torch.dtype,
        targets: int | None,
        copies: torch.Stream | None,
        before: Self | None = None,
    ) -> None:
        """Floating-point inputs become `compute`, except labels. `copies` is the stream of copies to the device, from pinned
        memory, which the host does not wait for; None: the device is the CPU. `before` is the previous batch."""
        super().__init__(batch)
        self.targets = targets
        self._device, self._compute, self._copies = device, compute, copies
        self._next: DeviceBatch | None = None
        if before is not None:
            before._next = self
        self._copied: torch.Event | None = None
        self._masks: dict[torch.Size, bool] = {}
        """True for padding masks without padding, by shape."""
        self._packed = False
        """True if a row of `position_ids` packs several sequences."""
        self._on_device = is_accelerator(device)

    def send(self) -> None:
        """Start the copies of the tensors to the device, once."""
        if self._copies is None or self._copied is not None:
            return
        for name, value in self.items():
            if isinstance(value, Tensor) and name.endswith("attention_mask") and value.dim() == 2:
                self._masks[value.shape] = self._masks.get(value.shape, True) and bool(value.all())
        positions = self.get("position_ids")
        if isinstance(positions, Tensor) and positions.dim() == 2:
            self._packed = masking_utils.find_packed_sequence_indices(positions) is not None
        with launching_on(self._copies):
            for name, value in self.items():
                if isinstance(value, Tensor) and not on_accelerator(value):
                    pinned = value if value.is_pinned() else value.pin_memory()
                    self[name] = pinned.to(self._device, non_blocking=True)
        self._copied = record_event(self._copies)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Inside the block the tensors are on the device and mask queries are answered; the next batch is being copied."""
        self.send()
        if self._next is not None:
            self._next.send()
        if self._copied is not None:
            stream = current_stream(self._device)
            stream.wait_event(self._copied)
        for name, value in self.items():
            if not isinstance(value, Tensor):
                continue
            if self._copied is not None:
                value.record_stream(stream)
            dtype = self._compute if value.is_floating_point() and name != "labels" else value.dtype
            self[name] = value.to(self._device, dtype, non_blocking=True)
        if not self._on_device:
            yield
            return
        answers: dict[str, _Function] = {
            "find_packed_sequence_indices": self._find_packed_sequences,
            "_ignore_causal_mask_sdpa": self._ignores,
            "_ignore_bidirectional_mask_sdpa": self._ignores,
            "fast_all": self._is_all_true,
        }
        there = vars(masking_utils)
        with replaced(
            masking_utils, {name: partial(answer, there[name]) for name, answer in answers.items() if name in there}
        ):
            yield

    def _find_packed_sequences(self, find: _Function, position_ids: Tensor) -> Tensor | None:
        """Skip the detection of packed sequences where the host has found none, and force it otherwise."""
        if not self._packed:
            return None
        # Under tracing the library omits its own early exit.
        with replaced(masking_utils, {"is_tracing": lambda *_: True}):
            sequences: Tensor = find(position_ids)
        return sequences

    def _ignores(self, ignored: _Function, padding_mask: Tensor | None = None, *arguments: Any, **named: Any) -> bool:
        """Treat a mask without padding as no mask."""
        pads_nothing = None if padding_mask is None else self._masks.get(padding_mask.shape)
        if pads_nothing is None:
            return bool(ignored(padding_mask, *arguments, **named))
        return pads_nothing and bool(ignored(None, *arguments, **named))

    def _is_all_true(self, fast_all: _Function, mask: Tensor) -> Any:
        known = self._masks.get(mask.shape)
        return fast_all(mask) if known is None else known
