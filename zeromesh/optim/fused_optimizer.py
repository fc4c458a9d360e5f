"""torch's own fused optimizers on the flat shards of buckets.

Each bucket has an optimizer of its own, so that buckets can be updated one by one: inside backward, or in parts that are streamed
when their states rest on another tier. Element-wise rules give the same bits however a buffer is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from zeromesh.errors import ConfigError
from zeromesh.offload import Purpose, Tiers
from zeromesh.options import OptimizerSettings, ZeroOptions
from zeromesh.units.unit import Bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a learning rate schedule changes in one step: the learning rate of each group is multiplied by `lr_factor`.

    `momentum` replaces that of SGD, or the first of Adam's betas; None: as in the settings.
    """

    lr_factor: float = 1.0
    momentum: float | None = None

    def of(self, settings: OptimizerSettings) -> OptimizerSettings:
        """The settings with this momentum."""
        if self.momentum is None:
            return settings
        return replace(settings, momentum=self.momentum, betas=(self.momentum, settings.betas[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerGroup:
    """Settings of one group of parameters."""

    lr: float
    weight_decay: float


class GroupRules:
    """Which optimizer group a parameter belongs to: 0 is decayed, 1 is not."""

    def __init__(self, settings: OptimizerSettings) -> None:
        self._patterns = settings.no_decay
        self._names = frozenset(self._patterns)
        self._globs = tuple(pattern for pattern in self._patterns if set("*?[").intersection(pattern))
        self.groups = (
            OptimizerGroup(lr=settings.lr, weight_decay=settings.weight_decay),
            OptimizerGroup(lr=settings.lr, weight_decay=0.0),
        )

    def group_of(self, fqn: str) -> int:
        """The number of the group of a parameter, by its name."""
        return int(fqn in self._names or any(fnmatchcase(fqn, pattern) for pattern in self._globs))

    def unmatched(self, fqns: Sequence[str]) -> list[str]:
        """Patterns that match none of the parameters `fqns`."""
        names = frozenset(fqns)
        return [each for each in self._patterns if each not in names and not any(fnmatchcase(n, each) for n in fqns)]


MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "sgd": (), "adagrad": ("sum",)}
"""torch's names of the moments of each optimizer; SGD has one with momentum."""


def moment_names(settings: OptimizerSettings) -> tuple[str, ...]:
    """torch's names of the moments, each with one element per parameter element."""
    if settings.name not in MOMENTS:
        raise ConfigError(
            f"optimizer.name is {settings.name!r}; element-wise shards take {', '.join(MOMENTS)}. "
            "Muon and Adafactor need whole matrices"
        )
    if settings.name == "sgd" and settings.momentum:
        return ("momentum_buffer",)
    return MOMENTS[settings.name]


class BucketOptimizer:
    """The optimizer of one bucket's shard. `moments`, by torch's names, are `[shard]` each, and zero before the first step.

    An update is element by element, so any interval may be updated at a time, on whatever device its tensors are then.
    """

    def __init__(self, bucket: Bucket, options: ZeroOptions, tiers: Tiers) -> None:
        master, at = bucket.master, options.offload.optimizer
        self._settings = options.optimizer
        self._bucket = bucket
        self.moments = {
            name: tiers.allocate(master.numel, master.dtype, at, Purpose.MOMENTS, f"{name} of {bucket.name}")
            for name in moment_names(self._settings)
        }
        self._groups = GroupRules(self._settings).groups
        self.steps = [0] * len(bucket.layout.slots)
        """How many updates each parameter has had. As in torch, one that is frozen for a while goes on from its own count."""
        self.follow()

    def follow(self) -> None:
        """Take in which parameters are trained now, and how many updates each has had."""
        bucket, kinds = self._bucket, list(zip(self._bucket.training, self.steps, strict=True))
        self._segments = [
            (segment.where.start, segment.where.end, self._groups[segment.group], segment.slot)
            for segment in bucket.layout.segments(bucket.interval, kinds)
            if bucket.training[segment.slot]
        ]

    def begin(self) -> None:
        """Begin another update: count it for the parameters that are trained."""
        self.steps = [count + trained for count, trained in zip(self.steps, self._bucket.training, strict=True)]

    def step(
        self,
        start: int,
        end: int,
        master: torch.Tensor,
        grad: torch.Tensor,
        moments: Sequence[torch.Tensor],
        rates: Rates,
    ) -> None:
        """Update elements [start, end) of the shard: `master`, `grad` and `moments` are `[end - start]`, changed in place."""
        settings = rates.of(self._settings)
        for segment_start, segment_end, group, slot in self._segments:
            first, last = max(start, segment_start), min(end, segment_end)
            if first < last:
                part = slice(first - start, last - start)
                states = [moment[part] for moment in moments]
                updates = self.steps[slot] - 1
                fused_update(settings, group, rates.lr_factor, master[part], grad[part], states, updates)


def fused_update(
    settings: OptimizerSettings,
    group: OptimizerGroup,
    lr_factor: float,
    master: torch.Tensor,
    grad: torch.Tensor,
    moments: Sequence[torch.Tensor],
    updates: int,
) -> None:
    """Update `master` and `moments`, all `[elements]` like `grad`, in place, by the functional form of torch's fused kernels.

    `updates` is how many updates were made before.
    """
    common: dict[str, Any] = {"lr": group.lr * lr_factor, "weight_decay": group.weight_decay, "maximize": False}
    steps = [torch.full((), float(updates), device=master.device)]  # made there: a copy would make the host wait
    with torch.no_grad():
        if settings.name == "sgd":
            common |= {"momentum": settings.momentum, "dampening": 0.0, "nesterov": False}
            sgd([master], [grad], list(moments) or [None], fused=True, **common)
        elif settings.name == "adagrad":
            common |= {"lr_decay": 0.0, "eps": settings.eps}
            adagrad([master], [grad], list(moments), steps, fused=not master.is_cuda, **common)
        else:
            kind = adamw if settings.name == "adamw" else adam
            first, second = moments
            common |= {"beta1": settings.betas[0], "beta2": settings.betas[1], "eps": settings.eps, "amsgrad": False}
            kind([master], [grad], [first], [second], [], steps, fused=True, **common)
