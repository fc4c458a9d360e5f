"""An exponential moving average of the weights, in shards beside the master weights.

It is that of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, updated after every `every`-th update of the
weights: the first one that counts copies them, later ones are `average + (1 - decay) (weights - average)`. Parameters that
never were trained have no average beside themselves. Buffers are not averaged: an averaged model has those of the model.
"""

from __future__ import annotations

import torch

from zeromesh.offload import Purpose, TierChoice, TieredTensor, Tiers
from zeromesh.options import AverageSettings
from zeromesh.units.unit import Bucket

_EXCHANGED = 1 << 20
"""Elements that are exchanged at a time."""


class WeightAverage:
    """The averages of this rank's shards, `[shard]` in the master dtype, which rest where the moments do."""

    def __init__(self, settings: AverageSettings, tiers: Tiers, at: TierChoice) -> None:
        self.count = 0
        """How many updates of the weights are in it. Before the first, averaged weights are the weights."""
        self._settings = settings
        self._tiers = tiers
        self._at = at
        self._tensors: dict[int, TieredTensor] = {}

    def of(self, bucket: Bucket) -> TieredTensor | None:
        """The average of a bucket's shard; None where nothing of it was ever trained."""
        return self._tensors.get(id(bucket))

    def begin(self, bucket: Bucket) -> None:
        """A bucket's weights, which have not changed so far, are their own average."""
        master, what = bucket.master, f"averages of {bucket.name}"
        average = self._tiers.allocate(master.numel, master.dtype, self._at, Purpose.AVERAGES, what)
        average.copy_from(master)
        self._tensors[id(bucket)] = average

    def due(self, update: int) -> bool:
        """Whether update number `update`, from 1, counts."""
        return update >= self._settings.start and update % self._settings.every == 0

    def blend(self, average: torch.Tensor, weights: torch.Tensor) -> None:
        """Take new weights into an average, in place; both are a part of a shard."""
        if self.count:
            average.lerp_(weights, 1 - self._settings.decay)
        else:
            average.copy_(weights)

    def exchange(self, bucket: Bucket) -> None:
        """Let a bucket's master weights and their averages change places, part by part. Raises `StorageError`."""
        master, average, device = bucket.master, self._tensors[id(bucket)], self._tiers.device
        if master.whole(device) is None or average.whole(device) is None:
            device = torch.device("cpu")
        for start in range(0, master.numel, _EXCHANGED):
            length = min(_EXCHANGED, master.numel - start)
            first, second = (torch.empty(length, dtype=master.dtype, device=device) for _ in range(2))
            for tensor, part in ((master, first), (average, second)):
                tensor.read(start, part).wait()
            for tensor, part in ((master, second), (average, first)):
                tensor.write(start, part).wait()
