"""Reading whole parameters and gradients of a sharded model by name: one bucket is gathered at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from zeromesh.errors import LayoutError, PhaseError
from zeromesh.flat.layout import Slot
from zeromesh.mesh.groups import Mesh
from zeromesh.zero.unit import Bucket, Unit, all_buckets


class StateAccess:
    """Logical tensors of the units' parameters, in the master dtype. Its methods are collective: all ranks call them alike."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], mesh: Mesh) -> None:
        self._model = model
        self._units = units
        self._mesh = mesh
        self._where = {
            name: (bucket, slot)
            for bucket in all_buckets(units)
            for slot in bucket.layout.slots
            for name in (slot.spec.fqn, *slot.spec.aliases)
        }

    def names(self) -> list[str]:
        """Canonical names, tied parameters once, in the order in which `parameters` yields them."""
        return [slot.spec.fqn for bucket in all_buckets(self._units) for slot in bucket.layout.slots]

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`(name, tensor)` of every parameter: master weights in fp32 whatever the model computes in, on CPU or the device.

        A tensor may be a view of this rank's own weights, which the next step changes: copy it to keep it.
        """
        for bucket in all_buckets(self._units):
            full = self._weights(bucket)
            for slot in bucket.layout.slots:
                yield slot.spec.fqn, _cut(full, slot)

    def parameter(self, fqn: str) -> torch.Tensor:
        """One parameter whole."""
        bucket, slot = self._find(fqn)
        return _cut(self._weights(bucket), slot).clone()

    def gradient(self, fqn: str) -> torch.Tensor | None:
        """One gradient whole, in the dtype of the sum, between backward and update; None for a frozen parameter.

        It is scaled as the last backward left it: a loss scale is still in it, clipping is not.

        Raises:
            PhaseError: when the optimizer has used it up inside backward.
        """
        bucket, slot = self._find(fqn)
        if not bucket.trainable:
            return None
        full = self._gradients(bucket)
        if full is None:
            raise PhaseError(f"the gradient of {fqn} was used inside backward (optimizer.in_backward)")
        return _cut(full, slot).clone()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`(name, tensor)` of every trainable parameter's gradient."""
        for bucket in all_buckets(self._units):
            full = self._gradients(bucket) if bucket.trainable else None
            if full is not None:
                for slot in bucket.layout.slots:
                    yield slot.spec.fqn, _cut(full, slot)

    def units_of(self, fqns: Iterable[str]) -> list[Unit]:
        """Units that hold these parameters."""
        wanted = {id(self._find(fqn)[0]) for fqn in fqns}
        return [unit for unit in self._units if any(id(bucket) in wanted for bucket in unit.buckets)]

    def make_whole(self) -> None:
        """Give the model ordinary parameters of its own, in the master dtype; the engine is over afterwards."""
        for bucket in all_buckets(self._units):
            full = self._weights(bucket)
            for parameter, slot in zip(bucket.parameters, bucket.layout.slots, strict=True):
                parameter.data = _cut(full, slot).clone()
                parameter.grad = None

    def _weights(self, bucket: Bucket) -> torch.Tensor:
        return self._whole(bucket, bucket.master.load(self._mesh.device))

    def _gradients(self, bucket: Bucket) -> torch.Tensor | None:
        shard = bucket.grad
        if shard is None and bucket.grad_rest is not None:
            shard = bucket.grad_rest.load(self._mesh.device)
        return None if shard is None else self._whole(bucket, shard)

    def _whole(self, bucket: Bucket, shard: torch.Tensor) -> torch.Tensor:
        if shard.numel() == bucket.layout.padded:
            return shard.detach()
        full = torch.empty(bucket.layout.padded, dtype=shard.dtype, device=shard.device)
        self._mesh.shard.all_gather_flat(full, shard.detach(), f"reading of {bucket.name}")
        return full

    def _find(self, fqn: str) -> tuple[Bucket, Slot]:
        if fqn not in self._where:
            raise LayoutError(f"the model has no parameter {fqn!r}; names are as in model.named_parameters()")
        return self._where[fqn]


def _cut(full: torch.Tensor, slot: Slot) -> torch.Tensor:
    return full[slot.where.start : slot.where.end].view(slot.spec.shape)
